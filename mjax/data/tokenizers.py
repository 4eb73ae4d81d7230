"""Tokenizers: text to token ids and back.

A tokenizer is named on the command line by kind and files (`sentencepiece:x.model`, `bytes`) and saved beside the data
as a folder, whose `mjax_tokenizer.json` says how to rebuild it: reading one back never executes or unpickles anything.

Every vocabulary holds an end-of-document id, `eod`, that no text encodes to. A sentencepiece model trained here adds no
space in front, folds no spaces and normalises nothing, and spells what it has no piece for in UTF-8 bytes. So
`decode(encode(text)) == text`, but for "▁" (U+2581), with which sentencepiece itself writes the space.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import sentencepiece

from mjax.errors import UsageError

DESCRIPTION = "mjax_tokenizer.json"
EOD_PIECE = "<|endoftext|>"
CHUNK = 2**14  # characters given to sentencepiece at once in training


class Tokenizer(Protocol):
    """What mjax asks of a tokenizer."""

    kind: ClassVar[str]
    """Name on the command line and in `mjax_tokenizer.json`."""
    vocabulary: int
    """Ids run from 0 to vocabulary - 1."""
    eod: int
    """Id that ends a document; no text encodes to it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document id."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in this thread alone."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; an end-of-document id becomes `<|endoftext|>`, bytes that are not UTF-8 become "�"."""

    def save(self, folder: Path) -> None:
        """Write into `folder`, made where missing, what `tokenizer_from_folder` needs."""


class ByteTokenizer:
    """The 256 bytes of UTF-8 and an end-of-document id: needs no training and spells any text."""

    kind = "bytes"
    form = "bytes"  # how it is written on the command line
    vocabulary = 257
    eod = 256

    @classmethod
    def from_files(cls, files: str) -> "ByteTokenizer":
        """From what follows the kind on the command line: nothing."""
        if files:
            raise UsageError(f"--tokenizer bytes:{files} names a file, but bytes need none; use --tokenizer bytes")
        return cls()

    @classmethod
    def from_folder(cls, folder: Path) -> "ByteTokenizer":
        """From a folder that `save` wrote."""
        return cls()

    def encode(self, text: str) -> list[int]:
        """Bytes of `text` in UTF-8."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes; see `Tokenizer`."""
        return _decode_around(self.eod, ids, lambda part: bytes(part).decode("utf-8", errors="replace"))

    def save(self, folder: Path) -> None:
        """Write the description; there is nothing else to keep."""
        _write_description(self, folder)


class SentencePieceTokenizer:
    """A sentencepiece model; its end-of-sentence piece, or a piece `<|endoftext|>`, ends documents."""

    kind = "sentencepiece"
    form = "sentencepiece:FILE.model"
    file = "tokenizer.model"

    def __init__(self, model: bytes, source: str):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UsageError(f"{source} is not a sentencepiece model; give the .model file of one") from None
        self._model = model
        self.vocabulary = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            self.eod = self._processor.piece_to_id(EOD_PIECE)
            if self._processor.id_to_piece(self.eod) != EOD_PIECE:  # unknown pieces get the id of <unk>
                raise UsageError(
                    f"{source} has neither an end-of-sentence piece nor a piece {EOD_PIECE} to end documents with; "
                    "use a model that has one, or leave --tokenizer out to train one"
                )

    @classmethod
    def from_files(cls, files: str) -> "SentencePieceTokenizer":
        """From what follows the kind on the command line: a .model file."""
        if not files:
            raise UsageError(f"--tokenizer {cls.kind} names no file; use --tokenizer {cls.form}")
        if not Path(files).is_file():
            raise UsageError(f"--tokenizer {cls.kind}:{files}: there is no file {files}; use --tokenizer {cls.form}")
        return cls(Path(files).read_bytes(), files)

    @classmethod
    def from_folder(cls, folder: Path) -> "SentencePieceTokenizer":
        """From a folder that `save` wrote."""
        model = folder / cls.file
        if not model.is_file():
            raise UsageError(
                f"{model} does not exist, though {folder / DESCRIPTION} asks for it; prepare the data again"
            )
        return cls(model.read_bytes(), str(model))

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces of `text`; a `<|endoftext|>` in it is spelled out and ends no document."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the pieces of each text."""
        return self._processor.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of pieces; see `Tokenizer`."""
        return _decode_around(self.eod, ids, self._processor.decode)

    def save(self, folder: Path) -> None:
        """Write the model and the description."""
        _write_description(self, folder)
        (folder / self.file).write_bytes(self._model)


def _decode_around(eod: int, ids: Sequence[int], decode) -> str:
    """Decode what lies between end-of-document ids and join it with their written form."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == eod:
            parts.append([])
        else:
            parts[-1].append(int(token))  # sentencepiece takes no NumPy integers
    return EOD_PIECE.join(decode(part) for part in parts)


