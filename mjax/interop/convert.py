"""`mjax convert`: a model folder of Hugging Face becomes a run folder, and a run's checkpoint a model folder.

    from-hf DIR OUT   OUT/config.json, OUT/tokenizer, OUT/checkpoints/0
    to-hf RUN DIR     DIR/config.json, model.safetensors, generation_config.json, the tokenizer's files

Checkpoint 0 holds the weights and nothing else: no step has been taken, so there are no moments, and training begins
with fresh ones. Both directions work on the CPU. from-hf reads tensor by tensor and to-hf writes the arrays from where
they are; the model is in memory once, beside what Orbax takes to compress a checkpoint or to read one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from jax.numpy import bfloat16
from rich.console import Console

from mjax.config import Config, DataConfig, MeshConfig, ModelConfig, read_config, save_config
from mjax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.interop.bert import BERT, MEGATRON_BERT, OF_TASKS
from mjax.interop.bloom import BLOOM
from mjax.interop.family import Family
from mjax.interop.fast_tokenizer import fast_tokenizer
from mjax.interop.gpt2 import GPT2
from mjax.interop.model_folder import check_new, check_replaceable, new_folder, read_object, write_object
from mjax.interop.places import shapes
from mjax.interop.settings import config_values, model_config
from mjax.interop.tensor_files import open_tensors, parse_size, write_tensors
from mjax.interop.tokenizer_files import find_tokenizer, write_tokenizer
from mjax.interop.weights import absent_heads, find_tensors, read_weights, weight_arrays
from mjax.models.build import Model
from mjax.names import leaf_name
from mjax.parallel.mesh import make_mesh
from mjax.progress import progress
from mjax.training.checkpoint import Checkpoints
from mjax.training.layout import initial_weights, lay_out
from mjax.validation import validate

FAMILIES = (GPT2, BERT, MEGATRON_BERT, BLOOM)
TYPES = {"fp32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(bfloat16))}
"""By --dtype: torch's word for it, and NumPy's."""


@dataclass(frozen=True)
class FromHfArguments:
    """Turn a model of Hugging Face (GPT-2, BERT, BLOOM) into a run folder, to use, evaluate or train further."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with config.json and model.safetensors, as save_pretrained writes it."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to make, such as runs/gpt2; it must not hold anything yet."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`; the tokenizer in the source folder when not given."""
    vocabulary_multiple: int = 128
    """The embedding gets rows of zeros up to a multiple of this, so that --mesh.model divides it; no token is ever
    predicted there."""
    allow_pickle: bool = False
    """Let torch read an old pytorch_model.bin, the tensors in it and nothing else; of use where there is no
    safetensors file."""
    draw_heads: bool = False
    """Give a BERT random weights in the heads of which its folder holds nothing (MLM head, pooler, order head)."""


@dataclass(frozen=True)
class ToHfArguments:
    """Turn a run's checkpoint into a folder that transformers opens."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/demo; --run RUN says the same."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to make."""
    step: int | None = None
    """Checkpoint to convert; the newest that is not damaged when not given."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the tensors; fp32 is what mjax stores, bf16 rounds it to half the size."""
    shard_size: str = "5GB"
    """Bytes of tensors in a file, such as 500MB; a larger model is cut into several files."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, for a run that has none; none leaves that of the run out."""
    overwrite: bool = False
    """Replace the model that is in the folder."""


