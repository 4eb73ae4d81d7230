"""`mjax clean`: keep the documents worth training on, and report what was removed and why.

The steps are the papers' filters, applied to every document in this order:

    repair          broken Unicode is repaired with ftfy: "donâ€™t" → "don't"        as Megatron's cleanup_dataset.py
    decontaminate   text of evaluation sets is cut out (decontaminate.py)           as Megatron's filter_ngrams.py
    short           documents of fewer than 128 tokens are removed                  arXiv 1909.08053, section 4
    keep            the user's own functions decide what stays: language, quality

In this order every document of the output is long enough and was accepted in its final form. The corpus is read once;
to cut out evaluation text it is first read once more, to count which runs of words are common phrases. Documents are
streamed; each worker holds the evaluation sets' runs of words in memory, 8 bytes a word.
"""

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ftfy
import numpy as np
import tyro

from mjax.config.bounds import Count, CountOrZero
from mjax.data.corpus import Document, TextFiles, decontaminate, find_files, outputs, parse
from mjax.data.corpus.blocks import Block
from mjax.data.corpus.decontaminate import GRAM, MOST_PIECES, SHORTEST_GRAM, Grams
from mjax.data.corpus.outputs import CleanedFiles, FilterArguments, Tally
from mjax.data.corpus.workers import Workers, useful_workers
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import RunError, UsageError

REPAIRED, CUT, MORE_PIECES = "repaired", "cut at evaluation text", "more pieces by that"
NOTHING_LEFT, TOO_MANY_PIECES = "nothing left beside evaluation text", f"cut into more than {MOST_PIECES} pieces"
AHEAD = 16  # characters a token, at most, in text whose beginning shows that it is long enough


@dataclass(frozen=True, kw_only=True)
class CleanArguments(FilterArguments):
    """Repair broken Unicode, cut out evaluation text, and remove documents that are short or unwanted."""

    repair: bool = True
    """Repair broken Unicode with ftfy, which also straightens quotes and expands ligatures."""
    decontaminate: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILES …")] = ()
    """Evaluation sets, as text files: where a document shares 13 words in a row with one, they are cut out of it with
    200 characters on either side."""
    decontaminate_key: str = "text"
    """Field of the evaluation sets that holds the text."""
    common: Count = 10
    """Runs of words that occur at least this often in the input are common phrases and are not cut out."""
    minimum_tokens: CountOrZero = 128
    """Remove documents of fewer tokens; 0: none."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """Tokenizer that counts tokens, as in `mjax prepare`; by default, words between white space are counted."""
    keep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.py:FUNCTION …")] = ()
    """Your functions that take a document's text and return True to keep it or False; also MODULE:FUNCTION."""

    @property
    def short(self) -> str:
        """Reason for removing a short document."""
        return f"fewer than {self.minimum_tokens} {'tokens' if self.tokenizer else 'words'}"


def clean(arguments: CleanArguments) -> dict[str, Any]:
    """Clean documents, print a summary and return the report.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or a function of --keep fails.
    """
    corpus = arguments.open()
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # --keep MODULE:FUNCTION looks here too
    evaluation = find_files(arguments.decontaminate)
    files = CleanedFiles(arguments, [*corpus.files, *evaluation])
    most = arguments.max_document_bytes
    texts = TextFiles(evaluation, arguments.decontaminate_key, all_fields=False, most=most)
    grams = decontaminate.evaluation_grams(document.text for document in texts) if evaluation else None
    if grams == {}:
        raise UsageError(
            f"--decontaminate {evaluation[0]} has no text of {SHORTEST_GRAM} words or more; "
            "give evaluation sets as text, or name their field with --decontaminate-key"
        )
    Cleaner(arguments, grams)  # what cannot be loaded is refused before anything is read
    workers = useful_workers(arguments.workers, corpus.size)
    with files:
        report = {"command": "clean", "inputs": corpus.names}
        report |= {"minimum_tokens": arguments.minimum_tokens, "tokenizer": arguments.tokenizer or "words"}
        if grams is not None:  # common phrases are left out of it
            counts: Counter[int] = Counter()
            with Workers(workers, Cleaner, (arguments, grams)) as pool:
                for part in pool.map(Cleaner.count_block, outputs.watched_blocks(corpus, "counting")):
                    counts.update(part)
            grams, all_grams = decontaminate.without_common(grams, counts, arguments.common), grams
            runs, left = (sum(map(len, table.values())) for table in (all_grams, grams))
            numbers = {"files": texts.names, "words": GRAM, "runs": runs, "runs_met": len(counts)}
            report["decontaminate"] = numbers | {"common": arguments.common, "common_runs": runs - left}
        tallies = {name: Tally(name) for name in ("read", "kept")}
        with Workers(workers, Cleaner, (arguments, grams)) as pool:
            for part in outputs.first_reading(corpus, "cleaning", pool, Cleaner.clean_block):
                files.kept.write(part.kept)
                files.removed.write(part.removed)
                for name, tally in part.tallies.items():
                    tallies.setdefault(name, Tally(name)).merge(tally)
        report = files.finish(report | _in_order(tallies, arguments), corpus)
    files.show(report, _remarks(arguments, report))
    return report


