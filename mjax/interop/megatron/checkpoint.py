"""Finds the checkpoint in a folder of Megatron's and opens it.

    latest_checkpointed_iteration.txt    a step, or the word release; latest_train_state.pt of Megatron-Bridge
    iter_0300000/, release/              mp_rank_00/model_optim_rng.pt … or .metadata, __0_0.distcp …

The first file names one of the folders, whose files determine the format (torch, torch_dist or fsdp_dtensor) and the
architecture. Checkpoints of Megatron-Bridge have other settings, and those of `HybridModel` other layer numbers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import yaml

from mjax.errors import UsageError, first_line
from mjax.interop.distributed_files import COMMON_ENTRIES, COMMON_STATE, StoredTensor, read_metadata
from mjax.interop.megatron.arguments import is_decoder
from mjax.interop.megatron.tensors import (
    EXPERTS,
    RankShard,
    incomplete_error,
    join_expert_ranks,
    join_tensor_ranks,
    open_stacks,
    to_current_names,
)
from mjax.interop.model_folder import read_object
from mjax.interop.tensor_files import Tensors
from mjax.interop.torch_files import PickleStub, load_megatron_file, to_numpy

TRACKER, BRIDGE_TRACKER = "latest_checkpointed_iteration.txt", "latest_train_state.pt"
SAVE_AGAIN = "save it again with Megatron's --ckpt-convert-format torch_dist"
SAVE_MOMENTS = (
    "save it with Megatron's --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or leave out --optimizer"
)
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""File names of a rank; versions with the second one saved the optimizer state in a separate file."""
Architecture = Literal["gpt", "bert", "decoder"]
Rank = tuple[int, int, int]  # tensor rank, pipeline stage, expert rank
MAX_NAME_DEPTH = 30  # dots in a name
OTHER_STATE = re.compile(r"(.*\.)?_extra_state(/.*)?|(chained_\d+\.)?optimizer\..*|common_state/.*")
"""State of TransformerEngine's kernels, moments and arguments."""
MOMENTS = r"(chained_\d+\.)?optimizer\.state\.(fp32_)?{}\."
"""Prefix of a weight's state in the optimizer, in the format torch_dist."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """An opened checkpoint.

    Attributes:
      folder: of the checkpoint.
      architecture: of the model.
      tensors: the weights by current names, merged over ranks.
      version: `checkpoint_version`; if missing, 0 with names from before megatron-core, else 3.
      version_missing: True if `version` is assumed.
      arguments: of the run that wrote it; None if missing.
      tensor_ranks: the tensor-parallel size of that run; None if unknown.
      old_names: True if its names are from before megatron-core.
      common: everything but tensors of the model, such as the state of the optimizer and its schedule.
      open_slot: returns the tensors of a slot of the optimizer's state (`optimizer.SLOTS`), by names of the weights:
        `param`, the float32 weights, are in a run in float32 the weights.
    """

    folder: Path
    architecture: Architecture
    tensors: Tensors
    version: float
    version_missing: bool
    arguments: dict[str, Any] | None
    tensor_ranks: int | None
    old_names: bool
    common: Mapping[str, Any]
    open_slot: Callable[[str], Tensors]


def open_checkpoint(source: Path, step: int | None = None) -> MegatronCheckpoint:
    """Open a Megatron checkpoint of either format.

    Args:
      source: the folder given to `--save`, or one checkpoint in it.
      step: of the checkpoint; None for the one named by the tracker file.

    Raises:
      UsageError: there is no such checkpoint, or it is incomplete or damaged, or calls a function.
    """
    folder = find_folder(source, step)
    if (folder / "metadata.json").is_file():
        backend = read_object(folder / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise UsageError(f"{folder} is in the format {backend!r}, not torch_dist or torch; {SAVE_AGAIN}")
    return _open_distributed(folder) if (folder / ".metadata").is_file() else _merge_ranks(folder, *_load_ranks(folder))


def find_folder(source: Path, step: int | None) -> Path:
    """The folder of one checkpoint.

    Raises:
      UsageError: there is none, or the choice is ambiguous.
    """
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder; give one that Megatron's --save named, or a checkpoint in it")
    if (source / ".metadata").is_file() or any(source.glob("mp_rank_*")):
        if step is not None:
            raise UsageError(f"{source} is one checkpoint already; leave out --step, or give the folder above")
        return source
    names = {entry.name for entry in source.iterdir() if re.fullmatch(r"iter_\d{7,}|release", entry.name)}
    tracker = source / TRACKER
    if step is not None:
        name = f"iter_{step:07d}"
    elif tracker.is_file():
        with tracker.open(errors="replace") as stream:
            word = stream.read(100).strip()
        if not re.fullmatch(r"release|[0-9]{1,18}", word):
            raise UsageError(f"{tracker} says {word[:40]!r}, which is not a step; write the step to convert into it")
        name = word if word == "release" else f"iter_{int(word):07d}"
    elif (source / BRIDGE_TRACKER).is_file():
        name = f"iter_{_read_bridge_step(source / BRIDGE_TRACKER):07d}"
    elif len(names) == 1:
        (name,) = names
    else:
        content = f"several checkpoints ({', '.join(sorted(names))})" if names else "no checkpoint of Megatron"
        raise UsageError(f"{source} has {content} and no {TRACKER}; give one checkpoint's folder")
    if name not in names:
        listed = ", ".join(sorted(names)) or "none"
        raise UsageError(f"{source} has no checkpoint {name}; there are: {listed}")
    return source / name


def _read_bridge_step(tracker: Path) -> int:
    """The step in the tracker file of Megatron-Bridge (`TrainState` in megatron/bridge/training/state.py)."""
    try:
        return int(load_megatron_file(tracker)["step"])
    except (LookupError, TypeError, ValueError, RuntimeError):
        raise UsageError(f"{tracker} has no step; give one checkpoint's folder") from None


# --- Format torch -----------------------------------------------------------------------------------------------------


def _merge_ranks(folder: Path, files: Mapping[Rank, Path], contents: Mapping[Rank, Any]) -> MegatronCheckpoint:
    first = contents[0, 0, 0]
    arguments = _read_arguments(first, folder)
    ranks, stages, experts = (1 + max(numbers) for numbers in zip(*contents, strict=True))
    chunks = list(filter(re.compile(r"model\d*").fullmatch, first))
    if not chunks:
        raise UsageError(f"{files[0, 0, 0]} has no model; give a checkpoint of Megatron")
    chunks.sort(key=lambda name: int(name.removeprefix("model") or 0))
    keys = product(chunks, contents)
    shards = {(chunk, *rank): _read_weights(contents[rank].get(chunk), files[rank]) for chunk, rank in keys}
    names = list(chain.from_iterable(shards.values()))
    kind = _detect_architecture(arguments, names, folder)
    current = {key: to_current_names(shard, kind, str(folder)) for key, shard in shards.items()}

    def open_rank(chunk: str, stage: int, rank: int) -> RankShard:
        return join_expert_ranks([current[chunk, rank, stage, expert] for expert in range(experts)], str(folder))

    pieces = [[open_rank(*piece, rank) for rank in range(ranks)] for piece in product(chunks, range(stages))]
    old = any(name.startswith("language_model.") for name in names)
    version, missing = _read_version(first, folder, assumed=0 if old else 3)
    tensors = join_tensor_ranks(pieces, version, str(folder), gated=kind == "decoder")

    def open_slot(slot: str) -> Tensors:
        if slot == "param" and not any("fp32_from_fp16_params" in part for part in list_optimizers(first)):
            return tensors
        moments = {rank: _with_moments(content, slot, files[rank]) for rank, content in contents.items()}
        return _merge_ranks(folder, files, moments).tensors

    return MegatronCheckpoint(folder, kind, tensors, version, missing, arguments, ranks, old, first, open_slot)


def _find_rank_files(folder: Path) -> dict[Rank, Path]:
    """Find the files by the numbers in their names: tensor rank, and pipeline stage and expert rank or, if there are
    two numbers, one of these."""
    files, longest = {}, 1
    for entry in sorted(folder.glob("mp_rank_*")):
        if not re.fullmatch(r"mp_rank_\d+(_\d+){0,2}", entry.name):
            raise UsageError(f"{entry} is not named mp_rank_NN; convert another checkpoint")
        rank_files = [entry / name for name in RANK_FILES if (entry / name).is_file()]
        if not rank_files:
            raise incomplete_error(f"{entry} has no {RANK_FILES[0]}")
        numbers = [int(number) for number in entry.name.split("_")[2:]]
        longest = max(longest, len(numbers))
        files[tuple([*numbers, 0, 0][:3])] = rank_files[0]
    if not files:
        raise incomplete_error(f"{folder} holds neither mp_rank_00 nor .metadata")
    for rank in product(*(range(1 + max(numbers)) for numbers in zip(*files, strict=True))):
        if rank not in files:
            name = "_".join(["mp_rank", f"{rank[0]:02}", *(f"{number:03}" for number in rank[1:longest])])
            raise incomplete_error(f"{folder} lacks {name}")
    return files


def _load_ranks(folder: Path) -> tuple[dict[Rank, Path], dict[Rank, dict[str, Any]]]:
    """Load the files, and check that they belong to the same checkpoint and are all of it."""
    files = _find_rank_files(folder)
    contents = {rank: load_megatron_file(file) for rank, file in files.items()}
    first = contents[0, 0, 0]
    for (rank, content), name in product(contents.items(), ("iteration", "checkpoint_version")):
        if (value := content.get(name)) != (expected := first.get(name)):
            raise incomplete_error(f"{files[rank]}: {name} is {value}, and {expected} in {files[0, 0, 0]}")
    sizes = _read_arguments(first, folder) or {}
    ranks, stages, experts = (1 + max(numbers) for numbers in zip(*files, strict=True))
    has_pipeline = sizes.get("pipeline_model_parallel_size") not in (None, 1)
    if experts == 1 and stages > 1 and sizes.get("expert_model_parallel_size") == stages and not has_pipeline:
        files = {(rank, 0, expert): file for (rank, expert, _), file in files.items()}
        contents = {(rank, 0, expert): content for (rank, expert, _), content in contents.items()}
        stages, experts = 1, stages
    _check_ranks(sizes, ranks, stages, experts, folder)
    return files, contents


def list_optimizers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of optimizers: one, or of dense layers and of experts on expert ranks."""
    state = content.get("optimizer")
    states = [*state.values()] if isinstance(state, dict) and 0 in state else state
    return [part for part in (states if isinstance(states, list) else [states]) if isinstance(part, dict)]


