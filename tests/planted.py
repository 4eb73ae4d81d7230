"""Plant the mistakes of planted.toml, one at a time, in a copy of the tree, and see which test catches each.

    python tests/planted.py [--only 3 17] [--markdown table.md]

A mistake meets the tests that its row names, in `make test` and in CI, then the whole of `make test` and what CI adds,
until one fails.
The last line counts what `make test` and CI catch; the exit code is 0 if CI catches all and `make test` 95% of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.make_numbers import record  # noqa: E402

OTHERS = ["--ignore", "tests/test_planted.py"]  # which compares the table with the code that was just changed
LONGEST = 1800  # seconds; a mistake that makes a test hang is caught too


@dataclass(frozen=True)
class Planted:
    """An edit of the product.

    Attributes:
      file: path from the root.
      old, new: text that occurs once in the file, and what takes its place.
      breaks: what users would suffer from.
      tests: test files that are tried first.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: list[str]

    def apply(self, root: Path) -> None:
        """Edit the file under `root`.

        Raises:
          ValueError: the old text does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {text.count(self.old)} times instead of once")
        (root / self.file).write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Outcome:
    """Which test caught a mistake, in which stage, after how many seconds; stage None: none did."""

    stage: str | None
    test: str
    seconds: float


def planted() -> list[Planted]:
    """The rows of planted.toml."""
    table = tomllib.loads((ROOT / "tests" / "planted.toml").read_text())
    return [Planted(**row) for row in table["planted"]]


def copy_tree(destination: Path) -> None:
    """Copy what git knows of the working tree, or would add to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            (destination / name).write_bytes((ROOT / name).read_bytes())


def first_failure(tree: Path, arguments: list[str]) -> str | None:
    """Run pytest in `tree` until a test fails; its name, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    try:
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"no end after {LONGEST} s"
    if run.returncode in (0, 5):  # 5: the tier has none of these tests
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.M)
    if not failed:
        raise RuntimeError(f"pytest {arguments} ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}")
    return failed[1]


def try_row(row: Planted) -> Outcome:
    """Plant one mistake in a copy and look for the test that catches it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        row.apply(tree)
        stages = [
            ("test", row.tests),
            ("ci", [*row.tests, "--tier", "ci"]),
            ("test", OTHERS),
            ("ci", [*OTHERS, "--tier", "ci", "--beyond", "test"]),
        ]
        for stage, arguments in stages:
            if test := first_failure(tree, arguments):
                return Outcome(stage, test, time.monotonic() - begun)
    return Outcome(None, "", time.monotonic() - begun)


def markdown(rows: list[Planted], outcomes: list[Outcome]) -> str:
    """A table of what caught each mistake."""
    lines = ["| # | file | what it breaks | caught by | tier | seconds |", "|---|---|---|---|---|---|"]
    for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        test = outcome.test.removeprefix("tests/").replace("|", "\\|")
        cells = (number, f"`{row.file}`", row.breaks, f"`{test}`", outcome.stage, round(outcome.seconds))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="rows of the table, from 0; default: all")
    parser.add_argument("--workers", type=int, default=2, help="mistakes planted at the same time")
    parser.add_argument("--record", action="store_true", help="store the count of a whole run in docs/numbers.toml")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table into this file")
    arguments = parser.parse_args()
    rows = planted()
    if arguments.only:
        rows = [rows[number] for number in arguments.only]
    outcomes = []
    with ThreadPoolExecutor(arguments.workers) as pool:
        for row, outcome in zip(rows, pool.map(try_row, rows), strict=True):
            outcomes.append(outcome)
            caught = f"{outcome.stage}: {outcome.test}" if outcome.stage else "SURVIVED"
            print(
                f"{len(outcomes):3}/{len(rows)} {outcome.seconds:6.1f} s  {row.file}: {row.breaks}: {caught}",
                flush=True,
            )
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows, outcomes))
    by_test = sum(outcome.stage == "test" for outcome in outcomes)
    by_ci = sum(outcome.stage is not None for outcome in outcomes)
    print(f"{len(rows)} planted, {by_test} caught by make test ({by_test / len(rows):.0%}), {by_ci} by CI")
    if arguments.record and not arguments.only:
        record("planted_caught", f"{by_ci} of {len(rows)}", f"{os.cpu_count()} cores of {platform.machine()}")
    return 0 if by_ci == len(rows) and by_test >= 0.95 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
