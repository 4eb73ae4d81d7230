"""Scores against NumPy on the full logits of one device, on one device and on meshes."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.config.axes import MODEL
from mjax.generation.inference import inference_config
from mjax.models.build import abstract_weights, build_model
from mjax.models.gpt.model import GPT
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import split_into_virtual_stages
from mjax.tasks.interface import ContextWindow, Score, split_into_windows
from mjax.tasks.scoring import PROGRAM_COST, LossScorer, Scorer, choose_widths, vocab_parallel_argmax
from tests.small import QUICKLY, small_config

POSITIONS = 128
ONE = MeshConfig()
THREE_AXES = MeshConfig(pipe=2, data=2, model=2, sequence_parallel=True, zero=3)
GATHERED = MeshConfig(context=4, context_attention="allgather", data=2, model=2, sequence_parallel=True, zero=3)
OTHERS = [
    MeshConfig(pipe=2, data=2, model=2, virtual_stages=2),
    MeshConfig(context=2, context_attention="ulysses"),
    GATHERED,
]


def lively(config):
    """A model whose logits differ enough from each other for some of its guesses to be right."""
    return jax.tree.map(lambda weight: weight * 8 + 0.02, build_model(5, config.model))


@cache
def scorer_and_model(mesh=ONE):
    config = inference_config(small_config(layers=4, sequence=POSITIONS), mesh, micro_batch=2)
    scorer = Scorer(config, make_mesh(mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, scorer.abstract_model)
    build = partial(jax.jit, compiler_options=QUICKLY)(lambda: split_into_virtual_stages(lively(config), config.mesh))
    return scorer, jax.device_put(build(), shardings)


@cache
def full_logits():
    """ids [s] → logits [s, v] of the whole forward pass on one device."""
    _, model = scorer_and_model()
    specs, mesh = nnx.get_partition_spec(model), make_mesh(ONE)
    program = jax.jit(jax.shard_map(GPT.__call__, mesh=mesh, in_specs=(specs, P()), out_specs=P(None, None, MODEL)))

    def logits(ids):
        padded = np.zeros((1, POSITIONS), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(program(model, padded), np.float64)[0, : len(ids)]

    return logits


def by_numpy(windows):
    """Return the scores from the definition, in NumPy."""
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
    """33 windows, so that the last batch is never full: a long text in overlapping windows, passages whose last tokens
    count, some of them guessed right, and a window of one label."""
    random = np.random.default_rng(0)
    text = random.integers(0, 60, 3 * POSITIONS + 5).astype(np.int32)
    found = split_into_windows(text, POSITIONS, 31)
    for number in range(33 - 1 - len(found)):
        ids = random.integers(0, 60, 5 + 3 * number).astype(np.int32)
        likely = full_logits()(ids).argmax(-1)
        counted = 1 + number % 3
        if number % 2 == 0:  # the model's own guess, of one token: the others follow from the true ones before them
            ids[-1] = likely[-2]
            counted = 1 if number % 4 == 0 else 2
        found.append(ContextWindow(ids, counted))
    return [*found, ContextWindow(text[:2], 1)]


def assert_same(ours, theirs):
    counts = [(score.labels, score.correct, score.windows, score.all_correct) for score in (ours, theirs)]
    assert counts[0] == counts[1]
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


@pytest.mark.parametrize(
    "mesh", [ONE, THREE_AXES, *(pytest.param(mesh, marks=pytest.mark.ci) for mesh in OTHERS)], ids=str
)
def test_scorer_equals_numpy(mesh):
    """Every pass separately, full and short windows, and a last batch that is filled up."""
    scorer, model = scorer_and_model(mesh)
    reported, passes = [], [windows(), windows()[3:20], windows()[:1], []]
    for found, of_pass in zip(scorer(model, passes, reported.append), passes, strict=True):
        assert_same(found, by_numpy(of_pass))
    assert sum(reported) == 33 + 17 + 1
    whole = by_numpy(windows())
    assert 0 < whole.all_correct < 33
    assert 1 < whole.correct < whole.labels / 2


def test_loss_scorer_equals_numpy_at_each_label():
    scorer, model = scorer_and_model(GATHERED)
    (losses,) = LossScorer(scorer.config, make_mesh(GATHERED))(model, [windows()[1:4]])
    for found, window in zip(losses, windows()[1:], strict=False):
        assert found.shape == (window.counted,)
        for last in (window.counted, window.counted - 20):  # that the order is right too
            expected = by_numpy([ContextWindow(window.tokens[: len(window.tokens) - window.counted + last], last)])
            assert found[:last].sum() == pytest.approx(expected.loss, rel=1e-4)


def test_labels_of_a_window_are_summed_in_float64(monkeypatch):
    losses = np.array([2.0**24, 1.0, 1.0], np.float32)
    monkeypatch.setattr(Scorer, "score_labels", lambda *_: [np.stack([losses, np.ones(3, np.float32)], axis=-1)])
    scorer, model = scorer_and_model()
    assert scorer.score_each(model, [ContextWindow(np.arange(9), 3)]) == [Score(2.0**24 + 2, 3, 3, 1, 1)]


def test_batches_are_as_wide_as_their_longest_window():
    scorer, _ = scorer_and_model()
    batches = list(scorer._batches(windows()))
    assert sorted(index for *_, indices in batches for index in indices) == list(range(33))
    longest = [max(len(windows()[index].tokens) - 1 for index in indices) for *_, indices in batches]
    assert longest == sorted(longest, reverse=True)
    assert all(width >= needed for (width, *_), needed in zip(batches, longest, strict=True))
    config = inference_config(
        small_config(layers=4, sequence=96, heads=3, hidden=48, vocabulary_multiple=96, feed_forward=96),
        MeshConfig(model=3, sequence_parallel=True),
        micro_batch=1,
    )
    uneven = Scorer(config, make_mesh(config.mesh))
    assert [width for width, *_ in uneven._batches([ContextWindow(np.arange(5), 1)])] == [18]


def test_programs_and_positions_cost_least():
    """Against every choice of batches at which a program begins."""
    random = np.random.default_rng(2)
    for count in (0, 1, 2, 9, 10):
        needed = sorted(16 * random.integers(1, 12, count), reverse=True)
        mean = sum(needed) / max(count, 1)

        def cost(widths, mean=mean):
            return sum(widths) + PROGRAM_COST * mean * len(set(widths))

        found = choose_widths(needed)
        assert all(width >= least for width, least in zip(found, needed, strict=True))
        ways = []
        for begins in product((False, True), repeat=max(count - 1, 0)):
            widths = needed[:1]
            for width, begin in zip(needed[1:], begins, strict=True):
                widths.append(width if begin else widths[-1])
            ways.append(cost(widths))
        assert cost(found) == pytest.approx(min(ways))


@pytest.mark.parametrize("ranks", [1, 4])
def test_argmax_of_split_logits_takes_lowest_id(ranks):
    logits = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    logits[:40] = logits[:40].round()  # many are equal, on one rank and across ranks
    logits[0] = -np.inf
    logits[1] = 0
    mesh = make_mesh(MeshConfig(model=ranks))
    found = jax.shard_map(vocab_parallel_argmax, mesh=mesh, in_specs=P(None, MODEL), out_specs=P())(jnp.asarray(logits))
    np.testing.assert_array_equal(np.asarray(found), logits.argmax(-1))


def test_inference_config_fills_pipeline_without_dropout():
    trained = small_config(global_batch=8, micro_batch=2)
    trained = replace(trained, train=replace(trained.train, batch_rampup=(2, 2, 100)))
    config = inference_config(trained, MeshConfig(pipe=2, data=2))
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0, 0)
    assert (config.train.micro_batch, config.micro_batches, config.train.global_batch) == (2, 8, 32)


@pytest.mark.parametrize(("kind", "sequence"), [("gpt", 32), ("bert", 16)])
def test_inference_config_has_all_positions_of_text(kind, sequence):
    trained = small_config(kind=kind, sequence=16)
    trained = replace(trained, model=replace(trained.model, max_position_embeddings=32))
    config = inference_config(trained, MeshConfig())
    assert config.model.sequence == sequence
    assert abstract_weights(config.model)["positions"][0][0] == 32
