"""A pipeline: its memory, and what it sends. Its gradients are in the table of meshes."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest

from mjax.parallel import pipeline
from mjax.parallel.pipeline_schedules import build_schedule, find_schedule
from mjax.planner.ledger import ledger
from tests.small import batch_of, gradient_program, small_config
from tests.traced import equations, traced_step


def _config(schedule, chunks, pipe, micro_batches, recompute="none", data=2, model=2, compute="fp64", **mesh):
    mesh = {"pipe": pipe, "schedule": schedule, "virtual_stages": chunks, **mesh}
    return small_config(
        data, model, 1, recompute, compute, layers=8, global_batch=data * micro_batches, mesh=mesh, heads=4
    )


# --- Memory and communication -----------------------------------------------------------------------------------------


def _temporary_bytes(schedule, micro_batches):
    config = small_config(
        layers=2, hidden=64, sequence=64, heads=4, dropout=0.0, global_batch=micro_batches,
        mesh={"pipe": 2, "schedule": schedule},
    )  # fmt: skip
    program, build = gradient_program(config)
    weights = build()
    arguments = weights, batch_of(config), jnp.int32(0), jnp.float32(1)
    return program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_1f1b_does_not_grow_with_micro_batches():
    few, many = 8, 32
    one_more = (_temporary_bytes("gpipe", many) - _temporary_bytes("gpipe", few)) / (many - few)
    assert one_more > 4 * 64 * 64 * 10  # at least ten tensors of a layer's stream for each micro-batch
    grown = _temporary_bytes("1f1b", many) - _temporary_bytes("1f1b", few)
    assert grown < 0.5 * one_more  # the batch itself and the longer table


@cache
def _residuals(config):
    """Shapes and types of the residuals of one forward pass, as many as the loop over ticks carries in its buffers."""
    held, place = [], pipeline._place_residuals
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_place_residuals", lambda kept: held.extend(kept) or place(kept))
        jaxpr = traced_step(config)[1]
    schedule = find_schedule(config)
    (loop,) = (e for e in equations(jaxpr, "scan") if e.params["length"] == schedule.ticks)
    carried = [variable.aval for variable in loop.outvars]
    slots, lanes = schedule.residual_slots, pipeline.LANES
    rows = sum(aval.shape[0] for aval in carried if aval.shape[1:] == (lanes,))
    assert rows == slots * sum(-(-like.size // lanes) for like in held)
    return Counter((like.shape, str(like.dtype)) for like in held)


def test_full_recomputation_keeps_only_inputs_of_layers():
    kept = _residuals(_config("1f1b", 1, 4, 8, "full", compute="bf16"))
    large = {kind for kind in kept if math.prod(kind[0]) >= 16 * 16}
    assert large == {((2, 16, 32), "bfloat16")}  # [layers of a stage, b · s, h]
    assert kept[((2, 16, 32), "bfloat16")] == 1


def test_stage_keeps_numbers_of_documents_and_no_mask():
    config = _config("1f1b", 1, 4, 8, compute="bf16")
    packed = replace(config, data=replace(config.data, reset_positions=True, reset_attention=True, mask_eod_loss=True))
    kept = _residuals(packed)
    assert set(kept - _residuals(config)) <= {((1, 16), "int32")}
    assert "bool" not in {dtype for _, dtype in kept}


def test_stage_keeps_no_weight_and_no_more_with_zero_3():
    expected = _residuals(_config("1f1b", 2, 4, 8, compute="bf16"))
    kernels = {(32, 3, 2, 8), (2, 8, 32), (32, 64), (64, 32)}  # on a rank of `model`
    assert not [shape for shape, _ in expected if shape[1:] in kernels]
    assert _residuals(_config("1f1b", 2, 4, 8, compute="bf16", zero=3)) == expected


@pytest.mark.parametrize(("schedule", "chunks", "zero"), [("1f1b", 2, 3), ("gpipe", 1, 1)])
def test_only_bf16_messages_cross_pipe_in_the_tick_loop(schedule, chunks, zero):
    """Weights cross in bf16, with ZeRO-1 before it, and gradients in float32 after it."""
    found = ledger(_config(schedule, chunks, 4, 8, compute="bf16", zero=zero)).records
    inside = [c for c in found if c.loops]
    over_pipe = [c for c in inside if "pipe" in c.axes]
    assert {(c.operation, c.shape) for c in over_pipe} == {("permute", (16, 32))}
    ticks = build_schedule(schedule, 4, 8, chunks).ticks
    assert sum(c.count for c in over_pipe) == 2 * ticks  # an activation forward and a gradient back, in every tick
    assert any("data" in c.axes for c in inside) == (zero == 3)
    assert {c.operation for c in inside if "model" in c.axes} == {"all-reduce"}
    assert {(c.operation, c.dtype) for c in found if {"pipe", "data"} & set(c.axes)} == {
        ("permute", "bfloat16"), ("all-gather", "bfloat16"), ("reduce-scatter", "float32"), ("all-reduce", "float32"),
    }  # fmt: skip
