"""`mjax convert`: the run folder of an import, the family of an export, and longer sequences (`--rope`).

Checkpoint 0 of an import has the weights only: no step has been taken, so there are no moments, and training begins
with new ones.
"""

from __future__ import annotations

import dataclasses
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

from mjax.checkpoint.arrays import leaves_by_path, names_with_layer_dim, type_and_shape, write_array
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import MANIFEST, write_manifest
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, save_config
from mjax.config.checks import validate
from mjax.config.model import REGISTRY, ModelConfig, import_object, is_user_defined
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, either
from mjax.interop.model_folder import CARD, new_folder
from mjax.interop.tensor_files import Tensors
from mjax.interop.weights import leaves
from mjax.models.huggingface.family import Family, unlike
from mjax.models.protocol import Model
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import build_layout, initial_weights

TYPES = {"fp32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(bfloat16))}
"""By --dtype: torch's name, and NumPy's."""


def import_config(model: ModelConfig, source: str, tensors: Tensors) -> Config:
    """The config of an import, after a check of the model; it names no data, which are given for training, and computes
    in the dtype of its weights: fp32, or bf16."""
    single = any(kind.dtype == "F32" for kind in tensors.kinds.values())
    config = Config(model=model, precision=PrecisionConfig(compute="fp32" if single else "bf16"))
    validate(dataclasses.replace(config, data=DataConfig(mock=True)), source)
    return config


def write_run(
    output: Path,
    config: Config,
    tokenizer: Tokenizer | None,
    read: Callable[[str, int, int], np.ndarray],
    carried: Mapping[str, bytes] | None = None,
    card: str = "",
) -> None:
    """Create the run folder of an import: checkpoint 0 has the weights only.

    Args:
      output: the folder.
      config: of the run.
      tokenizer: of the model, if there is one.
      read: the result of `block_reader`.
      carried: the result of `collect_files`, which go beside the tokenizer's own files.
      card: README.md of the run; empty for none.
    """
    with new_folder(output) as folder:
        save_config(config, folder / "config.json")
        if card:
            (folder / CARD).write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
            for name, content in (carried or {}).items():
                (folder / "tokenizer" / name).write_bytes(content)
        write_in_blocks(folder / "checkpoints", "model", abstract_weights(config), read)


def write_in_blocks(folder: Path, field: str, target: Any, read: Callable[[str, int, int], np.ndarray]) -> None:
    """Write checkpoint 0 into `folder`, which has none; it is not atomic, so write into a temporary folder.

    Orbax holds every array of a state in memory. Its arrays are Zarr 3 in one OCDBT store, which TensorStore writes by
    slices. So this is a checkpoint that Orbax begins, with arrays of no size, and TensorStore completes:
    `Checkpoints.restore` reads it as any other, on any mesh.

    Args:
      folder: `checkpoints` of a run.
      field: of the state, such as `model`; it is the only one.
      target: its tree of ShapeDtypeStructs.
      read: takes the name of an array as in `named(target)`, and where a block of its first dim begins and ends.
    """
    with Checkpoints(folder, on_notice=lambda line: None) as checkpoints:
        checkpoints.save(0, {field: jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), target)})
    store, arrays, stacked = folder / "0" / field, leaves_by_path(target), names_with_layer_dim(target)
    for begun in ("d", "ocdbt.process_0", "array_metadatas"):  # the last one has the chunks of arrays of no size
        shutil.rmtree(store / begun)
    for replaced in (store / "manifest.ocdbt", folder / "0" / MANIFEST):
        replaced.unlink()
    for name, leaf in arrays.items():
        write_array(store, f"{field}.{name}", leaf, name in stacked, partial(read, name))
    write_manifest(folder / "0", 0, {f"{field}.{name}": type_and_shape(leaf) for name, leaf in arrays.items()})


def abstract_weights(config: Config) -> Model:
    """The target for reading the weights of `config`: the model of ShapeDtypeStructs on one CPU device.

    Layers are not split into the chunks of a pipeline.
    """
    mesh = MeshConfig()
    return build_layout(dataclasses.replace(config, mesh=mesh), make_mesh(mesh, jax.devices("cpu"))).abstract_model


