"""Speed relative to the best peer, and times with a goal, in one run: the tables of docs/results/index.md.

    python benchmarks/ratios.py
    python benchmarks/ratios.py --only step host
    python benchmarks/ratios.py --record    # and store the numbers in docs/numbers.toml

Each benchmark runs as its own command, one after the other, and prints what it prints; the table follows. Nothing else
should compute on the machine: contenders take turns, but a second process takes cores from one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import COLLECTED, Figure, check_peers, in_one_sentence
from mjax.errors import RunError
from scripts.make_numbers import record

HERE = Path(__file__).resolve().parent
DROPOUT = "--model.hidden-dropout 0.1 --model.attention-dropout 0.1"
PARTS: dict[str, list[str]] = {
    "step": ["train_step.py --peers compile", f"train_step.py --peers compile {DROPOUT}"],
    "generation": ["generation.py"],
    "first": ["first_step.py"],
    "evaluation": ["evaluation.py"],
    "plans": ["planning.py --commands --rounds 1"],
    "host": ["host.py"],
}
"""Commands by part."""
PACKAGES = ("jax", "flax", "torch", "transformers", "lm_eval")


@in_one_sentence
def main() -> int:
    """Run the benchmarks and print the table; 0 when each of them ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--record", action="store_true", help="store the numbers in docs/numbers.toml")
    arguments = parser.parse_args()
    only = arguments.only
    check_peers("torch", "transformers", "lm_eval")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.jsonl"
        failed = []
        for command in (command for part in only for command in PARTS[part]):
            print(f"\npython benchmarks/{command}", flush=True)
            script, *flags = command.split()
            environment = os.environ | {COLLECTED: str(file)}
            if subprocess.run([sys.executable, str(HERE / script), *flags], env=environment).returncode:
                failed.append(command)
        lines = file.read_text().splitlines() if file.exists() else []
    figures = [Figure(**json.loads(line)) for line in lines]
    print(table(figures))
    if arguments.record:
        for figure in figures:
            if figure.number:
                record(figure.number, figure.text, f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}")
        print("recorded in docs/numbers.toml; now run: python scripts/make_numbers.py")
    if failed:
        raise RunError(f"{len(failed)} of the benchmarks failed, see above: {', '.join(failed)}")
    return 0


def table(figures: list[Figure]) -> str:
    """The ratios in Markdown, below the software and hardware of the measurement."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    cores = len(os.sched_getaffinity(0))
    rows = [
        f"\n{datetime.now(UTC):%Y-%m-%d}, {cores} cores of {platform.machine()}, Python {platform.python_version()}, "
        f"{versions}\n",
        "| line | measured | goal | |",
        "|---|---:|---:|---|",
    ]
    for each in figures:
        bound = "at least" if each.least else "at most"
        reached = "reached" if each.reached else "missed"
        rows.append(f"| {each.line} | {each.value:.2f} {each.unit} | {bound} {each.goal:g} | {reached} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
