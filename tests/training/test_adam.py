"""Adam's direction against float64: the means of the first steps lose no digits."""

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.step.optimizer import scale_by_adam


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9999)])
def test_direction_equals_float64(beta1, beta2):
    adam, gradients = scale_by_adam(beta1, beta2, 1e-8), np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    state, m, v = adam.init(jnp.zeros(8)), np.zeros(8), np.zeros(8)
    for t, g in enumerate(gradients.astype(np.float64), start=1):
        direction, state = adam.update(jnp.float32(g), state)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        expected = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
        np.testing.assert_allclose(direction, expected, rtol=1.5e-6)