def from_hf(arguments: FromHfArguments) -> int:
    """`mjax convert from-hf`. Returns the exit code.

    Raises:
      UsageError: something in the source is missing, damaged or not what mjax computes, or the output is in use;
        nothing was written.
    """
    source, output = arguments.source, arguments.output
    # --- Everything that can be refused before a number is read -------------------------------------------------------
    check_import(output, arguments.vocabulary_multiple)
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder; give one that holds config.json and model.safetensors")
    values = read_object(source / "config.json")
    family = find_family(values, source / "config.json")
    model = model_config(family.settings, values, str(source / "config.json"), arguments.vocabulary_multiple)
    config = import_config(model, str(source))
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    check_vocabulary(tokenizer, model)
    tensors = open_tensors(source, arguments.allow_pickle)
    names = find_tensors(family.naming, tensors, model, str(source), arguments.draw_heads)
    absent = absent_heads(family.naming, names)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    target = abstract_weights(config)
    with progress("reading", 4 * model.parameters) as read:
        drawn = draw_weights(config, target, tuple(absent))
        weights = read_weights(family.naming, tensors, names, model, target, read, drawn)
    write_run(output, config, tokenizer, weights)

    print(f"{output}: {model.parameters:,} parameters of a {family.naming.model}, checkpoint 0")
    if absent:
        print(
            f"not in {source}, drawn from seed {config.train.seed}: {', '.join(map(family.naming.heads.get, absent))}"
        )
    print_next_steps(source, output, model, tokenizer)
    return 0


def to_hf(arguments: ToHfArguments) -> int:
    """`mjax convert to-hf`. Returns the exit code.

    Raises:
      UsageError: the run holds no such checkpoint, a model for which transformers has no class or a tokenizer of which
        it has no equal, or the output is in use; nothing was written.
      RunError: the checkpoint is damaged.
    """
    run, output = arguments.run, arguments.output
    # --- Everything that can be refused before a number is read -------------------------------------------------------
    largest_file = parse_size(arguments.shard_size)
    if arguments.overwrite:
        check_replaceable(output)
    else:
        check_new(output)
    config = read_config(run / "config.json")
    family = _family_of(config.model)
    tokenizer = _tokenizer_of(run, arguments.tokenizer)
    check_vocabulary(tokenizer, config.model)
    library = None if tokenizer is None else fast_tokenizer(tokenizer, pairs=config.model.kind == "bert")

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False)
    with Checkpoints(run / "checkpoints", on_notice=lambda line: notices.print(line, markup=False)) as checkpoints:
        step, weights = checkpoints.restore(abstract_weights(config), arguments.step, field="model")
    torch_name, dtype = TYPES[arguments.dtype]
    sizes = shapes(family.naming.places, config.model)
    eod = None if tokenizer is None else tokenizer.eod
    ids = {"bos_token_id": eod, "eos_token_id": eod}
    with new_folder(output) as folder:
        values = {
            "architectures": [family.naming.model],
            "model_type": family.model_type,
            **config_values(family.settings, config.model),
            **(ids if family.generates else {"pad_token_id": getattr(tokenizer, "pad", None)}),
            **_classes(config.model),
            "torch_dtype": torch_name,
        }
        write_object(folder / "config.json", values)
        if family.generates:
            write_object(folder / "generation_config.json", ids | {"pad_token_id": eod})
        if tokenizer is not None:
            write_tokenizer(tokenizer, library, folder, config.model)
        array = weight_arrays(family.naming, weights, config.model)
        total = sum(math.prod(shape) for shape in sizes.values()) * dtype.itemsize
        with progress("writing", total) as wrote:
            files = write_tensors(folder, sizes, array, dtype, largest_file, wrote)

    print(f"{output}: checkpoint {step} of {run} as {family.naming.model}, {total / 1e6:,.1f} MB in {files[0]}", end="")
    print(f" and {len(files) - 2} more" if len(files) > 1 else "")
    if tokenizer is None and arguments.tokenizer is None:
        print(f"{run} has no tokenizer, so {output} has none; to add it: --tokenizer KIND:FILES --overwrite")
    return 0


def check_import(output: Path, vocabulary_multiple: int) -> None:
    """Refuse an import that cannot be written, or not so."""
    check_new(output)
    if vocabulary_multiple < 1:
        raise UsageError(f"--vocabulary-multiple is {vocabulary_multiple}; it must be at least 1")


def import_config(model: ModelConfig, source: str) -> Config:
    """The config of an import, after a check of the model; it names no data: they are named when it is trained."""
    config = Config(model=model)
    validate(dataclasses.replace(config, data=DataConfig(mock=True)), source)
    return config


