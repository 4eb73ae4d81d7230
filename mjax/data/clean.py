"""`mjax clean`: documents in, the documents worth training on out, and a report of what went and why.

cleaning.py has the steps and says why they come in this order. The corpus is read once; where evaluation text is to be
cut out, it is read once more before, to count which of its runs of words are common phrases.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mjax.data.blocks import MOST_BYTES, Block
from mjax.data.cleaning import (
    CUT,
    MORE_PIECES,
    NOTHING_LEFT,
    REPAIRED,
    TOO_MANY_PIECES,
    Cleaner,
    CleanMethod,
    CleanPart,
)
from mjax.data.corpus import Corpus, TextFiles, find_files
from mjax.data.decontaminate import GRAM, SHORTEST_GRAM, evaluation_grams, without_common
from mjax.data.outputs import CleanedFiles, Tally, report_text, show, watched_blocks
from mjax.data.workers import Workers, useful_workers
from mjax.errors import UsageError


@dataclass(frozen=True)
class CleanArguments:
    """Repair broken Unicode, cut out evaluation text, and remove documents that are short or not wanted."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.jsonl")]
    """Where to write what stays; FILE.removed.jsonl lists what went, and FILE.report.json says how much and why."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES …")] = ()
    """Text as `mjax prepare` reads it: .txt, .jsonl, both also .gz or .zst, .parquet, folders and quoted patterns."""
    key: str = "text"
    """Field of a JSON line or Parquet row that holds the text."""
    malformed: Literal["stop", "skip"] = "stop"
    """What to do with a line that is not JSON or has no text."""
    max_document_bytes: int = MOST_BYTES
    """Largest document that is read, in bytes: a .txt file or a line of .jsonl, unpacked. A larger one is malformed."""
    repair: bool = True
    """Mend broken Unicode with ftfy; it also straightens quotes and unfolds ligatures."""
    decontaminate: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILES …")] = ()
    """Evaluation sets, as text files: 13 words in a row that a document shares with one are cut out of it, with 200
    characters on either side."""
    decontaminate_key: str = "text"
    """Field of the evaluation sets that holds the text."""
    common: int = 10
    """Runs of words that the input holds this often are common phrases and are not cut out."""
    minimum_tokens: int = 128
    """Remove documents of fewer tokens; 0: none."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """What counts tokens, as in `mjax prepare`; when not given, words between white space are counted."""
    keep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.py:FUNCTION …")] = ()
    """Functions of yours that take a document's text and say, True or False, whether it stays; also MODULE:FUNCTION."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Processes that clean; as many as there are cores when not given, fewer where there is little text. The result
    is the same with any number."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing output."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the report as JSON instead of a table."""


def clean(arguments: CleanArguments) -> dict[str, Any]:
    """Clean documents, print a summary and return the report.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or a function of --keep fails.
    """
    started = time.perf_counter()
    _check(arguments)
    inputs = find_files(arguments.inputs)
    corpus = TextFiles(inputs, arguments.key, arguments.malformed, most=arguments.max_document_bytes)
    evaluation = find_files(arguments.decontaminate)
    files = CleanedFiles(arguments.output, [*inputs, *evaluation], arguments.overwrite)
    texts = TextFiles(evaluation, arguments.decontaminate_key, all_fields=False, most=arguments.max_document_bytes)
    grams = evaluation_grams(document.text for document in texts) if evaluation else None
    if grams == {}:
        raise UsageError(
            f"--decontaminate {evaluation[0]} has no text of {SHORTEST_GRAM} words or more; "
            "give evaluation sets as text, or name their field with --decontaminate-key"
        )
    how = CleanMethod(
        arguments.key,
        arguments.repair,
        grams,
        arguments.minimum_tokens,
        arguments.tokenizer,
        arguments.keep,
    )
    Cleaner(how)  # what cannot be loaded is refused before anything is read
    with files:
        settings = {"minimum_tokens": arguments.minimum_tokens, "tokenizer": arguments.tokenizer or "words"}
        if grams is not None:
            how, settings["decontaminate"] = _count(corpus, how, arguments, texts.names)
        with Workers(useful_workers(arguments.workers, corpus.size), _set_up, (how,)) as workers:
            tallies = _clean(corpus, workers, files)
        report = {"command": "clean", "inputs": corpus.names, **settings, **_in_order(tallies, how)}
        report = files.finish(report, corpus)
    if arguments.json:
        print(report_text(report), end="")
    else:
        show(arguments.output, report, time.perf_counter() - started, _remarks(arguments, report))
    return report


def _check(arguments: CleanArguments) -> None:
    if not arguments.inputs:
        raise UsageError("there is nothing to clean; give files such as corpus.jsonl")
    if arguments.minimum_tokens < 0:
        raise UsageError(f"--minimum-tokens is {arguments.minimum_tokens}; use 0 for no limit, or more, such as 128")
    if arguments.common < 1:
        raise UsageError(f"--common {arguments.common} would leave nothing to cut out; use 1 or more, such as 10")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # --keep MODULE:FUNCTION looks here too


def _count(
    corpus: Corpus, how: CleanMethod, arguments: CleanArguments, names: list[str]
) -> tuple[CleanMethod, dict[str, Any]]:
    """Leave common phrases out of the evaluation text; returns the method without them, and what the report says."""
    counts: Counter[int] = Counter()
    with Workers(useful_workers(arguments.workers, corpus.size), _set_up, (how,)) as workers:
        for part in workers.map(_count_block, watched_blocks(corpus, "counting")):
            counts.update(part)
    grams = without_common(how.grams, counts, arguments.common)
    runs, left = (sum(map(len, each.values())) for each in (how.grams, grams))
    settings = {"files": names, "words": GRAM, "runs": runs, "runs_met": len(counts)}
    return replace(how, grams=grams), settings | {"common": arguments.common, "common_runs": runs - left}


def _clean(corpus: Corpus, workers: Workers, files: CleanedFiles) -> dict[str, Tally]:
    """Clean all blocks and write what they give; returns the tallies."""
    tallies = {name: Tally(name) for name in ("read", "kept")}
    corpus.malformed.clear()
    for part in workers.map(_clean_block, watched_blocks(corpus, "cleaning")):
        for line in part.malformed:
            corpus.malformed.add(line)
        files.keep(part.kept)
        files.remove(part.removed)
        for name, tally in part.tallies.items():
            tallies.setdefault(name, Tally(name)).merge(tally)
    return tallies


def _in_order(tallies: dict[str, Tally], how: CleanMethod) -> dict[str, Any]:
    """The tallies as the report has them: every step that was asked for, in its order, even if it took nothing."""
    cutting = how.grams is not None
    changed = [REPAIRED] * how.repair + [CUT, MORE_PIECES] * cutting
    removed = [NOTHING_LEFT, TOO_MANY_PIECES] * cutting + [how.short] * (how.minimum_tokens > 0)
    removed += [f"--keep {spec}" for spec in how.keep]
    of = lambda names: [tallies.get(name, Tally(name)) for name in names]  # noqa: E731
    return {"read": tallies["read"], "changed": of(changed), "removed": of(removed), "kept": tallies["kept"]}


# --- In a worker ------------------------------------------------------------------------------------------------------

_cleaner: Cleaner


def _set_up(how: CleanMethod) -> None:
    global _cleaner
    _cleaner = Cleaner(how)


def _clean_block(block: Block) -> CleanPart:
    return _cleaner.clean_block(block)


def _count_block(block: Block) -> Counter[int]:
    return _cleaner.count_block(block)


# --- What a person sees -----------------------------------------------------------------------------------------------


def _remarks(arguments: CleanArguments, report: dict[str, Any]) -> Iterator[str]:
    """What there is to say beside the table."""
    if found := report.get("decontaminate"):
        yield (
            f"Of {found['runs']:,} runs of words in the evaluation sets {found['runs_met']:,} were met; "
            f"{found['common_runs']:,} of them {found['common']} times or more: common phrases, not cut out."
        )
    if arguments.minimum_tokens and not arguments.tokenizer:
        yield "Lengths are in words between white space; --tokenizer counts tokens."
