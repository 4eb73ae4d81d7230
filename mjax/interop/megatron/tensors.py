"""The tensors of a Megatron checkpoint by current names, merged from its files.

join_tensor_ranks   format `torch`: one file per rank with its shard of the model
open_stacks         format `torch_dist`, the default today: tensors in parts, independent of the ranks
split_fused         either format, of a decoder: a tensor for each part of a fused one

Names and layouts of Megatron's tensors since 2020:

    2020  language_model.transformer.layers.3.attention.query_key_value.weight
    2021  language_model.encoder.layers.3.self_attention.query_key_value.weight
    2023  decoder.layers.3.self_attention.linear_qkv.weight       (encoder.layers.… in a BERT)

Opening a checkpoint replaces its names by current ones (`to_current_name`), so one table is enough (`megatron_family`).

Weights have the layout of `torch.nn.Linear`, [out, in]. Queries, keys and values are fused along out, in one of three
orders, which only `checkpoint_version` determines, not names or shapes.

Of t ranks, each has its shard along out (column parallel, arXiv 1909.08053) or in (row parallel), or a full copy:

    out    linear_qkv, linear_q_proj, linear_…_up_proj, eh_proj, linear_fc1; the embedding and output bias, by tokens
    in     linear_proj and linear_fc2, whose biases are full copies
           the same for each expert
    all    everything else
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mjax.config import LlamaConfig, ModelConfig
from mjax.errors import UsageError
from mjax.interop.distributed_files import StoredTensor, StoredTensors
from mjax.interop.tensor_files import LazyTensor, Tensors
from mjax.models.huggingface.family import Family


def incomplete_error(problem: str) -> UsageError:
    """The error about a checkpoint that was not copied completely."""
    return UsageError(f"{problem}; copy the whole checkpoint again")


# --- Layout -----------------------------------------------------------------------------------------------------------


def megatron_family(kind: str, version: float, layernorm: str = "pre", layers: int = 0) -> Family:
    """Current names of the tensors of a `gpt` or a `bert`, with the layouts of a `checkpoint_version`.

    Args:
      kind: `gpt` or `bert`.
      version: determines the order of queries, keys and values. Below 1, which includes files of 2020 without a
        version, they are concatenated; in 1 they are interleaved number by number, from 2 on head by head.
      layernorm: `post` for a BERT with LayerNorm after the residual sums, as in the original (arXiv 1909.08053, figure
        7a). Megatron has pre-LayerNorm layers whose residual is the LayerNorm's output instead of its input
        (`--apply-residual-connection-post-layernorm`). That is the original with the layer boundaries shifted: a
        layer's first LayerNorm belongs to the module before it, the embedding or the MLP of the layer below, and the
        final LayerNorm to the last layer.
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

TRUNKS = {"gpt": "decoder", "bert": "encoder", "decoder": "decoder"}  # prefixes of the current names of layers
EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
SCORES, SCORES_BIAS = "output_layer.weight", "output_layer.bias"
VOCABULARY = (EMBEDDING, SCORES, SCORES_BIAS)  # tensors with one row per token of the padded vocabulary
FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names with TransformerEngine, which fuses a LayerNorm with the matrix after it; torch_dist always has the first two,
and latent attention all, because megatron-core's kernel has one width for keys and values."""
_NAME_CHANGES = (
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
    *((re.escape(fused), plain) for plain, fused in FUSED_NORMS.items()),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),  # of the format torch_dist
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),  # of HybridModel
    (r"\.mtp_model_layer\.", ".transformer_layer."),  # of the format torch since 0.17
)


def to_current_name(name: str, kind: str) -> str:
    """The current name for a name of any year; unknown names are returned unchanged."""
    for old, new in _NAME_CHANGES:
        name = re.sub(old, new, name)
    return name.replace("TRUNK.", f"{TRUNKS[kind]}.", 1)


def to_current_names(tensors: Mapping[str, Any], kind: str, source: str) -> dict[str, Any]:
    """Replace names of any year by current names.

    Raises:
      UsageError: two of the names are of the same tensor.
    """
    known: dict[str, str] = {}
    for name in tensors:
        if (earlier := known.setdefault(to_current_name(name, kind), name)) != name:
            raise UsageError(f"{source} has both {earlier} and {name}; remove the one that is not the model's")
    return {current: tensors[name] for current, name in known.items()}


