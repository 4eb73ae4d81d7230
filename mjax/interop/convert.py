"""`mjax convert`: the run folder of an import, the family of an export, and longer sequences (`--rope`).

Checkpoint 0 of an import has the weights only: no step has been taken, so there are no moments, and training begins
with new ones. Only an import of Megatron's optimizer has a whole state, and continues with its next step.
"""

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.numpy import bfloat16

from mjax.checkpoint.arrays import group_by_field, leaves_by_path, names_with_layer_dim, type_and_shape, write_array
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import MANIFEST, write_manifest
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, save_config
from mjax.config.checks import validate
from mjax.config.model import REGISTRY, ModelConfig, import_object, is_user_defined
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, either
from mjax.interop.model_folder import MODEL_CARD, new_folder
from mjax.interop.tensor_files import Tensors
from mjax.interop.weights import weights_by_name
from mjax.models.huggingface.family import Family, unlike
from mjax.models.protocol import Model
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import TrainState, build_layout, initial_weights
from mjax.step.step import build_program

DTYPES = {"fp32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(bfloat16))}
"""Values of --dtype: torch's name, and NumPy's dtype."""


def import_config(model: ModelConfig, source: str, tensors: Tensors) -> Config:
    """The config of an import, after a check of the model. It has no data, and computes in the dtype of its largest
    tensor: fp32, or bf16."""
    single = max(tensors.values(), key=lambda tensor: math.prod(tensor.shape)).dtype == "F32"
    config = Config(model=model, precision=PrecisionConfig(compute="fp32" if single else "bf16"))
    validate(dataclasses.replace(config, data=DataConfig(mock=True)), source)
    return config


def write_run(
    output: Path,
    config: Config,
    tokenizer: Tokenizer | None,
    read_block: Callable[[str, int, int], np.ndarray],
    extra_files: Mapping[str, bytes] | None = None,
    card: str = "",
    step: int = 0,
) -> None:
    """Create the run folder of an import: checkpoint 0 has the weights only, that of another step the whole state.

    Args:
      output: the folder.
      config: of the run.
      tokenizer: of the model, if there is one.
      read_block: the result of `make_block_reader`; of a whole state, of `make_state_reader`.
      extra_files: the result of `collect_tokenizer_files`, for the tokenizer's folder.
      card: README.md of the run; empty for none.
      step: of the checkpoint.
    """
    with new_folder(output) as folder:
        save_config(config, folder / "config.json")
        if card:
            (folder / MODEL_CARD).write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
            for name, content in (extra_files or {}).items():
                (folder / "tokenizer" / name).write_bytes(content)
        target = abstract_state(config) if step else {"model": abstract_model(config)}
        write_checkpoint(folder / "checkpoints", target, read_block, step)


def write_checkpoint(
    folder: Path, target: Any, read_block: Callable[[str, int, int], np.ndarray], step: int = 0
) -> None:
    """Write a checkpoint block by block into `folder`; not atomic, so write into a temporary folder.

    Orbax has every array of a state in memory. Its arrays are Zarr 3 in one OCDBT store, which TensorStore writes by
    slices. So Orbax begins this checkpoint, with empty arrays, and TensorStore completes it: `Checkpoints.restore`
    reads it on any mesh.

    Args:
      folder: `checkpoints` of a run.
      target: the state, or one field of it such as {"model": …}, of ShapeDtypeStructs.
      read_block: called with the name of an array in `target` without `model.`, and the begin and end of a block of its
        first dim.
      step: of the checkpoint.
    """
    with Checkpoints(folder, on_notice=lambda line: None) as checkpoints:
        checkpoints.save(step, jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), target))
    whole, arrays, stacked = folder / str(step), leaves_by_path(target), names_with_layer_dim(target)
    (whole / MANIFEST).unlink()
    for field in group_by_field(arrays):
        for folder_name in ("d", "ocdbt.process_0", "array_metadatas"):  # the last one describes empty arrays
            shutil.rmtree(whole / field / folder_name)
        (whole / field / "manifest.ocdbt").unlink()
    for name, leaf in arrays.items():
        read_rows = partial(read_block, name.removeprefix("model."))
        write_array(whole / name.split(".")[0], name, leaf, name in stacked, read_rows)
    write_manifest(whole, step, {name: type_and_shape(leaf) for name, leaf in arrays.items()})


def abstract_model(config: Config) -> Model:
    """The model of ShapeDtypeStructs on one CPU device, for reading the weights of `config`.

    Layers are not split into virtual stages.
    """
    mesh = MeshConfig()
    return build_layout(dataclasses.replace(config, mesh=mesh), make_mesh(mesh, jax.devices("cpu"))).abstract_model


def abstract_state(config: Config) -> TrainState:
    """The state of ShapeDtypeStructs of a run on one CPU device."""
    mesh = MeshConfig()
    return build_program(dataclasses.replace(config, mesh=mesh), make_mesh(mesh, jax.devices("cpu"))).abstract_state


