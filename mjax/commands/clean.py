"""`mjax clean`: keep the documents worth training on, and report what was removed and why.

The steps are the papers' filters, applied to every document in this order:

    repair          broken Unicode is repaired with ftfy: "donâ€™t" → "don't"        as Megatron's cleanup_dataset.py
    decontaminate   text of evaluation sets is cut out                              as Megatron's filter_ngrams.py
    short           documents of fewer than 128 tokens are removed                  arXiv 1909.08053, section 4
    filter          functions of the user remove documents: by language, quality

In this order every document of the output is long enough and was accepted in its final form. The corpus is read once;
to cut out evaluation text it is first read once more, to count which runs of words are common phrases. Documents are
streamed; each worker holds the evaluation sets' runs of words in memory, 8 bytes a word.

**Decontamination.** By the rules of Megatron's tools/openwebtext/filter_ngrams.py.

A test set that was trained on measures memory. Its texts become runs of 13 words, in lower case and without
punctuation; a text of 8 to 12 words is one run, a shorter one none. Where a document contains such a run, the run is
removed with 200 characters on either side, up to the end of the sentence there:

    … the sentence before. │ Some words. (200 characters) RUN (200 characters) words. │ The sentence after …
    ───────── piece ─────── cut ─────────────────────────────────────────────────── ── searched on ──────────

Pieces of 200 characters or fewer are removed too, and a document that falls into more than ten pieces is removed
altogether. Runs that occur in the training text ten times or more are common phrases, such as a license, and stay. So
remove duplicates first, or ten copies of a test set look like a common phrase.

Two rules follow the original exactly. A text of fewer than 13 words is not searched. Runs of 8 to 12 words are searched
wherever 13 words are left, and last among the last 13. A third rule differs: the original counts a run only if it does
not overlap the run before, so that most runs in a long common phrase look rare; here all count.

Runs are compared by 64-bit hashes (near_duplicates.py): of 2,000 corpora of 10¹⁰ words, searched for a million runs,
one would lose a sentence by chance.
"""

import importlib
import runpy
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import ftfy
import numpy as np

from mjax.commands.arguments import CleanArguments
from mjax.data.corpus import tasks
from mjax.data.corpus.documents import Document, MalformedLines, TextFiles, find_files, parse_block
from mjax.data.corpus.near_duplicates import window_hashes, word_hashes
from mjax.data.corpus.tasks import RETAINED, FilterJob, Tally, check_outputs
from mjax.data.tokenizers import load_tokenizer, tokenizer_files
from mjax.errors import RunError, UsageError
from mjax.utils.remote import locate

GRAM_WORDS, MIN_GRAM_WORDS = 13, 8  # words
MARGIN = 200  # characters removed on either side
MIN_PIECE_CHARACTERS = 200  # characters; a piece must have more
MAX_PIECES = 10
SENTENCE_ENDS = ".!?"

Grams = dict[int, np.ndarray]  # evaluation text: sorted hashes of its runs, uint64, by their number of words

Matches = dict[int, list[tuple[int, int]]]
"""Runs of it in a document: first word and hash of each, in order, by their number of words."""
REPAIRED, CUT, MORE_PIECES = "repaired", "cut at evaluation text", "more pieces by that"
ONLY_EVALUATION_TEXT, CUT_TO_PIECES = "nothing left beside evaluation text", f"cut into more than {MAX_PIECES} pieces"
AHEAD = 16  # characters a token, at most, in text whose beginning shows that it is long enough


def clean(arguments: CleanArguments) -> dict[str, Any] | None:
    """Clean documents, print a summary and return the report; None if the work was submitted to a cluster.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or a function of --filter fails.
    """
    corpus = arguments.open()
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # --filter MODULE:FUNCTION looks here too
    evaluation = find_files(arguments.decontaminate)
    check_outputs(arguments, [*corpus.files, *evaluation])
    most = arguments.max_document_bytes
    texts = TextFiles(evaluation, arguments.decontaminate_key, all_fields=False, max_bytes=most)
    grams = evaluation_grams(document.text for document in texts) if evaluation else None
    if grams == {}:
        fix = "give evaluation sets as text, or name their field with --decontaminate-key"
        raise UsageError(f"--decontaminate {evaluation[0]} has no text of {MIN_GRAM_WORDS} words or more; {fix}")
    Cleaner(arguments, grams)  # rejects a tokenizer or filter that cannot be loaded, before reading
    return tasks.run_job(CleanJob(arguments, corpus, texts.names, grams))


