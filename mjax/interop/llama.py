"""Llama, Mistral, Qwen 2, Qwen 3 and OLMo 2 of `transformers`: one model here, a class each there.

Queries, keys and values have tensors of their own there and are one weight here; so have the gate and the other half of
the MLP. What a table cannot say is rotary positions, of which config.json has two spellings: `rope_parameters` since
transformers 5, and `rope_theta` with `rope_scaling` before. Older readers do not know the new one and take θ = 10,000
without a word, so both are read and both are written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mjax.config.llama import LlamaConfig
from mjax.errors import UsageError
from mjax.interop.family import Family, Reader

LAYER = "model.layers.{0}"
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = {
    "default": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None}
    | {"truncate": True},
}
"""By the type of a scaling the settings that change what it computes, and the only value of each that mjax knows."""


def _read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of config.json without those of positions and of the output layer, and our fields for these."""
    values = dict(values)
    fields = _read_rope(values, file)
    fields["tied"] = values.pop("tie_word_embeddings", False)
    if not isinstance(fields["tied"], bool):
        raise UsageError(f"{file}: tie_word_embeddings is {fields['tied']!r}, not true or false; restore the file")
    for name in ("use_mrope", "rope_interleaved"):  # in published files, and false
        if (value := values.pop(name, None) or False) is not False:
            raise UsageError(f"{file}: {name} is {value!r}, and mjax supports only false; convert another model")
    if any(kind != FULL for kind in _layer_types(values, file)):
        raise UsageError(f"{file}: layer_types has other values than {FULL!r}, which mjax reads of Qwen only")
    return values, fields


def omitted(read: Reader, **settings: Any) -> Reader:
    """`read`, with what config.json omits as in the class of `transformers`; null is not omitted."""
    return lambda values, file: read({**settings, **values}, file)


def _layer_types(values: dict[str, Any], file: str) -> list[str]:
    """Take the kinds of attention of the layers, which may be omitted, out of `values`."""
    kinds = values.pop("layer_types", None) or []
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {FULL, SLIDING}:
        raise UsageError(f"{file}: layer_types is {kinds!r}, and mjax knows {FULL!r} and {SLIDING!r} in it")
    return kinds


