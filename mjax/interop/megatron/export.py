"""Write the weights of a run as a checkpoint of Megatron: the inverse of the import, by the same tables.

    latest_checkpointed_iteration.txt       release, or the step of an export with its optimizer (iter_0000500)
    release/mp_rank_00/model_optim_rng.pt   format torch: a file for each rank, or
    release/.metadata, __0_0.distcp …       format torch_dist, for any number of ranks

Megatron trains on a `release` from step 0 with new moments. All tensors have the names and layouts of megatron-core's
`GPTModel` and `BertModel`, `checkpoint_version` 3.
"""

import argparse
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.numpy import bfloat16

from mjax.config.marks import effective_value
from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.interop.megatron import tensors as layout
from mjax.interop.megatron.arguments import decoder_config, model_config, write_arguments
from mjax.interop.megatron.checkpoint import RANK_FILES, TRACKER, Architecture
from mjax.interop.model_folder import write_object
from mjax.interop.tensor_files import FLOAT32_NAMES
from mjax.interop.torch_files import import_torch
from mjax.interop.weights import iterate_tensors, tensor_layouts
from mjax.models.huggingface.family import Family

Format = Literal["torch_dist", "torch"]
Implementation = Literal["transformer_engine", "local"]
VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by, of each tensor rank
_LAYER_AND_REST = re.compile(r"(.*coder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Export:
    """The model of an export in Megatron's terms.

    Attributes:
      family: names and layouts.
      arguments: of a run of Megatron with this model and split.
      tensor, pipeline, expert: numbers of ranks.
    """

    model: ModelConfig
    family: Family
    arguments: dict[str, Any]
    tensor: int
    pipeline: int
    expert: int

    @property
    def gated(self) -> bool:
        """True if linear_fc1 is gate and up."""
        return ARCHITECTURES[self.model.kind] == "decoder"

    @property
    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Tensor rank, pipeline stage and expert rank of each file of the format torch."""
        return product(range(self.tensor), range(self.pipeline), range(self.expert))


# --- The model --------------------------------------------------------------------------------------------------------


def plan_export(
    model: ModelConfig,
    run: Path,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    transformer_impl: Implementation = "transformer_engine",
) -> Export:
    """Check that Megatron has this model with this split.

    Raises:
      UsageError: it has not.
    """
    kind = ARCHITECTURES.get(model.kind)
    if kind is None:
        known = ", ".join(ARCHITECTURES)
        problem = f"{run} is {model.title}{LACKS.get(model.kind, '')}"
        raise UsageError(f"to-megatron supports {known}, and {problem}; use to-hf")
    multiple = VOCABULARY_MULTIPLE * tensor
    padded = -(-model.vocabulary // multiple) * multiple
    sizes = {
        "tensor": model.columns() | model.column_sizes() | {"padded vocabulary": padded},
        "pipeline": {"layers": model.layers},
        "expert": {"experts": model.experts} if model.experts else {"experts of a dense model": 1},
    }
    for (flag, by_name), ranks in zip(sizes.items(), (tensor, pipeline, expert), strict=True):
        for name, size in by_name.items():
            if size % ranks and (name not in model.column_sizes() or ranks % size):
                fits = [str(number) for number in range(1, size + 1) if size % number == 0]
                raise UsageError(f"--{flag} {ranks} does not divide {name} {size:,}; use {', '.join(fits[:12])}")
    arguments = write_arguments(model, padded) | {
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "transformer_impl": transformer_impl,
    }
    if model.kind == "deepseek" and transformer_impl == "local":
        raise UsageError("--transformer-impl local: its attention has one width for keys and values; remove it")
    if pipeline > 1 and getattr(model, "mtp_layers", 0):
        raise UsageError(f"--pipeline {pipeline} is not supported with multi-token prediction; use torch_dist")
    family = layout.decoder_family(model) if kind == "decoder" else layout.megatron_family(kind, 3.0)
    _check_represented(model, kind, arguments, str(run))
    return Export(model, family, arguments, tensor, pipeline, expert)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt": "gpt", "bert": "bert", "llama": "decoder", "mixture": "decoder", "deepseek": "decoder",
}  # fmt: skip
"""mjax's kinds of models that Megatron has."""
LACKS = {
    "gemma3": ", and GPTModel lacks its post-LayerNorms, two RoPE bases and scaled embedding (Megatron-Bridge has them)"
}
"""Why a kind is none of megatron-core's models; the class of Megatron-Bridge 0.6.2 is Gemma3ModelProvider."""
UNCOMPARED = {
    *("vocabulary", "vocabulary_multiple", "sequence", "max_position_embeddings"),
    *("attention", "moe_kernel", "moe_token_dispatcher", "router_bias"),
}
"""Fields without a counterpart: sizes of samples and padding, kernels, and communication; and a bias that another field
implies."""


def _check_represented(model: ModelConfig, kind: Architecture, arguments: dict[str, Any], run: str) -> None:
    """Read the arguments as the import does: no field of the model may change.

    Raises:
      UsageError: one does, so Megatron has no such setting.
    """
    layer = f"{layout.TRUNKS[kind]}.layers.0"
    mlp, width = ("mlp.experts.0", getattr(model, "expert_width", 0)) if model.experts else ("mlp", model.mlp_width)
    shapes: dict[str, tuple[int, ...]] = {
        layout.EMBEDDING: (arguments["padded_vocab_size"], model.hidden),
        f"{layout.TRUNKS[kind]}.layers.{model.layers - 1}.{mlp}.linear_fc1.weight": (),
        f"{layer}.{mlp}.linear_fc2.weight": (model.hidden, width),
    }
    shapes |= {f"{layer}.self_attention.linear_{name}": shape for name, shape in _attention_shapes(model).items()}
    shapes |= {} if kind == "decoder" else {layout.POSITIONS: (model.max_positions, model.hidden)}
    shapes |= {f"{layer}.mlp.router.weight": (model.experts, model.hidden)} if model.experts else {}
    empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    tensors = layout.join_tensor_ranks([[empty]], 3.0, run)
    if kind == "decoder":
        represented: ModelConfig = decoder_config(arguments, tensors, run, 3.0)
    else:
        represented = model_config(arguments, tensors, kind, run)
    for field in dataclasses.fields(model):
        ours, theirs = effective_value(model, field.name), effective_value(represented, field.name)
        unused = field.name == "aux_loss_scope" and not getattr(model, "aux_loss_coef", 0)
        if ours != theirs and field.name not in UNCOMPARED and not unused:
            flag = f"--model.{field.name.replace('_', '-')}"
            problem = f"{run} has {flag} {ours}, and to-megatron can write only {theirs}"
            raise UsageError(f"{problem}; convert another run, or use to-hf")


def _attention_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    if model.kind != "deepseek":
        rows = (model.heads + 2 * model.groups) * model.head_size
        bias = {"qkv.bias": (rows,)} if getattr(model, "qkv_bias", False) else {}
        return {"qkv.weight": (rows, model.hidden), **bias}
    rank, values = model.kv_lora_rank, model.heads * model.v_head_dim
    return {
        "q_down_proj.weight": (model.q_lora_rank or 0, model.hidden),
        "kv_down_proj.weight": (rank + model.qk_rope_head_dim, model.hidden),
        "kv_up_proj.weight": (model.heads * model.qk_nope_head_dim + values, rank),
        "proj.weight": (model.hidden, values),
    }


# --- Tensors ----------------------------------------------------------------------------------------------------------

Blocks = Callable[[str, int], Iterable[tuple[int, np.ndarray]]]  # reads a weight of a checkpoint (`read_in_blocks`)


def gather_tensors(
    export: Export, blocks: Blocks, dtype: np.dtype, scratch: Path, on_written: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """Copy the weights into a file in memory-mapped form; returns Megatron's tensors by current names.

    Experts are stacked [E, out, in]. Rows that pad the vocabulary repeat the last one, as in Megatron's own converter:
    its softmax includes them, and rows of zeros would be far more probable than any token of a model with negative
    logits.

    Args:
      export: the model.
      blocks: reads the checkpoint.
      dtype: of the tensors.
      scratch: the file.
      on_written: called with the bytes of tensors copied since the last call.
    """
    family, model, rows = export.family, export.model, export.arguments["padded_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, int | None, int | None]] = {}
    for name, place in tensor_layouts(family, model).items():
        stored, shape, part_index = family.spelled(name), place.shape, None
        if stored in layout.VOCABULARY:
            shape = (rows, *shape[1:])
        if stored != name:
            parts = layout.list_parts(stored, model)
            part_index, shape = list(parts).index(name), (sum(parts.values()), *shape[1:])
        expert = _EXPERT.search(stored)
        if expert:
            stored, shape = stored.replace(expert[0], layout.EXPERTS), (model.experts, *shape)
        shapes[stored], places[name] = shape, (stored, part_index, int(expert[1]) if expert else None)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    data, whole, end = np.memmap(scratch, dtype, "w+", shape=(sum(sizes.values()),)), {}, 0
    for name, shape in shapes.items():
        end += sizes[name]
        whole[name] = data[end - sizes[name] : end].reshape(shape)
        if name.endswith(FLOAT32_NAMES):
            whole[name] = np.empty(shape, np.float32)
    for name, first, values in iterate_tensors(family, model, blocks):
        stored, part_index, expert = places[name]
        target = whole[stored] if expert is None else whole[stored][expert]
        if part_index is not None:
            target = layout.part_view(target, family.spelled(name), part_index, model)
        if stored in layout.VOCABULARY:
            target = target[first : first + len(values)]
        target[...] = values.reshape(target.shape)
        on_written(target.nbytes)
    for stored in whole.keys() & {*layout.VOCABULARY}:
        whole[stored][model.vocabulary :] = whole[stored][model.vocabulary - 1]
    return whole


def rank_tensors(export: Export, whole: Mapping[str, np.ndarray], rank: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """The shard of a rank: by the numbers of its tensor rank, pipeline stage and expert rank."""
    tensor_rank, stage, expert_rank = rank
    last = export.pipeline - 1
    layers, experts = export.model.layers // export.pipeline, (export.model.experts or 0) // export.expert
    names = dict(whole)
    if stage and stage == last:
        names.setdefault(layout.SCORES, whole[layout.EMBEDDING])  # of the output layer
    shard = {}
    for name, array in names.items():
        local_name, owner = name, 0 if name.startswith("embedding.") else last
        if match := _LAYER_AND_REST.fullmatch(name):
            owner, number = divmod(int(match[2]), layers)
            local_name = f"{match[1]}{number}{match[3]}"
        if owner != stage:
            continue
        pieces = {local_name: array}
        if layout.EXPERTS in name:
            prefix, first = f"{layout.EXPERTS}local_experts.", expert_rank * experts
            pieces = {local_name.replace(layout.EXPERTS, f"{prefix}{i}."): array[first + i] for i in range(experts)}
        for piece, matrix in pieces.items():
            parts = 2 if export.gated and ".linear_fc1." in piece else 1
            view = layout.rank_view(matrix, piece, tensor_rank, export.tensor, parts)
            joined = view.reshape(-1, *matrix.shape[1:]) if view.ndim > matrix.ndim else view
            shard[piece] = np.ascontiguousarray(joined)
    return shard


# --- Files ------------------------------------------------------------------------------------------------------------


def write_release(
    folder: Path, export: Export, trees: Mapping[str, Mapping[str, np.ndarray]], form: Format, common: Mapping[str, Any]
) -> None:
    """Write the checkpoint into a folder, which exists and is empty; not atomic.

    Args:
      folder: of the checkpoints.
      export: the model.
      trees: the results of `gather_tensors` by prefix of their names, which is empty for the weights.
      form: the format.
      common: of an export with its optimizer, the result of `common_state`; else empty.
    """
    torch = import_torch("checkpoints of Megatron are written by torch")
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, **common}
    state["args"] = argparse.Namespace(**export.arguments, **state.pop("args", {}))
    step = state["iteration"]
    release = folder / (f"iter_{step:07d}" if step else "release")
    release.mkdir()
    if form == "torch":
        for tensor_rank, stage, expert_rank in export.ranks:
            name = f"mp_rank_{tensor_rank:02}" + (f"_{stage:03}" if export.pipeline > 1 else "")
            place = release / (name + (f"_{expert_rank:03}" if export.expert > 1 else ""))
            place.mkdir()
            shard = rank_tensors(export, trees[""], (tensor_rank, stage, expert_rank))
            fuse = export.arguments["transformer_impl"] != "local"
            names = {name: _fuse_norm(name, shard, export) if fuse else name for name in shard}
            # Since 0.17 the layer of multi-token prediction has another name in this format.
            renamed = {name: now.replace(".transformer_layer.", ".mtp_model_layer.") for name, now in names.items()}
            model = {renamed[name]: _to_torch(array) for name, array in shard.items()}
            torch.save(state | {"model": model}, place / RANK_FILES[0])
    else:
        from torch.distributed import checkpoint

        tensors = {
            prefix + name: _to_torch(array)
            for prefix, whole in trees.items()
            for name, array in list_sharded_tensors(export, whole)
        }
        extra = _extra_states([name for name, _ in list_sharded_tensors(export, trees[""])])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
            checkpoint.save(
                tensors | {name: [None] for name in extra},
                storage_writer=checkpoint.FileSystemWriter(release, thread_count=1),
                planner=checkpoint.DefaultSavePlanner(flatten_state_dict=False),
                no_dist=True,
            )
        content = {"non_homogeneous_layers": True, "singleton_local_shards": True, "chained_optim_avoid_prefix": True}
        content |= {"distrib_optim_sharding_type": "fully_reshardable"} if common else {}
        torch.save(state | {"content_metadata": content}, release / "common.pt")
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_object(release / "metadata.json", backends | {"common_backend": "torch", "common_backend_version": 1})
    (folder / TRACKER).write_text(str(step or "release"), encoding="utf-8")


def list_sharded_tensors(export: Export, whole: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of torch_dist by name, where every layer, expert, gate and up is a tensor, so that a rank of Megatron
    reads its part only (`singleton_local_shards`)."""
    for name, array in whole.items():
        name = _fuse_norm(name, whole, export)
        pieces = {name: array}
        if layout.EXPERTS in name:
            before, _, rest = name.partition(layout.EXPERTS)
            pieces = {f"{before}{layout.EXPERTS}experts.{i}.{rest}": matrix for i, matrix in enumerate(array)}
        for piece, matrix in pieces.items():
            if export.gated and piece.endswith(".linear_fc1.weight"):
                yield from zip((f"{piece}_w", f"{piece}_v"), matrix.reshape(2, -1, matrix.shape[-1]), strict=True)
            else:
                yield piece, matrix


def _fuse_norm(name: str, names: Container[str], export: Export) -> str:
    """The name of a LayerNorm that is fused with the matrix after it, as with TransformerEngine, if this is one matrix;
    local layers have these names before experts, too, in torch_dist (megatron/core/models/gpt/gpt_layer_specs.py)."""
    local = export.arguments["transformer_impl"] == "local"
    for plain, fused in layout.FUSED_NORMS.items():
        fused_name = name.replace(plain, fused)
        is_fused = f"{fused_name.rpartition('.')[0]}.weight" in names or (local and "mlp" in plain)
        if fused_name != name and is_fused:
            return fused_name
    return name


def _extra_states(names: Collection[str]) -> list[str]:
    """Names of the states of TransformerEngine's modules, which Megatron expects; they hold nothing without FP8."""
    modules = {name.rpartition(".")[0] for name in names if not name.startswith("embedding.")}
    layers = [name.partition(".self_attention.") for name in names]
    modules |= {f"{layer}.self_attention.core_attention" for layer, attention, _ in layers if attention}
    return [f"{module}._extra_state/shard_0_1" for module in sorted(modules)]


def _to_torch(array: np.ndarray) -> Any:
    """A tensor of torch over the same memory: the inverse of `to_numpy`."""
    import torch

    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# --- The command of Megatron ------------------------------------------------------------------------------------------

OFF_FLAGS = {"add_bias_linear": "--disable-bias-linear", "bias_gelu_fusion": "--no-bias-gelu-fusion"}
"""Flags of arguments that are false."""
NO_FLAGS = {
    "vocab_size", "padded_vocab_size", "retro_add_retriever", "add_position_embedding", "bert_binary_head",
    "softmax_type", "mtp_num_layers",
}  # fmt: skip
"""Arguments that --use-checkpoint-args reads, or at Megatron's default."""


def make_command(export: Export, output: Path, form: Format, dtype: str, tokenizer: list[str]) -> list[str]:
    """The command line with which Megatron-LM trains on the export."""
    ranks = export.tensor * export.pipeline * export.expert
    program = "pretrain_bert.py" if export.model.kind == "bert" else "pretrain_gpt.py"
    words = ["torchrun", "--nproc-per-node", str(ranks), program, "--load", str(output), "--use-checkpoint-args"]
    words += ["--sequence-parallel"] if export.model.experts and export.tensor > 1 else []
    words += ["--ckpt-format", form]
    for name, value in export.arguments.items():
        flag = f"--{name.replace('_', '-').replace('opt-param', 'opt_param')}"
        if name in OFF_FLAGS:
            words += [] if value else [OFF_FLAGS[name]]
        elif value is True and name not in NO_FLAGS:
            words.append(flag)
        elif value is not None and value is not False and name not in NO_FLAGS:
            words += [flag, str(value).replace(" ", "")]
    return [*words, *tokenizer, *(["--bf16"] if dtype == "bf16" else [])]