class CleanJob(FilterJob):
    """The stages of `mjax clean`; `grams` is the text of `evaluation`, the evaluation sets, if any."""

    single_task_stages = ("common", "finish")
    reading_stages = ("lines", "count", "clean")

    def __init__(self, arguments: CleanArguments, corpus: TextFiles, evaluation: list[str], grams: Grams | None):
        counting = ["count", "common"] * (grams is not None)
        super().__init__(arguments, corpus, [*counting, "clean", "merge", "finish"])
        self.evaluation, self.grams = evaluation, grams
        sources = [spec.rpartition(":")[0] for spec in arguments.filter]
        sources = [getattr(sys.modules.get(source), "__file__", None) or source for source in sources]
        tokenizer = tokenizer_files(arguments.tokenizer) if arguments.tokenizer else []
        self.settings = [*map(locate, map(Path, (*evaluation, *sources))), *tokenizer]

    def count(self, rank: int) -> None:
        """Count how often each run of evaluation text occurs in a share."""
        counts: Counter[int] = Counter()
        for block in self.blocks(rank):
            for document in parse_block(block, self.corpus.key)[0]:
                occurrences = Words(document.text).find(self.grams)
                counts.update(gram for matches in occurrences.values() for _, gram in matches)
        with self.open_files(rank, "runs", "counts") as (runs, numbers):
            np.fromiter(counts, np.uint64, len(counts)).tofile(runs)
            np.fromiter(counts.values(), np.int64, len(counts)).tofile(numbers)

    def common(self, rank: int) -> dict[str, Any]:
        """Write the runs without the common phrases; returns the numbers of the report."""
        counts: Counter[int] = Counter()
        for task in range(self.tasks):
            runs, numbers = self.map_file("runs", task, np.uint64), self.map_file("counts", task, np.int64)
            counts.update(dict(zip(runs.tolist(), numbers.tolist(), strict=True)))
        often = np.array([gram for gram, count in counts.items() if count >= self.arguments.common], np.uint64)
        grams = {length: hashes[~np.isin(hashes, often)] for length, hashes in self.grams.items()}
        runs, left = (sum(map(len, table.values())) for table in (self.grams, grams))
        with self.open_files(rank, "grams") as (stream,):
            np.savez(stream, **{str(length): hashes for length, hashes in grams.items()})
        numbers = {"files": self.evaluation, "words": GRAM_WORDS, "runs": runs, "runs_met": len(counts)}
        return numbers | {"common": self.arguments.common, "common_runs": runs - left}

    @cached_property
    def _cleaner(self) -> "Cleaner":
        if self.grams is None:
            return Cleaner(self.arguments, None)
        with np.load(self.task_file("grams", 0), allow_pickle=False) as grams:
            return Cleaner(self.arguments, {int(length): hashes for length, hashes in grams.items()})

    def clean(self, rank: int) -> tuple[dict[str, Tally], MalformedLines]:
        """Clean a share."""
        malformed = self.sum_malformed()
        with self.open_files(rank, RETAINED, "removed") as streams:
            names = ("read", *chain(*_steps(self.arguments).values()), RETAINED)
            share = CleanShare(*streams, {name: Tally(name) for name in names})
            for block in self.blocks(rank):
                documents, lines = parse_block(block, self.arguments.key)
                malformed.add(lines)
                for document in documents:
                    share.count("read", document.text)
                    self._cleaner.clean(document, share)
        return share.tallies, malformed

    def finish(self, rank: int) -> dict[str, Any]:
        """Write the report and give the files their names."""
        arguments, tallies = self.arguments, self.tallies([part for part, _ in self.results("clean")])
        report = {"command": "clean", "inputs": self.corpus.names}
        report |= {"minimum_tokens": arguments.min_tokens, "tokenizer": arguments.tokenizer or "words"}
        if self.grams is not None:
            report["decontaminate"] = self.results("common")[0]
        malformed = self.sum_malformed([part for _, part in self.results("clean")])
        report["read"] = tallies["read"]
        report |= {key: [tallies[name] for name in names] for key, names in _steps(arguments).items()}
        return self.put_files(report | {RETAINED: tallies[RETAINED]}, malformed)

    def remarks(self, report: dict[str, Any]) -> Iterator[str]:
        """Remarks below the table."""
        if numbers := report.get("decontaminate"):
            yield (
                f"Found {numbers['runs_met']:,} of {numbers['runs']:,} runs of words of the evaluation sets, "
                f"{numbers['common_runs']:,} of them {numbers['common']} times or more: common phrases, not cut out."
            )
        if self.arguments.min_tokens and not self.arguments.tokenizer:
            yield "Lengths are in words between white space; --tokenizer counts tokens."


