"""mjax: language models trained the way Megatron-LM does it, in JAX, with every collective in one readable file.

The Python interface (docs/extend/python-tour.md). Names are imported on first use, and `import mjax` does not
import JAX.

    load_config(name)              a config from configs/, a .py file or a run's config.json
    Config                         built from its parts, such as mjax.config.MeshConfig
    validate(config)               reject a config that cannot run
    simulate(devices)              simulate several devices on one CPU; before the first array
    make_mesh(config.mesh)         the mesh, over the devices that JAX sees
    build_program(config, mesh)    initial state, train step and evaluation step
    Trainer(config, folder)        a run, optionally with a custom data source, callbacks, loss and optimizer
    Callback                       base class of code that runs around the steps of a run
    KeepBestCheckpoint()           keep the checkpoint with the lowest validation loss
    EvaluateWithHarness(tasks, n)  tasks of lm-eval every n steps
    open_run(folder)               config, tokenizer and weights of a run
    generate(run, prompts)         continue prompts, or token ids
    logits(run, ids)               scores of the next token after every position
    log_probs(run, ids)            log-probability of every token after those before it
    hidden_states(run, ids)        residual stream before the first layer and after each layer
    attention_weights(run, ids)    of every head, after the softmax
    gradients(run, ids)            loss of texts, and its gradient for every weight
    evaluate(folder, task, data)   metrics of a task
    plan(config, gpu)              what `mjax plan --json` prints
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers read; at run time a name is imported when it is first used
    from mjax.cluster.launch import simulate_devices as simulate
    from mjax.commands.evaluate import score_task as evaluate
    from mjax.commands.lm_eval import EvaluateWithHarness
    from mjax.commands.plan import plan_config as plan
    from mjax.config import Config, load_config
    from mjax.config.checks import validate_config as validate
    from mjax.generation.inference import open_run
    from mjax.generation.text import compute_attention_weights as attention_weights
    from mjax.generation.text import compute_gradients as gradients
    from mjax.generation.text import compute_hidden_states as hidden_states
    from mjax.generation.text import compute_log_probs as log_probs
    from mjax.generation.text import compute_logits as logits
    from mjax.generation.text import generate_texts as generate
    from mjax.parallel.mesh import make_mesh
    from mjax.run.callbacks import Callback, KeepBestCheckpoint
    from mjax.run.trainer import Trainer
    from mjax.step.step import build_program

__version__ = "0.2.0"

_LAZY_IMPORTS = {
    "Callback": "mjax.run.callbacks:Callback",
    "Config": "mjax.config:Config",
    "EvaluateWithHarness": "mjax.commands.lm_eval:EvaluateWithHarness",
    "KeepBestCheckpoint": "mjax.run.callbacks:KeepBestCheckpoint",
    "Trainer": "mjax.run.trainer:Trainer",
    "attention_weights": "mjax.generation.text:compute_attention_weights",
    "build_program": "mjax.step.step:build_program",
    "evaluate": "mjax.commands.evaluate:score_task",
    "generate": "mjax.generation.text:generate_texts",
    "gradients": "mjax.generation.text:compute_gradients",
    "hidden_states": "mjax.generation.text:compute_hidden_states",
    "load_config": "mjax.config:load_config",
    "log_probs": "mjax.generation.text:compute_log_probs",
    "logits": "mjax.generation.text:compute_logits",
    "make_mesh": "mjax.parallel.mesh:make_mesh",
    "open_run": "mjax.generation.inference:open_run",
    "plan": "mjax.commands.plan:plan_config",
    "simulate": "mjax.cluster.launch:simulate_devices",
    "validate": "mjax.config.checks:validate_config",
}

__all__ = [
    "Callback",
    "Config",
    "EvaluateWithHarness",
    "KeepBestCheckpoint",
    "Trainer",
    "__version__",
    "attention_weights",
    "build_program",
    "evaluate",
    "generate",
    "gradients",
    "hidden_states",
    "load_config",
    "log_probs",
    "logits",
    "make_mesh",
    "open_run",
    "plan",
    "simulate",
    "validate",
]


def __getattr__(name: str):
    if name not in _LAZY_IMPORTS:
        from mjax.errors import suggestion

        near = suggestion(name, _LAZY_IMPORTS, f"it has {', '.join(_LAZY_IMPORTS)}")
        raise AttributeError(f"module 'mjax' has no attribute {name!r}; {near}")
    module, _, inside = _LAZY_IMPORTS[name].partition(":")
    return getattr(importlib.import_module(module), inside)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY_IMPORTS])
