"""The steps of `mjax clean`: the filters of the papers, one after the other, over every document.

    repair          broken Unicode is mended with ftfy: "donâ€™t" → "don't"          as Megatron's cleanup_dataset.py
    decontaminate   text of evaluation sets is cut out (decontaminate.py)           as Megatron's filter_ngrams.py
    short           what has fewer than 128 tokens by now is removed                arXiv 1909.08053, section 4.2
    keep            the user's own functions say what stays: language, quality

The order makes what is written true of the output: every document in it is long enough and was accepted as it stands.
Documents are streamed; memory holds the evaluation sets' runs of words, 8 bytes a word, in each worker.
"""

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ftfy
import numpy as np

from mjax.data.blocks import Block
from mjax.data.corpus import Document, parse
from mjax.data.decontaminate import MOST_PIECES, Grams, count_matches, cut
from mjax.data.outputs import Tally, document_line, excerpt, json_line, where_they_differ
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import RunError, UsageError

REPAIRED, CUT, MORE_PIECES = "repaired", "cut at evaluation text", "more pieces by that"
NOTHING_LEFT, TOO_MANY_PIECES = "nothing left beside evaluation text", f"cut into more than {MOST_PIECES} pieces"
AHEAD = 16  # characters a token, at most, in text whose beginning alone shows that it is long enough


@dataclass(frozen=True)
class CleanMethod:
    """What is done to documents, in terms that a worker process understands."""

    key: str
    """Field that holds the text."""
    repair: bool
    """Whether broken Unicode is mended."""
    grams: Grams | None
    """Evaluation text to cut out; None: nothing is searched for."""
    minimum_tokens: int
    """Shorter documents are removed; 0: none."""
    tokenizer: str | None
    """What counts tokens; None: tokens are words between white space."""
    keep: tuple[str, ...]
    """Functions that say what stays, FILE.py:FUNCTION or MODULE:FUNCTION."""

    @property
    def short(self) -> str:
        """Why a short document is removed."""
        return f"fewer than {self.minimum_tokens} {'tokens' if self.tokenizer else 'words'}"


@dataclass
class CleanPart:
    """What one block has given."""

    kept: bytearray = field(default_factory=bytearray)
    """Lines of the documents that stay."""
    removed: bytearray = field(default_factory=bytearray)
    """Lines of the story of those that went."""
    malformed: list[str] = field(default_factory=list)
    """Lines that hold no document."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """Documents read, changed, removed and kept, by the names above."""

    def count(self, name: str, text: str, /, **example: Any) -> None:
        """Add a document to the tally `name`."""
        self.tallies.setdefault(name, Tally(name)).add(text, **example)

    def remove(self, reason: str, text: str, source: str, /, **details: Any) -> None:
        """Note that a document went."""
        self.removed += json_line({"source": source, "reason": reason, **details})
        self.count(reason, text, source=source, text=excerpt(text), **details)


class Cleaner:
    """Takes documents through all steps.

    Raises:
      UsageError: the tokenizer or a function cannot be loaded.
      RunError: a function fails on a document, or gives something else than True or False.
    """

    def __init__(self, how: CleanMethod):
        self.how = how
        self._encode = load_tokenizer(how.tokenizer).encode if how.tokenizer else str.split
        self._keep = [(spec, load_function(spec)) for spec in how.keep]

    def clean_block(self, block: Block) -> CleanPart:
        """Clean all documents of a block."""
        part = CleanPart()
        for item in parse(block, self.how.key):
            if isinstance(item, Document):
                part.count("read", item.text)
                self._clean(item, part)
            else:
                part.malformed.append(str(item))
        return part

    def count_block(self, block: Block) -> Counter[int]:
        """How often each run of evaluation text occurs in a block."""
        counts: Counter[int] = Counter()
        for item in parse(block, self.how.key):
            if isinstance(item, Document):
                counts.update(count_matches(item.text, self.how.grams))
        return counts

    def _clean(self, document: Document, part: CleanPart) -> None:
        text, source = document.text, document.source
        if self.how.repair:
            repaired = ftfy.fix_text(text)
            if repaired != text:
                before, after = where_they_differ(text, repaired)
                part.count(REPAIRED, text, source=source, before=before, after=after)
            text = repaired
        pieces, runs = cut(text, self.how.grams) if self.how.grams else ([text], [])
        if not pieces:
            part.remove(NOTHING_LEFT, text, source, evaluation_text=runs[0])
        elif len(pieces) > MOST_PIECES:
            part.remove(TOO_MANY_PIECES, text, source, pieces=len(pieces), evaluation_text=runs[0])
        elif runs:
            part.count(CUT, text, source=source, pieces=len(pieces), evaluation_text=runs[0])
            for number, piece in enumerate(pieces):
                if number:
                    part.count(MORE_PIECES, piece)
                self._judge(document._replace(text=piece), part, {"split_id": f"{source}-{number:04}"})
        else:
            self._judge(document._replace(text=text), part, {})

    def _judge(self, document: Document, part: CleanPart, split: dict[str, str]) -> None:
        """Keep a document or remove it; `split` names it where it is a piece of one."""
        text, source = document.text, document.source
        if self._is_short(text):
            part.remove(self.how.short, text, source, **split)
            return
        for spec, function in self._keep:
            if not _verdict(spec, function, document):
                part.remove(f"--keep {spec}", text, source, **split)
                return
        part.kept += document_line(document, self.how.key, **split)
        part.count("kept", text)

    def _is_short(self, text: str) -> bool:
        minimum = self.how.minimum_tokens
        # The beginning of a long text is enough, if it has twice the tokens: a cut changes only those next to it.
        beginning = text[: AHEAD * minimum]
        if len(beginning) < len(text) and len(self._encode(beginning)) >= 2 * minimum:
            return False
        return len(self._encode(text)) < minimum if minimum else False


def load_function(spec: str) -> Callable[[str], bool]:
    """The function that --keep SPEC names: FILE.py:FUNCTION, or MODULE:FUNCTION of an installed module.

    Raises:
      UsageError: there is none, or its file fails.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"--keep {spec} names no function; use FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        if place.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except Exception as error:
        raise UsageError(f"--keep {spec}: {place} cannot be loaded: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(each for each in vars(module) if callable(getattr(module, each)) and each[0] != "_")
        raise UsageError(f"--keep {spec}: {place} has no function {name!r}; it has {there or 'none'}")
    return function


def _verdict(spec: str, function: Callable[[str], bool], document: Document) -> bool:
    try:
        verdict = function(document.text)
    except Exception as error:
        raise RunError(f"--keep {spec} failed on {document.source}: {error!r}") from error
    if not isinstance(verdict, bool | np.bool_):
        raise RunError(f"--keep {spec} gave {verdict!r} for {document.source}; it has to give True or False")
    return bool(verdict)
