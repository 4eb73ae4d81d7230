"""megatron-core's decoders of today: RMSNorm, rotary positions, grouped queries, a gated MLP, no biases.

The names are those of a GPT, and two tensors of a layer hold what has names of its own elsewhere:

    linear_qkv  [k · (n / k + 2) · d, h]   of each group its query heads, then its key, then its value
    linear_fc1  [2 · f, h]                 gate, then up; but of p ranks each has its gate and its up

Cut into these parts it is a Llama as Hugging Face stores it, so its table is used (`llama.py`), or that of a mixture of
experts (`experts.py` has what only these have). With fewer groups than ranks linear_qkv is split evenly nevertheless:
no rank has a whole group, and none has a copy of another's.

Since 0.14 megatron-core may also store gate and up as two tensors, linear_fc1.weight_w and linear_fc1.weight_v.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mjax.config.llama import LlamaConfig
from mjax.config.mixture import MixtureConfig
from mjax.errors import UsageError
from mjax.interop.llama import LAYER, LLAMA
from mjax.interop.megatron.arguments import ONLY, check_known, numbers_of, shapes_of
from mjax.interop.megatron.experts import EXPERT, check_experts, mixture_fields
from mjax.interop.megatron.names import EMBEDDING, SCORES
from mjax.interop.mixture import QWEN3_MOE
from mjax.interop.tensor_files import Kind, Tensors

ONLY_DECODER: dict[str, Any] = {name: value for name, value in ONLY.items() if name != "num_experts"} | {
    "position_embedding_type": "rope", "use_rotary_position_embeddings": True, "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "qk_layernorm": True, "group_query_attention": True,
    "untie_embeddings_and_output_weights": True,
    # Nothing of these in a Llama.
    "rotary_interleaved": False, "mrope_section": None, "no_rope_freq": None, "qk_l2_norm": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
}  # fmt: skip
EITHER = ("qk_layernorm", "group_query_attention", "untie_embeddings_and_output_weights", "add_position_embedding")
EITHER += ("use_rotary_position_embeddings", "moe_router_pre_softmax")
"""Arguments that may be set or not."""
NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    SCORES: "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
}
QKV = "self_attention.linear_qkv"
MLP = r"(mlp|mlp\.experts\.\d+|mlp\.shared_experts)\.linear_fc"


def megatron_name(name: str) -> str:
    """Return Megatron's name of a tensor of a Llama, such as decoder.layers.1.mlp.linear_fc1.weight."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        layer, module, what = found.groups()
        module = {ours: theirs for theirs, ours in IN_LAYER.items()}.get(module, module)
        module = re.sub(r"^self_attn\.[qkv]_proj$", QKV, module)
        module = re.sub(r"\.(gate|up)_proj$", ".linear_fc1", re.sub(r"\.down_proj$", ".linear_fc2", module))
        return f"decoder.layers.{layer}.{module}.{what}"
    return {ours: theirs for theirs, ours in NAMES.items()}.get(name, name)


DECODER = replace(
    LLAMA, model="Megatron's decoder", prefix="", described_by="the rest of the checkpoint", padded=True,
    ignored="(?!)", spelled=megatron_name,
)  # fmt: skip
SHARED = f"{LAYER}.mlp.shared_experts"
MIXTURE = replace(
    DECODER,
    model="Megatron's mixture of experts",
    names={
        **QWEN3_MOE.names,
        "blocks.mlp.shared.up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        "blocks.mlp.shared.down": f"{SHARED}.down_proj",
    },
)


def is_decoder(arguments: Mapping[str, Any] | None, names: list[str]) -> bool:
    """Whether a checkpoint without learned positions says that it is one of these."""
    said = arguments or {}
    return not any("position_embeddings" in name for name in names) and (
        said.get("position_embedding_type") not in (None, "learned_absolute") or said.get("normalization") == "RMSNorm"
    )


