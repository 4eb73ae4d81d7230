"""A trial of a tokenizer from outside, in a child process, before this process encodes with it.

A tokenizer.json is a program: rules that rewrite text, regular expressions, tables of characters. Forty rules `a → aa`
never end, and a rule that puts 30 MB before a text takes 8 GB. So a child encodes texts with it first: every character
of the first two planes of Unicode, many languages, long words, and whatever its own rules look for.

    in the trial    time and memory for everything, time and memory per character, tokens per character, a crash
    afterwards      tokens per character, of every text (`check_expansion`)

Not covered: a regular expression that acts on a text which neither the trial nor the file holds.

A tokenizer that passes is remembered by its checksum, for this process and in the folder of caches; so is one that
mjax trained. Kinds whose rules are mjax's own, `gpt2` and `bert-…`, need no trial.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
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
"""Bytes that a trial may map, and that a text of LONGEST characters may take; a file of 10 MB takes 150 MB."""
LONGEST = MEMORY >> 10
"""Characters of a text that a chat template may write: the library takes up to 1 kB for a character of 4 tokens."""
EXPANSION = 64
"""Tokens per character: NFKC makes one character 18, and these are 33 bytes, each of which may be a token."""
GROWTH = 2**12
"""Characters that rules may write for one, as far as they say: NFKC's table has 33 bytes, and others 1 to 10."""
LONGEST_PIECE = 1024
"""Characters of a token on average; published ones have 2 to 8."""
SPARE = 0.25, 64 << 20
"""Seconds and bytes that a text may take whatever its length."""

PROSE = (
    "The quick brown fox, 3.14 times. Don't!\n\n\tdef f(x):\n        return x  # two  spaces \r\n"
    "Ça, c'est déjà vu: naïve café, 1968 — 2001. Αα Ωω Привет, мир! İ ẞ ﬁ Ⅷ ① ½ e\u0301 s\u0323\u0307\n"
    "漢字かな交じり文、中文。한국어 हिन्दी ภาษาไทย مرحبا بالعالم ٣ שלום 👩‍👩‍👧🇫🇷 \u200d\ufeff\u3000\n"
    "https://example.org/a?b=c&d=%20 {'key': [1, 2.5e-3]} <s>a</s> [MASK] <|endoftext|> ▁Ġ\n"
)
RUNS = ("a", " ", "\n", "1", ".", "漢", "a ")
"""What words of thousands of characters are made of: a rule may take their square."""

CHARSMAP = "precompiled_charsmap"

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
        raise UsageError(
            f"{name} fails a trial in a process of its own: {problem}; get the file again from its publisher, or use "
            "another tokenizer"
        )


def check_expansion(text: str, tokens: int, kind: str) -> None:
    """Refuse a tokenizer that writes more than EXPANSION tokens per character.

    Raises:
      UsageError: it does.
    """
    if tokens > EXPANSION * (len(text) + 1):
        raise UsageError(f"the {kind} tokenizer cannot be used: {_expansion(text, tokens)}; use another tokenizer")


def _expansion(text: str, tokens: int) -> str:
    return f"it writes {tokens:,} tokens for {_shown(text)}, more than {EXPANSION} for each character"


def _shown(text: str) -> str:
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
    checksum = hashlib.sha256(_trial_of(library))
    checksum.update(content)
    return checksum.hexdigest()


@cache
def _trial_of(library: str) -> bytes:
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
    return folder if problem is None else _say_forgotten(problem)


@cache
def _say_forgotten(problem: str) -> None:
    print(f"note: {problem}; every start tries tokenizers from outside again", file=sys.stderr)


# --- In the child -----------------------------------------------------------------------------------------------------


def encode_texts(question: bytes) -> bool:
    """Encode and decode texts with a tokenizer, from the name of its library, a line end, and its file.

    Returns False if the file is not a tokenizer.

    Raises:
      ChildError: a text takes too much time or memory, or too many tokens.
    """
    library, _, content = question.partition(b"\n")
    opened = (_sentencepiece if library == b"sentencepiece" else _tokenizers)(content)
    if opened is None:
        return False
    encode, decode, size, rules, growth = opened
    if growth > GROWTH:
        raise ChildError(f"its rules write up to {growth:,} characters for one; published ones write up to 33")
    for text in _texts(rules):
        began, before, tokens = time.process_time(), _peak_bytes(), 0
        with _ignored_errors():  # some have no token for what they do not know
            tokens = encode(text)
        seconds, grown, share = time.process_time() - began, _peak_bytes() - before, len(text) / LONGEST
        if tokens > EXPANSION * (len(text) + 1):
            raise ChildError(_expansion(text, tokens))
        if seconds > SECONDS * share + SPARE[0]:
            raise ChildError(f"it takes {seconds:.1f} s for {_shown(text)}")
        if grown > MEMORY * share + SPARE[1]:
            raise ChildError(f"it takes {grown >> 20} MiB for {_shown(text)}")
    length = 0
    with _ignored_errors():
        length = len(decode(list(range(size))))
    if length > LONGEST_PIECE * (size + 1):
        raise ChildError(f"it writes {length:,} characters for {size:,} tokens")
    return True


