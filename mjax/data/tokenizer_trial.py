"""A trial of a foreign tokenizer in a child process, before this process encodes with it.

A tokenizer.json is a program: rules that rewrite text, regular expressions, tables of characters. Forty rules `a → aa`
never end, and a rule that inserts 30 MB before a text uses 8 GB. So a child encodes texts with it first: every
character of the first two planes of Unicode, many languages, long words, and the strings in its rules.

    limited in the trial    total time and memory, time and tokens per character, crashes
    limited afterwards      tokens per character, of every text (`check_expansion`)

Not covered: a regular expression that matches only texts which neither the trial nor the file contains.

The checksum of a tokenizer that passes, or that mjax trained, is stored for this process and in the cache folder.
`gpt2` and `bert-…` have rules of mjax and need no trial.
"""

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

MAX_TRIAL_SECONDS = 20.0
"""Processor time of a trial, and of a text of MAX_TEMPLATE_CHARACTERS; published tokenizers need 3 to 10 s for one."""
MAX_TRIAL_BYTES = 4 << 30  # memory that a trial may map; a file of 10 MB needs 150 MB
MAX_TEMPLATE_CHARACTERS = MAX_TRIAL_BYTES >> 10
"""Length of a text that a chat template may write: the library needs up to 1 kB for a character of 4 tokens."""
MAX_TOKENS_PER_CHARACTER = 64  # NFKC makes one character 18, of 33 bytes, each of which may be a token
TEXT_GRACE_SECONDS = 0.25  # time for each text in addition to the time for its characters

SAMPLE_TEXT = (
    "The quick brown fox, 3.14 times. Don't!\n\n\tdef f(x):\n        return x  # two  spaces \r\n"
    "Ça, c'est déjà vu: naïve café, 1968 — 2001. Αα Ωω Привет, мир! İ ẞ ﬁ Ⅷ ① ½ e\u0301 s\u0323\u0307\n"
    "漢字かな交じり文、中文。한국어 हिन्दी ภาษาไทย مرحبا بالعالم ٣ שלום 👩‍👩‍👧🇫🇷 \u200d\ufeff\u3000\n"
    "https://example.org/a?b=c&d=%20 {'key': [1, 2.5e-3]} <s>a</s> [MASK] <|endoftext|> ▁Ġ\n"
)
REPEATED_TEXTS = ("a", " ", "\n", "1", ".", "漢", "a ")
"""Repeated to words of thousands of characters: a rule may need quadratic time."""

_problems: dict[str, str | None] = {}  # results of trials by checksum (None: passed)


def try_tokenizer(content: bytes, name: str, library: str) -> None:
    """Encode with a tokenizer in a child process, unless it has passed before.

    Args:
      content: of its file.
      name: of the file, for the error.
      library: "tokenizers" or "sentencepiece", which reads it.

    Raises:
      UsageError: it needs too much time or memory, writes too many tokens, or crashes. A file that is not a tokenizer
        passes, and is reported when it is opened.
    """
    checksum = _checksum(content, library)
    if checksum not in _problems and not _is_trusted(checksum):
        with contextlib.closing(Child(f"{__name__}:encode_texts", MAX_TRIAL_SECONDS, MAX_TRIAL_BYTES)) as child:
            try:
                if child.ask(library.encode() + b"\n" + content):
                    mark_trusted(content, library)
            except ChildError as error:
                _problems[checksum] = str(error)
    if problem := _problems.get(checksum):
        fix = "get the file again from its publisher, or use another tokenizer"
        raise UsageError(f"{name} fails a trial in a child process: {problem}; {fix}")


def check_expansion(text: str, tokens: int, kind: str) -> None:
    """Reject a tokenizer that writes more than MAX_TOKENS_PER_CHARACTER.

    Raises:
      UsageError: a text has more tokens.
    """
    if problem := _expansion_problem(text, tokens):
        raise UsageError(f"the {kind} tokenizer cannot be used: {problem}; use another tokenizer")


