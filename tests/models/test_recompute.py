"""What a layer keeps for its backward pass, counted in the traced step of 8.3 billion parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mjax.config import load_config
from tests.models.test_mixture import MIXTURE
from tests.small import small_config
from tests.traced import equations, traced_step

LAYERS = 72


def _step(recompute, sequence_parallel=False):
    config = load_config("gpt_8b")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        mesh=replace(config.mesh, sequence_parallel=sequence_parallel),
        train=replace(config.train, recompute=recompute),
    )
    return config, traced_step(config)[1]


def _stacked_residuals(jaxpr):
    """Shapes and types a layer hands from the forward scan to the backward one."""
    forward = next(e for e in equations(jaxpr, "scan") if e.params["length"] == LAYERS)
    stacked = [variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (LAYERS,)]
    return [(aval.shape[1:], aval.dtype) for aval in stacked]


def _spaces(jaxpr, length=LAYERS):
    """The memory spaces of what the forward scan stacks."""
    forward = next(e for e in equations(jaxpr, "scan") if e.params["length"] == length)
    return [variable.aval.memory_space for variable in forward.outvars if variable.aval.shape[:1] == (length,)]


def _bytes(shapes):
    total = 0
    for shape, dtype in shapes:
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        total += size
    return total


@pytest.mark.parametrize(("recompute", "kept"), [("selective", 6.0), ("full", 2.0)])
def test_a_layer_keeps_this_many_times_sbh_bytes(recompute, kept):
    config, jaxpr = _step(recompute)
    sbh = 1024 * 8 * config.model.hidden
    assert _bytes(_stacked_residuals(jaxpr)) / sbh == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize(("recompute", "kept"), [("selective", 20 / 8), ("full", 2 / 8)])
def test_with_sequence_parallelism_all_that_a_layer_keeps_is_divided(recompute, kept):
    # arXiv 2205.05198, equation 4 and table 2: 34 sbh / t, of which 2 are dropout masks and 12 what is computed again.
    config, jaxpr = _step(recompute, sequence_parallel=True)
    sbh = 1024 * 8 * config.model.hidden
    assert _bytes(_stacked_residuals(jaxpr)) / sbh == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize(("split", "kept"), [(False, 2.0), (True, 2 / 8)])
def test_with_offload_a_layer_keeps_its_input_in_host_memory_and_nothing_on_the_device(split, kept):
    config, jaxpr = _step("offload", split)
    sbh = 1024 * 8 * config.model.hidden
    assert _spaces(jaxpr) == [jax.memory.Space.Host]
    assert _bytes(_stacked_residuals(jaxpr)) / sbh == pytest.approx(kept, abs=0.01)
    assert set(_spaces(_step("full", split)[1])) == {jax.memory.Space.Device}


def test_with_offload_the_experts_that_a_router_chose_stay_on_the_device():
    config = small_config(1, 1, 8, "offload", **{**MIXTURE, "layers": 3})
    _, jaxpr = traced_step(config)
    assert sorted(map(str, _spaces(jaxpr, 3))).count(str(jax.memory.Space.Host)) == 1
    assert len(_spaces(jaxpr, 3)) > 1


def test_without_recomputation_sequence_parallelism_keeps_the_gathered_inputs_of_the_two_regions():
    config, jaxpr = _step("none", sequence_parallel=True)
    residuals = [(shape, dtype) for shape, dtype in _stacked_residuals(jaxpr) if shape[-2:] != (1024, 1024)]
    sbh = 1024 * 8 * config.model.hidden
    assert _bytes(residuals) / sbh == pytest.approx(2 * 2 + (24 + 4) / 8, abs=0.05)


def test_without_recomputation_only_the_scores_come_on_top_and_no_mask_is_stored():
    config, jaxpr = _step("none")
    residuals = _stacked_residuals(jaxpr)
    sbh = 1024 * 8 * config.model.hidden
    scores = [(shape, dtype) for shape, dtype in residuals if shape[-2:] == (1024, 1024)]
    assert (_bytes(residuals) - _bytes(scores)) / sbh == pytest.approx(11.0, abs=0.05)
    assert not [shape for shape, dtype in residuals if dtype == jnp.bool_ and len(shape) > 2]


def test_the_backward_pass_keeps_one_copy_of_the_logits_in_the_compute_type():
    _, jaxpr = _step("selective")
    rows = 51_200 // 8
    logits = [
        variable.aval
        for equation in equations(jaxpr, "dot_general")
        for variable in equation.outvars
        if variable.aval.shape == (8 * 1024, rows)
    ]
    assert [str(aval.dtype) for aval in logits] == ["bfloat16"]  # computed once, and never recomputed


def test_no_device_ever_holds_a_whole_row_of_logits():
    _, jaxpr = _step("none")
    shapes = {v.aval.shape for v in _variables(jaxpr)}
    assert (8 * 1024, 51_200 // 8) in shapes
    assert not [shape for shape in shapes if len(shape) > 1 and 51_200 in shape]


def _variables(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name not in ("jit", "shard_map"):  # outside of shard_map arrays are whole
            yield from equation.outvars
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield from _variables(item)
