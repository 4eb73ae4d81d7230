"""Each parallel layer against its serial twin in float64, on meshes that split it one, four and eight ways."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.models.norms import LayerNorm
from mjax.parallel import mappings
from mjax.parallel.axes import MODEL
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mjax.parallel.tokens import Tokens
from tests.parallel.on_ranks import draw, on_ranks

WAYS = [1, 4, 8]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("ways", WAYS)
def test_column_then_row_is_a_plain_two_layer_mlp(ways):
    keys = jax.random.split(jax.random.key(1))
    up = ColumnParallelLinear(keys[0], 6, (16,), 0, 1.0, jnp.float64)
    down = RowParallelLinear(keys[1], (16,), 6, 1.0, jnp.float64)
    layers, x, tokens = {"up": up, "down": down}, draw(6, 6), Tokens(2, 3)
    specs = nnx.get_partition_spec(layers)

    def parallel(layers, x):
        return layers["down"](jnp.tanh(layers["up"](x, tokens)), tokens)

    def serial(layers, x):
        hidden = jnp.tanh(x @ layers["up"].kernel[...] + layers["up"].bias[...])
        return hidden @ layers["down"].kernel[...] + layers["down"].bias[...]

    def with_gradients(function, layers, x):
        return jax.value_and_grad(lambda layers, x: jnp.square(function(layers, x)).sum(), argnums=(0, 1))(layers, x)

    found = on_ranks(ways, partial(with_gradients, parallel), (specs, P()), (P(), (specs, P())))(layers, x)
    expected = with_gradients(serial, layers, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("ways", WAYS)
def test_the_embedding_is_a_lookup_and_its_logits_a_product(ways):
    embedding = VocabParallelEmbedding(jax.random.key(0), 24, 24, 6, 1.0, jnp.float64)
    ids, tokens = np.random.default_rng(0).integers(0, 24, (2, 5)), Tokens(2, 5)
    specs = nnx.get_partition_spec(embedding)
    look = on_ranks(ways, lambda e, ids: e(ids, tokens), (specs, P()), P())
    score = on_ranks(ways, lambda e, x: e.logits(x, tokens), (specs, P()), P(None, MODEL))
    table = np.asarray(embedding.table[...])
    rows = table[ids.reshape(-1)]
    np.testing.assert_array_equal(look(embedding, ids), rows)
    np.testing.assert_allclose(score(embedding, rows), rows @ table.T, rtol=1e-12)


def test_layer_norm_is_the_textbook_formula():
    norm = LayerNorm(12, 1e-5, jnp.float64)
    norm.scale[...], norm.bias[...] = draw(12, seed=1), draw(12, seed=2)
    x = draw(2, 3, 12)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * norm.scale[...] + norm.bias[...]
    np.testing.assert_allclose(jax.jit(lambda norm, x: norm(x))(norm, x), expected, rtol=1e-12)


def test_f_and_g_are_each_others_transpose():
    def transposes(x, y):
        _, f_transposed = jax.vjp(mappings.enter, x)
        _, g_transposed = jax.vjp(mappings.leave, y)
        return f_transposed(y)[0] - mappings.leave(y), g_transposed(x)[0] - mappings.enter(x)

    first, second = on_ranks(4, transposes, (P(), P(MODEL)), (P(), P(MODEL)))(draw(8), draw(32))
    assert not np.any(first)
    assert not np.any(second)


def test_f_and_g_of_sequence_parallelism_are_each_others_transpose():
    tokens = Tokens(2, 4, split=True)

    def transposes(rows, partial):  # rows [t / p, h], partial [t, h] a rank
        _, f_transposed = jax.vjp(tokens.enter, rows)
        _, g_transposed = jax.vjp(tokens.leave, partial)
        return f_transposed(partial)[0] - tokens.leave(partial), g_transposed(rows)[0] - tokens.enter(rows)

    both = on_ranks(4, transposes, (P(MODEL), P(MODEL)), (P(MODEL), P(MODEL)))(draw(8, 3), draw(32, 3))
    assert not any(map(np.any, both))


def test_a_gather_and_a_scatter_of_tokens_are_an_all_reduce():
    tokens = Tokens(2, 4, split=True)

    def both(partial):
        return tokens.enter(tokens.leave(partial)) - mappings.vary(mappings.leave(partial), frozenset({MODEL}))

    assert np.abs(on_ranks(4, both, (P(MODEL),), P(MODEL))(draw(32, 3))).max() < 1e-14


@pytest.mark.parametrize(
    ("function", "spec", "words"),
    [
        (mappings.enter, P(MODEL), "a leave\\(\\) is missing"),
        (mappings.leave, P(), "already the same on every rank"),
        (mappings.gather_tokens, P(), "the same on every rank"),
        (mappings.scatter_tokens, P(), "already complete"),
    ],
)
def test_f_and_g_refuse_what_would_be_silently_wrong(function, spec, words):
    with pytest.raises(ValueError, match=words):
        on_ranks(4, function, (spec,), P())(draw(8))
