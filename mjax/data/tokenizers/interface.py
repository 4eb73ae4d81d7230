"""What mjax asks of a tokenizer, and what all kinds of them share: the law of `eod`, and a folder to live in.

A saved tokenizer is a folder with the files it was made from, byte for byte, and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Reading one back parses these files and nothing else: there is nothing to execute or unpickle, and a file that is not
the one that was saved is refused, because other merges would give other tokens without a word.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self

from mjax.errors import UsageError

DESCRIPTION = "mjax_tokenizer.json"
EOD_PIECE = "<|endoftext|>"


class Tokenizer(Protocol):
    """What mjax asks of a tokenizer."""

    kind: ClassVar[str]
    """Name on the command line and in `mjax_tokenizer.json`."""
    vocabulary: int
    """Ids run from 0 to vocabulary - 1."""
    eod: int
    """Id that ends a document; no text encodes to it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document id or any other that is not in the text.

        Raises:
          UsageError: the text holds half of a surrogate pair, which is no character.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster where the library has a way; in one thread."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; an end-of-document id becomes `<|endoftext|>`, bytes that are not UTF-8 become "�".

        So does an id from `vocabulary` on, which a model with a larger vocabulary may draw.
        """

    def save(self, folder: Path) -> None:
        """Write into `folder`, made where missing, what `tokenizer_from_folder` needs."""


class StoredTokenizer:
    """A tokenizer that is rebuilt from the very files it was made from; every kind is one."""

    kind: ClassVar[str]
    form: ClassVar[str]
    """How it is written on the command line."""
    stored: ClassVar[tuple[str, ...]] = ()
    """Names of its files in a folder."""
    contents: tuple[bytes, ...] = ()
    """What is in them, in the same order."""
    vocabulary: int
    eod: int

    @classmethod
    def from_files(cls, files: str) -> Self:
        """From what follows the kind on the command line.

        Raises:
          UsageError: a file is missing or not what the kind needs.
        """
        raise NotImplementedError

    @classmethod
    def from_contents(cls, contents: Sequence[bytes], names: Sequence[str], eod: int) -> Self:
        """From the files of a folder that `save` wrote: what is in them, and their names, to complain with.

        Raises:
          UsageError: a file is not what the kind needs.
        """
        return cls(*contents, *names)

    def save(self, folder: Path) -> None:
        """Write the files, and last the description, without which a folder is not taken for a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in zip(self.stored, self.contents, strict=True):
            (folder / name).write_bytes(content)
        values = {
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "eod": self.eod,
            "sha256": {name: sha256(content) for name, content in zip(self.stored, self.contents, strict=True)},
        }
        (folder / DESCRIPTION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def sha256(content: bytes) -> str:
    """Checksum of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def utf8(text: str) -> bytes:
    """The bytes of `text`; called by every `encode`, so that the libraries only see text that is whole.

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


def decode_around(tokenizer: Tokenizer, ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Decode with `decode` what lies between ends of documents and ids without a token, and write those out."""
    text, run = [], []
    for token in ids:
        if token != tokenizer.eod and 0 <= token < tokenizer.vocabulary:
            run.append(int(token))  # sentencepiece takes no NumPy integers
        else:
            text += [decode(run), EOD_PIECE if token == tokenizer.eod else "\ufffd"]
            run = []
    return "".join([*text, decode(run)])


def read_given(tokenizer: type[StoredTokenizer], files: str, file: str) -> bytes:
    """What is in `file`, one of the `files` given on the command line.

    Raises:
      UsageError: none is named, or it cannot be read.
    """
    if not file:
        raise UsageError(f"--tokenizer {tokenizer.kind} names no file; use --tokenizer {tokenizer.form}")
    if not Path(file).is_file():
        raise UsageError(
            f"--tokenizer {tokenizer.kind}:{files}: there is no file {file}; use --tokenizer {tokenizer.form}"
        )
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UsageError(
            f"--tokenizer {tokenizer.kind}:{files}: {file} cannot be read ({error.strerror}); check its permissions"
        ) from None


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
