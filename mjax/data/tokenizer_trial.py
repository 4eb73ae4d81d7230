"""A trial of a tokenizer from outside, in a child process, before this process encodes with it.

A tokenizer.json is a program: rules that rewrite text, regular expressions, tables of characters. Forty rules `a → aa`
never end, and a rule that puts 30 MB before a text takes 8 GB. So a child encodes texts with it first: every character
of the first two planes of Unicode, many languages, long words, and whatever its own rules look for.

    in the trial    time and memory for everything, time and tokens per character, a crash
    afterwards      tokens per character, of every text (`check_expansion`)

Not covered: a regular expression that acts on a text which neither the trial nor the file holds.

A tokenizer that passes is remembered by its checksum, for this process and in the folder of caches; so is one that
mjax trained. Kinds whose rules are mjax's own, `gpt2` and `bert-…`, need no trial.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mjax.errors import UsageError
from mjax.utils.child import Child, ChildError
from mjax.utils.files import cache_home, make_private

SECONDS = 20.0
"""Of processor time for a trial, and for a text of LONGEST characters; published tokenizers need 3 to 10 s for that."""
MEMORY = 4 << 30
"""Bytes that a trial may map; a file of 10 MB takes 150 MB."""
MAX_CHARACTERS = MEMORY >> 10
"""Characters of a text that a chat template may write: the library takes up to 1 kB for a character of 4 tokens."""
EXPANSION = 64
"""Tokens per character: NFKC makes one character 18, and these are 33 bytes, each of which may be a token."""
SPARE = 0.25
"""Seconds that a text may take whatever its length."""

PROSE = (
    "The quick brown fox, 3.14 times. Don't!\n\n\tdef f(x):\n        return x  # two  spaces \r\n"
    "Ça, c'est déjà vu: naïve café, 1968 — 2001. Αα Ωω Привет, мир! İ ẞ ﬁ Ⅷ ① ½ e\u0301 s\u0323\u0307\n"
    "漢字かな交じり文、中文。한국어 हिन्दी ภาษาไทย مرحبا بالعالم ٣ שלום 👩‍👩‍👧🇫🇷 \u200d\ufeff\u3000\n"
    "https://example.org/a?b=c&d=%20 {'key': [1, 2.5e-3]} <s>a</s> [MASK] <|endoftext|> ▁Ġ\n"
)
RUNS = ("a", " ", "\n", "1", ".", "漢", "a ")
"""What words of thousands of characters are made of: a rule may take their square."""

_problems: dict[str, str | None] = {}
"""Of the tokenizers that were tried, by checksum."""


def try_tokenizer(content: bytes, name: str, library: str) -> None:
    """Encode with a tokenizer in a child process, unless it has passed before.

    Args:
      content: of its file.
      name: of the file, for the error.
      library: "tokenizers" or "sentencepiece", which reads it.

    Raises:
      UsageError: it takes too much time or memory, writes too many tokens, or crashes. A file that is not a
        tokenizer passes: opening it reports that.
    """
    checksum = _checksum(content, library)
    if checksum not in _problems and not _is_remembered(checksum):
        child = Child(f"{__name__}:encode_texts", SECONDS, MEMORY)
        try:
            if child.ask(library.encode() + b"\n" + content):
                remember(content, library)
        except ChildError as error:
            _problems[checksum] = str(error)
        finally:
            child.close()
    if problem := _problems.get(checksum):
        fix = "get the file again from its publisher, or use another tokenizer"
        raise UsageError(f"{name} fails a trial in a process of its own: {problem}; {fix}")


def check_expansion(text: str, tokens: int, kind: str) -> None:
    """Refuse a tokenizer that writes more than EXPANSION tokens per character.

    Raises:
      UsageError: it does.
    """
    if tokens > EXPANSION * (len(text) + 1):
        raise UsageError(f"the {kind} tokenizer cannot be used: {_expansion(text, tokens)}; use another tokenizer")


def _expansion(text: str, tokens: int) -> str:
    return f"it writes {tokens:,} tokens for {_quote(text)}, more than {EXPANSION} for each character"


def _quote(text: str) -> str:
    return f"a text of length {len(text):,} ({text[:20]!r}…)"


# --- What has passed --------------------------------------------------------------------------------------------------


def remember(content: bytes, library: str) -> None:
    """Let a tokenizer pass that was tried, or that mjax made."""
    checksum = _checksum(content, library)
    _problems[checksum] = None
    if (folder := _records()) is not None:
        with contextlib.suppress(OSError):  # a full disk: it is tried again
            (folder / checksum).touch(mode=0o600)


def _is_remembered(checksum: str) -> bool:
    return (folder := _records()) is not None and (folder / checksum).is_file()


def _checksum(content: bytes, library: str) -> str:
    """Checksum of a tokenizer and of its trial."""
    checksum = hashlib.sha256(_make_trial(library))
    checksum.update(content)
    return checksum.hexdigest()


@cache
def _make_trial(library: str) -> bytes:
    """Return the bytes that a trial depends on: the library, and this file."""
    return f"{library} {version(library)}\n".encode() + Path(__file__).read_bytes()


def _records() -> Path | None:
    """The folder with an empty file for each tokenizer that passed; None if there is none that only the user writes."""
    if (home := cache_home()) is None:
        return None
    folder = home / "tokenizers"
    try:
        problem = make_private(folder)
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
    return folder if problem is None else _report_missing_text(problem)


@cache
def _report_missing_text(problem: str) -> None:
    print(f"note: {problem}; every start tries tokenizers from outside again", file=sys.stderr)


# --- In the child -----------------------------------------------------------------------------------------------------


def encode_texts(question: bytes) -> bool:
    """Encode and decode texts with a tokenizer, from the name of its library, a line end, and its file.

    Returns False if the file is not a tokenizer.

    Raises:
      ChildError: a text takes too much time, or too many tokens.
    """
    library, _, content = question.partition(b"\n")
    tokenizer, patterns = None, set()
    with _suppress_errors():
        if library == b"sentencepiece":
            import sentencepiece  # in the child alone

            tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content)
        else:
            tokenizer, patterns = _open_json(content)
    if tokenizer is None:
        return False
    for text in _texts(sorted(patterns)):
        began, tokens = time.process_time(), 0
        with _suppress_errors():  # some have no token for what they do not know
            tokens = len(tokenizer.encode(text))
        seconds = time.process_time() - began
        if tokens > EXPANSION * (len(text) + 1):
            raise ChildError(_expansion(text, tokens))
        if seconds > SECONDS * len(text) / MAX_CHARACTERS + SPARE:
            raise ChildError(f"it takes {seconds:.1f} s for {_quote(text)}")
    size = tokenizer.vocab_size() if library == b"sentencepiece" else tokenizer.get_vocab_size()
    with _suppress_errors():
        tokenizer.decode(list(range(size)))
    return True


@contextlib.contextmanager
def _suppress_errors() -> Iterator[None]:
    """Ignore what the user's process will report; a panic is not an Exception."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None


def _open_json(content: bytes) -> tuple[Any, set[str]]:
    """A tokenizer.json as `HuggingFaceTokenizer` opens it, and the strings in its rules."""
    import tokenizers  # in the child alone

    tokenizer, patterns = tokenizers.Tokenizer.from_str(content.decode()), set()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def collect(rule: dict) -> None:
        patterns.update(text for name, text in rule.items() if isinstance(text, str) and name != "precompiled_charsmap")

    for step in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if step is not None:
            json.loads(step.__getstate__(), object_hook=collect)
    return tokenizer, patterns


def _texts(patterns: list[str]) -> Iterator[str]:
    """Texts of a trial: few characters first, in case each costs much, and then 300,000."""
    yield from ("", "a", PROSE)
    for text in patterns:
        yield text * max(1, 2**10 // max(1, len(text)))
    for run in RUNS:
        yield run * (2**14 // len(run))
    yield PROSE * 2**7
    yield "".join(map(chr, (*range(0xD800), *range(0xE000, 0x20000))))
