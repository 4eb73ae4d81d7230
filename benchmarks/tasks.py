"""Time and memory of `mjax prepare`, `dedup` and `clean` as tasks, and a forecast for larger corpora.

    python benchmarks/tasks.py FILE.jsonl [--tasks 64] [--workers 2] [--commands prepare dedup clean]

Each command runs once, as its user types it. Memory is the peak of the largest process, mapped files included. The
forecast multiplies processor seconds by the bytes.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import check_counts, in_one_sentence
from mjax.data.corpus.documents import TextFiles

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"prepare": ["--tokenizer", "bytes"], "dedup": [], "clean": []}
FORECAST = {"30 GB": 30e9, "3 TB": 3e12}


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .jsonl file")
    parser.add_argument("--tasks", type=int, default=64, help="(default: 64)")
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--commands", nargs="+", choices=FLAGS, default=list(FLAGS), help="(default: all)")
    arguments = parser.parse_args()
    check_counts(arguments, "tasks", "workers")
    size = TextFiles([arguments.file]).size
    print(f"{size / 1e6:,.0f} MB, {arguments.tasks} tasks, {arguments.workers} workers on {os.cpu_count()} cores")
    heads = f"{'command':<8} {'seconds':>8} {'CPU s':>8} {'MB/s':>6} {'peak MB':>8}"
    print(f"{heads}   core hours of {', of '.join(FORECAST)}")
    with tempfile.TemporaryDirectory() as folder:
        for command in arguments.commands:
            output = f"{folder}/{command}" + ".jsonl" * (command != "prepare")
            line = [sys.executable, __file__, "--run", command, str(arguments.file), "--output", output, "--json"]
            line += ["--tasks", str(arguments.tasks), "--workers", str(arguments.workers), *FLAGS[command]]
            began = time.perf_counter()
            result = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            cpu, peak = map(float, result.stderr.splitlines()[-1].split())
            hours = "  ".join(f"{cpu / size * larger / 3600:,.1f}" for larger in FORECAST.values())
            figures = f"{seconds:>8.1f} {cpu:>8.1f} {size / 1e6 / seconds:>6.1f} {peak:>8,.0f}"
            print(f"{command:<8} {figures}   {hours}", flush=True)
    return 0


def run(line: list[str]) -> None:
    """Run a command and print processor seconds and the peak of its largest process to stderr."""
    subprocess.run([sys.executable, "-m", "mjax", *line], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        sys.exit(main())
