"""Scores against NumPy on the full logits of one device, and on every kind of mesh against those of one device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.inference import inference_config
from mjax.models.build import build_model
from mjax.models.gpt import GPT
from mjax.parallel.axes import MODEL
from mjax.parallel.cross_entropy import vocab_parallel_argmax
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import cut_into_chunks
from mjax.tasks.interface import Score, Window
from mjax.tasks.scoring import LossScorer, Scorer
from mjax.tasks.windows import overlapping_windows
from tests.products import one_in
from tests.small import QUICKLY, small_config

POSITIONS = 128
ONE = MeshConfig()
MESHES = [
    MeshConfig(data=2, model=2, sequence_parallel=True, zero=3),
    MeshConfig(pipe=2, data=2, model=2, chunks=2),
    MeshConfig(pipe=4, model=2, zero=1),
    MeshConfig(context=2, context_attention="heads"),
    MeshConfig(context=4, context_attention="gather", data=2, model=2, sequence_parallel=True, zero=3),
    MeshConfig(context=2, context_attention="gather", pipe=2),
]


def lively(config):
    """A model whose logits differ enough from each other for some of its guesses to be right."""
    return jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model))


@cache
def scorer_and_model(mesh=ONE):
    config = inference_config(small_config(layers=4, sequence=POSITIONS), mesh, micro_batch=2)
    scorer = Scorer(config, make_mesh(mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, scorer.abstract_model)
    build = partial(jax.jit, compiler_options=QUICKLY)(lambda: cut_into_chunks(lively(config), config.mesh))
    return scorer, jax.device_put(build(), shardings)


@cache
def full_logits():
    """ids [s] → logits [s, v] of the whole forward pass on one device."""
    _, model = scorer_and_model()
    specs, mesh = nnx.get_partition_spec(model), make_mesh(ONE)
    forward = jax.shard_map(GPT.__call__, mesh=mesh, in_specs=(specs, P()), out_specs=P(None, None, MODEL))
    program = jax.jit(forward)

    def logits(ids):
        padded = np.zeros((1, POSITIONS), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(program(model, padded), np.float64)[0, : len(ids)]

    return logits


def by_numpy(windows):
    """What `Scorer.score` should give, from the definition."""
    total = Score()
    for tokens, counted in windows:
        logits = full_logits()(tokens[:-1])[-counted:]
        labels = tokens[len(tokens) - counted :]
        highest = logits.max(-1, keepdims=True)
        log_sum = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1))
        losses = log_sum - logits[np.arange(counted), labels]
        correct = logits.argmax(-1) == labels
        total += Score(losses.sum(), counted, int(correct.sum()), 1, int(correct.all()))
    return total


@cache
def windows():
    """A long text in overlapping windows, passages of which the last tokens count, some of them guessed right, and a
    window of one label: 33 in all, so that the last batch is never full."""
    random = np.random.default_rng(0)
    text = random.integers(0, 60, 3 * POSITIONS + 5).astype(np.int32)
    found = overlapping_windows(text, POSITIONS, 31)
    for number in range(33 - 1 - len(found)):
        ids = random.integers(0, 60, 5 + 3 * number).astype(np.int32)
        likely = full_logits()(ids).argmax(-1)
        counted = 1 + number % 3
        if number % 2 == 0:  # the model's own guess, of one token: the others follow from the true ones before them
            ids[-1] = likely[-2]
            counted = 1 if number % 4 == 0 else 2
        found.append(Window(ids, counted))
    return [*found, Window(text[:2], 1)]


def assert_same(ours, theirs):
    counts = [(score.labels, score.correct, score.windows, score.right) for score in (ours, theirs)]
    assert counts[0] == counts[1]
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def test_scores_are_those_of_numpy_on_the_full_logits():
    scorer, model = scorer_and_model()
    expected = by_numpy(windows())
    assert expected.windows == 33
    assert 0 < expected.right < 33
    assert 1 < expected.correct < expected.labels / 2
    assert_same(scorer.score(model, windows()), expected)


@pytest.mark.parametrize("mesh", one_in(3, MESHES), ids=str)
def test_every_mesh_scores_what_one_device_does(mesh):
    scorer, model = scorer_and_model(mesh)
    assert_same(scorer.score(model, windows()), by_numpy(windows()))


@pytest.mark.parametrize("mesh", [ONE, MESHES[0], *MESHES[3:]], ids=str)
def test_losses_of_single_labels_are_those_of_numpy_and_of_every_mesh(mesh):
    scorer, model = scorer_and_model(mesh)
    losses = LossScorer(scorer.config, make_mesh(mesh)).score_each(model, windows()[:3])
    for found, window in zip(losses, windows(), strict=False):
        assert found.shape == (window.counted,)
        for last in (window.counted, window.counted - 30):  # that the order is right too
            expected = by_numpy([Window(window.tokens[: len(window.tokens) - window.counted + last], last)])
            assert found[:last].sum() == pytest.approx(expected.loss, rel=1e-4)


def test_the_scores_of_passes_are_those_of_each_by_itself():
    scorer, model = scorer_and_model()
    passes = [windows()[:3], windows()[3:20], []]
    for ours, theirs in zip(scorer(model, passes), passes, strict=True):
        assert_same(ours, scorer.score(model, theirs))


def test_what_fills_the_last_batch_counts_nothing_and_every_window_is_reported_once():
    scorer, model = scorer_and_model()
    one = scorer.score(model, windows()[:1])
    assert (one.windows, one.labels) == (1, POSITIONS)
    assert_same(one, by_numpy(windows()[:1]))
    reported = []
    scorer.score(model, windows(), reported.append)
    assert sum(reported) == 33
    assert scorer.score(model, []) == Score()


def test_short_windows_are_padded_to_half_the_width_and_score_the_same():
    scorer, model = scorer_and_model()
    short = [window for window in windows() if len(window.tokens) <= 65]
    assert {width for width, _ in scorer._batches(windows())} == {64, 128}
    assert {width for width, _ in scorer._batches(short)} == {64}
    assert_same(scorer.score(model, short), by_numpy(short))


def test_a_width_that_sequence_parallelism_cannot_split_is_not_used():
    config = inference_config(
        small_config(layers=4, sequence=96, heads=3, hidden=48, vocabulary_multiple=96, feed_forward=96),
        MeshConfig(model=3, sequence_parallel=True),
        micro_batch=1,
    )
    scorer = Scorer(config, make_mesh(config.mesh))
    assert [width for width, _ in scorer._batches([Window(np.arange(5), 1)])] == [96]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_highest_of_split_logits_is_found_and_of_equal_ones_the_lowest_id(ranks):
    logits = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    logits[:40] = logits[:40].round()  # many are equal, on one rank and across ranks
    logits[0] = -np.inf
    logits[1] = 0
    mesh = make_mesh(MeshConfig(model=ranks))
    found = jax.shard_map(vocab_parallel_argmax, mesh=mesh, in_specs=P(None, MODEL), out_specs=P())(jnp.asarray(logits))
    np.testing.assert_array_equal(np.asarray(found), logits.argmax(-1))


def test_the_config_of_a_run_is_evaluated_without_dropout_and_fills_a_pipeline():
    trained = small_config(global_batch=8, micro_batch=2)
    trained = replace(trained, train=replace(trained.train, batch_rampup=(2, 2, 100)))
    config = inference_config(trained, MeshConfig(pipe=2, data=2))
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0, 0)
    assert (config.train.micro_batch, config.micro_batches, config.train.global_batch) == (2, 8, 32)
