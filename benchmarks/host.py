"""The work of the host between two train steps, on a CPU whose step sleeps as a GPU's would compute.

    python benchmarks/host.py

A run of a small model on mock tokens writes its records, TensorBoard's file and the terminal, as `mjax train` does. Its
step ends with a sleep, so the processor is the host's alone. Between the return of one step's dispatch and the call of
the next the host fetches metrics, which waits for the device, reads a batch, and does the rest. The device is idle only
if this work and the dispatch take longer than a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.command import Figure, check_counts, collect, in_one_sentence
from mjax.config import Config, load_config
from mjax.run import loop
from mjax.run.trainer import Trainer

WARM_UP = 5
"""Steps that do not count."""
GOAL = 1.0
"""Milliseconds between two steps, at most."""


class Clock:
    """Seconds of the parts of each step, in the loop of a run whose step takes `seconds` more than it computes."""

    def __init__(self, seconds: float):
        self.seconds, self.returned = seconds, None
        self.waits, self.batches = 0.0, 0.0
        self.host: list[float] = []
        self.dispatch: list[float] = []
        self.batch: list[float] = []

    def of_device(self, get: Callable) -> Callable:
        """`jax.device_get`, whose time is a wait."""

        def timed(tree):
            begun = time.perf_counter()
            fetched = get(tree)
            self.waits += time.perf_counter() - begun
            return fetched

        return timed

    def of_batches(self, prefetch: Callable) -> Callable:
        """`prefetch`, with the time until a batch is there."""

        def timed(*arguments) -> Iterator:
            source = prefetch(*arguments)
            while True:
                begun = time.perf_counter()
                try:
                    batch = next(source)
                except StopIteration:
                    return
                self.batches = time.perf_counter() - begun
                yield batch

        return timed

    def of_program(self, build: Callable) -> Callable:
        """`build_program`, with a step that sleeps before its loss is there."""

        def asleep(loss):
            time.sleep(self.seconds)
            return loss

        def slow(*arguments, **options):
            program = build(*arguments, **options)
            sleep = jax.jit(lambda loss: jax.pure_callback(asleep, jax.ShapeDtypeStruct((), jnp.float32), loss))

            def step(*arguments):
                begun = time.perf_counter()
                if self.returned is not None:
                    self.host.append(begun - self.returned - self.waits - self.batches)
                    self.batch.append(self.batches)
                state, metrics = program.train_step(*arguments)
                metrics = replace(metrics, loss=sleep(metrics.loss))
                self.returned, self.waits = time.perf_counter(), 0.0
                self.dispatch.append(self.returned - begun)
                return state, metrics

            return replace(program, train_step=step)

        return slow


def settings(steps: int) -> Config:
    """gpt_demo, smaller, on mock tokens."""
    config = load_config("gpt_demo")
    return replace(
        config,
        model=replace(config.model, layers=2, hidden=64, heads=2, sequence=64),
        data=replace(config.data, mock=True, path=()),
        train=replace(config.train, steps=steps, global_batch=2, micro_batch=2, eval_interval=0),
        checkpoint=replace(config.checkpoint, interval=0),
        log=replace(config.log, sample_tokens=0),
    )


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps that count (default: 100)")
    parser.add_argument("--milliseconds", type=int, default=100, help="of sleep in a step (default: 100)")
    arguments = parser.parse_args()
    check_counts(arguments, "steps", "milliseconds")
    clock = Clock(arguments.milliseconds / 1e3)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(loop, "build_program", clock.of_program(loop.build_program)),
        mock.patch.object(loop, "prefetch", clock.of_batches(loop.prefetch)),
        mock.patch.object(jax, "device_get", clock.device_layers(jax.device_get)),
    ):
        Trainer(settings(arguments.steps + WARM_UP), f"{folder}/run").train()
    print(f"{'milliseconds of a step':<32} median     95%")
    for name, seconds in {
        "host, between two steps": clock.host[WARM_UP:],
        "dispatch": clock.dispatch[WARM_UP:],
        "waiting for a batch": clock.batch[WARM_UP:],
    }.items():
        print(f"{name:<32} {median(seconds) * 1e3:6.2f}  {quantiles(seconds, n=20)[-1] * 1e3:6.2f}")
    collect(Figure("host work between two steps", median(clock.host[WARM_UP:]) * 1e3, "ms", GOAL, number="host_ms"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
