"""Draws of tokens against NumPy, and their frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.sampling import allowed, draw


def reference_probabilities(logits, temperature, top_k, top_p):
    """What a token's probability should be, one row at a time and in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = order[:top_k] if top_k else order
    probabilities = np.exp(scaled[order] - scaled[order].max())
    probabilities /= probabilities.sum()
    kept, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.append(token)
        mass += probability
        if mass >= top_p and top_p < 1:
            break
    result = np.zeros(len(scaled))
    result[kept] = probabilities[: len(kept)] / probabilities[: len(kept)].sum()
    return result


def draws(temperature, top_k, top_p):
    """The logits of the tokens, and how often each id is drawn by 200 sequences at 200 positions each."""
    logits = jnp.array([2.0, 1.0, 1.0, 0.5, 0.0, -1.0, 9.0, 9.0], jnp.float32)  # the last two are padding
    settings = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.uint32(7)
    positions = jnp.tile(jnp.arange(200)[:, None], (1, 200))
    tokens = jax.vmap(lambda at: compiled_draw(jnp.tile(logits, (200, 1)), at, *settings))(positions)
    return np.asarray(logits[:6]), np.bincount(np.asarray(tokens).ravel(), minlength=8) / tokens.size


@jax.jit
def compiled_draw(logits, positions, temperature, top_k, top_p, seed):
    return draw(logits, positions, 6, temperature, top_k, top_p, seed)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (1.0, 2, 1.0), (2.0, 0, 0.01), (0.7, 4, 0.8)],
)
def test_tokens_are_drawn_with_their_probabilities(temperature, top_k, top_p):
    logits, frequencies = draws(temperature, top_k, top_p)
    expected = reference_probabilities(logits, temperature, top_k, top_p)
    deviation = np.sqrt(expected * (1 - expected) / 40_000)
    assert (np.abs(frequencies[:6] - expected) <= 5 * deviation).all()
    assert (frequencies[:6][expected == 0] == 0).all()
    assert (frequencies[6:] == 0).all()


def test_allowed_tokens_equal_numpy_with_ties():
    generator = np.random.default_rng(0)
    logits = np.round(generator.normal(size=(64, 30)), 1).astype(np.float32)  # one decimal: ties
    for top_k, top_p in [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.3), (0, 0.9), (7, 0.6), (0, 1e-6)]:
        found = np.asarray(allowed(jnp.asarray(logits), np.int32(top_k), np.float32(top_p)))
        expected = np.array([reference_probabilities(row, 1.0, top_k, top_p) > 0 for row in logits])
        np.testing.assert_array_equal(found, expected)
        assert found.any(-1).all()


def test_tiny_temperature_is_greedy():
    logits = jnp.array([[50.0, 99.0, 99.0, 70.0, 0.0, 0.0, 200.0, 200.0]] * 4)  # 50 / 1e-37 is beyond float32
    positions = jnp.arange(4)
    for temperature, top_k in [(0.0, 0), (3.0, 1), (1e-37, 1)]:
        found = compiled_draw(logits, positions, np.float32(temperature), np.int32(top_k), np.float32(1), np.uint32(0))
        np.testing.assert_array_equal(found, 1)