@contextlib.contextmanager
def _ignored_errors() -> Iterator[None]:
    """Ignore what the user's process will report; a panic is not an Exception."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None


Opened = tuple[Callable[[str], int], Callable[[list[int]], str], int, list[str], int]
"""Tokens of a text, the text of ids, the number of ids, what the rules look for, and their growth."""


def _tokenizers(content: bytes) -> Opened | None:
    import tokenizers

    tokenizer = None
    with _ignored_errors():
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    if tokenizer is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    steps = [step for step in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder) if step is not None]
    rules = [rule for step in steps for rule in _objects(json.loads(step.__getstate__()))]
    texts = {text for rule in rules for name, text in rule.items() if isinstance(text, str) and name != CHARSMAP}

    def encode(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=text == "a"))  # once with what it adds to texts

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return encode, decode, tokenizer.get_vocab_size(), sorted(texts), _growth(rules)


def _sentencepiece(content: bytes) -> Opened | None:
    import sentencepiece

    processor, opened = sentencepiece.SentencePieceProcessor(), False
    with _ignored_errors():
        opened = processor.LoadFromSerializedProto(content)
    if not opened:
        return None
    longest = _longest(parse_pieces(content).normalizer_spec.precompiled_charsmap)
    return lambda text: len(processor.encode(text)), processor.decode, processor.vocab_size(), [], longest


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _objects(part)


def _growth(rules: list[dict[str, Any]]) -> int:
    """The characters that a character may become by rules which no text of the trial may meet; at least 1."""
    product = longest = 1
    for rule in rules:
        written, looks_for = len(rule.get("content") or rule.get("prepend") or ""), rule.get("pattern")
        if isinstance(looks_for, dict) and looks_for.get("String"):  # it is in the trial, unless another rule hides it
            longest = max(longest, written // len(looks_for["String"]))
        else:
            product *= max(1, written, _longest(base64.b64decode(rule.get(CHARSMAP) or "")))
    return max(product, longest)


def _longest(charsmap: bytes) -> int:
    """Bytes of the longest replacement in a table of characters: size of a trie, the trie, and replacements."""
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *map(len, replacements.split(b"\0")))


def _texts(rules: list[str]) -> Iterator[str]:
    """Texts of a trial: few characters first, in case each costs much, and then 300,000."""
    yield from ("", "a", PROSE)
    for text in rules:
        yield text * max(1, 2**10 // max(1, len(text)))
    for run in RUNS:
        yield run * (2**14 // len(run))
    yield PROSE * 2**7
    yield "".join(map(chr, (*range(0xD800), *range(0xE000, 0x20000))))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- The contents of a sentencepiece model ----------------------------------------------------------------------------

BPE = 2  # model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # type of a piece

_MESSAGES = {
    "SentencePiece": (("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")),
    "TrainerSpec": (
        ("model_type", 3, "INT32", "1"), ("byte_fallback", 35, "BOOL", "false"), ("unk_surface", 44, "STRING", " ⁇ "),
    ),
    "NormalizerSpec": (
        ("precompiled_charsmap", 2, "BYTES", ""), ("add_dummy_prefix", 3, "BOOL", "true"),
        ("remove_extra_whitespaces", 4, "BOOL", "true"), ("escape_whitespaces", 5, "BOOL", "true"),
    ),
    "ModelProto": (
        ("pieces", 1, "SentencePiece", None), ("trainer_spec", 2, "TrainerSpec", None),
        ("normalizer_spec", 3, "NormalizerSpec", None),
    ),
}  # fmt: skip
"""Name, number, type and default of fields, as in sentencepiece_model.proto; enums are numbers."""


def parse_pieces(content: bytes) -> Any:
    """The ModelProto in `content`, a file that the library has opened: it is not checked again.

    The file is a protocol buffer. The library's own reader requires exactly the protobuf version it was generated with
    (7.36.1 in sentencepiece 0.2.3), so the fields needed here are declared again, and any version reads them.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # only such models need it

    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind, default in fields:
            field = described.field.add(name=name, number=number, default_value=default)
            field.label = field.LABEL_REPEATED if name == "pieces" else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".pieces.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.ModelProto")).FromString(content)
