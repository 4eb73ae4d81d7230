"""Runs that are poisoned on the way, under a launcher that starts them again: what is saved, and how they end."""

import os
import shutil
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.commands import cli
from mjax.config import CheckpointConfig, HealthConfig
from mjax.generation.inference import open_run
from mjax.run import health, loop
from mjax.run.metrics import MetricsLog, read_metrics
from tests.conftest import ROOT
from tests.small import named, program_of
from tests.training.test_optimizer import poisoned
from tests.training.test_replicas import with_flipped_bit

FLAGS = [
    "--config", str(ROOT / "tests" / "tiny_config.py"), "--name", "run", "--train.steps", "20",
    "--train.eval-interval", "0", "--model.attention", "xla",
]  # fmt: skip


def loss_scale(value):
    """Infinity: steps whose gradients are not finite, from weights and moments that are; 1: the end of them."""
    return lambda state: replace(state, loss_scale=replace(state.loss_scale, scale=jnp.float32(value)))


def weights(factor):
    return lambda state: replace(state, model=jax.tree.map(lambda x: x * jnp.float32(factor), state.model))


class Launcher:
    """Starts one run again and again, as `train.py` and its flags would; poisons its state before a step."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.poisons, self.stop_at = folder, {}, None
        self.run_folder = folder / "run"
        monkeypatch.setattr(loop, "build_program", self._build)
        monkeypatch.setattr(health, "WINDOW", 8)
        monkeypatch.setattr(health, "MAX_SKIPPED_STEPS", 5)
        monkeypatch.setattr(health, "GOOD_AFTER", 2)
        monkeypatch.setattr(health, "ROLLBACK_BATCHES", 2)
        monkeypatch.setattr(loop, "check_devices", lambda *_: None)  # one of the test's sixteen is enough
        monkeypatch.setattr(MetricsLog, "draw", lambda *_, **__: None)  # takes longer than all steps

    def _build(self, config, mesh, **options):
        program = program_of(replace(config, checkpoint=CheckpointConfig(), health=HealthConfig()))

        def step(state, batch, *limit):
            with jax.transfer_guard("allow"):
                coming = int(state.step) + 1
                if poison := self.poisons.pop(coming, None):
                    state = poison(state)
            if coming == self.stop_at:
                self.stop_at = None
                os.kill(os.getpid(), signal.SIGTERM)
            return program.train_step(state, batch, *limit)

        return replace(program, train_step=step)

    def __call__(self, *flags):
        return cli.main(["train", *FLAGS, "--runs", str(self.folder), *flags])

    def resume(self, *flags):
        return cli.main(["train", "--run", str(self.run_folder), *flags])

    def saved(self):
        return sorted(entry.name for entry in (self.run_folder / "checkpoints").iterdir() if entry.is_dir())

    def losses(self):
        return {record["step"]: record["loss"] for record in read_metrics(self.run_folder / "metrics.jsonl")}


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    return Launcher(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The losses of the run that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        launcher = Launcher(tmp_path_factory.mktemp("healthy"), patch)
        assert launcher() == 0
        assert launcher.saved() == ["16", "20"]
        return launcher.losses()


def test_poisoned_run_keeps_its_last_good_checkpoint(launcher, healthy, capfd):
    launcher.poisons = {12: weights(1e12)}
    assert launcher("--checkpoint.keep-last", "1") == 3
    captured = capfd.readouterr()
    command = f"python train.py --run {launcher.run_folder} --step 8 --optimizer.learning-rate 0.005 --allow-change"
    assert captured.err.strip().endswith(f"then continue from the last good checkpoint: {command}")
    assert "checkpoint 12 is postponed until the run is healthy; the last good one is 8" in captured.out
    assert launcher("--checkpoint.keep-last", "1") == 3  # a launcher that takes no hint
    assert "ended unhealthy (" in capfd.readouterr().err
    assert launcher.saved() == ["8"]
    assert launcher.resume("--step", "8") == 0
    assert launcher.losses() == healthy


@pytest.mark.ci
def test_rollback_reads_the_base_of_adapters_again(launcher, capfd):
    """Frozen weights that were damaged in memory equal the base's again."""
    length = ("--train.steps", "4", "--name", "base")
    assert launcher(*length) == 0
    launcher.run_folder = launcher.folder / "lora"
    flags = ("--init", str(launcher.folder / "base"), "--name", "lora", "--lora.rank", "4")
    launcher.poisons = {13: weights(30.0)}
    assert launcher(*flags, "--health.spike", "rollback") == 0
    assert "rolling back to checkpoint 8" in capfd.readouterr().out
    assert max(launcher.losses().values()) < 7
    base, own = (named(open_run(folder).weights) for folder in (launcher.folder / "base", launcher.run_folder))
    assert all(np.array_equal(own[name], weight) for name, weight in base.items())


