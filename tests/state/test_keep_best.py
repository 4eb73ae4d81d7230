"""`KeepBestCheckpoint`: the checkpoint with the lowest validation loss survives rotation, restarts and failed saves."""

from dataclasses import replace

import pytest

import mjax
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import checkpoint_steps
from mjax.config import CheckpointConfig
from mjax.run.loop import Evaluate
from tests.callbacks import StopAt
from tests.training.test_trainer import CONFIG, batch

pytestmark = [pytest.mark.usefixtures("quick_runs", "fewer_devices"), pytest.mark.ci]

LOSSES = {2: 5.0, 4: 3.0, 6: float("nan"), 8: 4.0, 10: 4.5, 12: 4.2}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains, with these validation losses, and returns the steps of the checkpoints."""
    monkeypatch.setattr(Evaluate, "measure", lambda evaluate, run, step: (LOSSES[step], {}))
    config = replace(CONFIG, train=replace(CONFIG.train, steps=12, eval_interval=2))
    config = replace(config, checkpoint=CheckpointConfig(interval=100, keep_last=1))

    def train(*callbacks, **checkpoint):
        used = replace(config, checkpoint=replace(config.checkpoint, **checkpoint))
        mjax.Trainer(used, tmp_path, data=batch, validation=batch, callbacks=callbacks, show=False).train()
        return checkpoint_steps(tmp_path)

    return train


def test_best_checkpoint_survives_restarts_and_rotation(trained, tmp_path):
    assert trained(mjax.KeepBestCheckpoint(), StopAt(5)) == [4, 6]
    assert trained(mjax.KeepBestCheckpoint(), StopAt(8), interval=3) == [4, 6, 9]  # 6 is known to be good
    assert trained(mjax.KeepBestCheckpoint()) == [4, 9, 12]
    assert Checkpoints(tmp_path / "checkpoints").host_values(4)["val_loss"] == 3.0


def test_best_checkpoint_that_is_not_saved_replaces_none(trained, monkeypatch):
    """Its save fails; the best of those that are there stays."""
    publish = Checkpoints._publish

    def failing(self, step, *arguments):
        if step == 4:
            raise OSError(28, "No space left on device")
        publish(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_publish", failing)
    assert trained(mjax.KeepBestCheckpoint()) == [8, 12]
