"""BLOOM's variant of the GPT: ALiBi's slopes and penalty, the serial reference on every kind of mesh, what it costs."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.models.attention import KeyValues, attend_cached
from mjax.models.attention_kernels import attend
from mjax.models.build import build_model
from mjax.models.positions import alibi_slopes
from mjax.names import leaf_name
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from mjax.planner.comms import ledger
from tests.against_reference import largest_error
from tests.products import seldom
from tests.small import BLOOM, QUICKLY, batch_of, packing_of, small_config
from tests.traced import equations, traced_step

# --- Slopes and penalty -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, np.arange(1, 17) / 2),
        (112, [*np.arange(1, 65) / 8, *np.arange(1, 97, 2) / 16]),
    ],
)
def test_slopes_are_those_of_the_paper_for_any_number_of_heads(heads, exponents):
    np.testing.assert_allclose(alibi_slopes(heads), 0.5 ** np.array(exponents), rtol=1e-15)


def _inputs(positions=16, heads=3):
    return [jax.random.normal(key, (2, positions, heads, 8)) for key in jax.random.split(jax.random.key(0), 3)]


def _textbook(q, k, v, documents=None, slopes=None):
    """Softmax(q kᵀ / √d − m (i − j)) v, in float64."""
    slopes = alibi_slopes(q.shape[2]) if slopes is None else np.array(slopes)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    place = np.arange(q.shape[1])
    scores = np.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(8)
    scores = scores - slopes[:, None, None] * (place[:, None] - place)
    visible = np.tril(np.ones((1, len(place), len(place)), bool))
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None])
    weights = np.exp(np.where(visible[:, None], scores, -np.inf))
    return np.einsum("bnqk,bknd->bqnd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
@pytest.mark.parametrize("positions", [16, 13])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_equal_the_textbook_formula(kernel, positions, packed):
    q, k, v = _inputs(positions)
    documents = np.sort(np.random.default_rng(0).integers(0, 4, (2, positions))) if packed else None
    found = attend(q, k, v, kernel, documents=documents, slopes=jnp.asarray(alibi_slopes(3)))
    np.testing.assert_allclose(found, _textbook(q, k, v, documents), atol=2e-6)


def test_far_from_the_beginning_the_penalty_is_as_exact_as_near_it():
    q, k, v = (x[:1] for x in _inputs(positions=2048, heads=1))
    found = attend(q, k, v, "xla", slopes=jnp.array([1.0]))
    np.testing.assert_allclose(found, _textbook(q, k, v, slopes=[1.0]), atol=2e-6)


def test_a_position_after_a_cache_attends_as_the_last_of_a_whole_sequence():
    q, k, v = _inputs()
    lengths, slopes = jnp.array([15, 9]), jnp.asarray(alibi_slopes(3))
    rows = jnp.arange(2)
    last = [x[rows, lengths][:, None] for x in (q, k, v)]
    # What lies behind the cached positions is nobody's: it must not matter.
    found = attend_cached(
        *last, KeyValues(k.at[0, 15].set(9.0).at[1, 9:].set(9.0), v.at[1, 9:].set(9.0)), lengths, jnp.arange(16), slopes
    )
    np.testing.assert_allclose(found[:, 0], _textbook(q, k, v)[rows, lengths], atol=2e-6)


# --- Loss and gradients -----------------------------------------------------------------------------------------------


SIX = {"vocabulary_multiple": 6}  # ranks of `model`: a head each


@pytest.mark.ci
@pytest.mark.parametrize(
    ("data", "model", "recompute", "mesh", "changes"),
    [
        (1, 1, "none", {}, {"dropout": 0.1}),
        (2, 2, "full", {}, {"attention": "xla_blocks"}),
        (1, 6, "selective", {"sequence_parallel": True}, {"micro_batch": 3, "global_batch": 6, **SIX}),
        (2, 2, "none", {"sequence_parallel": True, "zero": 3}, {"micro_batch": 2, "dropout": 0.1}),
        (2, 2, "none", {"pipe": 2}, {}),
    ],
)
def test_loss_and_every_gradient_equal_the_serial_reference(data, model, recompute, mesh, changes):
    changes = {"dropout": 0.0, **BLOOM, **changes}
    errors = largest_error(small_config(data, model, recompute=recompute, compute="fp64", mesh=mesh, **changes))
    assert "embedding_norm.scale" in errors
    assert "positions" not in errors
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.ci
@pytest.mark.parametrize("option", ["positions", "embedding_layernorm"])
def test_each_option_alone_equals_the_serial_reference(option):
    errors = largest_error(small_config(1, 2, micro_batch=4, compute="fp64", **{option: BLOOM[option]}))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("schedule", "chunks", "zero", "recompute"),
    seldom(product(("gpipe", "1f1b", "zb-h1"), (1, 2), (0, 3), ("none", "selective", "full"))),
)
def test_every_schedule_equals_the_serial_reference(schedule, chunks, zero, recompute):
    mesh = {"pipe": 2, "schedule": schedule, "chunks": chunks, "zero": zero, "sequence_parallel": bool(zero)}
    errors = largest_error(small_config(2, 2, recompute=recompute, compute="fp64", mesh=mesh, layers=4, **BLOOM))
    assert max(errors.values()) < 1e-12, errors


# --- What it means ----------------------------------------------------------------------------------------------------


def test_kept_apart_the_documents_of_a_sample_have_the_logits_they_have_alone_though_no_position_begins_anew():
    config = small_config(model=2, **BLOOM)
    build = jax.jit(lambda: build_model(0, config.model))
    forward = jax.shard_map(
        lambda weights, tokens, packing: weights(tokens, **packing),
        mesh=make_mesh(config.mesh),
        in_specs=(nnx.get_partition_spec(jax.eval_shape(build)), P(), P()),
        out_specs=P(None, None, MODEL),
    )
    logits = jax.jit(forward, compiler_options=QUICKLY)
    tokens, documents = batch_of(config)["tokens"], packing_of(8, 16)["documents"]
    packed = np.asarray(logits(build(), tokens, {"documents": documents}))
    places = [(row, documents[row] == document) for row in (0, 4) for document in range(4)]
    samples = np.stack([np.concatenate([tokens[row][own], np.full((~own).sum(), 7)]) for row, own in places])
    alone = logits(build(), samples, {})
    for (row, own), found in zip(places, np.asarray(alone), strict=True):
        np.testing.assert_allclose(found[: own.sum()], packed[row][own], atol=2e-6)


def test_the_weights_are_a_gpts_but_for_the_positions_and_the_layer_norm():
    def names(**changes):
        model = jax.eval_shape(lambda: build_model(0, small_config(**changes).model))
        return {leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]}

    assert names() - names(**BLOOM) == {"positions"}
    assert names(**BLOOM) - names() == {"embedding_norm.scale", "embedding_norm.bias"}


# --- What it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{}, {"sequence_parallel": True}])
def test_nothing_more_crosses_between_the_ranks_of_a_layer(mesh):
    # Learned positions against ALiBi; the LayerNorm has weights, whose gradients are summed as others are.
    found = [
        sorted((c.operation, c.axes, c.shape, c.count) for c in ledger(config).records if "model" in c.axes and c.loops)
        for config in (small_config(2, 2, mesh=mesh), small_config(2, 2, mesh=mesh, positions="alibi"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_keeps_nothing_of_the_penalty_for_its_backward_pass(recompute):
    def kept(**changes):
        config = small_config(model=2, recompute=recompute, compute="bf16", layers=3, **changes)
        forward = next(e for e in equations(traced_step(config)[1], "scan") if e.params["length"] == 3)
        stacked = [variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (3,)]
        return sorted((aval.shape, str(aval.dtype)) for aval in stacked)

    assert kept(positions="alibi") == kept()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_layer_computes_the_penalty_rather_than_read_it_from_memory(recompute):
    step = traced_step(small_config(model=2, recompute=recompute, layers=3, **BLOOM))[1]
    loops = [equation.params for equation in equations(step, "scan") if equation.params["length"] == 3]
    inside = sum(_penalties(loop["jaxpr"].jaxpr) for loop in loops)
    assert _penalties(step) == inside > 0


def _penalties(jaxpr):
    """How often it computes the penalty of a rank's three heads."""
    return sum(equation.outvars[0].aval.shape == (3, 16, 16) for equation in equations(jaxpr, "mul"))
