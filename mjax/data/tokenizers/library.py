"""Tokenizers that the `tokenizers` library runs: its Rust core splits, merges and looks up; mjax keeps eod apart.

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that very token. In Megatron's
it does not, nor here: otherwise a web page about GPT-2 would end in the middle.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tokenizers

from mjax.data.tokenizers.interface import StoredTokenizer, decode_around, utf8
from mjax.errors import UsageError

# One thread each: workers are processes. The library reads this when it encodes, and a user's own setting wins.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WHOLE_FILES = "get its files again, they may be damaged"


@contextmanager
def library_errors(before: str, after: str) -> Iterator[None]:
    """Turn what the library raises into the UsageError `before (…); after`, panics of its Rust core included."""
    try:
        yield
    except (UsageError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise UsageError(f"{before} ({error}); {after}") from None


class LibraryTokenizer(StoredTokenizer):
    """Encodes and decodes with a `tokenizers.Tokenizer`, without ever adding a token that is not in the text."""

    library: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of the tokens of `text`; special tokens written out in it are text like any other."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the tokens of each text."""
        for text in texts:
            utf8(text)
        # The fast one keeps no track of which token came from which characters.
        with library_errors(f"the {self.kind} tokenizer cannot encode a text", WHOLE_FILES):
            return [found.ids for found in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_characters(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of the tokens of each text, and the characters text[begin:end] that each token was made of."""
        for text in texts:
            utf8(text)
        with library_errors(f"the {self.kind} tokenizer cannot encode a text", WHOLE_FILES):
            found = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, one.offsets) for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; see `Tokenizer`."""
        with library_errors(f"the {self.kind} tokenizer cannot decode these ids", WHOLE_FILES):
            return decode_around(self, ids, lambda part: self.library.decode(part, skip_special_tokens=False))
