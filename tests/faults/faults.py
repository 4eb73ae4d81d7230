"""Faults: a small run is killed, stopped, starved and poisoned, hundreds of times, and must not lose a step.

    python tests/faults/faults.py                                  # everything, about an hour on two cores
    python tests/faults/faults.py --only kills --tries 20 --seed 7
    python tests/faults/faults.py --seconds 600

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


Damaged files: tests/faults/mutations.py.

Exit code 1 if a count that must be 0 is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.command import check_counts, in_one_sentence
from mjax.errors import UsageError
from tests.faults.kinds import KINDS, calls
from tests.faults.runs import Outcome, Place

TRIES = {"kills": 100, "stops": 20, "full disk": 3, "poisonings": 20}


@in_one_sentence
def main() -> int:
    arguments = _arguments()
    kinds = arguments.only.split(",") if arguments.only else [*TRIES]
    if wrong := [kind for kind in kinds if kind not in TRIES]:
        raise UsageError(f"--only names {wrong[0]!r}; there are: {', '.join(TRIES)}")
    end, broken = time.monotonic() + arguments.seconds, 0
    print("| kind | tries | as promised | lost | silent | tracebacks | hangs | details |")
    print(f"| --- |{' ---: |' * 6} --- |")
    with tempfile.TemporaryDirectory(prefix="mjax-faults-") as folder:
        place = Place.prepare(Path(folder))
        for number, kind in enumerate(kinds):
            outcomes = _run(kind, place, arguments, time.monotonic() + (end - time.monotonic()) / (len(kinds) - number))
            counts = [len(outcomes), sum(outcome.sound for outcome in outcomes)]
            counts += [sum(getattr(one, name) for one in outcomes) for name in ("lost", "silent", "traceback", "hang")]
            notes = sorted(Counter(outcome.note for outcome in outcomes).items())
            details = ", ".join(f"{count} {note}" for note, count in notes)
            print(f"| {kind} | {' | '.join(map(str, counts))} | {details} |", flush=True)
            broken += counts[0] - counts[1]
    return int(broken > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="kinds of faults, separated by commas (default: all)")
    parser.add_argument("--tries", type=int, help="tries of each kind (default: as many as its table row says)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the faults (default: 0)")
    parser.add_argument("--seconds", type=float, default=5400, help="begin no try after this many (default: 5400)")
    parser.add_argument("--workers", type=int, default=2, help="tries at the same time (default: 2)")
    arguments = parser.parse_args()
    check_counts(arguments, "tries", "workers")
    return arguments


def _run(kind: str, place: Place, arguments: argparse.Namespace, until: float) -> list[Outcome]:
    """All tries of a kind, some at the same time."""

    def chain(number: int) -> list[Outcome]:
        draw = Random(f"{arguments.seed} {kind} {number}")
        return list(KINDS[kind](place, draw, number)) if time.monotonic() < until else []

    # Kills strike one run again and again, so a chain of them yields several outcomes.
    with ThreadPoolExecutor(arguments.workers) as workers:
        chains = workers.map(chain, range(calls(kind, arguments.tries or TRIES[kind])))
        outcomes = [outcome for one in chains for outcome in one]
    for outcome in outcomes:
        if not outcome.sound:
            print(f"{kind}: {outcome.note}: {outcome.words}", file=sys.stderr)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
