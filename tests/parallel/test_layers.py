"""Each parallel layer against its serial twin in float64, on meshes that split it one, four and eight ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config.axes import MODEL
from mjax.parallel import mappings
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.token_layout import TokenLayout
from tests.parallel.on_ranks import draw, on_ranks


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_embedding_is_lookup_and_logits_are_product():
    """The last rank has two rows of padding, which no softmax may see."""
    embedding = VocabParallelEmbedding(jax.random.key(0), 22, 24, 6, 1.0, jnp.float64)
    ids, tokens = np.arange(22).reshape(2, 11), TokenLayout(2, 11)

    def both(embedding, ids):
        x = embedding(ids, tokens)
        return x, embedding.logits(x, tokens)

    specs = nnx.get_partition_spec(embedding)
    rows, logits = on_ranks(4, both, (specs, P()), (P(), P(None, MODEL)))(embedding, ids)
    table = np.asarray(embedding.table[...])[:22]
    np.testing.assert_array_equal(rows, table)
    np.testing.assert_allclose(logits[:, :22], table @ table.T, rtol=1e-12)
    assert (logits[:, 22:] == np.finfo(np.float64).min).all()


@pytest.mark.parametrize(
    ("function", "spec", "words"),
    [
        (mappings.copy_to_region, P(MODEL), r"a reduce_from_region\(\) is missing"),
        (mappings.reduce_from_region, P(), "already the same on every rank"),
        (mappings.all_gather_tokens, P(), "the same on every rank"),
        (mappings.reduce_scatter_tokens, P(), "already complete"),
    ],
)
def test_mappings_refuse_what_would_be_wrong(function, spec, words):
    with pytest.raises(ValueError, match=words):
        on_ranks(4, function, (spec,), P())(draw(8))
