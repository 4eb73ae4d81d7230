"""`mjax convert`: a model folder of Hugging Face becomes a run folder, and a run's checkpoint a model folder.

    from-hf DIR OUT   OUT/config.json, OUT/tokenizer, OUT/checkpoints/0
    to-hf RUN DIR     DIR/config.json, model.safetensors, generation_config.json, the tokenizer's files

Checkpoint 0 holds the weights and nothing else: no step has been taken, so there are no moments, and training begins
with fresh ones. Both directions work on the CPU. from-hf reads tensor by tensor and to-hf writes the arrays from where
they are; the model is in memory once, beside what Orbax takes to compress a checkpoint or to read one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro
from flax import nnx
from jax.numpy import bfloat16
from rich.console import Console

from mjax.config import Config, DataConfig, MeshConfig, ModelConfig, read_config, save_config
from mjax.data.outputs import progress
from mjax.data.tokenizers import Tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.interop import gpt2
from mjax.interop.model_folder import check_new, check_replaceable, new_folder, read_object, write_object
from mjax.interop.tensor_files import open_tensors, parse_size, write_tensors
from mjax.interop.tokenizer_files import find_tokenizer, write_tokenizer
from mjax.models.gpt import GPT, build_gpt
from mjax.parallel.mesh import make_mesh, sharded_shapes
from mjax.parallel.zero import plan_storage
from mjax.training.checkpoint import Checkpoints
from mjax.training.precision import parameter_type
from mjax.validation import validate

FAMILIES = {"gpt2": gpt2}
"""By `model_type` of config.json."""
TYPES = {"fp32": ("float32", np.dtype(np.float32)), "bf16": ("bfloat16", np.dtype(bfloat16))}
"""By --dtype: torch's word for it, and NumPy's."""


@dataclass(frozen=True)
class FromHfArguments:
    """Turn a model of Hugging Face (GPT2LMHeadModel) into a run folder, to generate with, evaluate or train further."""

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


@dataclass(frozen=True)
class ToHfArguments:
    """Turn a run's checkpoint into a folder that transformers opens (GPT2LMHeadModel)."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/demo."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to make."""
    step: int | None = None
    """Checkpoint to convert; the newest that is not damaged when not given."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the tensors; fp32 is what mjax stores, bf16 rounds it to half the size."""
    shard_size: str = "5GB"
    """Bytes of tensors in a file, such as 500MB; a larger model is cut into several files."""
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
    check_new(output)
    if arguments.vocabulary_multiple < 1:
        raise UsageError(f"--vocabulary-multiple is {arguments.vocabulary_multiple}; it must be at least 1")
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder; give one that holds config.json and model.safetensors")
    values = read_object(source / "config.json")
    family = _family(values, source / "config.json")
    config = Config(model=family.model_config(values, str(source / "config.json"), arguments.vocabulary_multiple))
    validate(dataclasses.replace(config, data=DataConfig(mock=True)), str(source))  # data are named when it is trained
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    _check_vocabulary(tokenizer, config.model)
    tensors = open_tensors(source, arguments.allow_pickle)
    names = family.find_tensors(tensors, config.model, str(source))

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    target = abstract_weights(config)
    with progress("reading", 4 * config.model.parameters) as read:
        weights = family.read_weights(tensors, names, config.model, target, read)
    with new_folder(output) as folder:
        save_config(config, folder / "config.json")
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
        with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
            checkpoints.save(0, {"model": weights})

    print(f"{output}: {config.model.parameters:,} parameters of a {family.ARCHITECTURE}, checkpoint 0")
    if tokenizer is None:
        print(f"no tokenizer found in {source}; --tokenizer names one (`generate` and `evaluate` need it)")
    else:
        print(f'generate     python -m mjax generate --checkpoint {output} --prompt "…"')
    print(f"train on     python train.py --resume {output} --data.path data/corpus")
    return 0


def to_hf(arguments: ToHfArguments) -> int:
    """`mjax convert to-hf`. Returns the exit code.

    Raises:
      UsageError: the run holds no such checkpoint or a model that has no place in GPT2LMHeadModel, or the output is in
        use; nothing was written.
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
    stored = run / "tokenizer"
    tokenizer = tokenizer_from_folder(stored) if stored.is_dir() else None
    _check_vocabulary(tokenizer, config.model)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False)
    with Checkpoints(run / "checkpoints", on_notice=lambda line: notices.print(line, markup=False)) as checkpoints:
        step, weights = checkpoints.restore(abstract_weights(config), arguments.step, field="model")
    torch_name, dtype = TYPES[arguments.dtype]
    arrays = dict(gpt2.weight_arrays(weights, config.model))
    eod = None if tokenizer is None else tokenizer.eod
    with new_folder(output) as folder:
        write_object(folder / "config.json", gpt2.config_values(config.model, torch_name, eod))
        write_object(folder / "generation_config.json", {"bos_token_id": eod, "eos_token_id": eod})
        opens = tokenizer is None or write_tokenizer(tokenizer, stored, folder, config.model.sequence)
        total = sum(array.size * dtype.itemsize for array in arrays.values())
        with progress("writing", total) as wrote:
            files = write_tensors(folder, arrays, dtype, largest_file, wrote)

    print(f"{output}: checkpoint {step} of {run} as {gpt2.ARCHITECTURE}, {total / 1e6:,.1f} MB in {files[0]}", end="")
    print(f" and {len(files) - 2} more" if len(files) > 1 else "")
    if tokenizer is None:
        print(f"{run} has no tokenizer, so none is in {output}")
    elif not opens:
        print(f"its tokenizer is of kind {tokenizer.kind}, which transformers cannot open; mjax can")
    return 0


def abstract_weights(config: Config, mesh: MeshConfig | None = None) -> GPT:
    """What the weights of `config` are read into: `GPT` of ShapeDtypeStructs on CPU devices, one when no mesh is given.

    Layers are not cut into the chunks of a pipeline.
    """
    mesh = mesh or MeshConfig()
    dtype = parameter_type(config.precision.compute)
    shapes = jax.eval_shape(lambda: build_gpt(config.train.seed, config.model, dtype))
    plan = plan_storage(shapes, nnx.get_partition_spec(shapes), mesh)
    specs = jax.tree.map(lambda storage: storage.spec, plan)
    return sharded_shapes(shapes, specs, make_mesh(mesh, jax.devices("cpu")))


def _family(values: dict, file: Path):
    """The module of the model that a config.json describes."""
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(f"{file}: model_type is {kind!r}; mjax knows {', '.join(FAMILIES)}: convert another model")
    return FAMILIES[kind]


def _check_vocabulary(tokenizer: Tokenizer | None, model: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.vocabulary > model.vocabulary:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the model's embedding {model.vocabulary:,} rows; "
            "give the tokenizer that the model was trained with"
        )