def _with_moments(content: dict[str, Any], slot: str, file: Path) -> dict[str, Any]:
    """The content of a file with the state of its optimizer in place of the weights.

    torch numbers parameters in the order of the model: of dense layers, then of experts on expert ranks, and in each
    first the matrices, which have weight decay (`get_megatron_optimizer` in core/optimizer/__init__.py).
    """
    parts, chunks = list_optimizers(content), [name for name in content if re.fullmatch(r"model\d*", name)]
    places = [
        (len(parts) > 1 and EXPERTS in name, tensor.ndim == 1, chunk, name)
        for chunk in chunks
        for name, tensor in _read_weights(content[chunk], file).items()
    ]
    values: list[Any] = []
    for part in parts:
        if slot == "param":
            values += chain.from_iterable(part.get("fp32_from_fp16_params", ()))
        else:
            state = part.get("optimizer", part).get("state") or {}
            values += [state[number].get(slot) for number in range(len(state))]
    if len(values) != len(places):
        raise UsageError(f"{file} has no {slot} for each weight; {SAVE_MOMENTS}")
    moments: dict[str, Any] = {chunk: {} for chunk in chunks}
    for (_, _, chunk, name), value in zip(sorted(places, key=lambda place: place[:2]), values, strict=True):
        moments[chunk][name] = value
    return content | moments