KINDS = {tokenizer.kind: tokenizer for tokenizer in (SentencePieceTokenizer, ByteTokenizer)}


# --- Opening ----------------------------------------------------------------------------------------------------------


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `--tokenizer SPEC` names, SPEC being KIND or KIND:FILES.

    Raises:
      UsageError: the kind is unknown, or a file is missing or not what the kind needs.
    """
    kind, _, files = spec.partition(":")
    if kind not in KINDS:
        raise UsageError(f"--tokenizer {spec} is of no known kind; use {_forms()}")
    return KINDS[kind].from_files(files)


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote into `folder`.

    Raises:
      UsageError: the folder holds none, or one that is damaged or of an unknown kind.
    """
    folder = Path(folder)
    description = folder / DESCRIPTION
    if not description.is_file():
        raise UsageError(f"{description} does not exist; `python -m mjax prepare` writes it beside the data")
    try:
        values = json.loads(description.read_text(encoding="utf-8"))
        kind, stated = values["kind"], (values["vocabulary"], values["eod"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{description} does not describe a tokenizer; prepare the data again") from None
    if kind not in KINDS:
        raise UsageError(f"{description} is of kind {kind!r}; this mjax knows {', '.join(KINDS)}")
    tokenizer = KINDS[kind].from_folder(folder)
    if (tokenizer.vocabulary, tokenizer.eod) != stated:
        raise UsageError(
            f"{description} states vocabulary and end of document {stated}, but the files beside it give "
            f"{(tokenizer.vocabulary, tokenizer.eod)}; restore the folder or prepare the data again"
        )
    return tokenizer


def _forms() -> str:
    return " or ".join(tokenizer.form for tokenizer in KINDS.values())


def _write_description(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"kind": tokenizer.kind, "vocabulary": tokenizer.vocabulary, "eod": tokenizer.eod}
    (folder / DESCRIPTION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- Training ---------------------------------------------------------------------------------------------------------


def train_sentencepiece(texts: Iterable[str], vocabulary: int) -> SentencePieceTokenizer:
    """Train a byte-pair vocabulary of exactly `vocabulary` pieces; the same texts give the same model.

    Of sentencepiece's two algorithms, byte pairs and unigram, the first gives no shorter tokens (3.46 and 3.45 bytes a
    token at 4,096 pieces of Wikipedia) and trains over ten times faster (0.4 s and 6 s for 5 MB).

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many characters; says what works.
    """
    model, interruption = io.BytesIO(), []

    def chunks() -> Iterator[str]:
        # Bounded, because sentencepiece passes over what is longer than max_sentence_length.
        try:
            for text in texts:
                yield from (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))
        except BaseException as error:  # sentencepiece turns whatever its iterator raises into a RuntimeError
            interruption.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chunks(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation in few tokens
            user_defined_symbols=["\n"],  # a line break is always a token of its own
            max_sentence_length=4 * CHUNK,  # in bytes
            unk_id=0,
            eos_id=1,
            eos_piece=EOD_PIECE,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise (interruption[0] if interruption else _explained(error, vocabulary)) from None
    return SentencePieceTokenizer(model.getvalue(), "the trained tokenizer")


def _explained(error: RuntimeError, vocabulary: int) -> Exception:
    """sentencepiece's errors in the words of our flags."""
    message = str(error)
    if found := re.search(r"too high.*<= (\d+)", message):
        return UsageError(
            f"--vocabulary {vocabulary} is too large for this little text, which yields {found[1]} pieces; "
            f"use --vocabulary {found[1]} or less, give more text, or use --tokenizer bytes"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UsageError(
            f"--vocabulary {vocabulary} is too small: bytes and characters of this text alone are {found[1]} pieces; "
            f"use --vocabulary {found[1]} or more, or --tokenizer bytes"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UsageError("there is no text to train a tokenizer on; give files that hold text")
    return error
