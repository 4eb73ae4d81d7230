"""`mjax convert`: import a Hugging Face model folder as a run folder, and export a run's checkpoint as a model folder.

    from-hf DIR OUT   OUT/config.json, OUT/tokenizer, OUT/checkpoints/0
    to-hf RUN DIR     DIR/config.json, model.safetensors, generation_config.json, the tokenizer's files

Both run on the CPU, with one layer of one weight in memory, whatever the size of the model.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from mjax.checkpoint.blocks import read_in_blocks
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import check_run_folder
from mjax.commands.flags import parse
from mjax.config import Config, read_settings
from mjax.config.bounds import Count
from mjax.config.model import ModelConfig
from mjax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_folder
from mjax.data.tokenizers.library import LibraryTokenizer
from mjax.errors import UsageError
from mjax.interop.convert import (
    TYPES,
    abstract_weights,
    check_vocabulary,
    class_settings,
    draw_weights,
    extended,
    family_of,
    find_family,
    import_config,
    rope_line,
    write_run,
)
from mjax.interop.family import Family, config_values, model_config
from mjax.interop.fast_tokenizer import fast_tokenizer
from mjax.interop.model_folder import (
    CARD,
    check_output,
    description,
    history,
    imported_card,
    new_folder,
    read_card,
    read_object,
    with_block,
    write_object,
)
from mjax.interop.tensor_files import open_tensors, parse_size, write_tensors
from mjax.interop.tokenizer_files import (
    GENERATION,
    IDS,
    SETTINGS,
    TEMPLATE,
    carried_files,
    find_tokenizer,
    restored_files,
    write_tokenizer,
)
from mjax.interop.weights import absent_heads, as_stored, block_reader, find_tensors, places, tensor_parts
from mjax.models.build import count_parameters
from mjax.run.continuing import origin_of
from mjax.run.metrics import read_metrics
from mjax.utils.progress import progress


@dataclass(frozen=True)
class FromHfArguments:
    """Convert a Hugging Face model (GPT-2, BLOOM, Llama, Mistral, Mixtral, Qwen, OLMo, BERT) into a run folder, to
    generate, evaluate or train."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with config.json and model.safetensors, as written by save_pretrained."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to create, such as runs/gpt2; must not exist or be empty."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`; by default the tokenizer in the source folder."""
    vocabulary_multiple: Count = 128
    """Pad the embedding with zero rows to a multiple of this, so that --mesh.model divides it; padding is never
    predicted."""
    allow_pickle: bool = False
    """Let torch read an old pytorch_model.bin, tensors only; for folders without a safetensors file."""
    draw_heads: bool = False
    """Initialise the BERT heads that are missing in the folder at random (MLM head, pooler, order head)."""
    rope: Annotated[str | None, tyro.conf.arg(metavar="KIND:FACTOR")] = None
    """Lower the rotary frequencies for longer sequences: yarn:8, llama3:8 or linear:4, for a model of 8,192 positions
    65,536 or 32,768. By default positions stay as they are."""


@dataclass(frozen=True)
class ToHfArguments:
    """Export a run's checkpoint as a folder for transformers."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/demo; same as --run RUN."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to create."""
    step: int | None = None
    """Checkpoint to convert; by default the newest intact one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the tensors; mjax stores fp32, bf16 rounds to half the size."""
    shard_size: str = "50GB"
    """Maximum size of a file, such as 5GB; larger models are split into several files."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, for a run that has none; `none` exports no tokenizer."""
    overwrite: bool = False
    """Replace an existing model folder."""