def _expansion_problem(text: str, tokens: int) -> str | None:
    if tokens <= MAX_TOKENS_PER_CHARACTER * (len(text) + 1):
        return None
    return f"it writes {tokens:,} tokens for {_quote(text)}, more than {MAX_TOKENS_PER_CHARACTER} for each character"


def _quote(text: str) -> str:
    return f"a text of length {len(text):,} ({text[:20]!r}…)"


# --- Tokenizers that have passed --------------------------------------------------------------------------------------


def mark_trusted(content: bytes, library: str) -> None:
    """Store that a tokenizer has passed its trial, or was made by mjax."""
    checksum = _checksum(content, library)
    _problems[checksum] = None
    if (folder := _cache_folder()) is not None:
        with contextlib.suppress(OSError):  # a full disk: the next start repeats the trial
            (folder / checksum).touch(mode=0o600)


def _is_trusted(checksum: str) -> bool:
    return (folder := _cache_folder()) is not None and (folder / checksum).is_file()


def _checksum(content: bytes, library: str) -> str:
    """Checksum of a tokenizer and of its trial."""
    trial = f"{library} {version(library)}\n".encode() + Path(__file__).read_bytes()
    return hashlib.sha256(trial + content).hexdigest()


def _cache_folder() -> Path | None:
    """The folder with an empty file for each tokenizer that passed; None if others may write into it."""
    if (home := cache_home()) is None:
        return None
    folder = home / "tokenizers"
    try:
        problem = make_private(folder)
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
    return folder if problem is None else _warn_once(problem)


@cache
def _warn_once(problem: str) -> None:
    print(f"note: {problem}; every start repeats the trial of foreign tokenizers", file=sys.stderr)


# --- In the child -----------------------------------------------------------------------------------------------------


def encode_texts(request: bytes) -> bool:
    """Encode and decode texts with a tokenizer; `request` is the name of its library, a line end, and its file.

    Returns False if the file is not a tokenizer.

    Raises:
      ChildError: a text needs too much time, or too many tokens.
    """
    library, _, content = request.partition(b"\n")
    tokenizer, patterns = None, set()
    with _suppress_errors():
        if library == b"sentencepiece":
            import sentencepiece  # in the child alone

            tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content)
        else:
            tokenizer, patterns = _open_json(content)
    if tokenizer is None:
        return False
    for text in _trial_texts(sorted(patterns)):
        began, tokens = time.process_time(), 0
        with _suppress_errors():  # some tokenizers have no token for unknown text
            tokens = len(tokenizer.encode(text))
        seconds = time.process_time() - began
        if problem := _expansion_problem(text, tokens):
            raise ChildError(problem)
        if seconds > MAX_TRIAL_SECONDS * len(text) / MAX_TEMPLATE_CHARACTERS + TEXT_GRACE_SECONDS:
            raise ChildError(f"it takes {seconds:.1f} s for {_quote(text)}")
    size = tokenizer.vocab_size() if library == b"sentencepiece" else tokenizer.get_vocab_size()
    with _suppress_errors():
        tokenizer.decode(list(range(size)))
    return True


@contextlib.contextmanager
def _suppress_errors() -> Iterator[None]:
    """Ignore errors that the parent process will report; a panic of Rust, not an Exception, crashes the child."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None


def _open_json(content: bytes) -> tuple[Any, set[str]]:
    """Open a tokenizer.json as `HuggingFaceTokenizer` does, and collect the strings in its rules."""
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


def _trial_texts(patterns: list[str]) -> Iterator[str]:
    """Texts of a trial: few characters first, in case each costs much, and then 300,000."""
    yield from ("", "a", SAMPLE_TEXT)
    for text in patterns:
        yield text * max(1, 2**10 // max(1, len(text)))
    for run in REPEATED_TEXTS:
        yield run * (2**14 // len(run))
    yield SAMPLE_TEXT * 2**7
    yield "".join(map(chr, (*range(0xD800), *range(0xE000, 0x20000))))