def decoder_config(arguments: Mapping[str, Any], tensors: Tensors, source: str, version: float) -> LlamaConfig:
    """The model, with every row of its embedding as a token; a `MixtureConfig` if it has experts.

    Raises:
      UsageError: the arguments ask for what mjax does not compute, or contradict the tensors.
    """
    either = {name: value for name, value in arguments.items() if name in EITHER and value is not None}
    if odd := [name for name, value in either.items() if not isinstance(value, bool)]:
        raise UsageError(f"{source}: {odd[0]} is {either[odd[0]]!r}, not true or false; copy the checkpoint again")
    check_known({name: value for name, value in arguments.items() if name not in EITHER}, source, ONLY_DECODER)
    if version < 2:
        raise UsageError(f"{source}: checkpoint_version is {version:g}, and decoders are read from 2 on; save it again")
    counts = {"num_attention_heads", "max_position_embeddings"}
    counts |= {"num_query_groups"} if arguments.get("group_query_attention") else set()
    for name in counts:
        if type(arguments.get(name)) is not int or arguments[name] < 1:
            raise UsageError(
                f"{source}: {name} is {arguments.get(name)!r} among the arguments, not a whole number above 0; "
                "copy the checkpoint again"
            )
    numbers = numbers_of(arguments, source)
    heads = arguments["num_attention_heads"]
    if arguments.get("num_experts"):
        check_experts(arguments, source)
        shapes = shapes_of(tensors, "decoder", source, EXPERT)
        kind, of_mlp = MixtureConfig, mixture_fields(arguments, tensors, shapes["ffn_hidden_size"], source)
    else:
        shapes = shapes_of(tensors, "decoder", source)
        kind, of_mlp = LlamaConfig, {"feed_forward": shapes["ffn_hidden_size"]}
    return kind(
        layers=shapes["num_layers"],
        hidden=shapes["hidden_size"],
        heads=heads,
        kv_heads=arguments["num_query_groups"] if arguments.get("group_query_attention") else heads,
        head_dim=_whole(arguments.get("kv_channels"), shapes["hidden_size"] // heads, source),
        **of_mlp,
        sequence=arguments["max_position_embeddings"],
        vocabulary=shapes["padded_vocab_size"],
        qk_norm="head" if arguments.get("qk_layernorm") else "none",
        qkv_bias=f"decoder.layers.0.{QKV}.bias" in tensors.kinds,
        tied=not arguments.get("untie_embeddings_and_output_weights"),
        norm_epsilon=numbers.pop("layernorm_epsilon"),
        **numbers,
        **_rope(arguments, source),
    )


def _whole(value: Any, default: int, source: str) -> int:
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{source}: kv_channels is {value!r}, not a whole number above 0; copy the checkpoint again")
    return value or default


def _rope(said: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our fields for rotary positions; Llama 3's scaling has fixed frequencies and 8,192 positions there."""
    found = {"rope_theta": said.get("rotary_base") or 10_000, "rope_share": said.get("rotary_percent") or 1.0}
    factor = said.get("rotary_seq_len_interpolation_factor")
    if said.get("use_rope_scaling"):
        found |= {"rope_scaling": "llama3", "rope_factor": said.get("rope_scaling_factor") or 8.0}
        if factor is not None:
            raise UsageError(
                f"{source}: use_rope_scaling and rotary_seq_len_interpolation_factor are both set, and mjax knows "
                "one of the two; convert another model"
            )
    elif factor is not None:
        found |= {"rope_scaling": "linear", "rope_factor": factor}
    for name, value in found.items():
        if name != "rope_scaling" and (type(value) not in (int, float) or not 0 < value < 1e30):
            raise UsageError(f"{source}: {name} would be {value!r}, not a number above 0; copy the checkpoint again")
    found = {name: value if name == "rope_scaling" else float(value) for name, value in found.items()}
    return found | ({"rope_original": 8192} if found.get("rope_scaling") == "llama3" else {})


class DecoderTensors:
    """`Tensors` with the names of a Llama, out of Megatron's."""

    def __init__(self, tensors: Tensors, model: LlamaConfig, source: str):
        """Name them.

        Raises:
          UsageError: linear_qkv or linear_fc1 has another number of rows than the model.
        """
        self._tensors, self._model = tensors, model
        self._places: dict[str, tuple[str, int | None]] = {}
        self.kinds: dict[str, Kind] = {}
        for name, kind in tensors.kinds.items():
            found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)(_[wv])?", name)
            layer, module, what, half = found.groups() if found else ("", "", "", None)
            parts = self._parts(module)
            if half and module != QKV and parts:
                whole = f"{LAYER.format(layer)}.{list(parts)[half == '_v']}.{what}"
                self._add(whole, name, None, kind, kind.shape)
            elif parts:
                if kind.shape[:1] != (sum(parts.values()),):
                    raise UsageError(
                        f"{source}: {name} has shape {kind.shape}, and the arguments ask for {sum(parts.values()):,} "
                        "rows; copy the whole checkpoint"
                    )
                for which, (part, extent) in enumerate(parts.items()):
                    self._add(f"{LAYER.format(layer)}.{part}.{what}", name, which, kind, (extent, *kind.shape[1:]))
            elif module in IN_LAYER:
                self._add(f"{LAYER.format(layer)}.{IN_LAYER[module]}.{what}", name, None, kind, kind.shape)
            elif down := re.fullmatch(f"{MLP}2", module):
                self._add(f"{LAYER.format(layer)}.{down[1]}.down_proj.{what}", name, None, kind, kind.shape)
            else:
                self._add(NAMES.get(name, name), name, None, kind, kind.shape)

    def _parts(self, module: str) -> dict[str, int]:
        """The tensors of a Llama that a module of Megatron has as one, with their rows; empty for any other module."""
        model = self._model
        if module == QKV:
            heads = {"q": model.heads, "k": model.groups, "v": model.groups}
            return {f"self_attn.{name}_proj": count * model.head_size for name, count in heads.items()}
        if not (found := re.fullmatch(f"{MLP}1", module)):
            return {}
        if found[1] == "mlp":
            width = model.mlp_width
        else:
            width = getattr(model, "shared_width" if "shared" in found[1] else "width_of_expert", 0)
        return {f"{found[1]}.gate_proj": width, f"{found[1]}.up_proj": width}

    def _add(self, name: str, theirs: str, which: int | None, kind: Kind, shape: tuple[int, ...]) -> None:
        self._places[name] = (theirs, which)
        self.kinds[name] = Kind(kind.dtype, shape)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        theirs, which = self._places[name]
        if which is None:
            return self._tensors.read(theirs, rows)
        if QKV not in theirs:
            f = self.kinds[name].shape[0]
            first, end, _ = rows.indices(f)
            return self._tensors.read(theirs, slice(which * f + first, which * f + max(first, end)))
        queries = self._model.heads // self._model.groups
        fused = self._tensors.read(theirs)
        fused = fused.reshape(self._model.groups, queries + 2, self._model.head_size, *fused.shape[1:])
        part = (slice(queries), slice(queries, queries + 1), slice(queries + 1, None))[which]
        return fused[:, part].reshape(self.kinds[name].shape)[rows]
