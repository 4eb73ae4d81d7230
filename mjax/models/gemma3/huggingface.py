"""`Gemma3ForCausalLM` of `transformers`: names of its tensors and settings of its config.json.

Rotary positions have two spellings, and both are written: `rope_parameters` by kind of layer since transformers 5, and
before that `rope_theta` and `rope_scaling` for layers that see everything with `rope_local_base_freq` for the others.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.gemma3.config import Gemma3Config
from mjax.models.llama.huggingface import FULL, LAYER, LLAMA, SLIDING, attention_kinds


def _read(values: dict[str, Any], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings without those of positions and kinds of layers, and our fields for these."""
    values = dict(values)
    every = _full_attention_every(values, file)
    by_kind = values.pop("rope_parameters", None) or {}
    if not isinstance(by_kind, dict) or not by_kind.keys() <= {FULL, SLIDING}:
        raise UsageError(
            f"{file}: rope_parameters must have {FULL!r} and {SLIDING!r} and nothing else; restore the file"
        )

    def rope(kind: str, theta: str, scaling: Any) -> dict[str, Any]:
        given = {"rope_parameters": by_kind.get(kind), "rope_theta": values.pop(theta, None), "rope_scaling": scaling}
        length = values.get("max_position_embeddings", 131072)
        rest, fields = LLAMA.read({**given, "max_position_embeddings": length}, file)
        if "rope_theta" in rest:
            values[theta] = rest["rope_theta"]
        return fields

    fields = rope(FULL, "rope_theta", values.pop("rope_scaling", None))
    local = rope(SLIDING, "rope_local_base_freq", None)
    if local["rope_scaling"] != "none":
        raise UsageError(
            f"{file}: rope_type of {SLIDING} is {local['rope_scaling']!r}, and mjax scales the positions of {FULL} "
            "only; convert another model"
        )
    return values, {**fields, "full_attention_every": every}


def _full_attention_every(values: dict[str, Any], file: str) -> int:
    """Take the kinds of layers out of `values`: of so many layers the last sees everything."""
    kinds, old = values.pop("layer_types", None), values.pop("sliding_window_pattern", None)
    every = values.pop("_sliding_window_pattern", 6) if old is None else old
    values.pop("_sliding_window_pattern", None)
    if type(every) is not int or every < 1:
        raise UsageError(f"{file}: sliding_window_pattern is {every!r}, not a whole number above 0; restore the file")
    if kinds is None:
        return every
    found = kinds if isinstance(kinds, list) else []
    first = found.index(FULL) + 1 if FULL in found else len(found) + 1
    for each in (every, first):
        if len(found) == values.get("num_hidden_layers", 26) and found == attention_kinds(len(found), each):
            return each
    raise UsageError(
        f"{file}: layer_types is {reprlib.repr(kinds)}, and mjax knows one kind for each of num_hidden_layers, of "
        f"which every n-th is {FULL!r} and all others are {SLIDING!r}; convert another model"
    )


def _write(model: Gemma3Config) -> dict[str, Any]:
    values, theta = LLAMA.write(model), model.local_rope_theta
    by_kind = {SLIDING: {"rope_type": "default", "rope_theta": theta}, FULL: values["rope_parameters"]}
    every = model.full_attention_every or model.layers + 1
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
        "num_hidden_layers": ("layers", 26),
        "hidden_size": ("hidden", 2304),
        "num_attention_heads": ("heads", 8),
        "num_key_value_heads": ("kv_heads", 4),
        "head_dim": ("head_dim", 256),
        "intermediate_size": ("feed_forward", 9216),
        "max_position_embeddings": ("sequence", 131072),
        "vocab_size": ("vocabulary", 262208),
        "sliding_window": ("window", 4096),
        "query_pre_attn_scalar": ("query_scalar", 256),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "initializer_range": ("init_std", 0.02),
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
    read_fields=LLAMA.read_fields | {"full_attention_every"},
    without_effect=frozenset({"cache_implementation"}),
)
FAMILIES = (GEMMA3,)
