"""Wrong numbers are found, with or without jit, and named by the operation that gives them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.doctor import GREEN, RED, numerics
from mjax.doctor.numerics import check_numerics, standard_operations


@pytest.fixture(scope="module")
def operations():
    return standard_operations(jax.local_devices()[0])


def test_this_device_is_right(operations):
    (finding,) = check_numerics(lambda device: operations)
    assert finding.status == GREEN


@pytest.mark.parametrize("index", range(4))
def test_wrong_operation_is_red_and_named(operations, index):
    right = operations[index]

    def run(*inputs):
        first, *others = right.run(*inputs)
        return [first.at[0].add(2 * right.bound * jnp.abs(first).max()), *others]

    (finding,) = check_numerics(lambda device: [replace(right, run=run, modes=("jit",))])
    assert finding.status == RED
    assert finding.found.startswith(f"{right.name} is wrong on {jax.default_backend().upper()} 0 (jit)")


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_wrong_device_is_named():
    def operations(device, off=1.0):
        run = lambda x: [x + device.id * off]  # noqa: E731
        return [numerics.Operation("one", run, (jnp.ones(3),), [np.ones(3)], 1e-3, ("jit",))]

    (finding,) = check_numerics(operations, jax.local_devices()[:2])
    assert finding.status == RED
    assert finding.found.startswith(f"one is wrong on {jax.default_backend().upper()} 1 (jit)")
    assert check_numerics(operations, jax.local_devices()[:1])[0].status == GREEN
    # The worst is shown, in whichever order.
    (finding,) = check_numerics(lambda device: operations(device, 1e-4), jax.local_devices()[1::-1])
    assert "on the worst of 2 devices" in finding.found
    assert finding.figures["one_relative"] == pytest.approx(1e-4, rel=0.01)


def test_nan_is_red():
    half = [jnp.ones(3), jnp.full(3, jnp.nan)]  # what is right before it must not hide it
    nothing = numerics.Operation("nothing", lambda: half, (), [np.ones(3)] * 2, 1e-3, ("no jit",))
    assert check_numerics(lambda device: [nothing])[0].status == RED
