"""Folders that hold no checkpoint, and checkpoints that do not open: refused before anything is lost."""

import jax.numpy as jnp
import pytest

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.errors import RunError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--name", "lr[3e-4]"], "lr[3e-4] has [ in its path"),
        (["--runs", "what?"], "has ? in its path"),
        (["--runs", "hdfs://bucket/runs"], "is an address"),
    ],
)
def test_folder_without_a_way_back_is_refused(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "gpt_demo", "--data.mock", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_checkpoint_that_does_not_open_is_not_saved(tmp_path):
    """Orbax merges nothing where its path looks like a pattern."""
    notices = []
    state = {"model": {"up": jnp.ones(3)}}
    checkpoints = Checkpoints(tmp_path / "[team]" / "checkpoints", keep_last=1, on_notice=notices.append)
    checkpoints.save(2, state)
    with pytest.raises(RunError, match=r"checkpoint 2 could not be saved .*model.up cannot be read back"):
        checkpoints.wait()
    assert (checkpoints.steps(), notices) == ([], [])
    assert not list(checkpoints.folder.iterdir())
