"""Llama, Mistral, Qwen 2, Qwen 3 and OLMo 2 of `transformers`: one model here, a class each there.

Queries, keys and values are separate tensors there and one weight here; likewise the gate and the other half of the
MLP. Rotary positions do not fit a table: config.json has two spellings, `rope_parameters` since
transformers 5, and `rope_theta` with `rope_scaling` before. Older readers do not know the new one and take θ = 10,000
without a word, so both are read and both are written.
"""

import math
from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.huggingface.family import SIZES, Family
from mjax.models.llama.config import LlamaConfig
from mjax.models.parts.config import RotaryConfig

LAYER = "model.layers.{0}"
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = {
    "default": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None}
    | {"truncate": True},
}
"""The settings of a type of scaling that change what it computes, and the only supported value of each."""


def _read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of config.json without the scaling of positions, and our fields for it."""
    values = dict(values)
    fields = _read_rope(values, file)
    for name in ("use_mrope", "rope_interleaved"):  # in published files, and false
        if (value := values.pop(name, None) or False) is not False:
            raise UsageError(f"{file}: {name} is {value!r}, and mjax supports only false; convert another model")
    if SLIDING in layer_types(values, file):
        raise UsageError(f"{file}: layer_types has other values than {FULL!r}, which mjax reads of Qwen only")
    return values, fields


def layer_types(values: dict[str, Any], file: str) -> list[str]:
    """Take the kinds of attention of the layers, which may be omitted, out of `values`."""
    kinds = values.pop("layer_types", None) or []
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise UsageError(f"{file}: layer_types is {kinds!r}, and mjax knows {FULL!r} and {SLIDING!r} in it")
    return kinds


def _read_rope(values: dict[str, Any], file: str) -> dict[str, Any]:
    """Take the scaling of rotary positions, in either spelling, out of `values`, leave rope_theta there; our fields."""
    new, old = values.pop("rope_parameters", None) or {}, values.pop("rope_scaling", None) or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise UsageError(f"{file}: rope_parameters and rope_scaling must be objects; restore the file")
    rope = {**old, **new}
    theta = rope.pop("rope_theta", values.pop("rope_theta", None))
    if theta is not None:
        values["rope_theta"] = theta
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UsageError(f"{file}: rope_type is {kind!r}; mjax knows {', '.join(SCALINGS)}: convert another model")
    factor, original = rope.pop("factor", 1.0), rope.pop("original_max_position_embeddings", None)
    if type(factor) not in (int, float) or not 1 <= factor < 1e30:
        raise UsageError(f"{file}: factor is {factor!r}, which is not a number from 1 on; restore the file")
    _check_scaling(rope, kind, factor, file)
    if kind == "default":
        return {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": None}
    original = values.get("max_position_embeddings") if original is None else original
    if kind != "linear" and (type(original) is not int or original < 1):
        raise UsageError(f"{file}: original_max_position_embeddings is {original!r}; restore the file")
    original = None if kind == "linear" else original
    return {"rope_scaling": kind, "rope_factor": float(factor), "rope_original_length": original}


def _check_scaling(settings: dict[str, Any], kind: str, factor: float, file: str) -> None:
    of_yarn = 0.1 * math.log(factor) + 1  # attention_factor follows from factor (arXiv 2309.00071, eq. 22)
    for name, value in settings.items():
        known = SCALINGS[kind].get(name)
        if name == "attention_factor" and type(value) in (int, float) and math.isclose(value, of_yarn):
            continue
        if name not in SCALINGS[kind] or (value != known and value is not None):
            raise UsageError(f"{file}: {name} of {kind} positions is {value!r}, and mjax knows only {known!r}")


def _write(model: RotaryConfig) -> dict[str, Any]:
    """The settings of positions in config.json, in both spellings."""
    if model.rope_scaling == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}, "rope_scaling": None}
    rope = {"rope_type": model.rope_scaling, "factor": model.rope_factor, **SCALINGS[model.rope_scaling]}
    rope["original_max_position_embeddings"] = model.rope_original_length
    rope = {name: value for name, value in rope.items() if value is not None}
    return {"rope_parameters": {**rope, "rope_theta": model.rope_theta}, "rope_scaling": rope}


LLAMA = Family(
    model="LlamaForCausalLM",
    names={
        "embedding": "model.embed_tokens", "blocks.attention_norm": f"{LAYER}.input_layernorm",
        "blocks.attention.qkv": tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "blocks.attention.query": f"{LAYER}.self_attn.q_proj",
        "blocks.attention.key_value": (f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
        "blocks.attention.query_norm": f"{LAYER}.self_attn.q_norm",
        "blocks.attention.key_norm": f"{LAYER}.self_attn.k_norm",
        "blocks.attention.out": f"{LAYER}.self_attn.o_proj",
        "blocks.mlp_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.mlp.up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        "blocks.mlp.down": f"{LAYER}.mlp.down_proj", "final_norm": "model.norm", "head": "lm_head",
    },
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # which old versions stored
    model_type="llama",
    generates=True,
    fixed={"kind": "llama", "norms": "pre", "qk_norm": "none", "qkv_bias": False, "window": None},
    fields={
        **SIZES, "num_key_value_heads": ("kv_heads", None), "head_dim": ("head_dim", None),
        "hidden_act": ("activation", "silu"), "rms_norm_eps": ("norm_epsilon", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0), "rope_theta": ("rope_theta", 10_000.0),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    nullable=frozenset({"num_key_value_heads", "head_dim"}),
    only={"attention_bias": False, "mlp_bias": False},
    read=_read,
    write=_write,
    read_fields=frozenset({
        "rope_scaling", "rope_factor", "rope_original_length",
        "hidden_dropout",  # of training only
    }),
    without_effect=frozenset({"is_llama_config"}),  # of the trainer
)  # fmt: skip

WINDOWED = {name: value for name, value in LLAMA.fixed.items() if name != "window"}
"""The fixed fields of families that have a window."""

MISTRAL = replace(
    LLAMA,
    model="MistralForCausalLM",
    model_type="mistral",
    fixed=WINDOWED,
    fields={**LLAMA.fields, "num_key_value_heads": ("kv_heads", ...), "sliding_window": ("window", 4096)},
    nullable=LLAMA.nullable | {"sliding_window"},
    only={},
)

# --- Windows in some layers -------------------------------------------------------------------------------------------


def _read_qwen(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings without positions and windows: of the layers in `layer_types`, or from `max_window_layers` on."""
    values = dict(values)
    kinds = layer_types(values, file)
    values, fields = _read(values, file)
    window, first = values.pop("sliding_window", 4096), values.pop("max_window_layers", 28)
    no_window = fields | {"window": None, "global_attention_interval": None}
    if not values.pop("use_sliding_window", False) or window is None:
        return values, no_window
    layers = values.get("num_hidden_layers")
    numbers = {"sliding_window": window, "max_window_layers": first, "num_hidden_layers": layers}
    for name, value in numbers.items():
        if type(value) is not int or not (name != "max_window_layers") <= value < 2**31:
            raise UsageError(f"{file}: {name} is {value!r}, which is not a whole number above 0; restore the file")
    kinds = kinds or [FULL if layer < first else SLIDING for layer in range(layers)]
    if SLIDING not in kinds:
        return values, no_window
    interval = attention_interval(kinds, layers, file)
    return values, fields | {"window": window, "global_attention_interval": interval}


