"""`mjax convert from-megatron`: convert a Megatron-LM checkpoint into a run folder, like `from-hf`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mjax.checkpoint.folders import check_run_folder
from mjax.commands.convert import print_next_steps
from mjax.config.bounds import Count
from mjax.config.model import ModelConfig
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.interop.convert import check_vocabulary, extended, import_config, rope_line, write_run
from mjax.interop.megatron.arguments import Activation, balance_left_out, decoder_config, model_config
from mjax.interop.megatron.checkpoint import Checkpoint, open_checkpoint
from mjax.interop.megatron.names import DECODER, MIXTURE, family_of
from mjax.interop.megatron.tensors import DecoderTensors
from mjax.interop.model_folder import check_output, imported_card
from mjax.interop.tensor_files import Tensors
from mjax.interop.tokenizer_files import carried_files, find_tokenizer
from mjax.interop.weights import block_reader, find_tensors
from mjax.models.build import count_parameters
from mjax.utils.progress import progress


@dataclass(frozen=True)
class FromMegatronArguments:
    """Convert a Megatron-LM checkpoint (a GPT, BERT, Llama or mixture of experts; formats torch and torch_dist) into a
    run folder."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of Megatron's --save, or of one checkpoint in it, such as release or iter_0300000."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to create, such as runs/megatron_345m; must not exist or be empty."""
    step: int | None = None
    """Checkpoint to convert; by default the one in latest_checkpointed_iteration.txt."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, such as gpt2:vocab.json,merges.txt: Megatron stores none."""
    vocabulary: int | None = None
    """Number of embedding rows that are tokens; the others are padding. By default the size of the tokenizer, or all
    rows without one."""
    heads: int | None = None
    """Attention heads; required if the checkpoint does not say."""
    activation: Activation | None = None
    """GELU, if the checkpoint does not say; by default gelu_tanh for a GPT and gelu_erf for a BERT."""
    vocabulary_multiple: Count = 128
    """Pad the embedding with zero rows to a multiple of this, so that --mesh.model divides it; padding is never
    predicted."""
    rope: Annotated[str | None, tyro.conf.arg(metavar="KIND:FACTOR")] = None
    """Lower the rotary frequencies for longer sequences: yarn:8, llama3:8 or linear:4, for a model of 8,192 positions
    65,536 or 32,768. By default positions stay as they are."""


def from_megatron(arguments: FromMegatronArguments) -> int:
    """`mjax convert from-megatron`. Returns the exit code.

    Raises:
      UsageError: something in the source is missing, damaged or not supported, torch is not installed, or the output
        exists; nothing was written.
    """
    source, output = arguments.source, arguments.output
    # --- Everything that can be refused before a tensor is read -------------------------------------------------------
    check_run_folder(output)
    check_output(output)
    checkpoint = open_checkpoint(source, arguments.step)
    place = str(checkpoint.folder)
    model, tensors = _model(checkpoint, arguments)
    model = extended(model, arguments.rope, place)
    rope = rope_line(model, arguments.rope)
    layernorm = getattr(model, "layernorm", "pre")
    if layernorm == "post" and not checkpoint.old_names:
        raise UsageError(
            f"{place}: apply_residual_connection_post_layernorm is set, which mjax supports for old BERT models only: "
            "megatron-core ignores it; convert another model"
        )
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    carries = tokenizer is not None and arguments.tokenizer is None and model.causal
    carried = carried_files(source, {}, model.sequence if rope else None) if carries else {}
    rows = model.vocabulary
    vocabulary = _vocabulary(arguments.vocabulary, tokenizer, checkpoint, rows)
    model = dataclasses.replace(model, vocabulary=vocabulary, vocabulary_multiple=arguments.vocabulary_multiple)
    check_vocabulary(tokenizer, model)
    config = import_config(model, place, tensors)
    family = MIXTURE if model.parted_experts() else DECODER
    if checkpoint.architecture != "decoder":
        family = family_of(checkpoint.architecture, checkpoint.version, layernorm, model.layers)
    found = find_tensors(family, tensors, model, place)

    card = imported_card(source, family.model, rope)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    with progress("reading", 4 * count_parameters(model)) as read:
        write_run(output, config, tokenizer, block_reader(family, tensors, found, model, read), carried, card)

    print(f"{output}: {count_parameters(model):,} parameters of {family.model}, checkpoint 0, from {place}")
    print(_what_was_taken(checkpoint, model, rows))
    if rope:
        print(f"{rope}; evaluate it with --task positions and --task needle, and train it on long texts")
    if family is MIXTURE and (left_out := balance_left_out(checkpoint.arguments, place)):
        print(left_out)
    print_next_steps(source, output, config, tokenizer)
    return 0


def _model(checkpoint: Checkpoint, given: FromMegatronArguments) -> tuple[ModelConfig, Tensors]:
    """The model, and its tensors by the names of its family."""
    place, said = str(checkpoint.folder), checkpoint.arguments
    if checkpoint.architecture != "decoder":
        tensors = checkpoint.tensors
        return model_config(said, tensors, checkpoint.architecture, place, given.heads, given.activation), tensors
    if named := [name for name in ("heads", "activation") if getattr(given, name) is not None]:
        raise UsageError(f"{place} says everything of its model itself; leave out --{named[0]}")
    model = decoder_config(said, checkpoint.tensors, place, checkpoint.version)
    return model, DecoderTensors(checkpoint.tensors, model, place)


def _vocabulary(given: int | None, tokenizer: Tokenizer | None, checkpoint: Checkpoint, rows: int) -> int:
    """The number of embedding rows that are tokens.

    Megatron pads the tokens of its tokenizer to a multiple of 128 for each tensor rank. A tokenizer that leaves more
    rows than that is probably the wrong one.
    """
    if given is not None:
        if not 1 <= given <= rows:
            raise UsageError(f"--vocabulary is {given}; the embedding has {rows:,} rows; use 1 to {rows}")
        return given
    if tokenizer is None or tokenizer.vocabulary > rows:  # the latter is refused by check_vocabulary
        return rows
    said = checkpoint.arguments or {}
    ranks = checkpoint.tensor_ranks or said.get("tensor_model_parallel_size") or 1
    multiple = (said.get("make_vocab_size_divisible_by") or 128) * ranks
    if rows - tokenizer.vocabulary >= multiple:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the embedding {rows:,} rows, more than padding to a "
            f"multiple of {multiple} explains; give the model's tokenizer, or add --vocabulary {tokenizer.vocabulary}"
        )
    return tokenizer.vocabulary


def _what_was_taken(checkpoint: Checkpoint, model: ModelConfig, rows: int) -> str:
    """One line about assumptions where the checkpoint says nothing."""
    padding = f"{rows - model.vocabulary} of padding left out" if rows > model.vocabulary else "none of them padding"
    line = f"embedding: {rows:,} rows, {padding}"
    if checkpoint.arguments is None:
        line += f" · no arguments in it: {model.heads} heads, {model.activation}, epsilon {model.layernorm_epsilon:g}"
    return line