def _steps(arguments: CleanArguments) -> dict[str, list[str]]:
    """The names of the steps in the report, in order."""
    cutting = bool(arguments.decontaminate)
    removed = [ONLY_EVALUATION_TEXT, CUT_TO_PIECES] * cutting + [arguments.too_short] * (arguments.min_tokens > 0)
    removed += [f"--filter {spec}" for spec in arguments.filter]
    return {"changed": [REPAIRED] * arguments.repair + [CUT, MORE_PIECES] * cutting, "removed": removed}


# --- In a worker ------------------------------------------------------------------------------------------------------


@dataclass
class CleanShare:
    """Result of one task.

    Attributes:
      retained: file for lines of the retained documents.
      removed: file for lines of the record of removed documents.
      tallies: documents read, changed, removed and retained, by the names above.
    """

    retained: BinaryIO
    removed: BinaryIO
    tallies: dict[str, Tally]

    def count(self, name: str, text: str, /, **example: Any) -> None:
        """Add a document to the tally `name`."""
        self.tallies[name].add(text, **example)

    def remove(self, reason: str, text: str, source: str, /, **details: Any) -> None:
        """Record that a document was removed."""
        self.removed.write(tasks.json_line({"source": source, "reason": reason, **details}))
        self.count(reason, text, source=source, text=tasks.excerpt(text), **details)


class Cleaner:
    """Applies all steps to documents; `grams` is the evaluation text to cut out, if any.

    Raises:
      UsageError: the tokenizer or a function cannot be loaded, or a function returns neither True nor False.
      RunError: a function fails on a document.
    """

    def __init__(self, arguments: CleanArguments, grams: Grams | None):
        self.arguments, self.grams = arguments, grams
        self._encode = load_tokenizer(arguments.tokenizer).encode if arguments.tokenizer else str.split
        self._keep = [(spec, load_function(spec)) for spec in arguments.filter]

    def clean(self, document: Document, share: CleanShare) -> None:
        """Apply all steps to a document."""
        text, source = document.text, document.source
        if self.arguments.repair:
            repaired = ftfy.fix_text(text)
            if repaired != text:
                before, after = tasks.diff_excerpts(text, repaired)
                share.count(REPAIRED, text, source=source, before=before, after=after)
            text = repaired
        pieces, runs = cut(text, self.grams) if self.grams else ([text], [])
        if not pieces:
            share.remove(ONLY_EVALUATION_TEXT, text, source, evaluation_text=runs[0])
        elif len(pieces) > MAX_PIECES:
            share.remove(CUT_TO_PIECES, text, source, pieces=len(pieces), evaluation_text=runs[0])
        elif runs:
            share.count(CUT, text, source=source, pieces=len(pieces), evaluation_text=runs[0])
            for number, piece in enumerate(pieces):
                if number:
                    share.count(MORE_PIECES, piece)
                self._judge(document._replace(text=piece), share, {"split_id": f"{source}-{number:04}"})
        else:
            self._judge(document._replace(text=text), share, {})

    def _judge(self, document: Document, share: CleanShare, split: dict[str, str]) -> None:
        """Keep or remove a document; `split` names it where it is a piece of one."""
        reason = self.arguments.too_short if self._is_short(document.text) else None
        for spec, function in self._keep:
            if reason is None and not _verdict(spec, function, document):
                reason = f"--filter {spec}"
        if reason is not None:
            share.remove(reason, document.text, document.source, **split)
            return
        share.retained.write(tasks.document_line(document, self.arguments.key, **split))
        share.count(RETAINED, document.text)

    def _is_short(self, text: str) -> bool:
        minimum = self.arguments.min_tokens
        # The beginning of a long text is enough if it has twice the tokens: a cut changes only tokens next to it.
        beginning = text[: AHEAD * minimum]
        if len(beginning) < len(text) and len(self._encode(beginning)) >= 2 * minimum:
            return False
        return len(self._encode(text)) < minimum if minimum else False


