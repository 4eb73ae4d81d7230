"""Seconds from the start of a process to the first loss on the screen, next to PyTorch, and seconds of short commands.

    python benchmarks/first_step.py                          gpt_demo with mock tokens
    python benchmarks/first_step.py --data.path data/demo    any flag of `train.py`

Contenders alternate, round by round, each in a separate process that ends with its first loss:

    cold     `train.py` with nothing compiled on the disk
    warm     the same command again
    eager    PyTorch with the same model and batches (benchmarks/contender.py)

A ratio is the median over the rounds of a contender's time divided by PyTorch's in the same round. The commands are the
list of runs (with `--lists` runs in it) and every --help; their fastest round counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Figure, check_counts, check_peers, collect, in_one_sentence
from mjax.commands.cli import COMMANDS, Commands
from mjax.commands.train import choose_config
from mjax.config import to_dict
from mjax.errors import RunError

ROOT = Path(__file__).resolve().parent.parent
GOALS = {"cold": 1.3, "warm": 0.6}
"""Times PyTorch's seconds."""
GOAL_OF_COMMANDS = 0.5
"""Seconds."""


def mjax_seconds(flags: Sequence[str], cache: Path, runs: Path) -> tuple[float, str]:
    """Seconds to the first loss of `train.py`, and the loss as it is printed.

    Raises:
      RunError: it ended without one.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    command = [sys.executable, str(ROOT / "train.py"), "--runs", str(runs), "--name", "first", *flags]
    begun, output = time.perf_counter(), []
    with subprocess.Popen(
        command,
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            output.append(line)
            if found := re.match(r"step 1/.*?loss (\S+)", line):
                seconds = time.perf_counter() - begun
                process.send_signal(signal.SIGKILL)  # SIGTERM would save
                shutil.rmtree(runs)
                return seconds, found[1]
    raise RunError(f"{' '.join(command)} printed no loss: {''.join(output[-3:]).strip()}")


def eager_seconds(request: str) -> tuple[float, str]:
    """The same of PyTorch's contender.

    Raises:
      RunError: it failed.
    """
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "contender.py"), "eager"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        print(request, file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline() or '{"failed": "it ended"}')
        seconds = time.perf_counter() - begun
        process.kill()
    if "failed" in answer:
        raise RunError(f"PyTorch's contender failed: {answer['failed']}")
    return seconds, f"{answer['loss']:.4f}"


def helps(group: Commands, before: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """`--help` of every command and of every group of them."""
    yield [*before, "--help"]
    for name, command in group.items():
        if isinstance(command.run, dict):
            yield from helps(command.run, (*before, name))
        else:
            yield [*before, name, "--help"]


def command_seconds(words: Sequence[str]) -> float:
    """Seconds of one command.

    Raises:
      RunError: it failed.
    """
    begun = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "mjax", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"mjax {' '.join(words)} failed: {done.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - begun


@in_one_sentence
def main() -> int:
    """Measure and print; 0 when every contender has a loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--lists", type=Path, default=Path("runs"), help="folder of runs that `mjax runs` lists")
    parser.add_argument("--only", choices=("steps", "commands"), help="leave the other half out")
    arguments, flags = parser.parse_known_args()
    check_counts(arguments, "rounds")
    if arguments.only != "commands":
        check_peers("torch", "transformers")
        measure_steps(arguments.rounds, flags or ["--data.mock"])
    if arguments.only != "steps":
        lists = [["runs", "--runs", str(arguments.lists)]] if arguments.lists.is_dir() else []
        measure_commands(arguments.rounds, [*lists, *helps(COMMANDS)])
    return 0


def measure_steps(rounds: int, flags: Sequence[str]) -> None:
    """Print the seconds to the first loss of every contender."""
    config = to_dict(choose_config(flags).settings)
    request = json.dumps({"config": config, "platform": "cpu", "threads": len(os.sched_getaffinity(0))})
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "eager": []}
    losses: dict[str, set[str]] = {name: set() for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            cache, runs = Path(folder, f"cache{number}"), Path(folder, "runs")
            for name, found in seconds.items():
                took, loss = eager_seconds(request) if name == "eager" else mjax_seconds(flags, cache, runs)
                found.append(took)
                losses[name].add(loss)
            shown = ", ".join(f"{name} {found[-1]:.1f}" for name, found in seconds.items())
            print(f"round {number + 1}: {shown}", file=sys.stderr, flush=True)
    print("| first loss | seconds | least | × PyTorch | goal | loss |\n|---|---:|---:|---:|---:|---:|")
    for name, found in seconds.items():
        ratio = median(ours / theirs for ours, theirs in zip(found, seconds["eager"], strict=True))
        goal = GOALS.get(name, "")
        loss = ", ".join(sorted(losses[name]))
        print(f"| {name} | {median(found):.2f} | {min(found):.2f} | {ratio:.2f} | {goal} | {loss} |")
        if name in GOALS:
            line, number = f"first step of gpt_demo, {name}", f"first_step_{name}"
            collect(Figure(line, 1 / ratio, "× PyTorch eager's speed", 1 / GOALS[name], True, number))


def measure_commands(rounds: int, commands: Sequence[Sequence[str]]) -> None:
    """Print the seconds of every command, in its fastest round."""
    seconds = [min(column) for column in zip(*(map(command_seconds, commands) for _ in range(rounds)), strict=True)]
    print("| command | seconds | goal |\n|---|---:|---:|")
    for words, found in zip(commands, seconds, strict=True):
        print(f"| mjax {' '.join(words)} | {found:.2f} | {GOAL_OF_COMMANDS} |")
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    collect(
        Figure(
            f"slowest of every --help and the list of runs: mjax {' '.join(commands[slowest])}",
            seconds[slowest],
            "s",
            GOAL_OF_COMMANDS,
            number="help_seconds",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