def to_hf_command(argv: Sequence[str]) -> int:
    """`mjax convert to-hf`, where the run may also be given by --run; returns the exit code."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--run", "--checkpoint", nargs="?")
    own.add_argument("--config", nargs="?")  # of a model of your own, which is refused with it and without
    named, rest = own.parse_known_args(argv)
    return to_hf(parse(ToHfArguments, rest if named.run is None else [named.run, *rest], "mjax convert to-hf"))


def from_hf(arguments: FromHfArguments) -> int:
    """`mjax convert from-hf`. Returns the exit code.

    Raises:
      UsageError: something in the source is missing, damaged or not supported, or the output exists; nothing was
        written.
    """
    source, output = arguments.source, arguments.output
    # --- Everything that can be refused before a tensor is read -------------------------------------------------------
    check_run_folder(output)
    check_output(output)
    if not source.is_dir():
        download = f"hf download {source} --local-dir {source.name}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not source.parent.exists():
            raise UsageError(
                f"there is no folder {source}; for a model of Hugging Face type {download}, and convert {source.name}"
            )
        raise UsageError(f"{source} is not a folder; give one with config.json and model.safetensors")
    values = read_object(source / "config.json")
    family = find_family(values, source / "config.json")
    model = model_config(family, values, str(source / "config.json"), arguments.vocabulary_multiple)
    model = extended(model, arguments.rope, str(source))
    rope = rope_line(model, arguments.rope)
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    left_out = check_vocabulary(tokenizer, model)
    card = imported_card(source, f"a {family.model}", rope)
    carries = tokenizer is not None and arguments.tokenizer is None and model.causal
    carried = carried_files(source, values, model.sequence if rope else None) if carries else {}
    for name in tokenizer.stored if carried else ():
        carried.pop(name, None)  # which the tokenizer writes
    tensors = open_tensors(source, arguments.allow_pickle)
    config = import_config(model, str(source), tensors)
    family = as_stored(family, tensors)
    found = find_tensors(family, tensors, model, str(source), arguments.draw_heads)
    absent = absent_heads(family, model, found)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    with progress("reading", 4 * count_parameters(model)) as read:
        drawn = draw_weights(config, tuple(absent))
        blocks = block_reader(family, tensors, found, model, read, drawn)
        write_run(output, config, tokenizer, blocks, carried, card)

    print(f"{output}: {count_parameters(model):,} parameters of a {family.model}, checkpoint 0")
    if rope:
        print(f"{rope}; evaluate it with --task positions and --task needle, and train it on long texts")
    if coefficient := values.get("router_aux_loss_coef"):
        # transformers' loss pools the layers and is k when balanced; the one of mjax is of each layer, and 1.
        loss = coefficient * model.experts_per_token / model.expert_layers
        print(
            f"router_aux_loss_coef {coefficient:g} is a setting of training; to train on with it type "
            f"--model.balance-loss {loss:g}, which is of each layer and has the same size when balanced"
        )
    if left_out:
        print(f"the embedding has no rows for {', '.join(left_out[:8])}, which no text encodes to: left out")
    if isinstance(tokenizer, LibraryTokenizer):
        print(f"texts end with {tokenizer.library.id_to_token(tokenizer.eod)}, id {tokenizer.eod}")
    if tokenizer is not None and tokenizer.bos is not None:
        print(f"texts begin with id {tokenizer.bos}, as in transformers")
    if tokenizer is not None and not carried:
        for name in (GENERATION, TEMPLATE):
            if (source / name).is_file():
                print(f"{source / name} is not carried; it goes with a {SETTINGS} and the tokenizer beside it")
    if absent:
        print(f"not in {source}, initialised from seed {config.train.seed}: {', '.join(map(family.heads.get, absent))}")
    print_next_steps(source, output, config, tokenizer)
    return 0


def to_hf(arguments: ToHfArguments) -> int:
    """`mjax convert to-hf`. Returns the exit code.

    Raises:
      UsageError: the run has no such checkpoint, transformers has no class for the model or no equivalent tokenizer, or
        the output exists; nothing was written.
      RunError: the checkpoint is damaged.
    """
    run, output = arguments.run, arguments.output
    # --- Everything that can be refused before a tensor is read -------------------------------------------------------
    largest_file = parse_size(arguments.shard_size)
    check_output(output, arguments.overwrite)
    config = read_settings(run / "config.json")
    family = family_of(config.model)
    tokenizer = _tokenizer_of(run, arguments.tokenizer)
    check_vocabulary(tokenizer, config.model)
    carried = restored_files(run / "tokenizer") if arguments.tokenizer is None and family.generates else {}
    library = None if tokenizer is None or carried else fast_tokenizer(tokenizer, config.model.samples != "text")

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False)
    with Checkpoints(run / "checkpoints", on_notice=lambda line: notices.print(line, markup=False)) as checkpoints:
        step = checkpoints.find(abstract_weights(config), arguments.step, field="model")
    torch_name, dtype = TYPES[arguments.dtype]
    shapes = {name: place.shape for name, place in places(family, config.model).items()}
    eod = None if tokenizer is None else tokenizer.eod
    generation = json.loads(carried.get(GENERATION, b"{}")) or dict.fromkeys(IDS, eod)
    ids = {name: generation.get(name) for name in ("bos_token_id", "eos_token_id")}
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
            write_object(folder / GENERATION, generation)
        if library is not None:
            write_tokenizer(tokenizer, library, folder, config.model)
        elif carried:
            tokenizer.save(folder)
            for name in carried.keys() - {GENERATION}:
                (folder / name).write_bytes(carried[name])
        parameters = sum(math.prod(shape) for shape in shapes.values())
        card = _card(arguments, family, config.model, parameters, step, tokenizer is not None)
        (folder / CARD).write_text(card, encoding="utf-8")
        held = run / "checkpoints" / str(step)
        parts = tensor_parts(family, config.model, lambda name, rank: read_in_blocks(held, f"model.{name}", rank))
        total = parameters * dtype.itemsize
        with progress("writing", total) as wrote:
            files = write_tensors(folder, shapes, parts, dtype, largest_file, wrote)

    print(f"{output}: checkpoint {step} of {run} as {family.model}, {total / 1e6:,.1f} MB in {files[0]}", end="")
    print(f" and {len(files) - 2} more" if len(files) > 1 else "")
    if tokenizer is None and arguments.tokenizer is None:
        print(f"{run} has no tokenizer, so {output} has none; to add it: --tokenizer KIND:FILES --overwrite")
    return 0


def _card(
    arguments: ToHfArguments, family: Family, model: ModelConfig, parameters: int, step: int, tokenizer: bool
) -> str:
    """README.md of an export: that of the export of this run which it replaces, or of the run, with a block of ours."""
    kept, name = read_card(arguments.run), arguments.output.resolve().name
    replaced = read_card(arguments.output)
    of_this_run = any(f"`{arguments.run.resolve().name}`" in line for line in history(replaced))
    lines = [*history(kept), _line(arguments.run, step)]
    block = description(name, family, model, parameters, TYPES[arguments.dtype][0], lines, tokenizer)
    return with_block(replaced if of_this_run else kept, block)


def _line(run: Path, step: int) -> str:
    """A checkpoint in one line of a model card."""
    name = f"- checkpoint {step:,} of the run `{run.resolve().name}`"
    if not step:
        return f"{name}: the weights as they were converted"
    records = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    tokens = next((record.get("tokens") for record in records if record.get("step") == step), None)
    origin = origin_of(run)
    return (
        f"{name}: trained for {step:,} steps"
        + (f" and {tokens:,} tokens" if tokens else "")
        + (f", from checkpoint {origin.step:,} of `{Path(origin.run).name}`" if origin else "")
    )


def print_next_steps(source: Path, output: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    """Print what to type after an import."""
    if tokenizer is None:
        print(
            f"no tokenizer found in {source}; convert again with --tokenizer KIND:FILES to store one in the run, or "
            "pass it to generate and evaluate each time"
        )
    else:
        sentences = "" if config.model.causal else " --split-sentences --no-append-eod"
        if config.model.causal:
            print(f'generate     python -m mjax generate --run {shlex.quote(str(output))} --prompt "…"')
        its = shlex.quote(f"run:{output}")
        print(f"your text    python -m mjax prepare corpus.jsonl --output data/corpus --tokenizer {its}{sentences}")
    faster = " --precision.compute bf16" if config.precision.compute == "fp32" else ""
    there = f"--config {shlex.quote(f'{output}/config.json')} --init {shlex.quote(str(output))}"
    print(f"train on     python train.py {there} --name NEW --data.path data/corpus{faster}")


def _tokenizer_of(run: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer of an export: that of the run, the given one, or none."""
    stored = run / "tokenizer"
    if given == "none":
        return None
    if given is None:
        return tokenizer_from_folder(stored) if stored.is_dir() else None
    return load_tokenizer(given)
