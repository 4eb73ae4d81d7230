"""ALiBi: what its penalty costs."""

import pytest

from tests.small import BLOOM, small_config
from tests.traced import equations, traced_step


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.ci)])
def test_layer_keeps_nothing_of_the_penalty(recompute):
    def kept(**changes):
        config = small_config(model=2, recompute=recompute, compute="bf16", layers=3, **changes)
        forward = next(e for e in equations(traced_step(config)[1], "scan") if e.params["length"] == 3)
        stacked = [variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (3,)]
        return sorted((aval.shape, str(aval.dtype)) for aval in stacked)

    assert kept(positions="alibi") == kept()


def test_penalty_is_computed_in_each_layer():
    """Rather than read from memory, for which it would be written out before the loop over layers."""
    step = traced_step(small_config(model=2, layers=3, **BLOOM))[1]
    loops = [equation.params for equation in equations(step, "scan") if equation.params["length"] == 3]
    inside = sum(_penalties(loop["jaxpr"].jaxpr) for loop in loops)
    assert _penalties(step) == inside > 0


def _penalties(jaxpr):
    """Count computations of the penalty of a rank's three heads."""
    return sum(equation.outvars[0].aval.shape == (3, 16, 16) for equation in equations(jaxpr, "mul"))
