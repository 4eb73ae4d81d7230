"""Training while the batch grows: the same samples and the same rates as by hand, and exact after a restart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mjax
from mjax.config import read_config
from mjax.config.batch_size import BatchSizes
from mjax.data.samples import MockDataset
from mjax.parallel.mesh import make_mesh
from mjax.run import loop
from mjax.run.loop import Options
from mjax.run.metrics import read_metrics
from mjax.step.learning_rate import learning_rate
from tests.callbacks import StopAt
from tests.small import small_config

pytestmark = pytest.mark.usefixtures("quick_runs", "fewer_devices")

SIZES = [4, 4, 4, 4, 8, 8]
SAMPLES = np.cumsum([0, *SIZES])


def _config(**optimizer):
    config = small_config(micro_batch=4, layers=1)
    return replace(
        config,
        optimizer=replace(config.optimizer, warmup_steps=3, decay_steps=6, **optimizer),
        train=replace(config.train, steps=6, global_batch=8, batch_rampup=(4, 4, 16), eval_interval=0),
        log=replace(config.log, tensorboard=False, sample_tokens=0),
    )


def _rates(config, samples):
    return [float(learning_rate(config, jnp.int32(n), jnp)) for n in samples]


def by_hand(config, sizes):
    """The state after steps of these sizes on samples 0, 1, …, and the loss of each."""
    mesh = make_mesh(config.mesh)
    programs = {size: loop.build_program(config, mesh, size, optimizer=None, loss=None) for size in set(sizes)}
    data, samples = MockDataset(config.model.vocabulary, config.model.sequence, config.train.seed), iter(range(99))
    state, losses = programs[sizes[0]].initialize(), []
    for size in sizes:
        rows = np.stack([data[next(samples)] for _ in range(size)])
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        state, metrics = programs[size].train_step(state, programs[size].put_on_devices(batch))
        losses.append(float(metrics.loss))
    return state, losses


def test_rampup_is_the_steps_by_hand(tmp_path, capsys):
    config = _config()
    assert [BatchSizes.from_config(config).size(step) for step in range(len(SIZES))] == SIZES
    loop.train(config, tmp_path / "run", options=Options(callbacks=[StopAt(1)]))
    result = loop.train(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    said = capsys.readouterr().out
    assert "continued after step 2" in said
    assert "batch 8 from step 5: compiling" in said
    state, losses = by_hand(config, SIZES)
    assert [record["loss"] for record in records] == losses
    jax.tree.map(np.testing.assert_array_equal, result.state, state)

    assert [record["tokens"] for record in records] == (SAMPLES[1:] * 16).tolist()
    assert [record["learning_rate"] for record in records] == pytest.approx(_rates(config, SAMPLES[:-1]), rel=1e-6)
    flops = [record["tflops"] * record["seconds"] for record in records]  # a device's
    for record, size, of_step in zip(records, SIZES, flops, strict=True):
        assert record["tokens_per_second"] == pytest.approx(size * 16 / record["seconds"])
        assert of_step == pytest.approx(flops[-1] * size / SIZES[-1])


def test_changed_batch_goes_on_from_the_next_sample(tmp_path):
    """Larger, smaller, then growing: no sample is read twice or passed over, and tokens and rates count the samples."""
    constant = _config(schedule="constant")
    constant = replace(constant, optimizer=replace(constant.optimizer, warmup_steps=0))
    first = {"batch_rampup": None, "global_batch": 4, "eval_interval": 0}
    for steps, batch in ((2, first), (3, {**first, "global_batch": 8}), (4, first), (6, {"batch_rampup": (4, 4, 24)})):
        config = replace(constant, train=replace(constant.train, **{**batch, "eval_interval": 0, "steps": steps}))
        assert mjax.Trainer(config, tmp_path, allow_change=True, show=False).train().exit_code == 0
    records, sizes = read_metrics(tmp_path / "metrics.jsonl"), [4, 4, 8, 4, 4, 8]
    assert [record["tokens"] for record in records] == (np.cumsum(sizes) * 16).tolist()
    assert [record["loss"] for record in records] == by_hand(constant, sizes)[1]
    assert BatchSizes.from_config(read_config(tmp_path / "config.json")).stretches(6) == [
        (2, 4),
        (1, 8),
        (2, 4),
        (1, 8),
    ]


# --- The clock of the learning rate -----------------------------------------------------------------------------------


def test_wsd_decay_is_the_samples_of_its_last_steps():
    config = _config(schedule="wsd", wsd_decay_steps=5, wsd_decay="minus_sqrt")
    begin, end = SAMPLES[1], SAMPLES[-1]
    config = replace(config, optimizer=replace(config.optimizer, warmup_steps=1))
    peak, floor = config.optimizer.learning_rate, config.optimizer.min_learning_rate
    assert _rates(config, [begin, (begin + end) // 2, end]) == pytest.approx(
        [peak, floor + (1 - 0.5**0.5) * (peak - floor), floor]
    )
