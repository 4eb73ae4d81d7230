"""The interface of a tokenizer, the parts that all kinds share, and those that the `tokenizers` library runs.

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that token. In Megatron's it
does not, nor here: otherwise a web page about GPT-2 would end in the middle.

A saved tokenizer is a folder with the files it was made from, byte for byte, and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Loading it parses these files and nothing else: there is nothing to execute or unpickle. A file that has changed since
is refused, because other merges would silently give other tokens.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import tokenizers

from mjax.data.tokenizer_trial import check_expansion
from mjax.data.tokenizers.fast import WORTH, EncodersDiffer, FastEncoder, fast_encoder
from mjax.errors import UsageError
from mjax.utils.files import write_whole

# One thread each: workers are processes. The library reads this when it encodes, and a user's own setting wins.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DESCRIPTION = "mjax_tokenizer.json"
EOD_PIECE = "<|endoftext|>"
WHOLE_FILES = "get its files again, they may be damaged"


class Tokenizer:
    """Text to token ids and back; rebuilt from the files it was made from.

    Attributes:
      scheme: name on the command line and in `mjax_tokenizer.json`.
      encoder: the package that has encoded texts for `encode_flat`; gigatoken if it took some of them.
      form: its form on the command line.
      stored: names of its files in a folder.
      contents: their bytes, in the same order.
      vocabulary: ids run from 0 to vocabulary - 1.
      eod: id that ends a document; no text encodes to it.
      bos: id that begins every text the model saw, before its tokens; None: there is none.
    """

    scheme: ClassVar[str]
    form: ClassVar[str]
    stored: ClassVar[tuple[str, ...]] = ()
    contents: tuple[bytes, ...] = ()
    vocabulary: int
    eod: int
    bos: int | None = None
    encoder: str = "mjax"

    @classmethod
    def from_files(cls, files: str) -> Self:
        """Make it from the files that follow the kind on the command line: one file, unless the kind says otherwise.

        Raises:
          UsageError: a file is missing or not what the kind needs.
        """
        return cls(read_given(cls, files, files), files)

    @classmethod
    def from_contents(cls, contents: Sequence[bytes], names: Sequence[str], eod: int) -> Self:
        """Make it from the files of a folder that `save` wrote: their bytes, and their names for error messages.

        Raises:
          UsageError: a file is not what the kind needs.
        """
        return cls(*contents, *names)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document id or any other that is not in the text.

        Raises:
          UsageError: the text holds half of a surrogate pair, which is not a character.
        """
        return self.encode_batch([text])[0]

    @property
    def start(self) -> int:
        """The id before the first token of a text: `bos`, or the end of the document before it."""
        return self.eod if self.bos is None else self.bos

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that a model continues: `encode` after `bos`."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def bos_of_files(self) -> int | None:
        """The id that `transformers` puts before every text with these files; None: it puts none."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster where the library allows; in one thread."""
        raise NotImplementedError

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          UsageError: as `encode`.
          EncodersDiffer: gigatoken encodes a text differently; switch it off and begin again.
        """
        ids = self.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, lengths.sum()), lengths

    def begin_file(self) -> None:
        """Compare the first texts that follow with another encoder, where there are two."""

    def leave_gigatoken(self) -> None:
        """Encode without gigatoken, where it would be used."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; an end-of-document id becomes `<|endoftext|>`, bytes that are not UTF-8 become "�".

        So do ids from `vocabulary` on, which a model with a larger vocabulary may draw.
        """
        text, run = [], []
        for token in ids:
            if token != self.eod and 0 <= token < self.vocabulary:
                run.append(int(token))  # sentencepiece takes no NumPy integers
            else:
                text += [self._text(run), EOD_PIECE if token == self.eod else "\ufffd"]
                run = []
        return "".join([*text, self._text(run)])

    def _text(self, ids: list[int]) -> str:
        """Text of ids of which each has a token and none ends a document."""
        raise NotImplementedError

    def leave_out(self, rows: int) -> list[str]:
        """Count no ids from `rows` on, if they are special tokens, which no text encodes to; their names, or none."""
        return []

    def save(self, folder: Path) -> None:
        """Write the files, and last the description, which makes the folder a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        files = dict(zip(self.stored, self.contents, strict=True))
        for name, content in files.items():
            write_whole(folder / name, content)
        values = {"kind": self.scheme, "vocabulary": self.vocabulary, "eod": self.eod}
        if self.bos is not None:
            values["bos"] = self.bos
        values["sha256"] = {name: sha256(content) for name, content in files.items()}
        write_whole(folder / DESCRIPTION, json.dumps(values, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and an end-of-document id: no files and no training, but four times as many tokens."""

    scheme = "bytes"
    form = "bytes"
    vocabulary = 257
    eod = 256

    @classmethod
    def from_files(cls, files: str) -> Self:
        """Make it; nothing follows the kind on the command line."""
        if files:
            raise UsageError(f"--tokenizer bytes:{files} names a file, but bytes needs none; use --tokenizer bytes")
        return cls()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Bytes of each text in UTF-8."""
        return [list(utf8(text)) for text in texts]

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class LibraryTokenizer(Tokenizer):
    """Encodes and decodes with a `tokenizers.Tokenizer`, without ever adding a token that is not in the text."""

    library: tokenizers.Tokenizer
    encoder = "tokenizers"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the tokens of each text; special tokens written out in it are text like any other."""
        if self._is_worth(texts):
            try:
                ids, lengths = self._fast.encode(texts)
                return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
            except EncodersDiffer as error:
                print(f"{error}; mjax continues with tokenizers alone", file=sys.stderr)
                self._fast = None
        return self._encode_slowly(texts)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts as any tokenizer does, and without lists where gigatoken can."""
        if not self._is_worth(texts):
            return super().encode_flat(texts)
        self.encoder = "gigatoken"
        return self._fast.encode(texts)

    def leave_gigatoken(self) -> None:
        """Encode with tokenizers alone."""
        self._fast = None

    def begin_file(self) -> None:
        """Let gigatoken's ids of the first texts that follow be compared."""
        if self._fast is not None:
            self._fast.compare()

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return fast_encoder(self.library, self._encode_slowly)

    def _is_worth(self, texts: Sequence[str]) -> bool:
        """True if gigatoken encodes these texts; they are checked to be valid."""
        if sum(map(len, texts)) < WORTH or self._fast is None:
            return False
        for text in texts:
            utf8(text)
        return True

    def _encode_slowly(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast method keeps no track of which token came from which characters.
        return [encoding.ids for encoding in self._encoded(texts, self.library.encode_batch_fast)]

    def encode_with_characters(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of the tokens of each text, and the characters text[begin:end] that each token was made of."""
        return [(encoding.ids, encoding.offsets) for encoding in self._encoded(texts, self.library.encode_batch)]

    def _encoded(self, texts: Sequence[str], encode: Callable) -> list[tokenizers.Encoding]:
        for text in texts:
            utf8(text)
        with library_errors(f"the {self.scheme} tokenizer cannot encode a text", WHOLE_FILES):
            encodings = encode(list(texts), add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            check_expansion(text, len(encoding), self.scheme)
        return encodings

    def _text(self, ids: list[int]) -> str:
        with library_errors(f"the {self.scheme} tokenizer cannot decode these ids", WHOLE_FILES):
            return self.library.decode(ids, skip_special_tokens=False)


@contextmanager
def library_errors(before: str, after: str) -> Iterator[None]:
    """Turn what the library raises into the UsageError `before (…); after`, panics of its Rust core included."""
    try:
        yield
    except (UsageError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise UsageError(f"{before} ({error}); {after}") from None


def sha256(content: bytes) -> str:
    """Checksum of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def utf8(text: str) -> bytes:
    """The bytes of `text`; called by every `encode`, so that the libraries see valid text only.

    Raises:
      UsageError: it holds half of a surrogate pair, which JSON can spell (`"\\ud83d"`) and UTF-8 cannot.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(
            f"character {error.start} of the text is {half}, half of a surrogate pair; replace or drop it"
        ) from None


def read_given(tokenizer: type[Tokenizer], files: str, file: str) -> bytes:
    """Read `file`, one of the `files` given on the command line.

    Raises:
      UsageError: no file is named, or it cannot be read.
    """
    given = f"--tokenizer {tokenizer.scheme}"
    if not file:
        raise UsageError(f"{given} names no file; use --tokenizer {tokenizer.form}")
    if not Path(file).is_file():
        raise UsageError(f"{given}:{files}: there is no file {file}; use --tokenizer {tokenizer.form}")
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{given}:{files}: cannot read {file} ({error.strerror}); check its permissions") from None


def utf8_lines(content: bytes, name: str) -> list[str]:
    """Lines of a text file that may come from Windows.

    Only a line feed ends a line: to `str.splitlines` U+2028 and U+0085 do too, and vocabularies hold them as tokens.

    Raises:
      UsageError: it is not UTF-8.
    """
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not a text file in UTF-8 (byte {error.start}); give the right file") from None
    return [line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)]
