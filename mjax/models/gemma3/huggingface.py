"""`Gemma3ForCausalLM` of `transformers`: names of its tensors and settings of its config.json.

Rotary positions have two spellings, and both are written: `rope_parameters` by kind of layer since transformers 5, and
before that `rope_theta` and `rope_scaling` for layers that see everything with `rope_local_base_freq` for the others.
"""

from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.gemma3.config import Gemma3Config
from mjax.models.huggingface.family import SIZES
from mjax.models.llama.huggingface import FULL, LAYER, LLAMA, SLIDING, attention_interval, attention_kinds, layer_types


def _read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the positions and layer kinds: return the other settings, and our fields for these."""
    values = dict(values)
    every = _read_interval(values, file)
    by_kind = values.pop("rope_parameters", None) or {}
    if not isinstance(by_kind, dict) or not by_kind.keys() <= {FULL, SLIDING}:
        fields = f"{FULL!r} and {SLIDING!r} and nothing else"
        raise UsageError(f"{file}: rope_parameters must have {fields}; restore the file")

    def rope(kind: str, theta: str, scaling: Any) -> dict[str, Any]:
        given = {"rope_parameters": by_kind.get(kind), "rope_theta": values.pop(theta, None), "rope_scaling": scaling}
        length = values.get("max_position_embeddings")
        rest, fields = LLAMA.read({**given, "max_position_embeddings": length}, file)
        if "rope_theta" in rest:
            values[theta] = rest["rope_theta"]
        return fields

    fields = rope(FULL, "rope_theta", values.pop("rope_scaling", None))
    local = rope(SLIDING, "rope_local_base_freq", None)
    if local["rope_scaling"] != "none":
        scaled = f"rope_type of {SLIDING} is {local['rope_scaling']!r}, and mjax scales the positions of {FULL} only"
        raise UsageError(f"{file}: {scaled}; convert another model")
    return values, {**fields, "global_attention_interval": every}


def _read_interval(values: dict[str, Any], file: str) -> int | None:
    """Take the kinds of layers out of `values`: of so many layers the last sees everything."""
    pattern, old = values.pop("_sliding_window_pattern", 6), values.pop("sliding_window_pattern", None)
    every, layers = pattern if old is None else old, values.get("num_hidden_layers")
    if type(every) is not int or every < 1:
        raise UsageError(f"{file}: sliding_window_pattern is {every!r}, not a whole number above 0; restore the file")
    kinds = layer_types(values, file)
    if not kinds or (len(kinds) == layers and kinds == attention_kinds(layers, every)):
        return every
    return attention_interval(kinds, layers, file)


def _write(model: Gemma3Config) -> dict[str, Any]:
    values, theta = LLAMA.write(model), model.local_rope_theta
    by_kind = {SLIDING: {"rope_type": "default", "rope_theta": theta}, FULL: values["rope_parameters"]}
    every = model.global_attention_interval or model.layers + 1
    kinds = {"layer_types": attention_kinds(model.layers, every), "sliding_window_pattern": every}
    return {**values, "rope_parameters": by_kind, **kinds}


GEMMA3 = replace(
    LLAMA,
    model="Gemma3ForCausalLM",
    model_type="gemma3_text",
    names={
        **LLAMA.names,
        "blocks.attention_out_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.mlp_norm": f"{LAYER}.pre_feedforward_layernorm",
        "blocks.mlp_out_norm": f"{LAYER}.post_feedforward_layernorm",
    },
    fixed={"kind": "gemma3"},
    fields={
        **SIZES,
        "num_key_value_heads": ("kv_heads", ...),
        "head_dim": ("head_dim", 256),
        "sliding_window": ("window", 4096),
        "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "rope_theta": ("rope_theta", 1e6),
        "rope_local_base_freq": ("local_rope_theta", 1e4),
    },
    nullable=frozenset(),
    only={
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    read=_read,
    write=_write,
    read_fields=LLAMA.read_fields | {"global_attention_interval"},
    without_effect=frozenset({"cache_implementation"}),
)
FAMILIES = (GEMMA3,)
