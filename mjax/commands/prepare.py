"""`mjax prepare`: turn text into an indexed dataset and its tokenizer.

    PREFIX.bin, PREFIX.idx   tokens, as Megatron's preprocess_data writes them
    PREFIX.json              sizes and origin of the dataset
    PREFIX.tokenizer/        the tokenizer, ready to be loaded
    PREFIX.mask              of conversations (--chat): which tokens are trained

Tasks encode shares of the text and copy their tokens to known places of the dataset (data/corpus/tasks.py), here or on
a cluster. Text is streamed: memory holds a block per worker and, while a tokenizer is trained, a sample of the text.

The rules follow Megatron's tools/preprocess_data.py. A sequence without tokens is left out, so a document without text
has no sequence but stays in the dataset, and document numbers do not change. The end-of-document id is appended to a
document's last sequence, if it has one.

Files get their final names when everything is done, the index last. A run that is interrupted or killed leaves
PREFIX.tmp, where the same command continues, with the same result.
"""

import dataclasses
import json
import random
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich import filesize
from rich.console import Console

from mjax import __version__
from mjax.commands.arguments import ConversationArguments, PrepareArguments
from mjax.config import DataConfig, read_settings
from mjax.config.datasets import DatasetMetadata, split_sequences
from mjax.data import indexed, tokenizers
from mjax.data.corpus import tasks
from mjax.data.corpus.documents import TABULAR, Block, TextFiles, Wikipedia, file_ending, parse_block
from mjax.data.indexed import DatasetSize, index_file, mask_file, token_dtype, token_file
from mjax.data.tokenizers import BertTokenizer, HuggingFaceTokenizer, Tokenizer
from mjax.errors import UsageError
from mjax.generation.chat import PLAIN, TEMPLATE, Chat, ChatError, Trained, encode, preview, refusal
from mjax.utils.progress import facts
from mjax.utils.remote import RemoteFile, remove

TRAINING_CHARACTERS = 2**26  # a larger sample does not improve a tokenizer
CHUNK = 2**14  # characters that are sampled together


@dataclass(frozen=True)
class PrepareSummary:
    """Result of `prepare`.

    Attributes:
      prefix: of the dataset.
      metadata: of the dataset.
      encoder: the package that encoded: gigatoken, tokenizers, sentencepiece, or mjax for bytes.
      workers: processes that encoded; 1 means this process alone.
      seconds: total time.
      dropped, cut: conversations that were too long.
      endless: conversations whose last turn ends without a special token.
      for_bert: whether the tokenizer has the tokens of a BERT's samples.
    """

    prefix: str
    metadata: DatasetMetadata
    encoder: str
    workers: int
    seconds: float
    dropped: int = 0
    cut: int = 0
    endless: int = 0
    for_bert: bool = False

    @property
    def files(self) -> list[Path]:
        """The dataset's files and its tokenizer's folder."""
        return indexed.dataset_files(self.prefix)


def prepare(arguments: PrepareArguments, following: bool = True) -> PrepareSummary | None:
    """Write a dataset and print a summary, with the command that follows; None if the work was submitted to a cluster.

    Raises:
      UsageError: arguments that contradict each other, an input that cannot be read, no text, or an output that exists.
      RunError: the demo cannot be fetched, a worker was killed, or the output cannot be written.
    """
    _check(arguments)
    if arguments.chat:
        if arguments.max_length is None:
            model = read_settings(_find_run(arguments) / "config.json").model
            arguments = replace(arguments, max_length=model.sequence + 1)
        corpus = _read_conversations(arguments)
    else:
        corpus = Wikipedia() if arguments.demo else arguments.open(all_fields=False, split=arguments.split_documents)
    return tasks.run_job(PrepareJob(arguments, corpus, following))


