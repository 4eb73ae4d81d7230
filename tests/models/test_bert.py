"""What a BERT sees: text on both sides, its type and its place, and no padding."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.models.build import build_model
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from tests.small import QUICKLY, pairs_of, small_config

CONFIG = small_config(model=2, kind="bert", attention="xla_blocks")


@pytest.fixture(scope="module")
def scores():
    """(a batch) → scores of its tokens and of its order."""
    build = jax.jit(lambda: jax.tree.map(lambda w: w * 5 + 0.01, build_model(0, CONFIG.model)))
    forward = jax.shard_map(
        lambda weights, *arrays: weights(*arrays),
        mesh=make_mesh(CONFIG.mesh),
        in_specs=(nnx.get_partition_spec(jax.eval_shape(build)), P(), P(), P()),
        out_specs=(P(None, None, MODEL), P()),
    )
    forward, weights = jax.jit(forward, compiler_options=QUICKLY), build()
    return lambda batch: [np.asarray(x) for x in forward(weights, *(batch[n] for n in ("tokens", *NAMES)))]


NAMES = ("token_types", "documents")
BATCH = pairs_of(CONFIG, 0)


def _with(name, rows, places, value):
    changed = BATCH[name].copy()
    changed[rows, places] = value
    return BATCH | {name: changed}


def test_padding_has_no_influence_on_text(scores):
    before, changed = scores(BATCH), np.where(BATCH["documents"] == 1, 7, BATCH["tokens"]).astype(np.int32)
    after, text = scores(BATCH | {"tokens": changed}), BATCH["documents"] == 0
    assert (changed != BATCH["tokens"]).any()
    np.testing.assert_array_equal(after[0][text], before[0][text])
    np.testing.assert_array_equal(after[1], before[1])


def test_a_token_is_seen_from_both_sides_and_by_the_order_head(scores):
    before = scores(BATCH)
    after = scores(_with("tokens", 0, 9, (BATCH["tokens"][0, 9] + 1) % 60))
    assert (np.abs(after[0][0] - before[0][0]).max(-1) > 1e-4).all()  # at every position
    assert np.abs(after[1][0] - before[1][0]).max() > 1e-4
    np.testing.assert_array_equal(after[0][1:], before[0][1:])  # and in no other sample


def test_the_type_of_a_token_makes_a_difference(scores):
    after = scores(_with("token_types", 0, 0, 1))
    assert np.abs(after[1][0] - scores(BATCH)[1][0]).max() > 1e-4
