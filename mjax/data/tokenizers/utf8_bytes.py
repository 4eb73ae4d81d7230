"""Bytes as tokens: no vocabulary to find or to train, and any text can be spelled, in four times the length."""

from collections.abc import Sequence
from typing import Self

from mjax.data.tokenizers.interface import StoredTokenizer, decode_around, utf8
from mjax.errors import UsageError


class ByteTokenizer(StoredTokenizer):
    """The 256 bytes of UTF-8 and an end-of-document id."""

    kind = "bytes"
    form = "bytes"
    vocabulary = 257
    eod = 256

    @classmethod
    def from_files(cls, files: str) -> Self:
        """From what follows the kind on the command line: nothing."""
        if files:
            raise UsageError(f"--tokenizer bytes:{files} names a file, but bytes need none; use --tokenizer bytes")
        return cls()

    def encode(self, text: str) -> list[int]:
        """Bytes of `text` in UTF-8."""
        return list(utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes; see `Tokenizer`."""
        return decode_around(self, ids, lambda part: bytes(part).decode("utf-8", errors="replace"))
