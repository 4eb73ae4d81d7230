"""Pipelines whose stages have different layers: dense layers before experts, and numbers that stages do not divide."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.config import MeshConfig
from mjax.config.pattern import StackRows, find_rows, layers_of_stages, stage_kinds
from mjax.planner.ledger import ledger
from tests.against_reference import largest_error
from tests.small import batch_of, initial_state, named, program_of, small_config
from tests.training.test_step_equals_reference import ARCHITECTURES, PACKED

DENSE = {**ARCHITECTURES["first-dense"], "first_dense_layers": 2}


def ci(*case):
    return pytest.param(*case, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("model", "data", "tensor", "micro_batches", "recompute", "mesh"),
    [
        (DENSE, 1, 1, 2, "none", {"pipe": 3}),
        ({}, 2, 1, 4, "selective", {"pipe": 2, "zero": 1, "virtual_stages": 2}),
        ci(ARCHITECTURES["first-dense"], 2, 1, 4, "full", {"pipe": 2, "zero": 3, "expert": 2}),
        ci(ARCHITECTURES["first-dense"], 2, 2, 4, "none", {"pipe": 2, "virtual_stages": 2, "sequence_parallel": True}),
        ci(DENSE, 1, 1, 4, "selective", {"pipe": 3, "context": 2, "schedule": "gpipe"}),
        ci(DENSE, 2, 2, 2, "full", {"pipe": 3, "zero": 3, "sequence_parallel": True}),
        ci(DENSE, 1, 2, 4, "none", {"pipe": 2, "stage_layers": (4, 1)}),
        ci(DENSE, 2, 1, 2, "none", {"pipe": 3, "zero": 1, "stage_layers": (2, 3, 0)}),
        ci({**ARCHITECTURES["gemma-3"]}, 1, 2, 4, "selective", {"pipe": 3}),
        ci({**ARCHITECTURES["post-LN"]}, 2, 1, 2, "full", {"pipe": 3, "zero": 3}),
    ],
    ids=str,
)
def test_uneven_stages_equal_the_serial_reference(model, data, tensor, micro_batches, recompute, mesh):
    samples = {} if model.get("kind") == "bert" else dict(PACKED)
    config = small_config(
        data, tensor, 8 // data // micro_batches, recompute, "fp64", 0.1, 8, mesh, samples, layers=5, **model
    )
    errors = largest_error(config, scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


def test_layers_are_divided_as_equally_as_possible():
    model = small_config(layers=5, **DENSE).model
    assert layers_of_stages(model, MeshConfig(pipe=3)) == [2, 2, 1]
    assert layers_of_stages(model, MeshConfig(pipe=2, virtual_stages=2)) == [2, 1, 1, 1]
    assert layers_of_stages(replace(model, layers=61), MeshConfig(pipe=16)) == [4] * 13 + [3] * 3
    assert stage_kinds(replace(model, layers=61), MeshConfig(pipe=16)) == (0, *[1] * 12, *[2] * 3)
    assert layers_of_stages(model, MeshConfig(pipe=3, stage_layers=(4, 1, 0))) == [4, 1, 0]


def test_rows_of_a_stack_follow_the_chunks():
    """Five layers on two stages with two chunks: 0 and 1, 2 | 3, 4."""
    rows = find_rows(small_config(layers=5).model, MeshConfig(pipe=2, virtual_stages=2), "blocks.mlp.up.kernel")
    assert rows == StackRows((2, 1, 1, 1), 2)
    assert rows.list_slots() == [[0, 1, 3], [2, 4, -1]]
    assert (rows.slots, rows.offsets, rows.even) == (3, [0, 0, 2, 1], False)


def test_checkpoint_of_uneven_stages_is_that_of_one_device(tmp_path):
    one, three = (small_config(layers=5, mesh=mesh, **DENSE) for mesh in ({}, {"pipe": 3}))
    steps = {config: program_of(config) for config in (one, three)}
    saved = initial_state(steps[three])
    batch = batch_of(three)
    saved, _ = steps[three].train_step(saved, steps[three].put_on_devices(batch))
    before = named(saved)
    for i, config in enumerate((one, three, one)):
        with Checkpoints(tmp_path / str(i)) as checkpoints:
            checkpoints.save(1, saved)
        with Checkpoints(tmp_path / str(i)) as checkpoints:
            _, saved = checkpoints.restore(steps[config].abstract_state)
        for name, value in named(saved).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_stages_exchange_weights_once_a_step():
    """In the compute dtype there, in float32 back, and nothing of even stacks."""
    changes = {"layers": 5, "compute": "bf16", "dropout": 0.0}
    even, uneven = (
        ledger(small_config(mesh={"pipe": pipe}, **changes | {"layers": layers})) for pipe, layers in ((2, 4), (2, 5))
    )
    assert "all-to-all" not in {record.operation for record in even.records}
    sent = [record for record in uneven.records if record.operation == "all-to-all"]
    assert {record.dtype for record in sent} == {"bfloat16", "float32"}
    assert not any(record.loops for record in sent)
    assert {record.axes for record in sent} == {("pipe",)}
