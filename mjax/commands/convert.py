"""`mjax convert`: a model folder of Hugging Face becomes a run folder, and a run's checkpoint a model folder.

    from-hf DIR OUT   OUT/config.json, OUT/tokenizer, OUT/checkpoints/0
    to-hf RUN DIR     DIR/config.json, model.safetensors, generation_config.json, the tokenizer's files

Both work on the CPU. from-hf reads tensor by tensor and to-hf writes the arrays from where they are; the model is in
memory once, beside what Orbax takes to compress a checkpoint or to read one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from mjax.bounds import Count
from mjax.config import read_config
from mjax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.flags import parse
from mjax.interop.convert import (
    TYPES,
    abstract_weights,
    check_vocabulary,
    class_settings,
    draw_weights,
    family_of,
    find_family,
    import_config,
    write_run,
)
from mjax.interop.fast_tokenizer import fast_tokenizer
from mjax.interop.model_folder import check_output, new_folder, read_object, write_object
from mjax.interop.settings import config_values, model_config
from mjax.interop.tensor_files import open_tensors, parse_size, write_tensors
from mjax.interop.tokenizer_files import find_tokenizer, write_tokenizer
from mjax.interop.weights import absent_heads, find_tensors, places, read_weights, weight_arrays
from mjax.model_config import ModelConfig
from mjax.models.build import count_parameters
from mjax.progress import progress
from mjax.state.checkpoint import Checkpoints


@dataclass(frozen=True)
class FromHfArguments:
    """Turn a model of Hugging Face (GPT-2, BERT, BLOOM) into a run folder, to use, evaluate or train further."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with config.json and model.safetensors, as save_pretrained writes it."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to make, such as runs/gpt2; it must not hold anything yet."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`; the tokenizer in the source folder when not given."""
    vocabulary_multiple: Count = 128
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


def to_hf_command(argv: Sequence[str]) -> int:
    """`mjax convert to-hf`, where the run may stand after --run as well; returns the exit code."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--run", "--checkpoint", nargs="?")
    named, rest = own.parse_known_args(argv)
    return to_hf(parse(ToHfArguments, rest if named.run is None else [named.run, *rest], "mjax convert to-hf"))


def from_hf(arguments: FromHfArguments) -> int:
    """`mjax convert from-hf`. Returns the exit code.

    Raises:
      UsageError: something in the source is missing, damaged or not what mjax computes, or the output is in use;
        nothing was written.
    """
    source, output = arguments.source, arguments.output
    # --- Everything that can be refused before a number is read -------------------------------------------------------
    check_output(output)
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder; give one that holds config.json and model.safetensors")
    values = read_object(source / "config.json")
    family = find_family(values, source / "config.json")
    model = model_config(family, values, str(source / "config.json"), arguments.vocabulary_multiple)
    config = import_config(model, str(source))
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    check_vocabulary(tokenizer, model)
    tensors = open_tensors(source, arguments.allow_pickle)
    found = find_tensors(family, tensors, model, str(source), arguments.draw_heads)
    absent = absent_heads(family, model, found)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    target = abstract_weights(config)
    with progress("reading", 4 * count_parameters(model)) as read:
        drawn = draw_weights(config, target, tuple(absent))
        weights = read_weights(family, tensors, found, model, target, read, drawn)
    write_run(output, config, tokenizer, weights)

    print(f"{output}: {count_parameters(model):,} parameters of a {family.model}, checkpoint 0")
    if absent:
        print(f"not in {source}, drawn from seed {config.train.seed}: {', '.join(map(family.heads.get, absent))}")
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
    check_output(output, arguments.overwrite)
    config = read_config(run / "config.json")
    family = family_of(config.model)
    tokenizer = _tokenizer_of(run, arguments.tokenizer)
    check_vocabulary(tokenizer, config.model)
    library = None if tokenizer is None else fast_tokenizer(tokenizer, pairs=config.model.samples != "text")

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False)
    with Checkpoints(run / "checkpoints", on_notice=lambda line: notices.print(line, markup=False)) as checkpoints:
        step, weights = checkpoints.restore(abstract_weights(config), arguments.step, field="model")
    torch_name, dtype = TYPES[arguments.dtype]
    shapes = {name: place.shape for name, place in places(family, config.model).items()}
    eod = None if tokenizer is None else tokenizer.eod
    ids = {"bos_token_id": eod, "eos_token_id": eod}
    with new_folder(output) as folder:
        values = {
            "architectures": [family.model],
            "model_type": family.model_type,
            **config_values(family, config.model),
            **(ids if family.generates else {"pad_token_id": getattr(tokenizer, "pad", None)}),
            **class_settings(config.model),
            "torch_dtype": torch_name,
        }
        write_object(folder / "config.json", values)
        if family.generates:
            write_object(folder / "generation_config.json", ids | {"pad_token_id": eod})
        if tokenizer is not None:
            write_tokenizer(tokenizer, library, folder, config.model)
        array = weight_arrays(family, weights, config.model)
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        with progress("writing", total) as wrote:
            files = write_tensors(folder, shapes, array, dtype, largest_file, wrote)

    print(f"{output}: checkpoint {step} of {run} as {family.model}, {total / 1e6:,.1f} MB in {files[0]}", end="")
    print(f" and {len(files) - 2} more" if len(files) > 1 else "")
    if tokenizer is None and arguments.tokenizer is None:
        print(f"{run} has no tokenizer, so {output} has none; to add it: --tokenizer KIND:FILES --overwrite")
    return 0


def print_next_steps(source: Path, output: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """What to type after an import."""
    if tokenizer is None:
        print(
            f"no tokenizer found in {source}; convert again with --tokenizer KIND:FILES to keep one in the run, or "
            "give it to generate and evaluate each time"
        )
    elif model.causal:
        print(f'generate     python -m mjax generate --run {output} --prompt "…"')
    print(f"train on     python train.py --run {output} --data.path data/corpus")


def _tokenizer_of(run: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer of an export: that of the run, the one that is given, or none."""
    stored = run / "tokenizer"
    if given == "none":
        return None
    if given is None:
        return tokenizer_from_folder(stored) if stored.is_dir() else None
    return load_tokenizer(given)
