"""Faults: a small run is killed, stopped, starved and corrupted, hundreds of times, and must not lose a step.

    python tests/faults/faults.py                                  # everything, about an hour on two cores
    python tests/faults/faults.py --only kills --tries 20 --seed 7
    python tests/faults/faults.py --seconds 600 --markdown

Every try is `train.py` in processes of its own, compared with one undisturbed run. The columns:

    lost         steps that were committed in a checkpoint when the fault struck, and had to be repeated
    silent       tries that ended as if successful, with other losses or weights than the undisturbed run
    tracebacks   tries in which a process ended with a Python traceback
    hangs        tries in which a process had to be killed

Try N of a seed makes the same fault each time; the moment at which it strikes depends on the machine. Kinds:

    kills        kill -9 at a random moment of compiling, training, saving, evaluating or resuming; then a restart
    stops        SIGTERM at a random moment, once or again during the save; then a restart
    full disk    the disk fills up in the middle of a run, and is made larger (needs root)
    poisonings   a weight or a moment is made NaN or 1e30 in the middle of a run, under a launcher that restarts
    damage       a file of the newest checkpoint is flipped, cut, emptied, removed or exchanged; then a restart
    disagreeing  one of two processes has another config, seed, data set, source or run folder
    mutations    damaged files of every kind that mjax reads (tests/faults/mutations.py)

Exit code 1 if a count that must be 0 is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from benchmarks.command import check_counts, in_one_sentence
from mjax.errors import UsageError
from tests.faults import mutations
from tests.faults.kinds import KINDS, calls
from tests.faults.runs import Outcome, Place

TRIES = {"kills": 100, "stops": 20, "full disk": 3, "poisonings": 20, "damage": 30, "disagreeing": 13}
MUTATIONS = 10_000


@dataclass
class Row:
    """The outcomes of all tries of a kind; `details` are for the reader."""

    kind: str
    tries: int = 0
    as_promised: int = 0
    lost: int = 0
    silent: int = 0
    tracebacks: int = 0
    hangs: int = 0
    details: str = ""

    def add(self, outcome: Outcome) -> None:
        """Count one try."""
        self.tries += 1
        self.lost += outcome.lost
        self.silent += outcome.silent
        self.tracebacks += outcome.traceback
        self.hangs += outcome.hang
        self.as_promised += outcome.sound

    @property
    def broken(self) -> bool:
        """Whether a try broke a promise."""
        return self.as_promised < self.tries


@in_one_sentence
def main() -> int:
    arguments = _arguments()
    kinds = arguments.only.split(",") if arguments.only else [*TRIES, "mutations"]
    for kind in kinds:
        if kind not in (*TRIES, "mutations"):
            raise UsageError(f"--only names {kind!r}; there are: {', '.join([*TRIES, 'mutations'])}")
    console, end, rows = Console(stderr=True), time.monotonic() + arguments.seconds, []
    with tempfile.TemporaryDirectory(prefix="mjax-faults-") as folder:
        place = None
        if kinds != ["mutations"]:
            console.print("the run that nothing happens to, and its data …")
            place = Place.prepare(Path(folder))
        for number, kind in enumerate(kinds):
            until = time.monotonic() + max(0.0, end - time.monotonic()) / (len(kinds) - number)
            if kind == "mutations":
                cases = arguments.tries or MUTATIONS
                rows.append(_mutations(until - time.monotonic(), arguments.seed, cases))
            else:
                rows.append(_run(kind, place, arguments, until, console))
            console.print(f"{kind}: {rows[-1].as_promised} of {rows[-1].tries} as promised")
    _print(rows, arguments.markdown)
    return int(any(row.broken for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="kinds of faults, separated by commas (default: all)")
    parser.add_argument("--tries", type=int, help="tries of each kind (default: as many as its table row says)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the faults (default: 0)")
    parser.add_argument("--seconds", type=float, default=5400, help="begin no try after this many (default: 5400)")
    parser.add_argument("--workers", type=int, default=2, help="tries at the same time (default: 2)")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/results/log/faults.md")
    arguments = parser.parse_args()
    check_counts(arguments, "tries", "workers")
    return arguments


def _run(kind: str, place: Place, arguments: argparse.Namespace, until: float, console: Console) -> Row:
    """All tries of a kind, some at the same time."""
    attempt: Callable[[Place, Random, int], Iterator[Outcome]] = KINDS[kind]
    row, notes = Row(kind), {}
    tries = arguments.tries or TRIES[kind]
    # Kills strike one run again and again, so a chain of them yields several outcomes.
    with ThreadPoolExecutor(arguments.workers) as workers:
        chains = [
            workers.submit(_chain, attempt, place, Random(f"{arguments.seed} {kind} {number}"), number, until)
            for number in range(calls(kind, tries))
        ]
        for chain in chains:
            for outcome in chain.result():
                row.add(outcome)
                notes[outcome.note] = notes.get(outcome.note, 0) + 1
                if not outcome.sound:
                    console.print(f"[red]{kind}[/red]: {outcome.note}: {outcome.words}", highlight=False)
    row.details = ", ".join(f"{count} {note}" for note, count in sorted(notes.items()))
    return row


def _chain(attempt, place: Place, random: Random, number: int, until: float) -> list[Outcome]:
    return list(attempt(place, random, number)) if time.monotonic() < until else []


def _mutations(seconds: float, seed: int, cases: int) -> Row:
    found = mutations.run(seconds, seed, cases)
    total = {name: sum(row[name] for row in found) for name in ("tried", "silent", "tracebacks", "hangs")}
    bad = total["silent"] + total["tracebacks"] + total["hangs"]
    refused = sum(row["refused"] for row in found)
    details = f"{len(found)} readers, {refused} refused in one sentence, the others read what the file says"
    return Row(
        "mutations",
        total["tried"],
        total["tried"] - bad,
        0,
        total["silent"],
        total["tracebacks"],
        total["hangs"],
        details,
    )


def _print(rows: list[Row], markdown: bool) -> None:
    names = [field.name.replace("_", " ") for field in fields(Row)]
    cells = [[str(getattr(row, field.name)) for field in fields(Row)] for row in rows]
    if markdown:
        for line in (names, ["---", *["---:"] * 6, "---"], *cells):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(*names)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