class PrepareJob(tasks.Job):
    """The stages of `mjax prepare`.

    Raises:
      UsageError: the tokenizer cannot be loaded, or lacks a feature that the arguments request.
    """

    single_task_stages = ("tokenizer", "finish")
    reading_stages = ("lines", "tokenizer", "encode")

    def __init__(self, arguments: PrepareArguments, corpus: TextFiles, following: bool):
        stages = [*["tokenizer"] * _trains(arguments), "encode", "merge", "finish"]
        super().__init__(arguments, corpus, arguments.output, stages)
        self.following, self.loaded, self.tokenizer_folder = following, None, self.folder / "tokenizer"
        self.settings = [Path(arguments.chat_template or "")]
        if not _trains(arguments):
            self.loaded = _with_bos(tokenizers.load_tokenizer(arguments.tokenizer), arguments)
            self.settings += tokenizers.tokenizer_files(arguments.tokenizer)

    def begin(self) -> None:
        """Save the tokenizer for the tasks, if one is given, and show the first conversations."""
        arguments, folder = self.arguments, self.tokenizer_folder
        loaded, self.loaded = self.loaded, None  # tasks read it from the folder
        if arguments.chat:
            _save_chat(arguments.chat_template, _find_run(arguments), folder, loaded)
            loaded.bos = None  # the template writes it
        if loaded is not None:
            loaded.save(folder)
        if arguments.preview and not arguments.json:
            _show_first(arguments, self.corpus, folder)

    def tokenizer(self, rank: int) -> None:
        """Train the tokenizer: sentencepiece or BERT's vocabulary, on a fixed random sample of a large corpus."""
        arguments = self.arguments
        demo_size = 4096 if arguments.tokenizer is None else 2048  # as in configs/gpt_demo.py and bert_demo.py
        vocabulary = arguments.vocabulary or (demo_size if arguments.demo else 8192)
        share, draw = TRAINING_CHARACTERS / max(self.corpus.size, 1), random.Random(0)

        def chunks() -> Iterator[str]:
            for document in self.corpus.documents(self.advance):
                for first in range(0, len(document.text), CHUNK):
                    if draw.random() < share:
                        yield document.text[first : first + CHUNK]
            self.advance(self.corpus.size)  # of blank lines too

        if arguments.tokenizer is None:
            trained = tokenizers.train_sentencepiece(chunks(), vocabulary)
        else:
            trained = tokenizers.train_wordpiece(chunks(), vocabulary, arguments.tokenizer)
        _with_bos(trained, arguments).save(self.tokenizer_folder)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer that the tasks use, loaded once in each process."""
        return tokenizers.tokenizer_from_folder(self.tokenizer_folder)

    @cached_property
    def _encoder(self) -> "Encoder | ConversationEncoder":
        make = ConversationEncoder if self.arguments.chat else Encoder
        return make(self.arguments, self.corpus.key, self.tokenizer_folder, self._tokenizer)

    def encode(self, rank: int) -> dict[str, Any]:
        """Encode a share: its tokens, the lengths of its sequences, the ends of its documents, its masks.

        Returns:
          counts, summed over blocks; malformed lines; encoder, the package that encoded; stops, ids of the tokens that
          end conversations.
        """
        encoder, malformed, counts, stops = self._encoder, self.sum_malformed(), Counter(), set()
        with self.open_files(rank, "tokens", "lengths", "ends", "masks") as (token_stream, lengths, ends, masks):
            for raw in self.blocks(rank):
                block = encoder.encode(raw)
                malformed.add(block.malformed)
                block.tokens.tofile(token_stream)
                block.lengths.tofile(lengths)
                (np.cumsum(block.sequences, dtype=np.int64) + counts["sequences"]).tofile(ends)
                if block.trained is not None:
                    block.trained.astype(np.uint8).tofile(masks)
                counts.update(block.counts)
                stops |= block.stops
        used = encoder.tokenizer.encoder
        return {"counts": counts, "malformed": malformed, "encoder": used, "stops": sorted(stops)}

    def merge(self, rank: int) -> None:
        """Copy a share to its place in the files of the dataset."""
        counts = [share["counts"] for share in self.results("encode")]
        shapes = np.array([[count.get(name, 0) for name in DatasetSize._fields] for count in counts])
        before, whole = DatasetSize(*shapes[:rank].sum(axis=0).tolist()), DatasetSize(*shapes.sum(axis=0).tolist())
        dtype = np.dtype(token_dtype(self._tokenizer.vocabulary))
        self.copy_file("tokens", rank, self.folder / "bin", before.tokens * dtype.itemsize)
        if self.arguments.chat:
            self.copy_file("masks", rank, self.folder / "mask", before.tokens)
        lengths, ends = np.array(self.map_file("lengths", rank, np.int32)), self.map_file("ends", rank, np.int64)
        indexed.write_index_part(self.folder / "idx", dtype, before, whole, lengths, ends)

    def finish(self, rank: int) -> PrepareSummary:
        """Write the metadata and give all files their names, the index last."""
        arguments, prefix = self.arguments, self.arguments.output
        shares, tokenizer, counts = self.results("encode"), self._tokenizer, Counter()
        for share in shares:
            counts.update(share["counts"])
        malformed = self.sum_malformed([share["malformed"] for share in shares])
        if not counts["tokens"] and counts["dropped"]:
            longer = f"all {counts['dropped']:,} conversations are longer than --max-length {arguments.max_length:,}"
            raise UsageError(f"{longer}; raise it, or add --overflow truncate")
        if not counts["tokens"]:
            raise UsageError(f"there is no text in {', '.join(self.corpus.names)}; give files with text")
        metadata = DatasetMetadata(
            tokenizer=tokenizer.scheme,
            vocabulary=tokenizer.vocabulary,
            eod=tokenizer.eod,
            append_eod=arguments.append_eod and not arguments.chat,
            bos=tokenizer.bos,
            inputs=self.corpus.names,
            mjax_version=__version__,
            sentences=arguments.language if arguments.split_sentences else None,
            malformed=malformed.count,
            malformed_examples=malformed.examples,
            trained=counts["trained"] if arguments.chat else None,
            **{name: counts[name] for name in ("documents", "tokens", "text_bytes", "sequences")},
        )
        self.copies_to_store = isinstance(token_file(prefix), RemoteFile)
        if (self.folder / "idx").exists():  # else a run that was killed just before its end has put all
            shutil.rmtree(indexed.temporary_tokenizer(prefix), ignore_errors=True)
            shutil.copytree(self.tokenizer_folder, indexed.temporary_tokenizer(prefix))
            stops = {stop for share in shares for stop in share["stops"]}
            tokenizers.add_stop_tokens(indexed.temporary_tokenizer(prefix), tokenizer.eod, stops)
            indexed.publish_metadata(prefix, metadata)
            if not arguments.chat:
                remove(mask_file(prefix))
        self.put_outputs({"bin": token_file(prefix), "mask": mask_file(prefix), "idx": index_file(prefix)})
        return PrepareSummary(
            prefix=prefix,
            metadata=metadata,
            encoder=min(share["encoder"] for share in shares),  # gigatoken, if it took some
            workers=(arguments.workers or self.tasks) if arguments.sbatch else max(self.processes, 1),
            seconds=time.time() - self.start_time,
            for_bert=isinstance(tokenizer, BertTokenizer),
            **{name: counts[name] for name in ("dropped", "cut", "endless")},
        )

    def result(self) -> PrepareSummary:
        """The summary."""
        values = super().result()
        return PrepareSummary(**values | {"metadata": DatasetMetadata(**values["metadata"])})

    def show(self, result: PrepareSummary) -> None:
        """Print the summary, as JSON with --json."""
        arguments, metadata = self.arguments, result.metadata
        if arguments.json:
            values = dataclasses.asdict(result)
            values = {**values, **values.pop("metadata"), "files": result.files}
            print(json.dumps(values, ensure_ascii=False, default=str))
            return
        console = Console(soft_wrap=True, highlight=False)
        tokenizer = f"{metadata.tokenizer}, trained on this text" if _trains(arguments) else arguments.tokenizer
        console.print(f"{arguments.output} is ready after {result.seconds:.1f} s", markup=False)
        console.print(facts(_facts(result, tokenizer)))
        if result.endless:
            note = f"note: {result.endless:,} conversations end without a special token: the model never learns to stop"
            console.print(f"{note}; another chat template can write one (--chat-template)")
        for example in metadata.malformed_examples:
            console.print(f"left out: {example}", markup=False)
        workers = f"{result.workers} worker{'s' * (result.workers > 1)}"
        console.print(f"encoded with {result.encoder}, {workers}", markup=False)
        if self.following:
            print(f"\nNext: {_following(arguments, metadata, result.for_bert)}")


# --- The steps --------------------------------------------------------------------------------------------------------


def _trains(arguments: PrepareArguments) -> bool:
    """True if the vocabulary is learned from the text."""
    return arguments.tokenizer is None or arguments.tokenizer in tokenizers.TRAINABLE_WORDPIECE


def _check(arguments: PrepareArguments) -> None:
    """Refuse arguments that are out of bounds or contradict each other, before text is fetched or read."""
    if arguments.demo and (arguments.inputs or arguments.split_documents is not None):
        raise UsageError("--demo fetches its documents; leave out --demo, or the files and --split-documents")
    if not arguments.demo and not arguments.inputs:
        raise UsageError("no input; give .txt, .jsonl or .parquet files, or --demo for 5 MB of Wikipedia")
    if arguments.vocabulary is not None and not _trains(arguments):
        raise UsageError(f"--vocabulary {arguments.vocabulary} is only for training a tokenizer; remove it")
    _check_chat(arguments)
    if arguments.split_sentences:
        load_splitter(arguments.language)
    indexed.check_output(arguments.output, arguments.overwrite)


def _find_run(arguments: PrepareArguments) -> Path:
    """The run of `--tokenizer run:RUN`."""
    return Path((arguments.tokenizer or "").partition(":")[2])


def _with_bos(tokenizer: Tokenizer, arguments: PrepareArguments) -> Tokenizer:
    """`tokenizer`, with or without a token before each text, as set by --prepend-bos."""
    if arguments.prepend_bos != "auto":
        tokenizer.bos = tokenizer.find_bos() if arguments.prepend_bos == "on" else None
        if arguments.prepend_bos == "on" and tokenizer.bos is None:
            raise UsageError(f"--prepend-bos on: a {tokenizer.scheme} tokenizer puts none before texts; remove it")
    return tokenizer


# --- In a worker ------------------------------------------------------------------------------------------------------


@dataclass
class Encoded:
    """The documents of one block.

    Attributes:
      tokens: token ids of all documents one after the other, [tokens] in their dtype on disk.
      lengths: tokens in each sequence, int32 [sequences].
      sequences: sequences in each document, int64 [documents].
      malformed: the malformed lines of the block, in order.
      counts: documents, sequences, tokens, text_bytes (in UTF-8); of conversations trained tokens; dropped and cut,
        which were too long; endless, whose last turn ends without a special token.
      trained: of conversations, whether each token is trained, bool [tokens].
      stops: ids of the special tokens that end conversations.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    malformed: list[str]
    counts: dict[str, int]
    trained: np.ndarray | None = None
    stops: frozenset[int] = frozenset()

    def __post_init__(self):
        sizes = {"documents": self.sequences, "sequences": self.lengths, "tokens": self.tokens}
        self.counts |= {name: len(values) for name, values in sizes.items()}


