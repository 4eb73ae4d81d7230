"""`mjax convert from-megatron`: a checkpoint of Megatron-LM becomes a run folder, as `from-hf` makes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mjax.bounds import Count
from mjax.commands.convert import print_next_steps
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.interop.convert import (
    abstract_weights,
    check_vocabulary,
    import_config,
    write_run,
)
from mjax.interop.megatron.arguments import Activation, model_config
from mjax.interop.megatron.checkpoint import Checkpoint, open_checkpoint
from mjax.interop.megatron.names import family_of
from mjax.interop.model_folder import check_output
from mjax.interop.tokenizer_files import find_tokenizer
from mjax.interop.weights import find_tensors, read_weights
from mjax.model_config import ModelConfig
from mjax.models.build import count_parameters
from mjax.progress import progress


@dataclass(frozen=True)
class FromMegatronArguments:
    """Turn a checkpoint of Megatron-LM (dense GPT or BERT, formats torch and torch_dist) into a run folder."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder that Megatron's --save named, or that of one checkpoint in it, such as release or iter_0300000."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to make, such as runs/megatron_345m; it must not hold anything yet."""
    step: int | None = None
    """Checkpoint to convert; the one that latest_checkpointed_iteration.txt names when not given."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, such as gpt2:vocab.json,merges.txt: Megatron stores none."""
    vocabulary: int | None = None
    """Rows of the embedding that are tokens; the others pad it. As many as the tokenizer has when not given, and all
    where there is none."""
    heads: int | None = None
    """Attention heads; asked for where the checkpoint does not say."""
    activation: Activation | None = None
    """GELU of a checkpoint that does not say: gelu_tanh for a GPT and gelu_erf for a BERT when not given."""
    vocabulary_multiple: Count = 128
    """The embedding gets rows of zeros up to a multiple of this, so that --mesh.model divides it; no token is ever
    predicted there."""


def from_megatron(arguments: FromMegatronArguments) -> int:
    """`mjax convert from-megatron`. Returns the exit code.

    Raises:
      UsageError: something in the source is missing, damaged or not what mjax computes, torch is not installed, or the
        output is in use; nothing was written.
    """
    source, output = arguments.source, arguments.output
    # --- Everything that can be refused before a number is read -------------------------------------------------------
    check_output(output)
    checkpoint = open_checkpoint(source, arguments.step)
    place = str(checkpoint.folder)
    model = model_config(
        checkpoint.arguments, checkpoint.tensors, checkpoint.architecture, place, arguments.heads, arguments.activation
    )
    layernorm = getattr(model, "layernorm", "pre")
    if layernorm == "post" and not checkpoint.old_names:
        raise UsageError(
            f"{place}: apply_residual_connection_post_layernorm is set, and mjax knows it of old BERT models only: "
            "megatron-core passes over it; convert another model"
        )
    tokenizer = find_tokenizer(source, arguments.tokenizer)
    rows = model.vocabulary
    vocabulary = _vocabulary(arguments.vocabulary, tokenizer, checkpoint, rows)
    model = dataclasses.replace(model, vocabulary=vocabulary, vocabulary_multiple=arguments.vocabulary_multiple)
    check_vocabulary(tokenizer, model)
    config = import_config(model, place)
    family = family_of(checkpoint.architecture, checkpoint.version, layernorm, model.layers)
    found = find_tensors(family, checkpoint.tensors, model, place)

    # --- Weights, then the folder -------------------------------------------------------------------------------------
    with progress("reading", 4 * count_parameters(model)) as read:
        weights = read_weights(family, checkpoint.tensors, found, model, abstract_weights(config), read)
    write_run(output, config, tokenizer, weights)

    print(f"{output}: {count_parameters(model):,} parameters of {family.model}, checkpoint 0, from {place}")
    print(_what_was_taken(checkpoint, model, rows))
    print_next_steps(source, output, model, tokenizer)
    return 0


def _vocabulary(given: int | None, tokenizer: Tokenizer | None, checkpoint: Checkpoint, rows: int) -> int:
    """How many of the embedding's rows are tokens.

    Megatron pads the tokens of its tokenizer to a multiple of 128 for each tensor rank. A tokenizer that leaves more
    rows over than that is probably another one.
    """
    if given is not None:
        if not 1 <= given <= rows:
            raise UsageError(f"--vocabulary is {given}; the embedding has {rows:,} rows: give 1 to {rows}")
        return given
    if tokenizer is None or tokenizer.vocabulary > rows:  # the latter is refused by check_vocabulary
        return rows
    said = checkpoint.arguments or {}
    ranks = checkpoint.tensor_ranks or said.get("tensor_model_parallel_size") or 1
    multiple = (said.get("make_vocab_size_divisible_by") or 128) * ranks
    if rows - tokenizer.vocabulary >= multiple:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} ids and the embedding {rows:,} rows, more than padding to a "
            f"multiple of {multiple} explains; give the model's tokenizer, or say --vocabulary {tokenizer.vocabulary}"
        )
    return tokenizer.vocabulary


def _what_was_taken(checkpoint: Checkpoint, model: ModelConfig, rows: int) -> str:
    """What the checkpoint does not say and was taken to be so, in a line."""
    padding = f"{rows - model.vocabulary} that pad it left out" if rows > model.vocabulary else "none of them padding"
    line = f"embedding: {rows:,} rows, {padding}"
    if checkpoint.arguments is None:
        line += f" · no arguments in it: {model.heads} heads, {model.activation}, epsilon {model.layernorm_epsilon:g}"
    return line
