"""The kinds of faults: each takes a place and a random source, injects the fault, and reports the outcome."""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.runs import (
    ROOT,
    SAVES,
    STEPS,
    Ended,
    Outcome,
    Place,
    Process,
    arrays_of,
    committed,
    losses_of,
    resumed_from,
    saving,
)

KILLS_OF_A_CHAIN = 10
RESTARTS = 6  # of the launcher


def calls(kind: str, tries: int) -> int:
    """The number of calls of a kind that make this many tries."""
    return -(-tries // KILLS_OF_A_CHAIN) if kind == "kills" else tries


# --- Kills and stops --------------------------------------------------------------------------------------------------


def kills(place: Place, random: Random, number: int) -> Iterator[Outcome]:
    """Kill one run again and again; if it finishes in between, start another."""
    name, runs = f"kills{number}", 0
    outcomes: list[Outcome] = []
    while len(outcomes) < KILLS_OF_A_CHAIN:
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
    """Whether a process has resumed from the checkpoint that existed when it started."""
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


# --- Poison -----------------------------------------------------------------------------------------------------------

POISONS = [("weight", "nan"), ("weight", "1e30"), ("weight", "inf"), ("mu", "nan"), ("mu", "1e30"), ("nu", "nan")]


def poisonings(place: Place, random: Random, number: int) -> Iterator[Outcome]:
    """Poison a run in the middle, restart it as launchers do, and resume from its last good checkpoint."""
    name = f"poison{number}"
    (part, value), step = POISONS[number % len(POISONS)], random.randint(2 * SAVES + 2, STEPS - 15)
    everywhere, always = random.random() < 0.5, random.random() < 0.3
    outcome = Outcome(f"{value} in a {'weight' if part == 'weight' else 'moment'}")
    poison = [str(Path(__file__).resolve()), str(step), part, value, "all" if everywhere else "one", str(number)]
    ended = place.start(name, program=poison).wait()
    said = ended.output
    for _ in range(RESTARTS):
        if ended.code in (0, 2, 3):
            break
        ended = place.start(name, program=poison if always else None).wait()
        said += ended.output
    if not ended.judge(outcome, 0, 3):
        outcome.words += f"after {RESTARTS} restarts; "
    elif ended.code == 0:
        outcome.note += ", got over"
        if "skipped" not in said and "spike" not in said:
            place.compare(name, outcome)
    else:
        _continue_from_good(place, name, ended, outcome)
    place.forget(name)
    yield outcome


def _continue_from_good(place: Place, name: str, ended: Ended, outcome: Outcome) -> None:
    """Run the command that an unhealthy run recommends, and check that nothing is lost."""
    command = re.search(r"--run \S+ --step (\d+)", ended.output)
    if command is None:
        outcome.words += "no command that continues was said; "
        return
    good = int(command[1])
    if arrays_of(place.folder / name, good) != place.checkpoints[good]:
        outcome.silent = True
        outcome.words += f"checkpoint {good}, called good, is not that of the undisturbed run; "
        return
    argv = [sys.executable, str(ROOT / "train.py"), *shlex.split(command[0])]
    again = Process(argv, place.environment(), place.folder / f"{name}.log").wait()
    if again.judge(outcome, 0):
        place.compare(name, outcome)


def poison_main(argv: list[str]) -> int:
    """`train.py` whose state is poisoned after a step: STEP weight|mu|nu VALUE all|one SEED, and the flags."""
    step, part, value, extent, seed, *flags = argv
    import jax
    import numpy as np

    from mjax.commands import cli
    from mjax.run import health, loop

    health.MOST_SKIPPED, build = 6, loop.build_program

    def poisoned(state):
        """The state with a bad value in one array, or one element of it."""

        def of_part(path) -> bool:
            words = jax.tree_util.keystr(path)
            return f".{part}" in words if part != "weight" else words.startswith(".model")

        leaves = jax.tree_util.tree_leaves_with_path(state)
        chosen = Random(int(seed)).choice([path for path, leaf in leaves if of_part(path) and leaf.ndim > 1])

        def one(path, leaf):
            if path != chosen:
                return leaf
            array = np.array(leaf)
            place = ... if extent == "all" else (0,) * array.ndim
            array[place] = float(value)
            return jax.device_put(array, leaf.sharding)

        return jax.tree_util.tree_map_with_path(one, state)

    def build_poisoned(*arguments, **keywords):
        program = build(*arguments, **keywords)

        def train_step(*arguments):
            state, metrics = program.train_step(*arguments)
            with jax.transfer_guard("allow"):
                return (poisoned(state) if int(state.step) == int(step) else state), metrics

        return dataclasses.replace(program, train_step=train_step)

    loop.build_program = build_poisoned
    return cli.main(["train", *flags])


KINDS: dict[str, Callable[[Place, Random, int], Iterator[Outcome]]] = {
    "kills": kills,
    "stops": stops,
    "full disk": full_disk,
    "poisonings": poisonings,
}

if __name__ == "__main__":
    sys.exit(poison_main(sys.argv[1:]))