class Encoder:
    """Encodes blocks: parses them, splits sentences if asked, and encodes all texts in one call of the tokenizer.

    Results are arrays: Python's lists of numbers, ten times their size, never leave the worker. Blocks are independent
    and come back in order, so the dataset does not depend on the number of workers.
    """

    def __init__(self, arguments: PrepareArguments, key: str, folder: Path, tokenizer: Tokenizer):
        self.key, self.append_eod, self.tokenizer = key, arguments.append_eod, tokenizer
        self.begin = self.tokenizer.bos
        self.dtype = token_dtype(self.tokenizer.vocabulary)
        self.splitter = load_splitter(arguments.language) if arguments.split_sentences else None

    def encode(self, block: Block) -> Encoded:
        """The documents of a block as token ids."""
        parsed, malformed = parse_block(block, self.key)
        texts = [document.text for document in parsed]
        tokens, lengths, sequences = self._encode(texts)
        indexed.check_ids(tokens, self.tokenizer.vocabulary)
        counts = {"text_bytes": sum(len(text) if text.isascii() else len(text.encode()) for text in texts)}
        return Encoded(tokens.astype(self.dtype), lengths, sequences, malformed, counts)

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, the lengths of sequences, and the number of sequences in each document, 0 without text."""
        parts = [split_sentences(text, self.splitter) if self.splitter else [text] for text in texts]
        tokens, lengths = self.tokenizer.encode_flat([sequence for document in parts for sequence in document])
        document = np.repeat(np.arange(len(parts)), [len(document) for document in parts])[lengths > 0]
        lengths, sequences = lengths[lengths > 0].astype(np.int32), np.bincount(document, minlength=len(parts))
        # Every document with tokens has a first and a last sequence: `begin` goes before one, the end behind the other.
        last = np.cumsum(sequences)[sequences > 0] - 1
        first = last - sequences[sequences > 0] + 1
        ends = np.cumsum(lengths, dtype=np.int64)
        before, after = [np.empty(0, np.int64)] * 2
        if self.begin is not None:
            before = (ends - lengths)[first]
            lengths[first] += 1
        if self.append_eod:
            after = ends[last]
            lengths[last] += 1
        # The end of a document is inserted before the beginning of the next, which is at the same place.
        values = np.repeat([self.tokenizer.eod, self.begin or 0], [len(after), len(before)]).astype(tokens.dtype)
        return np.insert(tokens, np.concatenate([after, before]), values), lengths, sequences


# --- Conversations: `mjax prepare --chat` -----------------------------------------------------------------------------

ONLY = {name: getattr(ConversationArguments, name) for name in ConversationArguments.__annotations__ if name != "chat"}
"""Flags that go with --chat, and their defaults."""


def _check_chat(arguments: PrepareArguments) -> None:
    """Refuse flags that do not go with --chat, or only with it, and a run without a chat template."""
    if not arguments.chat:
        for name, default in ONLY.items():
            if getattr(arguments, name) != default:
                raise UsageError(f"--{name.replace('_', '-')} is for conversations; add --chat, or remove it")
        return
    for name in ("demo", "split_sentences", "split_documents"):
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} is for text, and --chat for conversations; leave one out")
    run = _find_run(arguments)
    if not (arguments.tokenizer or "").startswith("run:"):
        raise UsageError("--chat needs the tokenizer and chat template of the model to train; add --tokenizer run:RUN")
    template = arguments.chat_template
    if template is None and not (run / "tokenizer" / TEMPLATE).is_file():
        raise UsageError(f"{run} has no chat template; add --chat-template FILE, or plain for User: … Assistant: …")
    if template not in (None, "plain") and not Path(template).is_file():
        raise UsageError(f"--chat-template {template} is not a file; give a file in Jinja, or plain")


def _save_chat(template: str | None, run: Path, folder: Path, tokenizer: Tokenizer) -> None:
    """Copy the run's tokenizer folder, with another chat template if there is one, into the folder of a tokenizer.

    The plain template begins with the token that begins texts of the tokenizer.
    """
    shutil.copytree(run / "tokenizer", folder, dirs_exist_ok=True)
    if template == "plain":
        begins = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.bos is not None
        begin = tokenizer.backend.id_to_token(tokenizer.bos) if begins else ""
        (folder / TEMPLATE).write_text(begin + PLAIN, encoding="utf-8")
    elif template is not None:
        shutil.copy(template, folder / TEMPLATE)


def _read_conversations(arguments: ConversationArguments) -> TextFiles:
    """The conversations of the inputs.

    Raises:
      UsageError: a file is text.
    """
    corpus = replace(arguments, key="").open()
    for file in corpus.files:
        if file_ending(file) not in TABULAR:
            raise UsageError(f"{file} is text, and --chat reads conversations from {', '.join(TABULAR)}; convert it")
    return corpus


def _show_first(arguments: ConversationArguments, corpus: TextFiles, folder: Path) -> None:
    """Print the first conversations, with the trained text in green."""
    console, chat = Console(soft_wrap=True, highlight=False), Chat(folder)
    for document in islice(corpus, arguments.preview):
        try:
            encoded = encode(chat, document.fields, _turns_to_train(arguments))
        except ChatError as error:
            raise refusal(document.source, error, document.fields) from None
        console.rule(document.source, style="dim")
        console.print("dropped, it is too long" if encoded is None else preview(chat, encoded))
    console.rule(style="dim")


def _turns_to_train(arguments: ConversationArguments) -> Trained:
    return Trained(arguments.train_on, arguments.reasoning, arguments.max_length, arguments.overflow)


class ConversationEncoder:
    """Encodes blocks of conversations: renders each by the chat template, and marks the trained tokens."""

    def __init__(self, arguments: ConversationArguments, key: str, folder: Path, tokenizer: Tokenizer):
        self.trained, self.skip = _turns_to_train(arguments), arguments.malformed == "skip"
        self.tokenizer = tokenizer
        self.chat = Chat(folder, self.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocabulary)

    def encode(self, block: Block) -> Encoded:
        """The conversations of a block as token ids and masks."""
        documents, malformed = parse_block(block, "")
        encoded, dropped = [], 0
        for document in documents:
            try:
                one = encode(self.chat, document.fields, self.trained)
                if one is not None and max(one.ids, default=0) >= (ids := self.tokenizer.vocabulary):
                    written = f"{self.chat.decode([max(one.ids)], special=True)}, id {max(one.ids)}"
                    raise ChatError(f"the chat template writes {written}, and the model has {ids:,} ids")
            except ChatError as error:
                if not self.skip:
                    raise refusal(document.source, error, document.fields) from None
                malformed.append(f"{document.source}: {error}")
                continue
            dropped += one is None
            encoded += [] if one is None else [one]
        lengths = np.array([len(one.ids) for one in encoded], np.int32)
        total = int(lengths.sum())
        trained = np.fromiter(chain.from_iterable(one.trained for one in encoded), bool, total)
        return Encoded(
            tokens=np.fromiter(chain.from_iterable(one.ids for one in encoded), self.dtype, total),
            lengths=lengths,
            sequences=np.ones(len(encoded), np.int64),
            malformed=malformed,
            counts={
                "text_bytes": sum(one.text_bytes for one in encoded),
                "trained": int(trained.sum()),
                "dropped": dropped,
                "cut": sum(one.cut for one in encoded),
                "endless": sum(one.stops is None and not one.cut for one in encoded),
            },
            trained=trained,
            stops=frozenset(one.stops for one in encoded if one.stops is not None),
        )


# --- Sentences: `mjax prepare --split-sentences`, which BERT is trained on --------------------------------------------

# Punkt (Kiss and Strunk, Computational Linguistics 32:4, 2006) ends a sentence at a full stop unless an abbreviation,
# an initial or a number stands before it, as learned from plain text of the language. The algorithm is NLTK's, so the
# sentences are those of Megatron's preprocess_data. The learned tables are not part of NLTK: `punkt_tab`, plain text in
# a folder tokenizers/punkt_tab/LANGUAGE under $NLTK_DATA or one of NLTK's usual folders. Megatron's older `punkt` is a
# pickle, which can execute anything; mjax never opens it.

PIECE = 1_000_000  # characters that Megatron splits at a time; the cuts between them end a sentence too


def load_splitter(language: str) -> Any:
    """NLTK's Punkt with the tables of a language, such as "english"; sentences do not include the spaces between them.

    Raises:
      UsageError: the language's tables are missing; the sentence names their source.
    """
    from nltk.tokenize.punkt import PunktTokenizer  # takes a second to import

    try:
        return PunktTokenizer(language)
    except (LookupError, ValueError):
        fix = "type `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to a folder that holds tokenizers/punkt_tab"
        raise UsageError(f"the sentence rules of {language!r} are missing; {fix}/{language}") from None


def split_sentences(text: str, splitter: Any) -> list[str]:
    """The sentences of a text, as Megatron's preprocess_data splits it: a million characters at a time."""
    parts = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    return [sentence for part in parts for sentence in splitter.tokenize(part)]


