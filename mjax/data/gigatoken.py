"""Byte pairs at the speed of memory, for texts that `tokenizers` encodes equally.

gigatoken is optional: `pip install 'mjax[fast]'`. Its word rules are older than those of `tokenizers` by a version of
Unicode, so a text goes to `tokenizers` if it holds

- a code point that Unicode 16 lacks: gigatoken takes a new letter for one, and finds the contraction in `X's`;
- a token that `tokenizers` finds in text, such as Qwen's `<think>`;
- where the tokenizer normalizes to NFC, a combining mark, or anything that NFC changes.

A tokenizer that gigatoken does not know, or misreads (`_is_read`), or that normalizes in another way, goes to
`tokenizers` altogether. Both encode the beginning of every hundredth text, and are compared.
MJAX_GIGATOKEN=0 switches gigatoken off.
"""

import json
import os
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers

from mjax.errors import UsageError

COMPARED, BEGINNING = 100, 1024
"""The first of so many texts is compared, by its first characters."""
SWITCH = "MJAX_GIGATOKEN"


class EncodersDiffer(UsageError):
    """gigatoken and `tokenizers` encode a text differently; the message says which."""


class FastEncoder:
    """Encodes with gigatoken the texts that both encode equally, and all others by `slow`.

    Raises:
      Exception: gigatoken is not there, or does not know this tokenizer.
    """

    def __init__(self, library: tokenizers.Tokenizer, slow: Callable[[Sequence[str]], list[list[int]]]):
        from gigatoken.gigatoken_rs import load_hf_json  # optional

        values = json.loads(library.to_str())
        self._slow, self._normalizes = slow, values["normalizer"] is not None
        self._added = [token["content"] for token in values["added_tokens"] if not token["special"]]
        if not _is_read(**values):
            raise ValueError("gigatoken misreads this kind of byte pairs")
        # Special tokens are text here, which to gigatoken no added token is.
        self._library = load_hf_json(json.dumps({**values, "added_tokens": [], "post_processor": None}))

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          EncodersDiffer: a text that is compared has two encodings.
        """
        is_fast = [self._is_fast(text) for text in texts]
        self._compare([text[:BEGINNING] for text, fast in zip(texts, is_fast, strict=True) if fast][::COMPARED])
        slow = iter(self._slow([text for text, fast in zip(texts, is_fast, strict=True) if not fast]))
        rows = [
            self._library.encode(text) if fast else np.array(next(slow), np.uint32)
            for text, fast in zip(texts, is_fast, strict=True)
        ]
        return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))

    def _is_fast(self, text: str) -> bool:
        if any(token in text for token in self._added):
            return False
        if text.isascii():
            return True
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        found = _classes(COMMON if codes.max() < COMMON else 0x110000)[codes].max()
        return found < (MARK if self._normalizes else UNKNOWN)

    def _compare(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self._slow(texts), strict=True):
            if self._library.encode(text).tolist() != ids:
                fix = f"to use tokenizers alone set {SWITCH}=0"
                raise EncodersDiffer(f"gigatoken and tokenizers encode {text[:60]!r} differently; {fix}")


def _is_read(model: dict[str, Any], pre_tokenizer: Any = None, normalizer: Any = None, **_: Any) -> bool:
    """True if gigatoken reads every field of a tokenizer.json as `tokenizers` does.

    Of a ByteLevel it ignores `use_regex`; of a Split it ignores `behavior`; of a model it ignores affixes of subwords
    and `dropout`. It refuses patterns that it does not know, and vocabularies without some byte.
    """
    read = ("type", "vocab", "merges", "ignore_merges", "unk_token", "fuse_unk")
    if normalizer not in (None, {"type": "NFC"}):  # only NFC is known to change few texts
        return False
    if model["type"] != "BPE" or any(value for name, value in model.items() if name not in read):
        return False
    *splits, last = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    of_bytes = tuple(map(last.get, ("type", "add_prefix_space", "use_regex")))
    return of_bytes == ("ByteLevel", False, not splits) and all(
        split["type"] == "Split" and (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        for split in splits
    )


MARK, UNKNOWN = 1, 2
COMMON = 0x20000  # code points; more take a second, and are in few texts


@cache
def _classes(end: int) -> np.ndarray:
    """For each code point before `end` UNKNOWN if Unicode lacks it, MARK if it combines with the one before, else 0."""
    classes = {"Cn": UNKNOWN, "Mn": MARK, "Mc": MARK, "Me": MARK}
    categories = map(unicodedata.category, map(chr, range(end)))
    return np.fromiter((classes.get(category, 0) for category in categories), np.uint8, end)


def fast_encoder(library: tokenizers.Tokenizer, slow: Callable[[Sequence[str]], list[list[int]]]) -> FastEncoder | None:
    """A FastEncoder, or None if gigatoken is missing, switched off, or does not know the tokenizer."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return FastEncoder(library, slow)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of Rust is not an Exception
        return None
