"""Draws of tokens against NumPy, and their frequencies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.generation.generate import sample_tokens


def reference_probabilities(logits, temperature, top_k, top_p):
    """Return the probability of each token, one row at a time and in float64."""
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


@partial(jax.jit, static_argnums=6)
def compiled_draw(logits, positions, temperature, top_k, top_p, seed, vocabulary=6):
    request = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return sample_tokens(logits, positions, vocabulary, request | {"streams": jnp.arange(len(logits))})


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.6), (2.0, 0, 0.01), (0.7, 4, 0.8)],
)
def test_tokens_are_drawn_with_their_probabilities(temperature, top_k, top_p):
    """Draws 200 positions of 200 sequences; of two tokens with one logit the first comes first."""
    logits = np.array([2.0, 1.0, 1.0, 0.5, 0.0, -1.0, 9.0, 9.0], np.float32)  # the last two are padding
    settings = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.uint32(7)
    positions = jnp.tile(jnp.arange(200)[:, None], (1, 200))
    tokens = jax.vmap(lambda at: compiled_draw(jnp.tile(logits, (200, 1)), at, *settings))(positions)
    frequencies = np.bincount(np.asarray(tokens).ravel(), minlength=8) / tokens.size
    expected = np.append(reference_probabilities(logits[:6], temperature, top_k, top_p), [0, 0])
    assert (np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / 40_000)).all()


def test_bf16_logits_are_drawn_from_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 10, (2048, 64)), jnp.bfloat16)
    settings = np.float32(7), np.int32(40), np.float32(0.95), np.uint32(7), 60
    narrow, wide = (compiled_draw(x, jnp.arange(2048), *settings) for x in (logits, logits.astype(jnp.float32)))
    np.testing.assert_array_equal(narrow, wide)


def test_tiny_temperature_is_greedy():
    logits = jnp.array([[50.0, 99.0, 99.0, 70.0, 0.0, 0.0, 200.0, 200.0]] * 4)  # 50 / 1e-37 is beyond float32
    positions = jnp.arange(4)
    for temperature, top_k in [(0.0, 0), (3.0, 1), (1e-37, 1)]:
        found = compiled_draw(logits, positions, np.float32(temperature), np.int32(top_k), np.float32(1), np.uint32(0))
        np.testing.assert_array_equal(found, 1)