def attention_kinds(layers: int, every: int | None) -> list[str]:
    """The kinds of attention of the layers of a model with a window."""
    return [FULL if every and layer % every == 0 else SLIDING for layer in range(1, layers + 1)]


def attention_interval(kinds: list[str], layers: Any, file: str) -> int | None:
    """The n of a pattern in which every n-th layer sees everything; None if no layer does."""
    every = kinds.index(FULL) + 1 if FULL in kinds else None
    if len(kinds) == layers and kinds == attention_kinds(layers, every):
        return every
    raise UsageError(
        f"{file}: the pattern of layers with a window, in layer_types or max_window_layers, does not repeat for each "
        f"of num_hidden_layers, and mjax knows only that every n-th layer, or none, has {FULL}; convert another model"
    )


def _write_qwen(model: LlamaConfig) -> dict[str, Any]:
    """The settings of positions and windows in config.json."""
    if model.window is None:
        return {**_write(model), "use_sliding_window": False}
    kinds = attention_kinds(model.layers, model.global_attention_interval)
    windows = {"use_sliding_window": True, "sliding_window": model.window, "layer_types": kinds}
    return {**_write(model), **windows, "max_window_layers": 0}  # which readers without layer_types go by


QWEN2 = replace(
    LLAMA,
    model="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed={**WINDOWED, "qkv_bias": True},
    fields={**LLAMA.fields, "num_key_value_heads": ("kv_heads", ...)},
    only={},
    read=_read_qwen,
    read_fields=LLAMA.read_fields | {"window", "global_attention_interval"},
    write=_write_qwen,
)

QWEN3 = replace(
    QWEN2,
    model="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed={**WINDOWED, "qk_norm": "head"},
    fields={**QWEN2.fields, "head_dim": ("head_dim", ...)},
    only={"attention_bias": False},
)

OLMO2 = replace(
    LLAMA,
    model="Olmo2ForCausalLM",
    names={
        **LLAMA.names,
        "blocks.attention_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.mlp_norm": f"{LAYER}.post_feedforward_layernorm",
    },
    model_type="olmo2",
    fixed={**LLAMA.fixed, "norms": "post", "qk_norm": "heads"},
    fields={**LLAMA.fields, "rms_norm_eps": ("norm_epsilon", 1e-5)},
    only={"attention_bias": False},
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2)
