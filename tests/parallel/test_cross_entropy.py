"""Cross entropy over a split vocabulary against log_softmax in float64; with logits in memory, and in chunks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config.axes import MODEL
from mjax.parallel.chunked_cross_entropy import chunked_cross_entropy, split_rows
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.token_layout import TokenLayout
from tests.parallel.on_ranks import draw, on_ranks

ROWS, VOCABULARY, WIDTH, TOKENS = 192, 170, 6, 16  # of eight ranks the last has two tokens


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_bf16_cross_entropy_is_computed_in_float32():
    """Near certainty; and what is kept for the backward pass is the logits in bf16 and one number for each row."""
    logits = jnp.zeros((1, 8), jnp.bfloat16).at[..., 3].set(9.0)
    labels = jnp.full(1, 3)
    kept = []

    def parallel(logits, labels):
        loss, pullback = jax.vjp(lambda logits: vocab_parallel_cross_entropy(logits, labels).sum(), logits)
        kept.extend((x.dtype, x.shape) for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating))
        return loss, pullback(jnp.ones_like(loss))[0]

    split = P(None, MODEL)
    loss, gradient = on_ranks(1, parallel, (split, P()), (P(), split))(logits, labels)
    assert float(loss) == pytest.approx(np.log1p(7 * np.exp(-9.0)), rel=1e-3)
    assert float(gradient[0, 3]) == pytest.approx(-7 * np.exp(-9.0) / (1 + 7 * np.exp(-9.0)), rel=1e-2)
    assert (jnp.bfloat16, (1, 8)) in kept
    assert (jnp.float32, (1, 8)) not in kept


# --- In chunks --------------------------------------------------------------------------------------------------------


def output_layer(dtype=jnp.float64, scale=1.0):
    """Embedding, residual stream, bias, labels including both ends of the vocabulary, and weights, some of them 0."""
    embedding = VocabParallelEmbedding(jax.random.key(0), VOCABULARY, ROWS, WIDTH, 1.0, dtype)
    labels = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    labels[0], labels[-1] = 0, VOCABULARY - 1
    weights = draw(TOKENS, seed=2) * (np.arange(TOKENS) % 3 > 0)
    x, bias = scale * draw(TOKENS, WIDTH, seed=1), draw(ROWS, seed=3)
    return embedding, x.astype(dtype), bias.astype(dtype), labels, weights


def loss_and_gradients(ways, chunks, split, biased, given):
    embedding, x, bias, labels, weights = given
    tokens, specs = TokenLayout(2, TOKENS // 2, split), nnx.get_partition_spec(embedding)

    def loss(embedding, x, bias, labels, weights):
        bias = bias if biased else None
        if chunks == 1:
            losses = vocab_parallel_cross_entropy(embedding.logits(x, tokens, bias), labels)
        else:
            losses = chunked_cross_entropy(x, embedding, bias, labels, replace(tokens, loss_chunks=chunks))
        return (losses * weights).sum()

    of_stream = P(MODEL) if split else P()
    inputs = specs, of_stream, P(MODEL), P(), P()
    program = on_ranks(ways, jax.value_and_grad(loss, (0, 1, 2)), inputs, (P(), inputs[:3]))
    found, (to_table, to_x, to_bias) = program(embedding, x, bias, labels, weights)
    return found, to_table.table[...], to_x, to_bias


@pytest.mark.parametrize(
    ("ways", "chunks", "split", "biased", "scale"),
    [
        (4, 1, False, False, 1.0),
        (8, 1, True, True, 100.0),
        (1, 2, False, False, 1.0),
        (4, 3, True, False, 100.0),
        (8, 5, True, True, 1.0),
    ],
)
def test_loss_of_stream_equals_log_softmax(ways, chunks, split, biased, scale):
    """Compares all gradients too, of the real tokens alone."""
    given = embedding, x, bias, labels, weights = output_layer(scale=scale)

    def serial(table, x, bias):
        logits = (x @ table.T + (bias if biased else 0))[:, :VOCABULARY]
        return -(jax.nn.log_softmax(logits)[np.arange(TOKENS), labels] * weights).sum()

    found = loss_and_gradients(ways, chunks, split, biased, given)
    loss, gradients = jax.value_and_grad(serial, (0, 1, 2))(embedding.table[...], x, bias)
    for one, other in zip(found, (loss, *gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12 * scale)


def test_chunked_bf16_gradients_are_as_exact():
    """The residual stream's gradient is a float32 sum over chunks, as exact as a single matmul."""
    given, exact = output_layer(jnp.bfloat16), output_layer()
    exact[0].table[...] = given[0].table[...].astype(jnp.float64)
    exact = (exact[0], given[1].astype(jnp.float64), *exact[2:])
    expected = loss_and_gradients(1, 1, False, False, exact)
    whole, chunked = (loss_and_gradients(1, chunks, False, False, given) for chunks in (1, 20))
    for one, other, true in zip(whole, chunked, expected, strict=True):
        errors = [np.linalg.norm(np.asarray(found, np.float64) - true) for found in (one, other)]
        assert errors[1] <= 1.1 * errors[0] + 1e-6


def test_chunked_loss_holds_no_row_of_logits():
    embedding, x, bias, labels, _ = output_layer()
    loss = partial(chunked_cross_entropy, bias=bias, tokens=TokenLayout(2, TOKENS // 2, loss_chunks=4))

    def gradients(embedding, x, labels):
        return jax.grad(lambda embedding, x: loss(x, embedding, labels=labels).sum(), (0, 1))(embedding, x)

    specs = nnx.get_partition_spec(embedding)
    program = on_ranks(1, gradients, (specs, P(), P()), (specs, P()))
    text = program.lower(embedding, x, labels).compile().as_text()
    assert f"[{TOKENS},{ROWS // 4}]" in text
    assert f"[{TOKENS},{ROWS}]" not in text


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"), [(60, 4, [16, 16, 16, 12]), (50257, 4, [12568] * 3 + [12553]), (4, 64, [4])]
)
def test_chunks_have_multiple_of_eight_rows(rows, chunks, sizes):
    """All but the last."""
    parts = split_rows(rows, chunks)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
