"""Byte-pair encoding at the speed of memory, for texts that gigatoken and `tokenizers` encode equally.

gigatoken is optional: `pip install 'mjax[fast]'`. Its word rules use an older Unicode version than the rules of
`tokenizers`, which therefore encodes a text that contains

- a code point that Unicode 16 lacks: gigatoken treats a new letter as one, and splits the contraction in `X's`;
- an added token that is not special, such as Qwen's `<think>`;
- if the tokenizer normalizes to NFC, a combining mark, or anything that NFC changes.

`tokenizers` encodes all texts if gigatoken does not support the tokenizer or misreads it (`_is_supported`), or if the
tokenizer normalizes in another way. Both encode the beginning of every hundredth text, and the ids are compared.
MJAX_GIGATOKEN=0 disables gigatoken.
"""

import json
import os
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
import tokenizers

from mjax.errors import UsageError

COMPARE_INTERVAL, COMPARE_CHARACTERS = 100, 1024  # one text in so many is compared, by its first characters
ENVIRONMENT_VARIABLE = "MJAX_GIGATOKEN"
Encode = Callable[[Sequence[str]], list[list[int]]]


class EncoderMismatchError(UsageError):
    """gigatoken and `tokenizers` encode a text differently; the message shows the text."""


class FastEncoder:
    """Encodes texts with gigatoken where both encode equally, and all others with `slow`.

    Raises:
      Exception: gigatoken is not installed, or does not support this tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, slow: Encode):
        from gigatoken.gigatoken_rs import load_hf_json  # optional

        values = json.loads(backend.to_str())
        self._slow, self._normalizes = slow, values["normalizer"] is not None
        self._added = [token["content"] for token in values["added_tokens"] if not token["special"]]
        if not _is_supported(**values):
            raise ValueError("gigatoken misreads this kind of byte pairs")
        # Special tokens are ordinary text in mjax, and gigatoken matches every added token.
        self._gigatoken = load_hf_json(json.dumps({**values, "added_tokens": [], "post_processor": None}))

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          EncoderMismatchError: a compared text has two encodings.
        """
        is_fast = [self._is_fast(text) for text in texts]
        compared = list(compress(texts, is_fast))[::COMPARE_INTERVAL]
        self._compare([text[:COMPARE_CHARACTERS] for text in compared])
        slow = iter(self._slow([text for text, fast in zip(texts, is_fast, strict=True) if not fast]))
        pairs = zip(texts, is_fast, strict=True)
        ids = [self._gigatoken.encode(text) if fast else np.array(next(slow), np.uint32) for text, fast in pairs]
        return np.concatenate(ids), np.fromiter(map(len, ids), np.int64, len(ids))

    def _is_fast(self, text: str) -> bool:
        if any(token in text for token in self._added):
            return False
        if text.isascii():
            return True
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        classes = _code_point_classes(SMALL_TABLE_SIZE if codes.max() < SMALL_TABLE_SIZE else 0x110000)
        return classes[codes].max() < (COMBINING if self._normalizes else UNASSIGNED)

    def _compare(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self._slow(texts), strict=True):
            if self._gigatoken.encode(text).tolist() != ids:
                fix = f"to use tokenizers alone set {ENVIRONMENT_VARIABLE}=0"
                raise EncoderMismatchError(f"gigatoken and tokenizers encode {text[:60]!r} differently; {fix}")


def _is_supported(model: dict[str, Any], pre_tokenizer: Any = None, normalizer: Any = None, **_: Any) -> bool:
    """True if gigatoken reads every field of a tokenizer.json as `tokenizers` does.

    It ignores `use_regex` of ByteLevel, `behavior` of Split, and subword affixes and `dropout` of the model. It rejects
    patterns that it does not support, and vocabularies that lack a byte.
    """
    supported = ("type", "vocab", "merges", "ignore_merges", "unk_token", "fuse_unk")
    if normalizer not in (None, {"type": "NFC"}):  # NFC changes few texts
        return False
    if model["type"] != "BPE" or any(value for name, value in model.items() if name not in supported):
        return False
    *splits, last = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    byte_level = tuple(map(last.get, ("type", "add_prefix_space", "use_regex")))
    return byte_level == ("ByteLevel", False, not splits) and all(
        split["type"] == "Split" and (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        for split in splits
    )


COMBINING, UNASSIGNED = 1, 2
SMALL_TABLE_SIZE = 0x20000  # code points; the table of all takes a second, and few texts need it


@cache
def _code_point_classes(end: int) -> np.ndarray:
    """Class of each code point before `end`: UNASSIGNED in Unicode, COMBINING with the one before, or 0."""
    classes = {"Cn": UNASSIGNED, "Mn": COMBINING, "Mc": COMBINING, "Me": COMBINING}
    categories = map(unicodedata.category, map(chr, range(end)))
    return np.fromiter((classes.get(category, 0) for category in categories), np.uint8, end)


def make_fast_encoder(backend: tokenizers.Tokenizer, slow: Encode) -> FastEncoder | None:
    """A FastEncoder, or None if gigatoken is missing or disabled, or does not support the tokenizer."""
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return None
    try:
        return FastEncoder(backend, slow)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of Rust is not an Exception
        return None