def load_function(spec: str) -> Callable[[str], bool]:
    """The function that --filter SPEC names: FILE.py:FUNCTION, or MODULE:FUNCTION of an installed module.

    Raises:
      UsageError: there is no such function, or its file fails.
    """
    source, _, name = spec.rpartition(":")
    if not source:
        raise UsageError(f"--filter {spec} names no function; write FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        names = runpy.run_path(source) if source.endswith(".py") else vars(importlib.import_module(source))
    except Exception as error:
        fix = "use FILE.py:FUNCTION or MODULE:FUNCTION"
        raise UsageError(f"--filter {spec}: {source!r} cannot be loaded ({error!r}); {fix}") from error
    if not callable(names.get(name)):
        functions = ", ".join(key for key, value in names.items() if callable(value) and not key.startswith("_"))
        raise UsageError(f"--filter {spec}: {source} has no function {name!r}; it has {functions or 'none'}")
    return names[name]


def _verdict(spec: str, function: Callable[[str], bool], document: Document) -> bool:
    try:
        verdict = function(document.text)
    except Exception as error:
        raise RunError(f"--filter {spec} failed on {document.source}: {error!r}") from error
    if not isinstance(verdict, bool | np.bool_):
        raise UsageError(f"--filter {spec} returned {verdict!r} for {document.source}; return True or False")
    return bool(verdict)


# --- Decontamination --------------------------------------------------------------------------------------------------


class Words:
    """A text as hashed words with their positions."""

    def __init__(self, text: str):
        self.text = text
        self.hashes, self.starts, self.ends = word_hashes(_fold_case(text))

    def __len__(self) -> int:
        return len(self.hashes)

    def runs(self, words: int) -> np.ndarray:
        """Hash of each run of `words` words, uint64 [runs]; empty if the text is shorter."""
        if len(self) < words:
            return np.empty(0, np.uint64)
        return window_hashes(self.hashes, np.array([len(self)]), words)[0]

    def find(self, grams: Grams) -> Matches:
        """All runs of this text that are evaluation text."""
        matches = {}
        for length, wanted in grams.items():
            runs = self.runs(length)
            nearest = np.minimum(np.searchsorted(wanted, runs), len(wanted) - 1)
            hits = np.flatnonzero(wanted[nearest] == runs) if len(wanted) else np.empty(0, np.int64)
            matches[length] = list(zip(hits.tolist(), runs[hits].tolist(), strict=True))
        return matches


def evaluation_grams(texts: Iterable[str]) -> Grams:
    """The runs of words of evaluation texts."""
    grams: dict[int, list[np.ndarray]] = {}
    for text in texts:
        words = Words(text)
        length = min(len(words), GRAM_WORDS)
        if length >= MIN_GRAM_WORDS:
            grams.setdefault(length, []).append(words.runs(length))
    return {length: np.unique(np.concatenate(parts)) for length, parts in grams.items()}


def cut(text: str, grams: Grams) -> tuple[list[str], list[str]]:
    """Cut `text`: returns the remaining pieces and the runs it was cut at; without runs, the text is the only piece."""
    words = Words(text)
    matches = words.find(grams)
    pieces, runs, begin = [], [], 0
    while match := _first_match(matches, bisect_left(words.starts, begin), len(words)):
        starts, ends = words.starts[match], words.ends[match]
        runs.append(text[starts[0] : ends[-1]])
        start = int(starts[0])
        # For the original, a run is as long as its words with single spaces between them.
        end = start + int((ends - starts).sum()) + len(starts) - 1
        before = max(text.rfind(mark, begin, max(start - MARGIN + 1, 0)) for mark in SENTENCE_ENDS)
        if before + 1 - begin > MIN_PIECE_CHARACTERS:
            pieces.append(text[begin : before + 1])
        after = [end_mark for mark in SENTENCE_ENDS if (end_mark := text.find(mark, end + MARGIN)) >= 0]
        begin = min(after) + 1 if after else len(text)
    if not runs or len(text) - begin > MIN_PIECE_CHARACTERS:
        pieces.append(text[begin:])
    return pieces, runs


def _first_match(matches: Matches, begin: int, count: int) -> slice | None:
    """The words of the match that the original finds first in a text of `count` words, from word `begin` on.

    At each word it tries 13 words, then 8 to 12. Only at the end, where no 13 are left, the lengths come first.
    """

    def first_from(length: int, begin: int) -> int:
        """The word at which the first match of `length` words begins; beyond all words if there is none."""
        index = bisect_left(matches[length], (begin,))
        return matches[length][index][0] if index < len(matches[length]) else sys.maxsize

    last = count - GRAM_WORDS  # the last word that 13 words begin with
    starts = ((first_from(words, begin), words != GRAM_WORDS, words) for words in matches)
    word, _, length = min(starts, default=(count, True, 0))
    if word <= last:
        return slice(word, word + length)
    for length in sorted(matches) if begin < last else ():
        word = first_from(length, last)
        if word < count:
            return slice(word, word + length)
    return None


def _fold_case(text: str) -> str:
    """`text` in lower case without moving characters: the few whose lower case is longer stay."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
