"""Names of Megatron's tensors since 2020, their layouts, and how tensor parallelism splits them.

    2020  language_model.transformer.layers.3.attention.query_key_value.weight
    2021  language_model.encoder.layers.3.self_attention.query_key_value.weight
    2023  decoder.layers.3.self_attention.linear_qkv.weight       (encoder.layers.… in a BERT)

Names are replaced by current ones when a checkpoint is opened (`today`), so one table is enough (`family_of`).

Weights are those of a `torch.nn.Linear`, [out, in]. Queries, keys and values are fused along out, in one of three
orders, which only `checkpoint_version` tells: names and shapes do not.

Of p ranks, each has its shard along out (column parallel, arXiv 1909.08053) or in (row parallel), or a full copy:

    out    linear_qkv and linear_fc1 with their biases; the embedding and the bias of the scores, by tokens
    in     linear_proj and linear_fc2, whose biases are full copies
           experts likewise, one by one
    all    everything else
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mjax.errors import UsageError
from mjax.models.huggingface.family import Family
from mjax.models.llama.huggingface import LAYER, LLAMA
from mjax.models.mixture.huggingface import QWEN3_MOE

DEEPEST = 30  # dots in a name


def incomplete(problem: str) -> UsageError:
    """Return the error about a checkpoint that was not copied completely."""
    return UsageError(f"{problem}; copy the whole checkpoint again")


# --- Layout -----------------------------------------------------------------------------------------------------------


def family_of(kind: str, version: float, layernorm: str = "pre", layers: int = 0) -> Family:
    """Current names of the tensors of a `gpt` or a `bert`, with the layouts of a `checkpoint_version`.

    Args:
      kind: `gpt` or `bert`.
      version: determines the order of queries, keys and values. Below 1, which includes files of 2020 without a
        version, they are concatenated; in 1 they are interleaved number by number, from 2 on head by head.
      layernorm: `post` for a BERT with LayerNorm after the residual sums, as in the original (arXiv 1909.08053, figure
        7a). Megatron keeps the pre-LayerNorm layers, but takes the residual from the LayerNorm's output instead of its
        input (`--apply-residual-connection-post-layernorm`). That is the original with the layer boundaries shifted: a
        layer's first LayerNorm belongs to what precedes it, the embedding or the MLP of the layer below, and the final
        LayerNorm to the last layer.
      layers: of a `post` BERT.
    """
    trunk = TRUNKS[kind]
    layer = f"{trunk}.layers.{{0}}"
    names = {
        "embedding": "embedding.word_embeddings",
        "positions": "embedding.position_embeddings",
        "token_types": "embedding.tokentype_embeddings",
        "blocks.attention_norm": f"{layer}.input_layernorm",
        "blocks.attention.qkv": f"{layer}.self_attention.linear_qkv",
        "blocks.attention.out": f"{layer}.self_attention.linear_proj",
        "blocks.mlp_norm": f"{layer}.pre_mlp_layernorm",
        "blocks.mlp.up": f"{layer}.mlp.linear_fc1",
        "blocks.mlp.down": f"{layer}.mlp.linear_fc2",
        "final_norm": f"{trunk}.final_layernorm",
        "mlm.transform": "lm_head.dense",
        "mlm.norm": "lm_head.layer_norm",
        "mlm": "output_layer",
        "pooler": "pooler.dense",
        "order": "binary_head",
    }
    renamed = ()
    if layernorm == "post":
        names |= {
            "embedding_norm": f"{trunk}.layers.0.input_layernorm",
            "blocks.attention_norm": f"{layer}.pre_mlp_layernorm",
            "blocks.mlp_norm": f"{trunk}.layers.{{1}}.input_layernorm",
        }
        renamed = ((rf"^{trunk}\.final_layernorm", f"{trunk}.layers.{layers}.input_layernorm"),)
    return Family(
        model=f"Megatron's {kind.upper()}",
        names=names,
        qkv="cnd" if version < 1 else "ndc" if version < 2 else "ncd",
        copies={SCORES: EMBEDDING},
        renamed=renamed,
        described_by="the rest of the checkpoint",
        padded=True,
    )


# --- Names ------------------------------------------------------------------------------------------------------------

TRUNKS = {"gpt": "decoder", "bert": "encoder", "decoder": "decoder"}
"""Prefixes of the current names of layers."""
EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
SCORES, SCORES_BIAS = "output_layer.weight", "output_layer.bias"
VOCABULARY = (EMBEDDING, SCORES, SCORES_BIAS)
"""Tensors with one row per token of the padded vocabulary."""
_OLD = (
    (r"^language_model\.(transformer|encoder)\.", "TRUNK."),
    (r"^language_model\.", ""),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
    (r"^lm_head\.bias$", SCORES_BIAS),
    # The last pipeline stage has a copy of the embedding for the output layer.
    (r"^word_embeddings_for_head\.weight$", SCORES),
    # TransformerEngine fuses a LayerNorm with the linear layer after it.
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),  # of the format torch_dist
)
_NO_WEIGHT = re.compile(r"(.*\.)?_extra_state(/.*)?|(chained_\d+\.)?optimizer\..*")
"""State of TransformerEngine's kernels, and moments."""


def kind_of(names: list[str]) -> str:
    """`bert` if tensors of these names include BERT's heads, else `gpt`."""
    return "bert" if any(re.match(r"lm_head\.|binary_head\.|.*tokentype_embeddings", name) for name in names) else "gpt"


def is_weight(name: str) -> bool:
    """Whether a tensor belongs to the model."""
    return not _NO_WEIGHT.fullmatch(name)


def today(name: str, kind: str) -> str:
    """The current name for a name of any year; unknown names are returned unchanged."""
    for old, new in _OLD:
        name = re.sub(old, new, name)
    return name.replace("TRUNK.", f"{TRUNKS[kind]}.", 1)


def renamed(tensors: Mapping[str, Any], kind: str, source: str) -> dict[str, Any]:
    """A dict with names of any year, with current names.

    Raises:
      UsageError: two of the names are of the same tensor.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, tensor in tensors.items():
        known = today(name, kind)
        if known in found:
            raise UsageError(f"{source} has both {found[known][0]} and {name}; remove the one that is not the model's")
        found[known] = (name, tensor)
    return {known: tensor for known, (_, tensor) in found.items()}


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{'a': {'b': x}} → {'a.b': x}: the nested dicts of 2020 with today's flat names."""
    found = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        if above.count(".") > DEEPEST:  # a pickle can hold itself
            raise UsageError(f"{above}{name} is nested too deeply for a checkpoint of Megatron; convert another")
        found |= flat(value, f"{above}{name}.") if nested else {f"{above}{name}": value}
    return found


# --- Decoders ---------------------------------------------------------------------------------------------------------

NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    SCORES: "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
"""Megatron's names outside layers → those of a Llama."""
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


# --- Tensor parallelism -----------------------------------------------------------------------------------------------

_BY_OUT = re.compile(r".*\.(linear_qkv|linear_fc1)\.(weight|bias)")
_BY_IN = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")


def split_dim(name: str) -> int | None:
    """The dimension along which a tensor (by current name) is split over ranks; None: each has all of it."""
    if name in VOCABULARY or _BY_OUT.fullmatch(name):
        return 0
    return 1 if _BY_IN.fullmatch(name) else None