# --- On the terminal --------------------------------------------------------------------------------------------------


def _following(arguments: PrepareArguments, metadata: DatasetMetadata, for_bert: bool) -> str:
    """The command that trains on the dataset."""
    if for_bert and (metadata.append_eod or not arguments.split_sentences):
        return "for a BERT, prepare it again with --split-sentences --no-append-eod"
    config, more, run = "gpt_demo", "", str(_find_run(arguments))
    if for_bert:
        config, more = ("bert_demo", "") if arguments.demo else ("bert_336m", " --mesh.data 1")
    if (arguments.tokenizer or "").startswith("run:"):  # of a model, which the text is for
        config, more = f"{run}/config.json", f" --init {shlex.quote(run)} --name NEW"
    command = f"mjax sft{more}" if arguments.chat else f"python train.py --config {shlex.quote(config)}{more}"
    command += f" --data.path {shlex.quote(arguments.output)}"
    if not split_sequences(DataConfig.split, metadata.documents)[1]:  # there is no validation
        one = metadata.documents == 1
        command += " --train.eval-interval 0" if one else f" --data.split {metadata.documents - 1},1,0"
    return command


def _facts(summary: PrepareSummary, tokenizer: str) -> Iterator[tuple[str, str, str]]:
    metadata = summary.metadata
    documents = "documents" if metadata.trained is None else "conversations"
    yield documents, f"{metadata.documents:,}", f"{filesize.decimal(metadata.text_bytes)} of text"
    if metadata.sentences:
        yield "sentences", f"{metadata.sequences:,}", f"a sequence each, by the rules of {metadata.sentences}"
    yield "tokens", f"{metadata.tokens:,}", f"{metadata.bytes_per_token:.2f} bytes of text each"
    if metadata.trained is not None:
        yield "trained", f"{metadata.trained:,}", f"{metadata.trained / metadata.tokens:.1%} of the tokens"
    for what, count in (("dropped", summary.dropped), ("cut", summary.cut)):
        if count:
            yield what, f"{count:,}", "conversations that were too long"
    yield "vocabulary", f"{metadata.vocabulary:,}", tokenizer
    if metadata.bos is not None:
        yield "begin of document", f"{metadata.bos}", "before each document"
    if metadata.trained is None:
        yield "end of document", f"{metadata.eod}", "after each document" if metadata.append_eod else "not appended"
    if metadata.malformed:
        yield "malformed", f"{metadata.malformed:,}", "lines left out"
    for file in summary.files:
        size = sum(part.stat().st_size for part in (file.rglob("*") if file.is_dir() else [file]))
        yield "" if file != summary.files[0] else "files", filesize.decimal(size), str(file)