def _check_ranks(sizes: dict[str, Any], ranks: int, stages: int, experts: int, folder: Path) -> None:
    expected = {
        "tensor_model_parallel_size": ranks,
        "model_parallel_size": ranks,  # until 2020
        "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": experts,
    }
    for name, actual in expected.items():
        if sizes.get(name) not in (None, actual):
            raise incomplete_error(f"{folder}: {name} was {sizes[name]}, and there are {actual}")
    if sizes.get("num_experts") and (expert_ranks := sizes.get("expert_tensor_parallel_size")) not in (None, ranks):
        problem = f"expert_tensor_parallel_size was {expert_ranks}, and there are {ranks} tensor ranks"
        raise UsageError(f"{folder}: {problem}; {SAVE_AGAIN}")


def _read_weights(model: Any, file: Path) -> RankShard:
    """Convert the weights in the `model` entry of a file."""
    if not isinstance(model, dict):
        raise incomplete_error(f"{file} has no model")
    values = flatten_names(model)
    return to_numpy(file, {name: value for name, value in values.items() if not OTHER_STATE.fullmatch(name)})


def flatten_names(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the nested dicts of 2020 to dotted names: {'a': {'b': x}} → {'a.b': x}."""
    flat = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        if prefix.count(".") > MAX_NAME_DEPTH:  # a pickle can hold itself
            raise UsageError(f"{prefix}{name} is nested too deeply for a checkpoint of Megatron; convert another")
        flat |= flatten_names(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _detect_architecture(arguments: dict[str, Any] | None, names: list[str], folder: Path) -> Architecture:
    trunks = [re.match(r"(?:language_model\.)?(encoder|decoder)\.layers\.", name) for name in names]
    if len({trunk[1] for trunk in trunks if trunk}) > 1:
        raise UsageError(f"{folder} holds an encoder and a decoder, as of T5, which mjax does not support; use others")
    if any(re.match(r"lm_head\.|binary_head\.|.*tokentype_embeddings", name) for name in names):
        return "bert"
    return "decoder" if is_decoder(arguments, names) else "gpt"


def _read_version(content: dict[str, Any], folder: Path, assumed: float) -> tuple[float, bool]:
    """The `checkpoint_version`, and True if it is missing and so `assumed`."""
    value = content.get("checkpoint_version")
    if value is None:
        return assumed, True
    if type(value) not in (int, float) or not 0 <= value < 100:
        raise UsageError(f"{folder}: checkpoint_version is {value!r}, which is not a version; copy it again")
    return value, False


def _read_arguments(content: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    arguments = content.get("args")
    if not isinstance(arguments, PickleStub | dict | None):
        raise incomplete_error(f"{folder}: args is {arguments!r}, which are not Megatron's run arguments")
    return vars(arguments) if isinstance(arguments, PickleStub) else arguments


# --- Format torch_dist ------------------------------------------------------------------------------------------------


def _open_distributed(folder: Path) -> MegatronCheckpoint:
    entries = read_metadata(folder / ".metadata")
    common = _load_common(folder, entries)
    arguments = _read_arguments(common, folder)
    if arguments is None and (folder / RUN_CONFIG).is_file():
        arguments = read_run_config(folder / RUN_CONFIG)
    stored = {name: tensor for name, tensor in entries.items() if not OTHER_STATE.fullmatch(name)}
    if entries.keys() & {*COMMON_ENTRIES}:
        stored = {strip_wrappers(name): tensor for name, tensor in stored.items() if name.startswith("model.")}
    kind = _detect_architecture(arguments, list(stored), folder)
    tensors = open_stacks(folder, to_current_names(stored, kind, str(folder)))
    version, missing = _read_version(common, folder, assumed=3)

    def open_slot(slot: str) -> Tensors:
        prefix = re.compile(MOMENTS.format(slot))
        moments = {prefix.sub("", name, 1): tensor for name, tensor in entries.items() if prefix.match(name)}
        if slot == "param" and not moments:
            return tensors
        if not moments:
            raise UsageError(f"{folder} has no {slot} for each weight; {SAVE_MOMENTS}")
        return open_stacks(folder, to_current_names(moments, kind, str(folder)))

    return MegatronCheckpoint(folder, kind, tensors, version, missing, arguments, None, False, common, open_slot)


def strip_wrappers(name: str) -> str:
    """The name of a tensor in the format fsdp_dtensor without those of its wrappers, an expert's number in front of its
    matrix: model.module.decoder.layers.0.mlp.experts.linear_fc1.weight3_w → ….mlp.experts.3.linear_fc1.weight_w."""
    name = re.sub(r"^model\.(module\.)*", "", name).replace(".experts.local_experts.", ".experts.")
    return re.sub(r"\.experts\.(linear_fc\d)\.(weight|bias)(\d+)", r".experts.\3.\1.\2", name)


def _load_common(folder: Path, entries: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Load what is not a tensor: `args` and `checkpoint_version`."""
    if (folder / "common.pt").is_file():  # megatron-core until 0.18
        return load_megatron_file(folder / "common.pt")
    common: dict[str, Any] = {}
    for name in entries.keys() & {COMMON_STATE, *COMMON_ENTRIES}:
        (chunk,) = entries[name].chunks
        common |= load_megatron_file(folder / chunk.file, chunk, None if name == COMMON_STATE else name)
    if not common:
        raise incomplete_error(f"{folder} holds neither common.pt nor {COMMON_STATE}")
    return common


# --- Settings of Megatron-Bridge --------------------------------------------------------------------------------------
#
# Megatron-Bridge writes no arguments. In their place each checkpoint has a run_config.yaml, `ConfigContainer.to_yaml`
# (megatron/bridge/training/config.py of 0.6.2), with the fields of `TransformerConfig` and of `GPTModel`:
#
#     model:
#       _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
#       activation_func: {_target_: torch.nn.functional.silu, _call_: false}
#       num_layers: 16
#
# Classes and functions are compared by name, and never imported.

RUN_CONFIG = "run_config.yaml"
BRIDGE_ARGUMENTS = {
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
BRIDGE_ACTIVATIONS = {True: ("torch.nn.functional.silu", "silu"), False: ("torch._C._nn.gelu", "gelu")}
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
    arguments = {BRIDGE_ARGUMENTS.get(name, name): value for name, value in fields.items() if name != "transformer"}
    for name, known in KNOWN_TARGETS.items():
        if re.fullmatch(rf"megatron\.({known})", _target_name(arguments.get(name))):
            del arguments[name]
    gated, activation = bool(arguments.pop("gated_linear_unit", False)), arguments.pop("activation_func", "not there")
    if _target_name(activation) not in BRIDGE_ACTIVATIONS[gated]:
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


# --- HybridModel ------------------------------------------------------------------------------------------------------
#
# `HybridModel` (megatron/core/models/hybrid/hybrid_model.py of megatron-core 0.18; `MambaModel` until 0.17) makes a
# layer of each module and states their order in a pattern:
#
#     decoder.layers.0.self_attention…  decoder.layers.1.mlp…  decoder.layers.2.self_attention…     `*-*-`
#     decoder.layers.0.self_attention…  decoder.layers.0.mlp…  decoder.layers.1.self_attention…     a GPT
#
# `*` is attention, `-` an MLP, `E` experts, and `|` a boundary of pipeline stages.

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # arguments with the pattern: since 0.17, and before
OTHER_ARGUMENTS = ("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments without effect if there is a pattern."""
OTHER_LAYERS = {
    "M": "Mamba", "G": "a gated delta net", "D": "DeepSeek's sparse attention", "+": "multi-latent attention",
    "/": "multi-token prediction",
}  # fmt: skip
LAYER_SPEC = re.compile(r"megatron\.core\.models\.(mamba|hybrid)\.\w+ (mamba|hybrid)(_inference)?_stack_spec")


def open_hybrid(checkpoint: MegatronCheckpoint) -> MegatronCheckpoint:
    """The checkpoint of a `HybridModel` as that of a GPT; another checkpoint is returned unchanged.

    Raises:
      UsageError: mjax does not support a kind of layer, or their order, or the tensors do not follow the pattern.
    """
    arguments = checkpoint.arguments or {}
    names = [name for name in PATTERNS if arguments.get(name)]
    if not names:
        return checkpoint
    pattern, source = arguments[names[0]], str(checkpoint.folder)
    sparse = _read_pattern(pattern, names[0], source)
    if arguments.get("use_rope_scaling"):
        problem = "use_rope_scaling is set, which HybridModel ignores"
        raise UsageError(f"{source}: {problem}; add --ignore use_rope_scaling")
    dropped = {*PATTERNS, *OTHER_ARGUMENTS}
    if LAYER_SPEC.fullmatch(" ".join(map(str, arguments.get("spec") or []))):
        dropped.add("spec")
    settings: dict[str, Any] = {name: value for name, value in arguments.items() if name not in dropped}
    tensors = _halve_layer_numbers(checkpoint.tensors, source)
    settings |= {"num_layers": len(sparse), **({"moe_layer_freq": sparse} if any(sparse) else {})}

    def open_slot(slot: str) -> Tensors:
        return _halve_layer_numbers(checkpoint.open_slot(slot), source)

    return replace(checkpoint, arguments=settings, tensors=tensors, open_slot=open_slot)


def _read_pattern(pattern: Any, name: str, source: str) -> list[int]:
    """1 for each of a GPT's layers that has experts, 0 for the others."""
    if isinstance(pattern, str) and re.fullmatch(r"(\*[-E])+", modules := pattern.replace("|", "")):
        return [int(module == "E") for module in modules[1::2]]
    unsupported = [f"{kind} is {word}, which mjax lacks" for kind, word in OTHER_LAYERS.items() if kind in str(pattern)]
    problem = unsupported[0] if unsupported else "mjax reads attention with MLP (*-) or experts (*E) in turn"
    raise UsageError(f"{source}: {name} is {pattern!r}: {problem}; convert another model")


def _halve_layer_numbers(tensors: Tensors, source: str) -> Tensors:
    """The tensors of a `HybridModel` with the layer numbers of a GPT: half of its own.

    Raises:
      UsageError: two modules of the same kind follow each other.
    """
    names: dict[str, str] = {}
    for stored in tensors:
        name = re.sub(r"(?<=\.layers\.)\d+", lambda match: str(int(match[0]) // 2), stored)
        if (earlier := names.setdefault(name, stored)) != stored:
            raise incomplete_error(f"{source} has both {earlier} and {stored}, which its pattern excludes")
    return {name: tensors[stored] for name, stored in names.items()}