def _read_mistral(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, and the sliding window, which Mistral has unless config.json says null."""
    values, fields = _read(values, file)
    window = fields["window"] = values.pop("sliding_window", 4096)
    if window is not None and (type(window) is not int or window < 1):
        raise UsageError(f"{file}: sliding_window is {window!r}, which is not a whole number above 0; restore the file")
    return values, fields


def _read_qwen(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, and the sliding window of some layers: of those in `layer_types`, or from `max_window_layers` on."""
    kinds = _layer_types(values, file)
    values, fields = _read(values, file)
    window, first = values.pop("sliding_window", 4096), values.pop("max_window_layers", 28)
    none = {"window": None, "full_attention_every": None}
    if not values.pop("use_sliding_window", False) or window is None:
        return values, fields | none
    layers = values.get("num_hidden_layers", 32)
    numbers = {"sliding_window": window, "max_window_layers": first, "num_hidden_layers": layers}
    for name, value in numbers.items():
        if type(value) is not int or not (name != "max_window_layers") <= value < 2**31:
            raise UsageError(f"{file}: {name} is {value!r}, which is not a whole number above 0; restore the file")
    kinds = kinds or [FULL if layer < first else SLIDING for layer in range(layers)]
    if SLIDING not in kinds:
        return values, fields | none
    every = kinds.index(FULL) + 1 if FULL in kinds else None
    if kinds != _kinds(layers, every):
        raise UsageError(
            f"{file}: the pattern of layers with a window, in layer_types or max_window_layers, does not repeat, and "
            f"mjax knows only that every n-th layer, or none, has {FULL}; convert another model"
        )
    return values, fields | {"window": window, "full_attention_every": every}


def _kinds(layers: int, every: int | None) -> list[str]:
    """The kinds of attention of the layers of a model with a window."""
    return [FULL if every and layer % every == 0 else SLIDING for layer in range(1, layers + 1)]


def _write_qwen(model: LlamaConfig) -> dict[str, Any]:
    """What config.json says of positions, of heads and of windows."""
    if model.window is None:
        return {**_write(model), "use_sliding_window": False}
    kinds = _kinds(model.layers, model.full_attention_every)
    windows = {"use_sliding_window": True, "sliding_window": model.window, "layer_types": kinds}
    return {**_write(model), **windows, "max_window_layers": 0}  # which readers without layer_types go by


def _read_rope(values: dict[str, Any], file: str) -> dict[str, Any]:
    """Take the settings of rotary positions, in either spelling, out of `values`; our fields for them."""
    new, old = values.pop("rope_parameters", None) or {}, values.pop("rope_scaling", None) or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise UsageError(f"{file}: rope_parameters and rope_scaling must be objects; restore the file")
    rope = {**old, **new}
    theta = values.pop("rope_theta", None)
    theta = rope.pop("rope_theta", theta if theta is not None else 10_000.0)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UsageError(f"{file}: rope_type is {kind!r}; mjax knows {', '.join(SCALINGS)}: convert another model")
    factor, original = rope.pop("factor", 1.0), rope.pop("original_max_position_embeddings", None)
    for name, value in rope.items():
        known = SCALINGS[kind].get(name)
        if name == "attention_factor" and type(value) in (int, float) and _is_of_yarn(value, factor):
            continue
        if name not in SCALINGS[kind] or (value != known and value is not None):
            raise UsageError(f"{file}: {name} of {kind} positions is {value!r}, and mjax knows only {known!r}")
    numbers = {"rope_theta": theta, "factor": factor}
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 1 <= value < 1e30:
            raise UsageError(f"{file}: {name} is {value!r}, which is not a number from 1 on; restore the file")
    if kind in ("llama3", "yarn"):
        original = values.get("max_position_embeddings") if original is None else original
        if type(original) is not int or original < 1:
            raise UsageError(f"{file}: original_max_position_embeddings is {original!r}; restore the file")
    else:
        original = None
    scaling = "none" if kind == "default" else kind
    return {
        "rope_theta": float(theta),
        "rope_scaling": scaling,
        "rope_factor": float(factor) if scaling != "none" else 1.0,
        "rope_original": original,
    }


def _is_of_yarn(attention_factor: float, factor: Any) -> bool:
    """Whether this factor of the attention scores is the one that follows from `factor` (arXiv 2309.00071, eq. 22)."""
    return type(factor) in (int, float) and factor >= 1 and math.isclose(attention_factor, 0.1 * math.log(factor) + 1)


def _write(model: LlamaConfig) -> dict[str, Any]:
    """What config.json says of positions, in both spellings, of heads and of the output layer."""
    rope: dict[str, Any] = {"rope_type": "default" if model.rope_scaling == "none" else model.rope_scaling}
    if model.rope_scaling != "none":
        rope["factor"] = model.rope_factor
    if model.rope_original is not None:
        rope["original_max_position_embeddings"] = model.rope_original
    rope |= {name: value for name, value in SCALINGS[rope["rope_type"]].items() if value is not None}
    return {
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling == "none" else rope,
        "tie_word_embeddings": model.tied,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_size,
    }


LLAMA = Family(
    model="LlamaForCausalLM",
    names={
        "embedding": "model.embed_tokens",
        "blocks.attention_norm": f"{LAYER}.input_layernorm",
        "blocks.attention.qkv": tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "blocks.attention.query": f"{LAYER}.self_attn.q_proj",
        "blocks.attention.key_value": (f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
        "blocks.attention.query_norm": f"{LAYER}.self_attn.q_norm",
        "blocks.attention.key_norm": f"{LAYER}.self_attn.k_norm",
        "blocks.attention.out": f"{LAYER}.self_attn.o_proj",
        "blocks.mlp_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.mlp.up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        "blocks.mlp.down": f"{LAYER}.mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # which old versions stored
    model_type="llama",
    generates=True,
    fixed={"kind": "llama", "norms": "pre", "qk_norm": "none", "qkv_bias": False, "window": None},
    fields={
        "num_hidden_layers": ("layers", 32),
        "hidden_size": ("hidden", 4096),
        "num_attention_heads": ("heads", 32),
        "num_key_value_heads": ("kv_heads", None),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("feed_forward", 11008),
        "max_position_embeddings": ("sequence", 2048),
        "vocab_size": ("vocabulary", 32000),
        "hidden_act": ("activation", "silu"),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "initializer_range": ("init_std", 0.02),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    only={"attention_bias": False, "mlp_bias": False},
    read=_read,
    write=_write,
    read_fields=frozenset({
        "tied", "rope_theta", "rope_scaling", "rope_factor", "rope_original",
        "hidden_dropout",  # of training only
    }),
    without_effect=frozenset({
        "pretraining_tp",  # how tensor-parallel inference rounded
        "is_llama_config", "transformers.js_config",  # of the trainer and of another reader
    }),
)  # fmt: skip

MISTRAL = replace(
    LLAMA,
    model="MistralForCausalLM",
    model_type="mistral",
    fixed={name: value for name, value in LLAMA.fixed.items() if name != "window"},
    fields={
        **LLAMA.fields,
        "intermediate_size": ("feed_forward", 14336),
        "max_position_embeddings": ("sequence", 131072),
    },
    only={},
    read=omitted(_read_mistral, num_key_value_heads=8),
    read_fields=LLAMA.read_fields | {"window"},
    write=lambda model: {**_write(model), "sliding_window": model.window},
)

QWEN2 = replace(
    LLAMA,
    model="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed={name: value for name, value in LLAMA.fixed.items() if name != "window"} | {"qkv_bias": True},
    fields={
        **LLAMA.fields,
        "intermediate_size": ("feed_forward", 22016),
        "max_position_embeddings": ("sequence", 32768),
        "vocab_size": ("vocabulary", 151936),
    },
    only={},
    read=omitted(_read_qwen, num_key_value_heads=32),
    read_fields=LLAMA.read_fields | {"window", "full_attention_every"},
    write=_write_qwen,
    without_effect=frozenset(),
)

QWEN3 = replace(
    QWEN2,
    model="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed={name: value for name, value in LLAMA.fixed.items() if name != "window"} | {"qk_norm": "head"},
    only={"attention_bias": False},
    read=omitted(QWEN2.read, head_dim=128),
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
    fields={**LLAMA.fields, "vocab_size": ("vocabulary", 50304), "rms_norm_eps": ("norm_epsilon", 1e-5)},
    only={"attention_bias": False},
)
