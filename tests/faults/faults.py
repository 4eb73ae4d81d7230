"""Faults: a small run is killed, stopped and starved, more than a hundred times, and must not lose a step.

    python tests/faults/faults.py                                  # everything, about an hour on two cores
    python tests/faults/faults.py --only kills --tries 20 --seed 7
    python tests/faults/faults.py --seconds 600

Every try is `train.py` in separate processes, compared with one undisturbed run. The columns:

    lost         steps that were committed in a checkpoint when the fault struck, and had to be repeated
    silent       tries that ended as if successful, with other losses or weights than the undisturbed run
    tracebacks   tries in which a process ended with a Python traceback
    hangs        tries in which a process had to be killed

Try N of a seed makes the same fault each time; the moment at which it strikes depends on the machine. Kinds:

    kills        kill -9 at ten random moments of compiling, training, saving, evaluating or resuming; then a restart
    stops        SIGTERM at a random moment, once or again during the save; then a restart
    full disk    the disk fills up in the middle of a run, and is made larger (needs root)

Damaged files: tests/faults/mutations.py. Poisoned and disagreeing processes, and damaged checkpoints: the tests.

Exit code 1 if a count that must be 0 is not.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.command import check_counts, in_one_sentence
from mjax.errors import UsageError
from tests.faults.runs import SAVES, STEPS, Ended, Outcome, Place, Process, committed, losses_of, resumed_from, saving

TRIES = {"kills": 10, "stops": 20, "full disk": 3}
KILLS_OF_A_TRY = 10


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="kinds of faults, separated by commas (default: all)")
    parser.add_argument("--tries", type=int, help=f"of each kind (default: {TRIES})")
    parser.add_argument("--seed", type=int, default=0, help="fixes the faults (default: 0)")
    parser.add_argument("--seconds", type=float, default=5400, help="begin no try after this many (default: 5400)")
    parser.add_argument("--workers", type=int, default=2, help="tries at the same time (default: 2)")
    arguments = parser.parse_args()
    check_counts(arguments, "tries", "workers")
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


def _run(kind: str, place: Place, arguments: argparse.Namespace, until: float) -> list[Outcome]:
    """All tries of a kind, some at the same time."""

    def attempt(number: int) -> list[Outcome]:
        draw = Random(f"{arguments.seed} {kind} {number}")
        return list(KINDS[kind](place, draw, number)) if time.monotonic() < until else []

    with ThreadPoolExecutor(arguments.workers) as workers:
        tries = workers.map(attempt, range(arguments.tries or TRIES[kind]))
        outcomes = [outcome for one in tries for outcome in one]
    for outcome in outcomes:
        if not outcome.sound:
            print(f"{kind}: {outcome.note}: {outcome.words}", file=sys.stderr)
    return outcomes


# --- Kills and stops --------------------------------------------------------------------------------------------------


def kills(place: Place, random: Random, number: int) -> Iterator[Outcome]:
    """Kill one run again and again; if it finishes in between, start another."""
    name, runs = f"kills{number}", 0
    outcomes: list[Outcome] = []
    while len(outcomes) < KILLS_OF_A_TRY:
        run = place.folder / f"{name}.{runs}"
        before = committed(run)[-1:] or [0]
        # An empty cache of compiled programs: the kill can strike a compilation.
        fresh = {"JAX_ENABLE_COMPILATION_CACHE": "0"} if random.random() < 0.15 else {}
        process = place.start(run.name, **fresh)
        _strike_time(process, run, place, random, before[0])
        phase = _phase(process, run, bool(before[0]))
        process.send(signal.SIGKILL)
        ended = process.wait()
        if ended.code == 0:  # done before it was struck
            final = outcomes[-1] if outcomes else Outcome("never struck")
            place.compare(run.name, final)
            runs += 1
            continue
        outcome = Outcome(f"while {phase}")
        outcomes.append(outcome)
        ended.judge(outcome, -signal.SIGKILL)
        _check_resumed(ended, before[0], outcome)
    run = place.folder / f"{name}.{runs}"
    before = committed(run)[-1:] or [0]
    ended = place.start(run.name).wait()
    if ended.judge(outcomes[-1], 0):
        _check_resumed(ended, before[0], outcomes[-1])
        place.compare(run.name, outcomes[-1])
    place.forget(*(f"{name}.{i}" for i in range(runs + 1)))
    yield from outcomes


def stops(place: Place, random: Random, number: int) -> Iterator[Outcome]:
    """SIGTERM, in every second try once more during the save that follows; then resume."""
    name, twice = f"stops{number}", number % 2 == 1
    run = place.folder / name
    process = place.start(name)
    _strike_time(process, run, place, random, 0)
    outcome = Outcome("SIGTERM twice" if twice else "SIGTERM")
    process.send(signal.SIGTERM)
    if twice:
        process.until(lambda: saving(run) or "saving" in process.output(), 2)
        time.sleep(random.uniform(0, 0.1))
        process.send(signal.SIGTERM)
    ended = process.wait()
    if "step 1/" not in ended.output and ended.code == -signal.SIGTERM:
        outcome.note = "SIGTERM before the first step"
    elif ended.judge(outcome, 0, 75) and ended.code == 75:
        said = re.search(r"stopped by \w+ after step (\d+)", ended.output)
        if not said or committed(run)[-1:] != [int(said[1])]:
            outcome.words += f"checkpoints {committed(run)} after it said {said and said[0]!r}; "
    before = committed(run)[-1:] or [0]
    again = place.start(name).wait()
    if again.judge(outcome, 0):
        _check_resumed(again, before[0], outcome)
        place.compare(name, outcome, stopped_at=before[0])
    place.forget(name)
    yield outcome


def _strike_time(process: Process, run: Path, place: Place, random: Random, before: int) -> None:
    """Wait for a random moment of the process: during its start, or at a later step."""
    draw = random.random()
    if draw < 0.35:
        time.sleep(random.uniform(0, place.seconds))
    elif draw < 0.6:
        process.until(lambda: saving(run))
        time.sleep(random.uniform(0, 0.02))
    else:
        step = random.randint(before + 1, min(before + 4 * SAVES, STEPS))
        process.until(lambda: max(losses_of(run), default=0) >= step)
        time.sleep(random.uniform(0, 0.05))


def _phase(process: Process, run: Path, resumes: bool) -> str:
    output = process.output()
    if saving(run):
        return "saving"
    if "step " in output:
        return "training or evaluating"
    if not output:
        return "starting"
    return "resuming" if resumes else "compiling"


def _check_resumed(ended: Ended, before: int, outcome: Outcome) -> None:
    """True if a process has resumed from the checkpoint that existed when it started."""
    if "run  " in ended.output:  # it came as far as printing it
        outcome.lost += max(0, before - resumed_from(ended.output))


# --- A full disk ------------------------------------------------------------------------------------------------------


def full_disk(place: Place, random: Random, number: int) -> Iterator[Outcome]:
    """Train on a disk with room for a few checkpoints, enlarge it, and resume."""
    disk = place.folder / f"disk{number}"
    disk.mkdir()
    size = random.randint(1200, 2600)
    outcome = Outcome("disk of 1 to 3 MB")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "mjax-faults", str(disk)], capture_output=True, text=True
    )
    if made.returncode:
        yield Outcome("not tried, no file system can be mounted here", words=made.stderr.strip())
        return
    try:
        ended = place.start(f"{disk.name}/run", "--checkpoint.keep-last", "1000").wait()
        if ended.judge(outcome, 1) and "No space left" not in ended.output:
            outcome.words += "the reason was not said; "
        before = committed(disk / "run")[-1:] or [0]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = place.start(f"{disk.name}/run").wait()
        if again.judge(outcome, 0):
            _check_resumed(again, before[0], outcome)
            place.compare(f"{disk.name}/run", outcome)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
    yield outcome


KINDS: dict[str, Callable[[Place, Random, int], Iterator[Outcome]]] = {
    "kills": kills,
    "stops": stops,
    "full disk": full_disk,
}


if __name__ == "__main__":
    sys.exit(main())