def init_weights(config: Config, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Initialize the weights whose names have these prefixes, as in a run of `config`."""

    def select(model: Model) -> dict:
        return {name: leaf for name, leaf in weights_by_name(model).items() if name.startswith(names)}

    shardings = jax.tree.map(lambda leaf: leaf.sharding, select(abstract_model(config)))
    return jax.jit(lambda: select(initial_weights(config)), out_shardings=shardings)() if names else {}


def families() -> tuple[Family, ...]:
    """The families of all registered models (`ModelConfig.families`)."""
    names = dict.fromkeys(cls.families for cls in REGISTRY.values() if cls.families)
    return tuple(family for name in names for family in import_object(name))


def find_family(values: dict, file: Path) -> Family:
    """The family of the model in a config.json."""
    known: dict[str, Family] = {}
    for family in families():
        if not family.written_only:
            known.setdefault(family.model_type, family)  # a custom model's comes after those of mjax
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        remedy = "convert a model of one of these" if kind is not None else "write the right one into the file"
        raise UsageError(f"{file}: model_type is {kind!r}; mjax supports {', '.join(known)}: {remedy}")
    return known[kind]


def export_family(model: ModelConfig) -> Family:
    """The family for exporting a model of mjax."""
    if getattr(model, "mlm_activation", None) not in (None, getattr(model, "activation", None)):
        raise UsageError("transformers has one activation for MLP and MLM head, and this BERT two; convert another")
    if is_user_defined(type(model)) and not model.families:
        fix = "state `families` in its config, or use `mjax.open_run(RUN).weights`"
        raise UsageError(f"mjax convert has no names for {model.title}; {fix}")
    differences = {}
    for family in families():
        if not (difference := unlike(family, model)):
            return family
        if family.fixed["kind"] == model.kind:
            differences[family.model] = difference
    nearest, fields = min(differences.items(), key=lambda item: len(item[1]))
    flags = " ".join(f"--model.{name.replace('_', '-')} {getattr(model, name)}" for name in fields)
    values = ", ".join(f"{name} {value}" for name, value in fields.items())
    raise UsageError(f"transformers has no class for {model.title} with {flags}; {nearest} has {values}")


def label_settings(model: ModelConfig) -> dict:
    """The id2label and label2id of config.json for a classification head; a run does not have the labels' names."""
    if getattr(model, "head", None) != "classification":
        return {}
    names = [f"LABEL_{number}" for number in range(model.num_labels)]  # transformers' default names
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def check_vocabulary(tokenizer: Tokenizer | None, model: ModelConfig) -> list[str]:
    """Reject a tokenizer with more ids than the model has tokens, after removing excess special tokens, which are
    returned."""
    if tokenizer is None or tokenizer.vocabulary <= model.vocabulary:
        return []
    removed = tokenizer.trim_vocabulary(model.vocabulary)
    if tokenizer.vocabulary > model.vocabulary:
        counts = f"{tokenizer.vocabulary:,} ids and the model's embedding {model.vocabulary:,} rows"
        raise UsageError(f"the tokenizer has {counts}; give the tokenizer that the model was trained with")
    return removed


# --- Longer sequences -------------------------------------------------------------------------------------------------
#
# `mjax convert … --rope yarn:8` changes no weight. It lowers the frequencies of the rotary positions, so that positions
# beyond the training length rotate queries and keys by angles within it (formulas in `models/parts/rotary.py`):
#
#     linear   divides every frequency by the factor (position interpolation, arXiv 2306.15595)
#     llama3   only low frequencies, between two fixed wavelengths (Llama 3.1, arXiv 2407.21783)
#     yarn     only low frequencies, by their rotations over the original length, with an attention temperature
#              (arXiv 2309.00071)
#
# The outputs for short texts change too, least with YaRN. All three are designed for a few hundred steps of further
# training on long texts.

ROPE_SCALINGS = ("linear", "llama3", "yarn")
MAX_POSITIONS = 2**31  # positions are int32


def scale_rope(model: ModelConfig, rope: str | None, source: str) -> ModelConfig:
    """Apply `--rope` to a model, whose sequences become longer by the factor.

    Args:
      model: the trained model.
      rope: KIND:FACTOR, such as `yarn:8`; None changes nothing.
      source: of the model, for messages.

    Raises:
      UsageError: the model has no rotary positions or scaled ones already, or `rope` is not a kind and a factor with a
        whole number of positions.
    """
    if rope is None:
        return model
    positions = model.max_positions
    if not hasattr(model, "rope_scaling"):
        raise UsageError(f"--rope {rope} is for rotary positions and {source} is {model.title} without; remove it")
    if model.rope_scaling != "none":
        scaled = f"{model.rope_scaling}:{model.rope_factor:g}, {positions:,} of them"
        raise UsageError(f"--rope {rope}: {source} already has rotary positions with {scaled}; leave --rope out")
    match = re.fullmatch(rf"({'|'.join(ROPE_SCALINGS)}):(\d{{1,9}}(?:\.\d+)?)", rope)
    kind, factor = (match[1], float(match[2])) if match else ("", 0.0)
    if factor <= 1:
        use = f"use one of {either(ROPE_SCALINGS)}, such as yarn:8"
        raise UsageError(f"--rope {rope} is not a scaling and a factor above 1; {use}")
    scaled = positions * factor
    if scaled >= MAX_POSITIONS or scaled != int(scaled):
        use = f"use a factor such as {kind}:{max(2, round(min(factor, 64)))}"
        raise UsageError(f"--rope {rope} makes {scaled:,.10g} positions; it must be a whole number below 2^31: {use}")
    original = None if kind == "linear" else positions
    scaling: dict[str, Any] = {"rope_scaling": kind, "rope_factor": factor, "rope_original_length": original}
    return dataclasses.replace(model, sequence=int(scaled), max_position_embeddings=int(scaled), **scaling)


def describe_rope(model: ModelConfig, rope: str | None) -> str:
    """One line on the result of `scale_rope`; empty without `--rope`."""
    return f"--rope {rope}, {model.max_positions:,} positions instead of {model.unscaled_sequence:,}" if rope else ""
