"""Options and values that are gone: for one release each is refused by its name, with what to use instead.

The config.json of a run from before may still have them. A value that changed no number, or that says what mjax does
now, is dropped from it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A field that a config no longer has.

    Attributes:
      instead: what to use, as the end of a sentence.
      harmless: values that a run may have been trained with and still continues as it was.
    """

    instead: str
    harmless: Container[Any]


class _Anything:
    def __contains__(self, value: Any) -> bool:
        return True


REMOVED = {
    "data.test_path": Removed(
        "training never read it; give the dataset to `mjax evaluate --task perplexity --data PREFIX`", _Anything()
    ),
    "optimizer.warmup_from": Removed(
        "the warm-up begins at 0; leave it out, with a longer --optimizer.warmup-steps", (0.0,)
    ),
    "health.rewind_batches": Removed("a rewind skips 10 batches; leave it out", (10,)),
    "health.good_after": Removed("10 healthy steps make a checkpoint good; leave it out", (10,)),
    "health.unhealthy_share": Removed("more than half of a window ends a run; leave it out", (0.5,)),
    "optimizer.muon_momentum": Removed("Muon's momentum is 0.95; leave it out", (0.95,)),
    "precision.min_loss_scale": Removed("the dynamic loss scale falls to 1; leave it out", (1.0,)),
    "precision.hysteresis": Removed("the second overflow halves the loss scale; leave it out", (2,)),
    "save_program": Removed(
        "in mjax's repository, benchmarks/aot/step.py --save-program FILE writes the compiled step", ()
    ),
    "train.streams": Removed(
        "layers compute a whole micro-batch at a time, with the same numbers; leave it out", (1, 2)
    ),
}
"""By dotted name."""

REMOVED_VALUES = {
    ("model.balance_over", "layers"): (
        "use micro_batch, and --model.balance-loss times the experts per token / the layers with experts"
    ),
    ("optimizer.wsd_decay", "cosine"): "use minus_sqrt",
}
"""Values of fields that are still there: (dotted name, value) → what to use."""


def instead_of_value(name: str, value: Any) -> str:
    """'; it was removed: use …' if a field, or a flag without its dashes, once had this value; else ''."""
    gone = REMOVED_VALUES.get((name.replace("-", "_"), value)) if isinstance(value, str) else None
    return f"; it was removed: {gone}" if gone else ""


MOVED = {
    "model_config": "config.model", "llama_config": "config.llama", "mixture_config": "config.mixture",
    "optimizer_config": "config.optimizer", "validation": "config.checks", "generation": "generation.generate",
    "inference": "generation.inference", "sampling": "generation.sampling", "launch": "cluster.launch",
    "hardware": "cluster.hardware", "names": "utils.names", "planner.comms": "trace.collectives",
    "interop.family": "models.huggingface.family", "interop.llama": "models.huggingface.llama",
    "training.step": "step.step",
    "training.forward": "step.forward", "training.muon": "step.muon", "training.optimizer": "step.optimizer",
    "training.trainer": "run.trainer", "state.layout": "step.layout", "state.precision": "step.precision",
}  # fmt: skip
"""Modules that a file of one's own may import, and where they are now."""


def named_like(text: str) -> str:
    """': … was removed; …' or ': it is … now' if a message names a field that is gone or a module that has moved, as
    the errors of a dataclass and of an import do; else ''."""
    for name, (instead, _) in REMOVED.items():
        if f"'{name.rpartition('.')[2]}'" in text:
            return f": {name} was removed; {instead}"
    for old, new in MOVED.items():
        if f"'mjax.{old}'" in text:
            return f": it is mjax.{new} now"
    return ""