def _in_order(tallies: dict[str, Tally], how: CleanArguments) -> dict[str, Any]:
    """The tallies as in the report: every requested step, in order, even if it removed nothing."""
    cutting = bool(how.decontaminate)
    changed = [REPAIRED] * how.repair + [CUT, MORE_PIECES] * cutting
    removed = [NOTHING_LEFT, TOO_MANY_PIECES] * cutting + [how.short] * (how.minimum_tokens > 0)
    removed += [f"--keep {spec}" for spec in how.keep]
    steps = {"changed": changed, "removed": removed}
    steps = {key: [tallies.get(name, Tally(name)) for name in names] for key, names in steps.items()}
    return {"read": tallies["read"], **steps, "kept": tallies["kept"]}


def _remarks(arguments: CleanArguments, report: dict[str, Any]) -> Iterator[str]:
    """Remarks below the table."""
    if numbers := report.get("decontaminate"):
        yield (
            f"Found {numbers['runs_met']:,} of {numbers['runs']:,} runs of words of the evaluation sets, "
            f"{numbers['common_runs']:,} of them {numbers['common']} times or more: common phrases, not cut out."
        )
    if arguments.minimum_tokens and not arguments.tokenizer:
        yield "Lengths are in words between white space; --tokenizer counts tokens."


# --- In a worker ------------------------------------------------------------------------------------------------------


@dataclass
class CleanPart:
    """Result of one block.

    Attributes:
      kept: lines of the documents kept.
      removed: lines of the record of those removed.
      malformed: malformed lines.
      tallies: documents read, changed, removed and kept, by the names above.
    """

    kept: bytearray = field(default_factory=bytearray)
    removed: bytearray = field(default_factory=bytearray)
    malformed: list[str] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def count(self, name: str, text: str, /, **example: Any) -> None:
        """Add a document to the tally `name`."""
        self.tallies.setdefault(name, Tally(name)).add(text, **example)

    def remove(self, reason: str, text: str, source: str, /, **details: Any) -> None:
        """Record that a document was removed."""
        self.removed += outputs.json_line({"source": source, "reason": reason, **details})
        self.count(reason, text, source=source, text=outputs.excerpt(text), **details)


class Cleaner:
    """Applies all steps to documents; `grams` is the evaluation text to cut out, if any.

    Raises:
      UsageError: the tokenizer or a function cannot be loaded.
      RunError: a function fails on a document, or returns something other than True or False.
    """

    def __init__(self, how: CleanArguments, grams: Grams | None):
        self.how, self.grams = how, grams
        self._encode = load_tokenizer(how.tokenizer).encode if how.tokenizer else str.split
        self._keep = [(spec, load_function(spec)) for spec in how.keep]

    def clean_block(self, block: Block) -> CleanPart:
        """Clean all documents of a block."""
        documents, malformed = parse(block, self.how.key)
        part = CleanPart(malformed=malformed)
        for document in documents:
            part.count("read", document.text)
            self._clean(document, part)
        return part

    def count_block(self, block: Block) -> Counter[int]:
        """Count how often each run of evaluation text occurs in a block."""
        counts: Counter[int] = Counter()
        for document in parse(block, self.how.key)[0]:
            counts.update(decontaminate.count_matches(document.text, self.grams))
        return counts

    def _clean(self, document: Document, part: CleanPart) -> None:
        text, source = document.text, document.source
        if self.how.repair:
            repaired = ftfy.fix_text(text)
            if repaired != text:
                before, after = outputs.where_they_differ(text, repaired)
                part.count(REPAIRED, text, source=source, before=before, after=after)
            text = repaired
        pieces, runs = decontaminate.cut(text, self.grams) if self.grams else ([text], [])
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
        """Keep or remove a document; `split` names it where it is a piece of one."""
        reason = self.how.short if self._is_short(document.text) else None
        for spec, function in self._keep:
            if reason is None and not _verdict(spec, function, document):
                reason = f"--keep {spec}"
        if reason is not None:
            part.remove(reason, document.text, document.source, **split)
            return
        part.kept += outputs.document_line(document, self.how.key, **split)
        part.count("kept", document.text)

    def _is_short(self, text: str) -> bool:
        minimum = self.how.minimum_tokens
        # The beginning of a long text is enough if it has twice the tokens: a cut changes only tokens next to it.
        beginning = text[: AHEAD * minimum]
        if len(beginning) < len(text) and len(self._encode(beginning)) >= 2 * minimum:
            return False
        return len(self._encode(text)) < minimum if minimum else False


def load_function(spec: str) -> Callable[[str], bool]:
    """The function that --keep SPEC names: FILE.py:FUNCTION, or MODULE:FUNCTION of an installed module.

    Raises:
      UsageError: there is no such function, or its file fails.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UsageError(f"--keep {spec} names no function; use FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        if source.endswith(".py"):
            file_spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            module = importlib.util.module_from_spec(file_spec)
            file_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Exception as error:
        raise UsageError(f"--keep {spec}: {source} cannot be loaded: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"--keep {spec}: {source} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function


def _verdict(spec: str, function: Callable[[str], bool], document: Document) -> bool:
    try:
        verdict = function(document.text)
    except Exception as error:
        raise RunError(f"--keep {spec} failed on {document.source}: {error!r}") from error
    if not isinstance(verdict, bool | np.bool_):
        raise RunError(f"--keep {spec} returned {verdict!r} for {document.source}; return True or False")
    return bool(verdict)