# --- Decoders ---------------------------------------------------------------------------------------------------------

QKV = "self_attention.linear_qkv"
_GPT = megatron_family("gpt", 3)
LAYER = "decoder.layers.{0}"
DECODER = replace(
    _GPT,
    model="Megatron's decoder",
    names={
        **_GPT.names,
        "blocks.attention.qkv": tuple(f"{LAYER}.{QKV}.{part}" for part in "qkv"),
        "blocks.attention.query": f"{LAYER}.{QKV}.q",
        "blocks.attention.key_value": (f"{LAYER}.{QKV}.k", f"{LAYER}.{QKV}.v"),
        "blocks.attention.query_norm": f"{LAYER}.self_attention.q_layernorm",
        "blocks.attention.key_norm": f"{LAYER}.self_attention.k_layernorm",
        "blocks.mlp.up": (f"{LAYER}.mlp.linear_fc1.gate", f"{LAYER}.mlp.linear_fc1.up"),
        "head": "output_layer",
    },
    spelled=lambda name: re.sub(r"(?<=linear_qkv|linear_fc1)\.\w+(?=\.)", "", name),
)
"""With names for the parts of linear_qkv and linear_fc1, which `split_fused` splits."""
MIXTURE = replace(
    DECODER,
    model="Megatron's mixture of experts",
    names={
        **DECODER.names,
        "blocks.mlp.router": f"{LAYER}.mlp.router",
        "blocks.mlp.router.bias": f"{LAYER}.mlp.router.expert_bias",
        "blocks.mlp.up": tuple(f"{LAYER}.mlp.experts.{{2}}.linear_fc1.{part}" for part in ("gate", "up")),
        "blocks.mlp.down": f"{LAYER}.mlp.experts.{{2}}.linear_fc2",
        "blocks.mlp.up.kernel": DECODER.names["blocks.mlp.up"],  # of layers without experts
        "blocks.mlp.down.kernel": DECODER.names["blocks.mlp.down"],
        "blocks.mlp.shared.up": tuple(f"{LAYER}.mlp.shared_experts.linear_fc1.{part}" for part in ("gate", "up")),
        "blocks.mlp.shared.down": f"{LAYER}.mlp.shared_experts.linear_fc2",
    },
    ignored=r"mtp\..*",  # with --ignore mtp_num_layers
)
LATENT_ATTENTION = {
    "query": "linear_q_proj", "q_down": "linear_q_down_proj", "q_norm": "q_layernorm", "q_up": "linear_q_up_proj",
    "kv_down": "linear_kv_down_proj", "kv_norm": "kv_layernorm", "kv_up": "linear_kv_up_proj", "out": "linear_proj",
}  # fmt: skip
_LATENT_BLOCK = {
    **{
        ours: theirs
        for ours, theirs in MIXTURE.names.items()
        if ours.startswith("blocks.") and "attention." not in ours
    },
    **{f"blocks.attention.{ours}": f"{LAYER}.self_attention.{theirs}" for ours, theirs in LATENT_ATTENTION.items()},
}
MTP = "mtp.layers.0"


