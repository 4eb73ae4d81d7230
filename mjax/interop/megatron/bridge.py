"""The model's settings in a checkpoint of Megatron-Bridge, as arguments of Megatron-LM.

Megatron-Bridge writes no arguments. In their place each checkpoint has a run_config.yaml, `ConfigContainer.to_yaml`
(megatron/bridge/training/config.py of 0.6.2), with the fields of `TransformerConfig` and of `GPTModel`:

    model:
      _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
      activation_func: {_target_: torch.nn.functional.silu, _call_: false}
      num_layers: 16

Classes and functions are compared by name, and never imported.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from mjax.errors import UsageError, first_line

RUN_CONFIG = "run_config.yaml"
ARGUMENTS = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""Field → argument of Megatron-LM, if they differ."""
KNOWN_TARGETS = {
    "_target_": r"(bridge\.models\.(\w+\.)?(gpt|hybrid|mamba|llama|qwen|mistral)_provider|training\.models\.\w+)\.\w+",
    "_builder_": r"(bridge|training)\.models\.(\w+\.)?\w+\.(GPT|Hybrid|Mamba)ModelBuilder",
    "transformer_layer_spec": r"(bridge|core)\.models\.(\w+\.)*(default|local|transformer_engine)_layer_spec"
    r"|core\.models\.gpt\.gpt_layer_specs\.get_gpt_(decoder_block|layer_local|layer_with_transformer_engine)_spec",
    "hybrid_stack_spec": (stack := r"bridge\.models\.\w+\.\w+\.(get_default|transformer_engine)_\w+_stack_spec"),
    "mamba_stack_spec": stack,
}
"""Names in the package megatron of classes and functions that make the model of megatron-core and no other."""
ACTIVATIONS = {True: ("torch.nn.functional.silu", "silu"), False: ("torch._C._nn.gelu", "gelu")}
"""activation_func of a model with gated_linear_unit, and without."""


def read_run_config(file: Path) -> dict[str, Any]:
    """Read the model's settings as arguments of Megatron-LM.

    A class or function that is not in `KNOWN_TARGETS` becomes an argument, which is rejected by its name later.

    Raises:
      UsageError: the file is not YAML of Megatron-Bridge, or the checkpoint contains adapters only.
    """
    try:
        config = yaml.safe_load(file.read_bytes())
        fields = {**config["model"], **(config["model"].get("transformer") or {})}
        fields["_target_"] = config["model"]["_target_"]
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, AttributeError, ValueError) as error:
        problem = f"is not a run_config of Megatron-Bridge ({type(error).__name__}: {first_line(error)})"
        raise UsageError(f"{file} {problem}; copy the checkpoint again") from None
    if config.get("peft"):
        raise UsageError(f"{file} has peft, adapters without a model; merge them with Megatron-Bridge first")
    arguments = {ARGUMENTS.get(name, name): value for name, value in fields.items() if name != "transformer"}
    for name, known in KNOWN_TARGETS.items():
        if re.fullmatch(rf"megatron\.({known})", _target_name(arguments.get(name))):
            del arguments[name]
    gated, activation = bool(arguments.pop("gated_linear_unit", False)), arguments.pop("activation_func", "not there")
    if _target_name(activation) not in ACTIVATIONS[gated]:
        arguments["activation_func"] = activation
    tied, groups = arguments.pop("share_embeddings_and_output_weights", True), arguments.get("num_query_groups")
    return arguments | {
        "swiglu": gated,
        "bias_gelu_fusion": not gated and bool(arguments.get("bias_activation_fusion")),
        "group_query_attention": groups not in (None, arguments.get("num_attention_heads")),
        "untie_embeddings_and_output_weights": not tied,
    }


def _target_name(value: Any) -> str:
    """The name of a class or function; empty if the value sets one of its arguments."""
    if not isinstance(value, dict):
        return str(value)
    harmless_keys = {"_target_", "_call_", "_partial_", "_args_", "use_transformer_engine"}
    return "" if value.keys() - harmless_keys or value.get("_args_") else str(value.get("_target_"))
