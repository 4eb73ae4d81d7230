"""Cross entropy over a split vocabulary against log_softmax in float64; with logits in memory, and in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.parallel.axes import MODEL
from mjax.parallel.cross_entropy import chunked_cross_entropy, rows_of_chunks, vocab_parallel_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.tokens import Tokens
from tests.parallel.on_ranks import draw, on_ranks

WAYS = [1, 4, 8]
ROWS, VOCABULARY, WIDTH, TOKENS = 192, 170, 6, 16  # of eight ranks the last has two tokens


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _serial(logits, labels, weights):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[..., None], -1)[..., 0]
    return -(picked * weights).sum()


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_cross_entropy_of_split_logits_equals_log_softmax(ways, scale):
    logits, labels = scale * draw(2, 5, 24), np.random.default_rng(0).integers(0, 24, (2, 5))
    weights = draw(2, 5, seed=2)

    def parallel(logits, labels, weights):
        return (vocab_parallel_cross_entropy(logits, labels) * weights).sum()

    split = P(None, None, MODEL)
    program = on_ranks(ways, jax.value_and_grad(parallel), (split, P(), P()), (P(), split))
    loss, gradient = program(logits, labels, weights)
    expected_loss, expected = jax.value_and_grad(_serial)(logits, labels, weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_cross_entropy_in_bf16_keeps_float32_accuracy_near_certainty():
    logits = jnp.zeros((1, 1, 8), jnp.bfloat16).at[..., 3].set(9.0)
    labels = jnp.full((1, 1), 3)
    split = P(None, None, MODEL)
    program = on_ranks(
        1, jax.value_and_grad(lambda x, y: vocab_parallel_cross_entropy(x, y).sum()), (split, P()), (P(), split)
    )
    loss, gradient = program(logits, labels)
    exact = np.log1p(7 * np.exp(-9.0))
    assert float(loss) == pytest.approx(exact, rel=1e-3)
    assert float(gradient[0, 0, 3]) == pytest.approx(-7 * np.exp(-9.0) / (1 + 7 * np.exp(-9.0)), rel=1e-2)


# --- In chunks --------------------------------------------------------------------------------------------------------


def _output_layer(dtype=jnp.float64, scale=1.0):
    """Embedding, stream, bias, labels of which the first and the last are at the ends, and weights, some of them 0."""
    embedding = VocabParallelEmbedding(jax.random.key(0), VOCABULARY, ROWS, WIDTH, 1.0, dtype)
    labels = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    labels[0], labels[-1] = 0, VOCABULARY - 1
    weights = draw(TOKENS, seed=2) * (np.arange(TOKENS) % 3 > 0)
    x, bias = scale * draw(TOKENS, WIDTH, seed=1), draw(ROWS, seed=3)
    return embedding, x.astype(dtype), bias.astype(dtype), labels, weights


def _loss_and_gradients(ways, chunks, split, biased, given):
    embedding, x, bias, labels, weights = given
    tokens, specs = Tokens(2, TOKENS // 2, split), nnx.get_partition_spec(embedding)

    def loss(embedding, x, bias, labels, weights):
        bias = bias if biased else None
        if chunks == 1:
            losses = vocab_parallel_cross_entropy(embedding.logits(x, tokens, bias), labels)
        else:
            losses = chunked_cross_entropy(x, embedding, bias, labels, tokens, chunks)
        return (losses * weights).sum()

    of_stream = P(MODEL) if split else P()
    inputs = specs, of_stream, P(MODEL), P(), P()
    program = on_ranks(ways, jax.value_and_grad(loss, (0, 1, 2)), inputs, (P(), inputs[:3]))
    found, (to_table, to_x, to_bias) = program(embedding, x, bias, labels, weights)
    return found, to_table.table[...], to_x, to_bias


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(("chunks", "split", "biased"), [(2, False, False), (3, True, False), (5, True, True)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_in_chunks_loss_and_gradients_equal_log_softmax_of_the_tokens(ways, chunks, split, biased, scale):
    given = embedding, x, bias, labels, weights = _output_layer(scale=scale)

    def serial(table, x, bias):
        logits = x @ table.T + (bias if biased else 0)
        return _serial(logits[:, :VOCABULARY], labels, weights)

    found = _loss_and_gradients(ways, chunks, split, biased, given)
    loss, gradients = jax.value_and_grad(serial, (0, 1, 2))(embedding.table[...], x, bias)
    for one, other in zip(found, (loss, *gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12 * scale)


def test_in_chunks_the_gradient_of_the_stream_is_as_exact_in_bf16_as_in_one_product():
    given, exact = _output_layer(jnp.bfloat16), _output_layer()
    exact[0].table[...] = given[0].table[...].astype(jnp.float64)
    exact = (exact[0], given[1].astype(jnp.float64), *exact[2:])
    expected = _loss_and_gradients(1, 1, False, False, exact)
    for whole, chunked, true in zip(
        *(_loss_and_gradients(1, chunks, False, False, given) for chunks in (1, 5)), expected, strict=True
    ):
        errors = [np.abs(np.asarray(each, np.float64) - true).max() for each in (whole, chunked)]
        assert errors[1] <= 1.1 * errors[0] + 1e-6


def test_in_chunks_no_array_has_a_row_of_logits():
    embedding, x, bias, labels, _ = _output_layer()
    loss = partial(chunked_cross_entropy, bias=bias, tokens=Tokens(2, TOKENS // 2), chunks=4)

    def gradients(embedding, x, labels):
        return jax.grad(lambda embedding, x: loss(x, embedding, labels=labels).sum(), (0, 1))(embedding, x)

    specs = nnx.get_partition_spec(embedding)
    program = on_ranks(1, gradients, (specs, P(), P()), (specs, P()))
    text = program.lower(embedding, x, labels).compile().as_text()
    assert f"[{TOKENS},{ROWS // 4}]" in text
    assert f"[{TOKENS},{ROWS}]" not in text


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(64, 4, [16] * 4), (60, 4, [16, 16, 16, 12]), (50257, 4, [12568] * 3 + [12553]), (16, 8, [8, 8]), (4, 64, [4])],
)
def test_chunks_have_a_multiple_of_eight_rows_but_for_the_last(rows, chunks, sizes):
    parts = rows_of_chunks(rows, chunks)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