def _to_mtp(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The names of a layer's tensors in the layer of multi-token prediction."""
    return names.replace(LAYER, f"{MTP}.transformer_layer") if isinstance(names, str) else tuple(map(_to_mtp, names))


LATENT = replace(
    MIXTURE,
    model="Megatron's mixture of experts with latent attention",
    names={
        **{ours: theirs for ours, theirs in MIXTURE.names.items() if not ours.startswith("blocks.")},
        **_LATENT_BLOCK,
        **{ours.replace("blocks.", "mtp.block."): _to_mtp(theirs) for ours, theirs in _LATENT_BLOCK.items()},
        "mtp.embedding_norm": f"{MTP}.enorm",
        "mtp.hidden_norm": f"{MTP}.hnorm",
        "mtp.projection": f"{MTP}.eh_proj",
        "mtp.final_norm": f"{MTP}.final_layernorm",
    },
    ignored=DECODER.ignored,
)


def decoder_family(model: ModelConfig) -> Family:
    """Current names of the tensors of a decoder."""
    return LATENT if model.kind == "deepseek" else MIXTURE if model.experts else DECODER


# --- Tensor parallelism -----------------------------------------------------------------------------------------------

_COLUMN_PARALLEL = re.compile(r".*\.(linear_(qkv|fc1|q_proj|q_up_proj|kv_up_proj)|eh_proj)\.(weight|bias)")
_ROW_PARALLEL = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")


def split_dim(name: str) -> int | None:
    """The dimension along which a tensor (by current name) is split over ranks; None: every rank has all of it."""
    if name in VOCABULARY or _COLUMN_PARALLEL.fullmatch(name):
        return 0
    return 1 if _ROW_PARALLEL.fullmatch(name) else None


def rank_view(whole: np.ndarray, name: str, rank: int, ranks: int, parts: int = 1) -> np.ndarray:
    """A view of a rank's shard of a tensor, [c, n / t, …] if c `parts` are concatenated in both."""
    dim = split_dim(name)
    if dim is None or ranks == 1:
        return whole
    view = whole.reshape(parts, -1, *whole.shape[1:]) if dim == 0 else whole
    size = view.shape[1] // ranks
    return view[:, rank * size : (rank + 1) * size]


# --- Format torch -----------------------------------------------------------------------------------------------------
#
#     mp_rank_00/model_optim_rng.pt           tensor rank 0; mp_rank_01 … where there are more
#     mp_rank_00_001/model_optim_rng.pt       tensor rank 0 of pipeline stage 1, where there is a pipeline
#
# Each stage numbers its layers from 0. With several chunks per stage, as in the interleaved schedule, they are
# `model0`, `model1`, … in its file, and layers are ordered by chunk: chunk 0 of every stage comes before chunk 1 of the
# first. Arrays are memory-mapped like the files; shards are merged when they are read.

RankShard = dict[str, np.ndarray]  # the tensors of one rank for one piece of the model, by current names
_LAYER_NUMBER = re.compile(r"(?<=coder\.layers\.)\d+(?=\.)")
EXPERTS = ".mlp.experts."


def join_tensor_ranks(
    pieces: Sequence[Sequence[RankShard]], version: float, source: str, gated: bool = False
) -> Tensors:
    """Join the tensor ranks of a model. Its layers are numbered from the first stage of the pipeline to the last.

    Args:
      pieces: of the pipeline, in layer order: for each, the shards of the tensor ranks in rank order.
      version: `checkpoint_version`.
      source: the checkpoint, for messages.
      gated: True if linear_fc1 is gate and up, and each rank has its part of both.

    Raises:
      UsageError: ranks have tensors of different names or shapes, or two pieces have the same tensor.
    """
    joined: dict[str, LazyTensor] = {}
    layers = 0
    for number, piece in enumerate(pieces):
        for rank, shard in enumerate(piece):
            if mismatch := shard.keys() ^ piece[0].keys():
                raise incomplete_error(f"{source}: of tensor ranks 0 and {rank} only one holds {min(mismatch)}")
        numbers = [int(match[0]) for name in piece[0] if (match := _LAYER_NUMBER.search(name))]
        for name in piece[0]:
            whole = _LAYER_NUMBER.sub(lambda match: str(int(match[0]) + layers), name)  # noqa: B023 - called at once
            if whole in joined:
                raise incomplete_error(f"{source}: two stages of the pipeline hold {name}, of piece {number} too")
            # Each rank begins with the queries of its heads, or with its gate.
            parts = 3 if QKV in name and version < 1 else 2 if gated and ".linear_fc1." in name else 1
            joined[whole] = _join_shards(whole, [shard[name] for shard in piece], parts, source)
        layers += 1 + max(numbers, default=-1)
    return joined


def _join_shards(name: str, shards: Sequence[np.ndarray], parts: int, source: str) -> LazyTensor:
    """Join the shards of a tensor, in each of which so many `parts` are concatenated."""
    first, dim = shards[0], split_dim(name)
    for rank, shard in enumerate(shards):
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            kinds = f"{first.dtype} {first.shape} on tensor rank 0 and {shard.dtype} {shard.shape} on {rank}"
            raise incomplete_error(f"{source}: {name} is {kinds}")
    shape = tuple(len(shards) * size if i == dim else size for i, size in enumerate(first.shape))

    def read(rows: slice) -> np.ndarray:
        if dim is None or len(shards) == 1:
            return first[rows]
        if name in VOCABULARY:
            wanted, starts = range(shape[0])[rows], range(0, shape[0], len(first))
            spans = (slice(max(0, wanted.start - start), max(0, wanted.stop - start)) for start in starts)
            return np.concatenate([shard[span] for shard, span in zip(shards, spans, strict=True)])
        whole = np.empty(shape, first.dtype)
        for rank, shard in enumerate(shards):
            view = rank_view(whole, name, rank, len(shards), parts)
            view[...] = shard.reshape(view.shape)
        return whole[rows]

    return replace(LazyTensor.from_array(first), shape=shape, read=read)


def join_expert_ranks(shards: Sequence[RankShard], source: str) -> RankShard:
    """Join the expert ranks of one tensor rank into one share with a tensor for each matrix of each expert.

    Args:
      shards: in the order of expert ranks, by current names; all but experts is the same in each.
      source: the checkpoint, for messages.

    Raises:
      UsageError: the ranks do not fit together, or a tensor does not fit the number of experts.
    """
    joined = {name: array for name, array in shards[0].items() if EXPERTS not in name}
    shared_names = set(joined)
    for rank, shard in enumerate(shards):
        if mismatch := shared_names ^ {name for name in shard if EXPERTS not in name}:
            raise incomplete_error(f"{source}: of expert ranks 0 and {rank} only one holds {min(mismatch)}")
        for name, array in shard.items():
            if EXPERTS not in name:
                continue
            before, _, part = name.partition(EXPERTS)
            router = shard.get(f"{before}.mlp.router.weight")
            if router is None or router.ndim != 2 or len(router) % len(shards):
                problem = f"does not say how many experts each of {len(shards)} expert ranks has"
                raise incomplete_error(f"{source}: {before}.mlp.router.weight {problem}")
            local_experts = len(router) // len(shards)
            for number, rest, tensor in _expert_matrices(part, array, local_experts, router.shape[1]):
                whole = f"{before}{EXPERTS}{rank * local_experts + number}.{rest}"
                if joined.setdefault(whole, tensor) is not tensor:
                    raise incomplete_error(f"{source}: two expert ranks hold {whole}, rank {rank} the second time")
    return joined


def _expert_matrices(part: str, array: np.ndarray, experts: int, hidden: int) -> Iterator[tuple[int, str, np.ndarray]]:
    """The matrices in one tensor of a rank with so many `experts`: number, rest of the name, [out, in]."""
    if match := re.fullmatch(r"local_experts\.(\d+)\.(.+)", part):
        yield int(match[1]), match[2], array
    elif match := re.fullmatch(r"(linear_fc[12])\.(weight|bias)(\d+)", part):
        yield int(match[3]), f"{match[1]}.{match[2]}", array
    elif part in ("weight1", "weight2") and array.size % (experts * hidden) == 0:
        shape = (experts, hidden, -1) if part == "weight1" else (experts, -1, hidden)
        for number, matrix in enumerate(array.reshape(shape)):
            yield number, f"linear_fc{part[-1]}.weight", matrix.T
    else:  # rejected later by its name, with other tensors that are not part of the model
        yield 0, part, array


# --- Format torch_dist ------------------------------------------------------------------------------------------------
#
#     .metadata, __0_0.distcp …    tensors, as of torch.distributed.checkpoint
#     common.pt                    everything but tensors: the arguments of the run, its step
#     metadata.json                the format
#
# All layers may be one tensor `decoder.layers.mlp.linear_fc1.weight` [l, out, in], or one tensor each, with the layer's
# number in the name. So may the experts of a layer, `decoder.layers.3.mlp.experts.linear_fc1.weight` [E, out, in].

Index = tuple[int, ...]
STACK_PREFIXES = (".layers.", ".mlp.experts.")
"""Name parts followed by a number, or by none if all layers or experts are stored as one tensor."""


def open_stacks(folder: Path, stored: Mapping[str, StoredTensor]) -> Tensors:
    """Open a folder of torch.distributed.checkpoint, by layer and expert even if all are stored as one tensor.

    Args:
      folder: of the files.
      stored: the tensors, by current names.

    Raises:
      UsageError: a file is missing or too short, or the parts of a tensor do not cover it.
    """
    files = StoredTensors(folder, stored)
    parts = [(whole, *part) for whole in stored for part in _list_numbered_names(whole, stored[whole].shape)]
    return {name: files.select(whole, index) for whole, name, index in parts}


def _list_numbered_names(name: str, shape: Index, index: Index = ()) -> Iterator[tuple[str, Index]]:
    """Names and indices of the tensors stored as one, with a number for each layer and expert."""
    for many in STACK_PREFIXES:
        before, _, behind = name.partition(many)
        if behind and not behind.split(".")[0].isdigit() and len(index) < len(shape):
            for number in range(shape[len(index)]):
                yield from _list_numbered_names(f"{before}{many}{number}.{behind}", shape, (*index, number))
            return
    yield name, index


# --- Decoders ---------------------------------------------------------------------------------------------------------
#
# Two tensors of a layer hold several:
#
#     linear_qkv  [k · (n / k + 2) · d, h]   of each group its query heads, then its key, then its value
#     linear_fc1  [2 · f, h]                 gate, then up; but of t ranks each has its gate and its up
#
# With fewer groups than ranks linear_qkv is still split evenly: no rank has a whole group, and no two ranks have the
# same rows. Since 0.14 megatron-core may also store gate and up as two tensors, linear_fc1.weight_w and
# linear_fc1.weight_v.


def list_parts(name: str, model: LlamaConfig) -> dict[str, int]:
    """The names of the parts of a tensor, with their numbers of rows if there are several."""
    match = re.fullmatch(r"(.+\.(linear_qkv|linear_fc1))\.(weight|bias)(_[wv])?", name)
    if not match:
        return {name: 0}
    module, kind, parameter, half = match.groups()
    if half:
        return {f"{module}.{'gate' if half == '_w' else 'up'}.{parameter}": 0}
    width = model.mlp_width
    if ".experts." in module:
        width = getattr(model, "expert_width", 0)
    elif ".shared_experts." in module:
        width = getattr(model, "shared_expert_ffn_hidden", 0)
    parts = {"gate": width, "up": width}
    if kind == "linear_qkv":
        heads = {"q": model.heads, "k": model.groups, "v": model.groups}
        parts = {part: count * model.head_size for part, count in heads.items()}
    return {f"{module}.{part}.{parameter}": rows for part, rows in parts.items()}


def part_view(fused: np.ndarray, name: str, part_index: int, model: LlamaConfig) -> np.ndarray:
    """A view of one of the parts of a tensor: gate or up [f, …]; of each group its queries, key or value [k, …]."""
    if QKV not in name:
        return fused.reshape(2, -1, *fused.shape[1:])[part_index]
    queries = model.heads // model.groups
    part = (slice(queries), slice(queries, queries + 1), slice(queries + 1, None))[part_index]
    return fused.reshape(model.groups, queries + 2, model.head_size, *fused.shape[1:])[:, part]


def split_fused(tensors: Tensors, model: LlamaConfig, source: str) -> Tensors:
    """Split fused tensors into their parts, by names such as linear_qkv.q.weight and linear_fc1.gate.weight.

    Raises:
      UsageError: linear_qkv or linear_fc1 has another number of rows than the model.
    """
    split: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        parts = list_parts(name, model)
        if len(parts) > 1 and tensor.shape[:1] != (rows := sum(parts.values()),):
            asked = f"the arguments ask for {rows:,} rows"
            raise incomplete_error(f"{source}: {name} has shape {tensor.shape}, and {asked}")
        for index, (part, rows) in enumerate(parts.items()):
            split[part] = tensor if len(parts) == 1 else _select_part(tensor, name, index, rows, model)
    return split


def _select_part(fused: LazyTensor, name: str, index: int, rows: int, model: LlamaConfig) -> LazyTensor:
    shape = (rows, *fused.shape[1:])
    return replace(fused, shape=shape, read=lambda rows: part_view(fused[:], name, index, model).reshape(shape)[rows])
