"""Training while the batch grows: the same samples and the same rates as by hand, and exact after a restart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.batch_size import BatchSizes
from mjax.data.samples import MockDataset
from mjax.parallel.mesh import make_mesh
from mjax.training import loop
from mjax.training.metrics import read_metrics
from mjax.training.schedule import learning_rate
from mjax.training.step import build_program
from tests.small import small_config

pytestmark = pytest.mark.usefixtures("quick_runs")

SIZES = [4, 4, 6, 6, 8, 8]  # 8 samples for each of two increments


def _config(steps=6, **optimizer):
    config = small_config(2, 8, micro_batch=1)
    return replace(
        config,
        optimizer=replace(config.optimizer, warmup_steps=3, decay_steps=6, **optimizer),
        train=replace(
            config.train, steps=steps, global_batch=8, batch_rampup=(4, 2, 16), eval_interval=4, eval_batches=1
        ),
        log=replace(config.log, tensorboard=False, sample_tokens=0),
    )


def _records(folder):
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def ramped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramped") / "run"
    config = _config()
    assert [BatchSizes.of(config).size(step) for step in range(len(SIZES))] == SIZES
    result = loop.train(config, folder)
    return result, _records(folder)


@pytest.mark.ci
def test_a_ramp_is_the_steps_by_hand_over_the_same_samples(ramped):
    config, (result, records) = _config(), ramped
    model, mesh = config.model, make_mesh(config.mesh)
    programs = {size: build_program(config, mesh, batch=size) for size in set(SIZES)}
    data, samples = MockDataset(model.vocabulary, model.sequence, config.train.seed), iter(range(sum(SIZES)))
    state, losses = programs[8].initialize(), []
    for size in SIZES:
        rows = np.stack([data[next(samples)] for _ in range(size)])
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        state, metrics = programs[size].train_step(state, programs[size].on_devices(batch))
        losses.append(float(metrics.loss))
    assert [record["loss"] for record in records] == losses
    assert int(result.state.samples) == int(state.samples) == sum(SIZES)


def test_tokens_and_rates_follow_the_samples(ramped):
    _, records = ramped
    config = _config()
    seen = np.cumsum([0, *SIZES])
    assert [record["tokens"] for record in records] == (seen[1:] * 16).tolist()
    rates = [float(learning_rate(config, jnp.int32(n))) for n in seen[:-1]]
    assert [record["learning_rate"] for record in records] == pytest.approx(rates, rel=1e-6)
    for record, size in zip(records, SIZES, strict=True):
        assert record["tokens_per_second"] == pytest.approx(size * 16 / record["seconds"])
    per_token = [record["tflops"] / record["tokens_per_second"] for record in records]
    assert per_token == pytest.approx([per_token[0]] * len(SIZES))


@pytest.mark.parametrize("steps", [3, pytest.param(5, marks=pytest.mark.ci)])
def test_a_run_that_stops_in_the_middle_of_a_ramp_continues_bit_for_bit(ramped, tmp_path, steps, capsys):
    folder = tmp_path / "run"
    loop.train(_config(steps), folder)
    capsys.readouterr()
    result = loop.train(_config(), folder)
    said = capsys.readouterr().out
    assert f"continued after step {steps}" in said
    assert f"batch {SIZES[steps]} from step {steps + 1}: compiling" in said
    assert [record["loss"] for record in _records(folder)] == [record["loss"] for record in ramped[1]]
    assert result.validation_loss == ramped[0].validation_loss
    for ours, theirs in zip(jax.tree.leaves(result.state), jax.tree.leaves(ramped[0].state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- The clock of the learning rate -----------------------------------------------------------------------------------


def test_warm_up_and_decay_end_after_as_many_steps_as_the_config_says():
    config = _config()
    rates = [float(learning_rate(config, jnp.int32(n))) for n in np.cumsum([0, *SIZES, 8])]
    peak, floor = config.optimizer.learning_rate, config.optimizer.min_learning_rate
    assert rates[0] == 0
    assert rates[1] == pytest.approx(peak * 4 / 14)  # the first three steps have 14 samples
    assert rates[3] == pytest.approx(peak)
    assert peak > rates[5] > floor
    assert rates[6] == rates[7] == pytest.approx(floor)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_square_root", "wsd"])
def test_a_schedule_of_one_size_changes_no_bit_of_the_learning_rate(schedule):
    samples = range(0, 100, 3)
    config = _config(schedule=schedule)
    plain = replace(config, train=replace(config.train, batch_rampup=None))
    same = replace(config, train=replace(config.train, batch_rampup=None, batch_schedule="0:8"))
    traced = [str(jax.make_jaxpr(lambda n, c=c: learning_rate(c, n, jnp))(jnp.int32(0))) for c in (plain, same)]
    assert traced[0] == traced[1]
    assert [float(learning_rate(plain, jnp.int32(n))) for n in samples] == [
        float(learning_rate(same, jnp.int32(n))) for n in samples
    ]


def test_the_decay_of_wsd_is_the_samples_of_its_last_steps():
    config = _config(schedule="wsd", wsd_decay_steps=2, wsd_decay="linear")
    before = sum(SIZES[:4])
    peak, floor = config.optimizer.learning_rate, config.optimizer.min_learning_rate
    rates = [float(learning_rate(config, jnp.int32(n))) for n in (before, before + 8, before + 16)]
    assert rates == pytest.approx([peak, (peak + floor) / 2, floor])
