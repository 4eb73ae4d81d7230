"""Mutated inputs: thousands of damaged files of every kind that mjax reads, each read in a process with limits.

    python tests/faults/mutations.py --cases 10000
    python tests/faults/mutations.py --reader checkpoint --cases 500

A case damages one of the valid files of a reader (`mutated_files.py`) and reads them. Allowed outcomes: a refusal in
one sentence (UsageError, RunError, Unusable), or a correct reading of the damaged file. The table counts all others:

    silent       accepted, but different from the second reader (or, under a checksum, from the valid file)
    tracebacks   any other exception, a malformed message, memory beyond the limit, or the death of the process
    hangs        more than `SECONDS` of CPU time

Case N of a seed is always the same. Exit code 1 if one of the three is not 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.command import check_counts, in_one_sentence
from mjax.checkpoint.folders import Unusable
from mjax.errors import RunError, UsageError
from mjax.utils.figures import format_table
from tests.faults.damage import damage
from tests.faults.mutated_files import READERS, Files, Reader

SECONDS = 20  # of processor time for one file of some kilobytes
WALL_SECONDS = 300  # of a process that waits for something
MEMORY = 2**30  # bytes in addition to the process's memory at its begin
SENTENCE = 2000  # characters
REFUSALS = (UsageError, RunError, Unusable)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: `kind` is refused, accepted, silent, tracebacks or hangs; `words` describe it."""

    case: int
    kind: str
    words: str


def run(seconds: float, seed: int, cases: int, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Read about `cases` damaged files, divided among the readers, and stop after `seconds`.

    Returns:
      For each reader the plain values of a row: reader, tried, refused, accepted, silent, tracebacks, hangs,
      and `worst`, descriptions of the first failures.
    """
    chosen = [reader for reader in READERS if names is None or reader.name in names]
    end, rows = time.monotonic() + seconds, []
    for number, reader in enumerate(chosen):
        share = cases // len(chosen) + (number < cases % len(chosen))
        until = time.monotonic() + (end - time.monotonic()) / (len(chosen) - number)
        outcomes = list(outcomes_of(reader, seed, share, until))
        tally = Counter(outcome.kind for outcome in outcomes)
        row = {"reader": reader.name, "tried": len(outcomes)}
        row |= {kind: tally[kind] for kind in ("refused", "accepted", "silent", "tracebacks", "hangs")}
        bad = [outcome for outcome in outcomes if outcome.kind not in ("refused", "accepted")]
        row["worst"] = [f"case {outcome.case}: {outcome.words}" for outcome in bad[:20]]
        rows.append(row)
    return rows


def outcomes_of(reader: Reader, seed: int, cases: int, until: float = float("inf")) -> Iterator[Outcome]:
    """The outcome of each case, in one child process at a time; a case that kills it gets a new one."""
    context = multiprocessing.get_context("fork")  # what is imported here is there at once
    with tempfile.TemporaryDirectory(prefix="mjax-mutations-") as folder:
        sound = Path(folder) / "sound"
        sound.mkdir()
        files = reader.make(sound)
        case = 0
        while case < cases and time.monotonic() < until:
            ours, theirs = context.Pipe()
            child = context.Process(target=_work, args=(reader, files, seed, range(case, cases), Path(folder), theirs))
            child.start()
            theirs.close()
            while case < cases and time.monotonic() < until:
                try:
                    if not ours.poll(WALL_SECONDS):
                        yield Outcome(case, "hangs", f"nothing for {WALL_SECONDS} s")
                        case += 1
                        break
                    outcome = ours.recv()
                except EOFError:
                    child.join()
                    hung = child.exitcode == -signal.SIGPROF
                    yield Outcome(case, "hangs" if hung else "tracebacks", f"the process ended with {child.exitcode}")
                    case += 1
                    break
                yield outcome
                case += 1
            child.kill()
            child.join()


def _work(reader: Reader, files: Files, seed: int, cases: range, folder: Path, pipe) -> None:
    """Read one case after the other; the kernel ends this process if it takes too long or its parent is gone."""
    with suppress(BrokenPipeError, KeyboardInterrupt):
        whole = _read(reader, files, folder / "whole")
        limit = _virtual_memory() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for case in cases:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            pipe.send(_one(reader, files, seed, case, folder, whole))


def _one(reader: Reader, files: Files, seed: int, case: int, folder: Path, whole: Any) -> Outcome:
    name, changed, how = mutated(reader, files, seed, case)
    words = f"{name}, {how}"
    try:
        found = _read(reader, changed, folder / f"case-{case}")
    except REFUSALS as error:
        sentence = str(error)
        if "\n" in sentence or not 0 < len(sentence) < SENTENCE:
            return Outcome(case, "tracebacks", f"{words}: no sentence of {len(sentence)} characters: {sentence!r:.300}")
        return Outcome(case, "refused", f"{words}: {sentence}")
    except BaseException as error:  # a panic of Rust is not an Exception
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in where if "/mjax/" in f.filename]
        return Outcome(case, "tracebacks", f"{words}: {type(error).__name__} {str(error)!r:.200} at {ours[-2:]}")
    try:
        expected = reader.expected(changed) if reader.expected else whole
    except Exception as error:
        expected = f"the second reader refuses it: {error!r:.200}"
    differs = (reader.expected or reader.is_checked(name, how)) and found != expected
    return Outcome(case, "silent" if differs else "accepted", f"{words}: {found!r:.300} for {expected!r:.300}")


def mutated(reader: Reader, files: Files, seed: int, case: int) -> tuple[str, Files, str]:
    """Name of the damaged file of a case, all files with it, and what was done to it."""
    draw = Random(f"{seed} {reader.name} {case}")
    name = draw.choice(sorted(reader.damaged(files)))
    content, how = damage(files[name], name, draw)
    return name, {**files, name: content}, how


def _read(reader: Reader, files: Files, folder: Path) -> Any:
    """Return the reader's result for `files`, in a new folder: None is a missing file, `...` a folder instead of it."""
    try:
        for name, content in files.items():
            place = folder / name
            (place if content is ... else place.parent).mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                place.write_bytes(content)
        return reader.read(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _virtual_memory() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="damaged files in all (default: 10,000)")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after this time (default: 1800)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--reader", action="append", choices=[reader.name for reader in READERS], help="only these")
    parser.add_argument("--case", type=int, help="show one case of one --reader, in this process")
    arguments = parser.parse_args()
    check_counts(arguments, "cases")
    if arguments.case is not None:
        (reader,) = [reader for reader in READERS if reader.name in (arguments.reader or ())]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sound").mkdir()
            files = reader.make(Path(folder) / "sound")
            print(_one(reader, files, arguments.seed, arguments.case, Path(folder), _read(reader, files, Path(folder))))
        return 0
    rows = run(arguments.seconds, arguments.seed, arguments.cases, arguments.reader)
    columns = ["reader", "tried", "refused", "accepted", "silent", "tracebacks", "hangs"]
    totals = {name: sum(row[name] for row in rows) for name in columns[1:]}
    rows.append({"reader": "all", "worst": [], **totals})
    print("\n".join(format_table(columns, [[row[name] for name in columns] for row in rows])))
    for row in rows:
        print(*(f"{row['reader']}: {line}\n" for line in row["worst"]), sep="", end="")
    return int(any(totals[name] for name in ("silent", "tracebacks", "hangs")))


if __name__ == "__main__":
    sys.exit(main())
