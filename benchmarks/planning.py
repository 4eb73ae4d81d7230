"""Time of planning: memory and time of one config, the ledger of a traced step, a search.

    python benchmarks/planning.py

Each runs `--rounds` times in this process and the fastest counts; seconds are CPU time, which is wall time on an idle
machine. The first ledger of a process also imports what it traces with, which is not counted.

    python benchmarks/planning.py --commands

The commands of `COMMANDS` as a user waits for them: wall time of the whole process, next to its goal on two idle cores.
`--compile` needs JAX's CUDA wheels, here or in `.venv-cuda` (`make .venv-cuda/installed`), and is left out otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import Figure, check_counts, collect, in_one_sentence
from mjax.cluster import launch
from mjax.cluster.hardware import gpu_named
from mjax.config import load_config
from mjax.errors import RunError
from mjax.planner.ledger import ledger
from mjax.planner.memory import predict_memory
from mjax.planner.search import changes_that_fit, search
from mjax.planner.time import predict_time
from mjax.utils.packages import cuda_build

COMMANDS = {
    "--devices 512 --config gpt_8b": (4, "plan_mesh_seconds"),
    "--devices 64 --config mixtral_8x7b": (10, "plan_experts_seconds"),
    "--devices 64 --days 30": (12, "plan_budget_seconds"),
    "--compile --config llama3_8b": (60, "plan_compile_seconds"),
}
"""Flags of `mjax plan --gpu h100`, the seconds that each may take, and the number in docs/numbers.toml."""
ROOT = Path(__file__).resolve().parent.parent
COMPILER = ROOT / ".venv-cuda" / "bin" / "python"


def seconds(work: Callable[[], object], rounds: int, calls: int = 1) -> float:
    """Seconds of one call, in the fastest round."""
    work()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            work()
        found.append((time.process_time() - start) / calls)
    return min(found)


def time_commands(rounds: int) -> int:
    """Print the seconds of each command, in the fastest round, and its goal."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for flags, (goal, number) in COMMANDS.items():
        elsewhere = "--compile" in flags and cuda_build() is None
        if elsewhere and not COMPILER.exists():
            print(f"mjax plan --gpu h100 {flags:<35} left out: no JAX for CUDA here; make .venv-cuda/installed")
            continue
        python, found = str(COMPILER) if elsewhere else sys.executable, []
        for _ in range(rounds):
            begun = time.perf_counter()
            command = [python, "-m", "mjax", "plan", "--gpu", "h100", *flags.split()]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RunError(f"mjax plan --gpu h100 {flags} failed: {done.stderr.strip().splitlines()[-1]}")
            found.append(time.perf_counter() - begun)
        print(f"mjax plan --gpu h100 {flags:<35} {min(found):6.1f} s, goal {goal:3} s", flush=True)
        collect(Figure(f"mjax plan {flags}", min(found), "s", goal, number=number))
    return 0


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run; the fastest counts")
    parser.add_argument("--config", default="gpt_8b", help="what the ledger and the search are of")
    parser.add_argument("--devices", type=int, default=512, help="GPUs of the search")
    parser.add_argument("--commands", action="store_true", help="time whole commands instead, next to their goals")
    arguments = parser.parse_args()
    check_counts(arguments, "rounds", "devices")
    if arguments.commands:
        return time_commands(arguments.rounds)
    gpu, trillion, config = gpu_named("h100"), load_config("gpt_1t"), load_config(arguments.config)
    launch.hide_accelerators()  # tracing needs none
    trials = 0

    def search_once():
        nonlocal trials
        found = search(
            config, arguments.devices, predict_memory, lambda each: predict_time(each, gpu), gpu.usable_bytes
        )
        trials = found.tried

    start = time.process_time()
    search_once()  # traces a layer for each size of `model` and each kind of recomputation
    traced, mesh = time.process_time() - start, config.mesh
    rows = {
        "memory of gpt_1t": seconds(lambda: predict_memory(trillion), arguments.rounds, 100),
        "time of gpt_1t": seconds(lambda: predict_time(trillion, gpu), arguments.rounds, 100),
        "refusal of gpt_1t on 40 GiB, with three changes": seconds(
            lambda: changes_that_fit(trillion, 40 * 2**30), arguments.rounds
        ),
        f"ledger of {arguments.config} on {mesh.data} × {mesh.model}": seconds(
            lambda: ledger(config), arguments.rounds
        ),
    }
    took = seconds(search_once, arguments.rounds)
    rows[f"search of {arguments.config} on {arguments.devices} × {gpu.name}, {trials:,} candidates"] = traced
    rows["the same again, with the traces of the first"] = took
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}} {1e3 * value:12,.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
