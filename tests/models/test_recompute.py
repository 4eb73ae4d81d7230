"""Saved activations of a layer, counted in the traced step of 8.3 billion parameters."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from mjax.config import load_config
from tests.models.test_mixture import MIXTURE
from tests.small import small_config
from tests.traced import equations, traced_step

LAYERS, POSITIONS, RANKS, ROWS = 72, 1024, 8, 51_200 // 8
TOKENS = 8 * POSITIONS
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@cache
def step_of(recompute, split=False):
    config = load_config("gpt_8b")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        mesh=replace(config.mesh, sequence_parallel=split),
        train=replace(config.train, recompute=recompute),
    )
    return traced_step(config)[1]


def kept_by_layer(jaxpr, layers=LAYERS):
    """The arrays [layers, …] that the forward scan hands to the backward one."""
    forward = next(e for e in equations(jaxpr, "scan") if e.params["length"] == layers)
    return [variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (layers,)]


def is_scores(array):
    return array.shape[-2:] == (POSITIONS, POSITIONS)


# arXiv 2205.05198, equation 4 and table 2: 34 sbh / t, 2 of them dropout masks, hashed again here; selective
# recomputation leaves out 12, of norms and GELU, too. With sequence parallelism all of it is divided, but for the
# gathered inputs of the two regions without recomputation.
@pytest.mark.parametrize(
    ("recompute", "split", "times", "space"),
    [
        ("none", False, 11.0, DEVICE),
        ("none", True, 2 * 2 + (24 + 4) / RANKS, DEVICE),
        ("selective", False, 6.0, DEVICE),
        ("selective", True, 20 / RANKS, DEVICE),
        ("full", True, 2 / RANKS, DEVICE),
        ("offload", True, 2 / RANKS, HOST),
    ],
)
def test_layer_keeps_multiple_of_sbh_bytes(recompute, split, times, space):
    """Besides scores, which only `none` keeps; and never a mask."""
    kept = kept_by_layer(step_of(recompute, split))
    found = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in kept if not is_scores(array))
    hidden = load_config("gpt_8b").model.hidden
    assert found / (TOKENS * hidden) == pytest.approx(times, abs=0.05 if recompute == "none" else 0.01)
    assert any(map(is_scores, kept)) == (recompute == "none")
    assert {array.memory_space for array in kept} == {space}
    assert not [array for array in kept if array.dtype == jnp.bool_ and array.ndim > 3]


def test_offload_leaves_chosen_experts_on_device():
    config = small_config(1, 1, 8, "offload", **{**MIXTURE, "layers": 3})
    spaces = [array.memory_space for array in kept_by_layer(traced_step(config)[1], 3)]
    assert spaces.count(HOST) == 1
    assert len(spaces) > 1


def test_logits_are_computed_once_in_compute_dtype():
    """And no device holds a whole row of them."""
    shapes, logits = set(), []
    for equation in equations(step_of("selective")):
        if equation.primitive.name not in ("jit", "shard_map"):  # outside of shard_map arrays are whole
            shapes |= {variable.aval.shape for variable in equation.outvars}
        if equation.primitive.name == "dot_general":
            logits += [x.aval.dtype for x in equation.outvars if x.aval.shape == (TOKENS, ROWS)]
    assert logits == [jnp.bfloat16]
    assert not [shape for shape in shapes if len(shape) > 1 and 51_200 in shape]