def test_skipped_steps_name_the_gradient_and_end_the_run(launcher, capfd):
    launcher.poisons = {2: loss_scale(jnp.inf)}
    assert launcher() == 3
    captured = capfd.readouterr()
    assert "step 2 skipped: gradients are not finite (final_norm.bias first, 28 of 28" in captured.out
    assert "5 steps in a row were skipped, and nothing is saved; start again" in captured.err


@pytest.mark.parametrize(
    ("value", "step", "found"),
    [pytest.param(jnp.nan, 5, 7, id="nan-by the next step"), pytest.param(1e30, 8, 8, id="1e30-before it is saved")],
)
def test_broken_moment_ends_the_run_and_is_not_saved(launcher, capfd, value, step, found):
    launcher.poisons = {step: lambda state: poisoned(state, "mu.blocks.mlp.up.kernel", value)}
    assert launcher() == 3
    error = capfd.readouterr().err
    broken = "weights or moments are not finite, or above 1e20 (blocks.mlp.up.kernel of layer 2 first, 1 of 28)"
    assert f"after step {found} {broken}" in error
    assert f"--run {launcher.run_folder} --step 4" in error
    assert launcher.saved() == ["4"]


def test_stopped_unhealthy_run_keeps_its_good_checkpoints(launcher, healthy, capfd):
    launcher.poisons, launcher.stop_at = {10: loss_scale(jnp.inf)}, 12
    assert launcher("--checkpoint.keep-last", "1") == 75
    assert launcher.saved() == ["12", "4", "8"]
    launcher.poisons, launcher.stop_at = {13: loss_scale(1)}, 15
    assert launcher("--checkpoint.keep-last", "1") == 75
    assert "checkpoint 12 was saved while the run was unhealthy; the last good one is 4" in capfd.readouterr().out
    assert launcher.saved() == ["15", "4"], "checkpoint 12 counts as good"
    assert launcher.resume("--step", "4") == 0
    assert "set aside the checkpoints after 4 as 15.abandoned" in capfd.readouterr().out
    assert launcher.losses() == healthy


def test_command_goes_back_once(launcher, capfd):
    launcher.stop_at = 6
    assert launcher("--checkpoint.keep-last", "3") == 75
    launcher.stop_at = 5
    assert launcher.resume("--step", "4") == 75
    assert launcher.saved() == ["4", "5", "6.abandoned"]
    launcher.stop_at = 6
    assert launcher.resume("--step", "4") == 75
    assert "checkpoint 5 continues from 4 already" in capfd.readouterr().out


def test_spike_is_rewound_the_same_way_after_a_restart(launcher, capfd):
    launcher.poisons = {13: weights(30.0)}
    assert launcher("--health.spike", "rollback") == 0
    assert "rolling back to checkpoint 8" in capfd.readouterr().out
    records = read_metrics(launcher.run_folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["step"] for record in records if record["skipped"]] == [12, 13]
    found = launcher.losses()
    shutil.rmtree(launcher.run_folder / "checkpoints")
    assert launcher("--health.spike", "rollback") == 0
    assert launcher.losses() == found


@pytest.mark.ci
def test_run_with_differing_replicas_ends_with_3(launcher, capfd):
    def flip(state):
        bias = state.model.final_norm.bias
        bias[...] = with_flipped_bit(bias[...], jax.devices()[1])
        return state

    launcher.poisons = {5: flip}
    assert launcher("--mesh.data", "2") == 3
    assert "after step 8 the replicas have different weights: replica 0" in capfd.readouterr().err
    assert launcher.saved() == ["4"]
