"""The run folder of an imported model, and the transformers family for an export.

Checkpoint 0 of an import has the weights only: no step has been taken, so there are no moments, and training begins
with new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.numpy import bfloat16

from mjax.checkpoint.blocks import write_in_blocks
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, save_config
from mjax.config.checks import validate
from mjax.config.model import ModelConfig, is_own, kind_of
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.interop.bert import BERT, MEGATRON_BERT, OF_TASKS
from mjax.interop.bloom import BLOOM
from mjax.interop.family import Family
from mjax.interop.gpt2 import GPT2
from mjax.interop.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from mjax.interop.mixture import MIXTRAL, OLMOE, QWEN3_MOE
from mjax.interop.model_card import CARD
from mjax.interop.model_folder import new_folder
from mjax.interop.settings import fits, unlike
from mjax.interop.tensor_files import Tensors
from mjax.interop.weights import leaves
from mjax.models.protocol import Model
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import initial_weights, lay_out

FAMILIES = (GPT2, BERT, MEGATRON_BERT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, MIXTRAL, QWEN3_MOE, OLMOE)
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
      carried: the result of `carried_files`, which go beside the tokenizer's own files.
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


def abstract_weights(config: Config, mesh: MeshConfig | None = None) -> Model:
    """The target for reading the weights of `config`: the model of ShapeDtypeStructs on CPU devices, by default one.

    Layers are not split into the chunks of a pipeline.
    """
    mesh = mesh or MeshConfig()
    return lay_out(dataclasses.replace(config, mesh=mesh), make_mesh(mesh, jax.devices("cpu"))).abstract_model


def draw_weights(config: Config, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Initial weights, as in a run of `config`, for the names with these prefixes."""

    def chosen(model: Model) -> dict:
        return {name: leaf for name, leaf in leaves(model).items() if name.startswith(names)}

    places = jax.tree.map(lambda leaf: leaf.sharding, chosen(abstract_weights(config)))
    return jax.jit(lambda: chosen(initial_weights(config)), out_shardings=places)() if names else {}


def find_family(values: dict, file: Path) -> Family:
    """The family of the model in a config.json."""
    kind, families = values.get("model_type"), {family.model_type: family for family in FAMILIES}
    if not isinstance(kind, str) or kind not in families:
        remedy = "docs/extending.md adds one" if kind is not None else "write the right one into the file"
        raise UsageError(f"{file}: model_type is {kind!r}; mjax supports {', '.join(families)}: {remedy}")
    return families[kind]


def family_of(model: ModelConfig) -> Family:
    """The family for exporting a model of mjax."""
    if getattr(model, "mlm_activation", None) not in (None, getattr(model, "activation", None)):
        raise UsageError(
            f"the MLP of this BERT has {model.activation} and its MLM head {model.mlm_activation}, and transformers "
            "has one activation for both; convert a model with one"
        )
    if is_own(type(model)):
        raise UsageError(
            f"mjax convert has no name table for {model.title}; docs/convert.md says how to write one, and "
            "`mjax.open_run(RUN).weights` has its weights in Python"
        )
    families = (*FAMILIES, *OF_TASKS)
    for family in families:
        if fits(family, model):
            return family
    near = [family for family in families if family.fixed["kind"] == kind_of(model)]
    theirs = {family.model: unlike(family, model) for family in near}
    asked = (*(name for family in near for name in family.fixed), *(name for each in theirs.values() for name in each))
    given = [name for name in dict.fromkeys(asked) if any(name in each for each in theirs.values())]
    raise UsageError(
        f"transformers has no class for {model.title} with "
        + " ".join(f"--model.{name.replace('_', '-')} {getattr(model, name)}" for name in given)
        + "".join(f"; {other} has {_listed(each)}" for other, each in theirs.items())
    )


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def class_settings(model: ModelConfig) -> dict:
    """The settings of config.json for the number of classes of a head; a run does not have their names."""
    if getattr(model, "head", None) != "classification":
        return {}
    names = [f"LABEL_{number}" for number in range(model.answers)]  # transformers' default names
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def check_vocabulary(tokenizer: Tokenizer | None, model: ModelConfig) -> list[str]:
    """Refuse a tokenizer with more ids than the model has tokens; special tokens that are too many are left out and
    returned."""
    left_out: list[str] = []
    if tokenizer is not None and tokenizer.vocabulary > model.vocabulary:
        left_out = tokenizer.leave_out(model.vocabulary)
    if tokenizer is not None and tokenizer.vocabulary > model.vocabulary:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the model's embedding {model.vocabulary:,} rows; "
            "give the tokenizer that the model was trained with"
        )
    return left_out