def draw_weights(config: Config, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Initial weights, as in a run of `config`, for the names with these prefixes."""

    def chosen(model: Model) -> dict:
        return {name: leaf for name, leaf in leaves(model).items() if name.startswith(names)}

    shardings = jax.tree.map(lambda leaf: leaf.sharding, chosen(abstract_weights(config)))
    return jax.jit(lambda: chosen(initial_weights(config)), out_shardings=shardings)() if names else {}


def families() -> tuple[Family, ...]:
    """The families that configs of registered models name (`ModelConfig.families`)."""
    named = dict.fromkeys(cls.families for cls in REGISTRY.values() if cls.families)
    return tuple(family for name in named for family in import_object(name))


def find_family(values: dict, file: Path) -> Family:
    """The family of the model in a config.json."""
    known = {family.model_type: family for family in families() if not family.written_only}
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        remedy = "convert a model of one of these" if kind is not None else "write the right one into the file"
        raise UsageError(f"{file}: model_type is {kind!r}; mjax supports {', '.join(known)}: {remedy}")
    return known[kind]


def model_family(model: ModelConfig) -> Family:
    """The family for exporting a model of mjax."""
    if getattr(model, "mlm_activation", None) not in (None, getattr(model, "activation", None)):
        raise UsageError("transformers has one activation for MLP and MLM head, and this BERT two; convert another")
    if is_user_defined(type(model)):
        raise UsageError(f"mjax convert has no names for {model.title}; `mjax.open_run(RUN).weights` has its weights")
    different = {}
    for family in families():
        if not (difference := unlike(family, model)):
            return family
        if family.fixed["kind"] == model.kind:
            different[family.model] = difference
    nearest, fields = min(different.items(), key=lambda each: len(each[1]))
    flags = " ".join(f"--model.{name.replace('_', '-')} {getattr(model, name)}" for name in fields)
    values = ", ".join(f"{name} {value}" for name, value in fields.items())
    raise UsageError(f"transformers has no class for {model.title} with {flags}; {nearest} has {values}")


def class_settings(model: ModelConfig) -> dict:
    """The settings of config.json for the number of classes of a head; a run does not have their names."""
    if getattr(model, "head", None) != "classification":
        return {}
    names = [f"LABEL_{number}" for number in range(model.num_labels)]  # transformers' default names
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def check_vocabulary(tokenizer: Tokenizer | None, model: ModelConfig) -> list[str]:
    """Reject a tokenizer with more ids than the model has tokens; special tokens that are too many are left out and
    returned."""
    if tokenizer is None or tokenizer.vocabulary <= model.vocabulary:
        return []
    left_out = tokenizer.trim_vocabulary(model.vocabulary)
    if tokenizer.vocabulary > model.vocabulary:
        counts = f"{tokenizer.vocabulary:,} ids and the model's embedding {model.vocabulary:,} rows"
        raise UsageError(f"the tokenizer has {counts}; give the tokenizer that the model was trained with")
    return left_out


# --- Longer sequences -------------------------------------------------------------------------------------------------
#
# `mjax convert … --rope yarn:8` changes no weight. It lowers the frequencies of the rotary positions, so that positions
# which the model has never seen turn queries and keys by angles that it has (formulas in `models/parts/rotary.py`):
#
#     linear   every frequency by the factor (position interpolation, arXiv 2306.15595)
#     llama3   only the slow ones, between two fixed wavelengths (Llama 3.1, arXiv 2407.21783)
#     yarn     only the slow ones, by their turns over the original length, and a temperature of attention
#              (arXiv 2309.00071)
#
# A model with longer positions computes something else for short texts too. YaRN does least harm to them without
# further training; all three are made for some hundred steps of training on long texts.

SCALINGS = ("linear", "llama3", "yarn")
MAX_POSITIONS = 2**31
"""Positions are int32."""


def scale_positions(model: ModelConfig, given: str | None, source: str) -> ModelConfig:
    """The model with the positions of `--rope`; sequences are longer by the factor.

    Args:
      model: as it was trained.
      given: KIND:FACTOR, such as `yarn:8`; None leaves the model as it is.
      source: where the model comes from, for messages.

    Raises:
      UsageError: the model has no rotary positions or longer ones already, or `given` is not a kind and a factor that
        gives a whole number of positions.
    """
    if given is None:
        return model
    positions = model.max_positions
    if not hasattr(model, "rope_scaling"):
        raise UsageError(f"--rope {given} is for rotary positions and {source} is {model.title} without; remove it")
    if model.rope_scaling != "none":
        scaled = f"{model.rope_scaling}:{model.rope_factor:g}, {positions:,} of them"
        raise UsageError(f"--rope {given}: {source} already has rotary positions with {scaled}; leave --rope out")
    match = re.fullmatch(rf"({'|'.join(SCALINGS)}):(\d{{1,9}}(?:\.\d+)?)", given)
    kind, factor = (match[1], float(match[2])) if match else ("", 0.0)
    if factor <= 1:
        use = f"use one of {either(SCALINGS)}, such as yarn:8"
        raise UsageError(f"--rope {given} is not a scaling and a factor above 1; {use}")
    longer = positions * factor
    if longer >= MAX_POSITIONS or longer != int(longer):
        use = f"use a factor such as {kind}:{max(2, round(min(factor, 64)))}"
        raise UsageError(f"--rope {given} makes {longer:,.10g} positions; it must be a whole number below 2^31: {use}")
    original = None if kind == "linear" else positions
    scaling: dict[str, Any] = {"rope_scaling": kind, "rope_factor": factor, "rope_original_length": original}
    return dataclasses.replace(model, sequence=int(longer), max_position_embeddings=int(longer), **scaling)


def rope_line(model: ModelConfig, given: str | None) -> str:
    """Return one line on the result of `scale_positions`; empty without `--rope`."""
    if given is None:
        return ""
    return f"--rope {given}, {model.max_positions:,} positions instead of {model.unscaled_sequence:,}"
