"""The loss in chunks of the vocabulary against torch's cross entropy, with the gradients, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.axes import MODEL
from mjax.parallel.cross_entropy import chunked_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.mesh import make_mesh
from mjax.parallel.tokens import Tokens

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")

ROWS, VOCABULARY, WIDTH, TOKENS = 96, 90, 12, 20


@pytest.mark.parametrize(("ways", "chunks"), [(1, 2), (4, 5)])
def test_chunked_loss_and_gradients_equal_torch(ways, chunks):
    random = np.random.default_rng(0)
    x, table, bias = random.normal(size=(TOKENS, WIDTH)), random.normal(size=(ROWS, WIDTH)), random.normal(size=ROWS)
    labels, mask = random.integers(0, VOCABULARY, TOKENS), random.integers(0, 2, TOKENS).astype(bool)

    given = [torch.tensor(each, requires_grad=True) for each in (x, table, bias)]
    logits = (given[0] @ given[1].T + given[2])[:, :VOCABULARY]
    ignored = torch.tensor(np.where(mask, labels, -100))
    expected = torch.nn.functional.cross_entropy(logits, ignored, reduction="sum")
    expected.backward()

    def loss(x, embedding, bias, labels, mask):
        losses = chunked_cross_entropy(x, embedding, bias, labels, Tokens(1, TOKENS), chunks)
        return losses.sum(where=mask)

    with jax.enable_x64(True):
        embedding = VocabParallelEmbedding(jax.random.key(0), VOCABULARY, ROWS, WIDTH, 1.0, jnp.float64)
        embedding.table[...] = jnp.asarray(table)
        specs = P(), nnx.get_partition_spec(embedding), P(MODEL)
        program = jax.shard_map(
            jax.value_and_grad(loss, (0, 1, 2)),
            mesh=make_mesh(MeshConfig(model=ways)),
            in_specs=(*specs, P(), P()),
            out_specs=(P(), specs),
        )
        found, gradients = jax.jit(program)(x, embedding, bias, labels, mask)
    np.testing.assert_allclose(found, expected.item(), rtol=1e-12)
    for gradient, leaf in zip(jax.tree.leaves(gradients), given, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-12)
