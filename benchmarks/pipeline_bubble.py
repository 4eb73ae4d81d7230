"""The measured pipeline bubble: the pipeline of training, with layers that sleep, compared with the formula.

    python benchmarks/pipeline_bubble.py

Four simulated devices are the four stages of a pipeline and run `pipeline_gradients` as a training step does, with its
scan over ticks, buffers, residuals and messages. Only the model is made up: a layer is a product with a tiny matrix
that also sleeps, for as long as the pass of a large layer would take. So two CPU cores are enough, and the measurement
covers the dependencies between operations. The interpreter's own time is included.

A micro-batch takes one unit forward and two backward through all chunks of a stage. Every operation must have run once,
and loss and gradients must equal a run of the same layers without a pipeline. The exit code is 1 if a time is off its
prediction by more than 10%.
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

from benchmarks.command import check_counts, in_one_sentence
from mjax.cluster import launch
from mjax.config.axes import PIPE
from mjax.config.pattern import StackRows
from mjax.errors import UsageError
from mjax.parallel.pipeline_schedules import PipelineSchedule, build_schedule

STAGES = 4
CASES = [
    (name, micro_batches, chunks)
    for micro_batches in (8, 16)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2))
]
TOLERANCE = 0.10
ROWS, WIDTH = 2, 2  # of the stream


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit-ms", type=float, default=240.0, help="time of a forward pass, in ms (default: 240)")
    parser.add_argument("--rounds", type=int, default=3, help="times each case is run; the fastest counts (default: 3)")
    arguments = parser.parse_args()
    check_counts(arguments, "rounds")
    if not 0 < arguments.unit_ms < float("inf"):
        raise UsageError(f"--unit-ms is {arguments.unit_ms:g}; it must be above 0")
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
        times = np.array([1, 2]) * arguments.unit_ms / 1e3 / chunks  # seconds
        formula = (STAGES - 1) / (chunks * micro_batches)
        seconds = measure(schedule, times, arguments.rounds)
        predicted = schedule.makespan(*times)
        work = micro_batches * chunks * times.sum()
        failed |= abs(seconds / predicted - 1) > TOLERANCE
        figures = f"{seconds:.3f}", *(f"{x:.1%}" for x in (seconds / work - 1, schedule.bubble(*times), formula))
        row = name, micro_batches, chunks, schedule.ticks, *figures, f"{seconds / predicted:.3f}"
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "flax", "numpy"))
    print(f"\nP = {STAGES}, a unit is {arguments.unit_ms:g} ms, the fastest of {arguments.rounds} runs; {versions}")
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} CPU cores, load {os.getloadavg()[0]:.1f}")
    if failed:
        print(f"a time differs from its prediction by more than {TOLERANCE:.0%}", file=sys.stderr)
    return int(failed)


def measure(schedule: PipelineSchedule, times: np.ndarray, rounds: int) -> float:
    """Seconds of the fastest of `rounds` steps whose F and B sleep for `times` seconds.

    Raises:
      AssertionError: an operation was left out or ran twice, or loss or gradients are wrong.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import PartitionSpec

    from mjax.config import MeshConfig
    from mjax.parallel import linear, mappings, pipeline
    from mjax.parallel.mesh import make_mesh

    # --- What sleeps --------------------------------------------------------------------------------------------------

    ran = []  # the kind of each operation that has slept

    def sleeper(kind: str, seconds: float):
        def sleep(x):
            time.sleep(seconds)
            ran.append(kind)
            return np.asarray(x)

        def sleeping(x):
            same = jax.ShapeDtypeStruct(x.shape, x.dtype)
            result = jax.pure_callback(sleep, same, x, vmap_method="broadcast_all")
            # A callback's result is typed as the same on every stage, which it is not.
            return mappings.vary(result, mappings.varying_axes(x))

        return sleeping

    sleep_forward, sleep_backward = map(sleeper, "FB", times)
    pause = jax.custom_vjp(sleep_forward)
    pause.defvjp(lambda x: (sleep_forward(x), None), lambda _, gradient: (sleep_backward(gradient),))

    def layer(chunk, x, micro_batch, virtual_stage):
        kernel = jax.tree.map(lambda one: one[0], chunk)["kernel"]  # a chunk is one layer
        return pause(linear.linear(kernel[...], x, 1)), {}

    # --- The model, with and without a pipeline -----------------------------------------------------------------------

    random = np.random.default_rng(0)
    draw = lambda *shape: random.uniform(0.25, 0.75, shape).astype(np.float32)  # noqa: E731  positive: nothing cancels
    kernels = draw(STAGES * schedule.chunks, WIDTH, WIDTH)
    shared, micro_batches = {"embed": draw(WIDTH), "head": draw(WIDTH)}, draw(schedule.micro_batches, ROWS, WIDTH)
    program = pipeline.StageProgram(
        embed=lambda shared, micro_batch: micro_batch * shared["embed"],
        layers=layer,
        head=lambda shared, x, micro_batch: {"loss": (x * shared["head"]).sum()},
        loss_weights={"loss": 1.0},
        kinds=(0,) * len(kernels),
        rows={"kernel": nnx.Param(StackRows((1,) * len(kernels), STAGES))},
    )

    def step(shared, blocks, micro_batches):
        of_stage = jax.tree.map(lambda kernels: kernels[:, 0], blocks)
        means, to_shared, to_blocks = pipeline.pipeline_gradients(
            schedule, program, shared, of_stage, micro_batches, jnp.float32
        )
        loss, to_shared = jax.tree.map(lambda x: mappings.psum(x, frozenset({PIPE})), (means["loss"], to_shared))
        return loss, to_shared, jax.tree.map(lambda kernels: kernels[:, None], to_blocks)

    def without_pipeline(shared, kernels):
        x = micro_batches * shared["embed"]
        for kernel in kernels:
            x = x @ kernel
        return (x * shared["head"]).sum()

    # --- Compiled -----------------------------------------------------------------------------------------------------

    # Virtual stage v · P + p is chunk v of stage p.
    shape, split = (schedule.chunks, STAGES, WIDTH, WIDTH), PartitionSpec(None, PIPE)
    blocks = {"kernel": nnx.Param(kernels.reshape(shape))}
    everywhere = PartitionSpec()
    stages = jax.shard_map(
        step,
        mesh=make_mesh(MeshConfig(pipe=STAGES)),
        in_specs=(everywhere, split, everywhere),
        out_specs=(everywhere, everywhere, split),
    )
    compiled = jax.jit(stages).lower(shared, blocks, micro_batches).compile()

    # --- Run ----------------------------------------------------------------------------------------------------------

    each_once = dict.fromkeys("FB", STAGES * schedule.chunks * schedule.micro_batches)
    loss, (to_shared, to_kernels) = jax.value_and_grad(without_pipeline, argnums=(0, 1))(shared, kernels)
    expected = loss, to_shared, {"kernel": to_kernels.reshape(shape)}
    fastest = float("inf")
    for _ in range(rounds):
        ran.clear()
        start = time.perf_counter()
        found = jax.block_until_ready(compiled(shared, blocks, micro_batches))
        fastest = min(fastest, time.perf_counter() - start)
        assert Counter(ran) == each_once, f"{Counter(ran)} operations ran, and not {each_once}"
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    return fastest


if __name__ == "__main__":
    sys.exit(main())
