"""Gradients are added up over micro-batches in float32 when a step computes in bf16: read from the traced step."""

import math
from collections import Counter

import jax
import pytest

from mjax.parallel.pipeline_schedules import build_schedule
from mjax.parallel.weights import leaf_name
from tests.small import small_config
from tests.traced import carried, equations, traced_step

MICRO_BATCHES = 5


def carried_by(jaxpr, lengths):
    """Shapes and dtypes of the floating-point numbers that the loops of these lengths carry."""
    found = Counter()
    for loop in equations(jaxpr, "scan"):
        if loop.params["length"] in lengths:
            found.update((value.shape, value.dtype.name) for value in carried(loop) if value.dtype.kind != "i")
    return found


@pytest.mark.parametrize("unroll", ["off", "on"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_loop_over_micro_batches_sums_in_float32(zero, unroll):
    config = small_config(
        2, 2, 1, "none", "bf16", global_batch=2 * MICRO_BATCHES, mesh={"zero": zero}, unroll=unroll, layers=3
    )
    program, jaxpr = traced_step(config)
    # With ZeRO the last micro-batch may be outside the loop.
    found = carried_by(jaxpr, {MICRO_BATCHES, MICRO_BATCHES - 1})
    assert {dtype for _, dtype in found} == {"float32"}
    assert found.total() > len(jax.tree.leaves(program.abstract_state.model))  # and the loss


def shape_in_a_stage(path, weight):
    """Return the shape of a weight in a stage: layers are split over `pipe`, matrices over `model`."""
    splits = {"model": 2, "pipe": 2 if leaf_name(path).startswith("blocks") else 1}
    return tuple(
        size // math.prod(splits.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes or ()))
        for size, axes in zip(weight.shape, weight.sharding.spec, strict=True)
    )


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("1f1b", 1)])
def test_pipeline_sums_every_gradient_in_float32(schedule, zero):
    mesh = {"pipe": 2, "schedule": schedule, "zero": zero}
    config = small_config(2, 2, 1, "none", "bf16", global_batch=2 * MICRO_BATCHES, layers=4, mesh=mesh)
    program, jaxpr = traced_step(config)
    found = carried_by(jaxpr, {build_schedule(schedule, 2, MICRO_BATCHES).ticks})
    weights = jax.tree_util.tree_leaves_with_path(program.abstract_state.model)
    wanted = Counter((shape_in_a_stage(*weight), "float32") for weight in weights)
    assert wanted <= found, wanted - found
