"""The pipeline bubble by the clock: schedules run with operations that sleep, beside the formula.

    python benchmarks/pipeline_bubble.py

Four simulated devices are the four stages of a pipeline. They run a schedule's table as `mjax/parallel/pipeline.py`
does, one scan over ticks with F, B and W under conditionals and messages between neighbours, but an operation sleeps
for as long as it should take instead of computing. So two CPU cores are enough, and what is measured is the schedule:
which operation waits for which. The messages are real, and whatever calls and exchanges cost is in the time.

A micro-batch takes one unit forward and two backward through all chunks of a stage; in zb-h1 one for B and one for W.
The exit code is 1 if a time is off its prediction by more than 10%.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from mjax import launch
from mjax.parallel.schedules import Schedule, build_schedule

STAGES = 4
CASES = [
    (name, micro_batches, chunks)
    for micro_batches in (8, 16)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1))
]
TOLERANCE = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit-ms", type=float, default=30.0, help="time of a forward pass, in ms (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="times each case is run; the fastest counts (default: 3)")
    arguments = parser.parse_args()
    launch.simulate_devices(STAGES)

    columns = (
        "schedule",
        "M",
        "V",
        "ticks",
        "measured s",
        "bubble measured",
        "lock-step model",
        "formula",
        "time / predicted",
    )
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))
    failed = False
    for name, micro_batches, chunks in CASES:
        schedule = build_schedule(name, STAGES, micro_batches, chunks)
        times = np.array([1, 1, 1] if schedule.weight else [1, 2, 0]) * arguments.unit_ms / 1e3 / chunks  # seconds
        formula = (STAGES - 1) / ((3 if schedule.weight else chunks) * micro_batches)
        seconds = measure(schedule, times, arguments.rounds)
        predicted = schedule.makespan(*times)
        work = micro_batches * chunks * times.sum()
        failed |= abs(seconds / predicted - 1) > TOLERANCE
        figures = f"{seconds:.3f}", *(f"{x:.1%}" for x in (seconds / work - 1, schedule.bubble(*times), formula))
        row = name, micro_batches, chunks, schedule.ticks, *figures, f"{seconds / predicted:.3f}"
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "numpy"))
    print(f"\nP = {STAGES}, a unit is {arguments.unit_ms:g} ms, the fastest of {arguments.rounds} runs; {versions}")
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} CPU cores")
    if failed:
        print(f"a time differs from its prediction by more than {TOLERANCE:.0%}", file=sys.stderr)
    return int(failed)


def measure(schedule: Schedule, times: np.ndarray, rounds: int) -> float:
    """Seconds of the fastest of `rounds` runs of the table, whose F, B and W sleep for `times` seconds."""
    import jax
    import jax.numpy as jnp
    from jax import Array, lax
    from jax.sharding import PartitionSpec

    from mjax.config import MeshConfig
    from mjax.parallel import mappings
    from mjax.parallel.mesh import make_mesh

    ran = Counter()

    def sleeping(kind: str, seconds: float):
        def sleep(x):
            time.sleep(seconds)
            ran[kind] += 1
            return np.asarray(x)

        return lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    kinds = {"F": schedule.forward.on, "B": schedule.backward.on}
    if schedule.weight:
        kinds["W"] = schedule.weight.on
    operations = {kind: sleeping(kind, seconds) for kind, seconds in zip(kinds, times, strict=False)}

    def run(kind: str, row: dict[str, Array], x: Array) -> Array:
        return lax.cond(row[kind] == 1, operations[kind], lambda x: x, x)

    def tick(received: tuple[Array, Array], row: dict[str, Array]):
        y = run("F", row, received[0])
        if not schedule.exclusive:
            y = mappings.to_next_stage(y)
        dx = run("B", row, after(received[1], y))  # a stage does one thing at a time
        if schedule.weight:
            dx = run("W", row, dx)
        if schedule.exclusive:
            y = mappings.to_next_stage(after(y, dx))
        return (y, mappings.to_previous_stage(after(dx, y))), None

    def pipeline(table):
        start = jnp.zeros(1), jnp.zeros(1)
        y, dx = lax.scan(tick, start, jax.tree.map(lambda column: column[:, 0], table))[0]
        return y + dx

    mesh, per_stage = make_mesh(MeshConfig(pipe=STAGES)), PartitionSpec(None, mappings.PIPE)
    # The types of varying values guard gradients, and here are none.
    stages = jax.shard_map(
        pipeline, mesh=mesh, in_specs=per_stage, out_specs=PartitionSpec(mappings.PIPE), check_vma=False
    )
    compiled = jax.jit(stages)
    compiled(kinds).block_until_ready()
    ran.clear()
    fastest = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        compiled(kinds).block_until_ready()
        fastest = min(fastest, time.perf_counter() - start)
    every = STAGES * schedule.micro_batches * schedule.chunks * rounds
    assert ran == dict.fromkeys(kinds, every), f"{ran} operations ran, and not {every} of each kind"
    return fastest


def after(x, *others):
    """`x`, not before `others` are there: it depends on their values, which no compiler may leave out."""
    return x + sum(0 * other for other in others)


if __name__ == "__main__":
    sys.exit(main())