def write_run(output: Path, config: Config, tokenizer: Tokenizer | None, weights: Model) -> None:
    """Make the run folder of an import: checkpoint 0 holds the weights and nothing else."""
    with new_folder(output) as folder:
        save_config(config, folder / "config.json")
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
        with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
            checkpoints.save(0, {"model": weights})


def print_next_steps(source: Path, output: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """What to type after an import."""
    if tokenizer is None:
        print(
            f"no tokenizer found in {source}; convert again with --tokenizer KIND:FILES to keep one in the run, or "
            "give it to generate and evaluate each time"
        )
    elif model.kind == "gpt":
        print(f'generate     python -m mjax generate --run {output} --prompt "…"')
    print(f"train on     python train.py --run {output} --data.path data/corpus")


def abstract_weights(config: Config, mesh: MeshConfig | None = None) -> Model:
    """What the weights of `config` are read into: the model of ShapeDtypeStructs on CPU devices, one when no mesh is
    given.

    Layers are not cut into the chunks of a pipeline.
    """
    mesh = mesh or MeshConfig()
    return lay_out(dataclasses.replace(config, mesh=mesh), make_mesh(mesh, jax.devices("cpu"))).abstract_model


def draw_weights(config: Config, target: Model, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """The weights whose names begin so, as a run of `config` would begin with them, in the shards of `target`."""

    def chosen(model: Model) -> dict:
        leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
        return {name: leaf for name, leaf in leaves.items() if name.startswith(names)}

    places = jax.tree.map(lambda leaf: leaf.sharding, chosen(target))
    return jax.jit(lambda: chosen(initial_weights(config)), out_shardings=places)() if names else {}


def find_family(values: dict, file: Path) -> Family:
    """The family of the model that a config.json describes."""
    kind, families = values.get("model_type"), {family.model_type: family for family in FAMILIES}
    if not isinstance(kind, str) or kind not in families:
        remedy = "convert another model" if kind is not None else "write the right one into the file"
        raise UsageError(f"{file}: model_type is {kind!r}; mjax knows {', '.join(families)}: {remedy}")
    return families[kind]


def _family_of(model: ModelConfig) -> Family:
    """The family that a model of mjax has a place in."""
    if model.head == "pretraining" and model.mlm_activation not in (None, model.activation):
        raise UsageError(
            f"the MLP of this BERT has {model.activation} and its MLM head {model.mlm_activation}, and transformers "
            "has one activation for both; convert a model with one"
        )
    for family in (*FAMILIES, *OF_TASKS):
        if family.settings.fits(model):
            return family
    layernorm = "a" if model.embedding_layernorm else "no"
    raise UsageError(
        f"transformers has no class for a {model.kind} with --model.positions {model.positions}, --model.activation "
        f"{model.activation}, feed-forward {model.mlp_width} and {layernorm} LayerNorm after the embedding; "
        "GPT2LMHeadModel has learned positions and none, BloomForCausalLM ALiBi, gelu_tanh, 4 × hidden and one"
    )


def _tokenizer_of(run: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer of an export: that of the run, the one that is given, or none."""
    stored = run / "tokenizer"
    if given == "none":
        return None
    if given is None:
        return tokenizer_from_folder(stored) if stored.is_dir() else None
    return load_tokenizer(given)


def _classes(model: ModelConfig) -> dict:
    """The settings of config.json that say how many classes a head has; their names are not in a run."""
    if model.head != "classification":
        return {}
    names = [f"LABEL_{number}" for number in range(model.answers)]  # as transformers calls them
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def check_vocabulary(tokenizer: Tokenizer | None, model: ModelConfig) -> None:
    """Refuse a tokenizer that has more ids than the model has tokens."""
    if tokenizer is not None and tokenizer.vocabulary > model.vocabulary:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the model's embedding {model.vocabulary:,} rows; "
            "give the tokenizer that the model was trained with"
        )
