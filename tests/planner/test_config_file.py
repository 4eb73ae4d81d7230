"""Configs that the planner writes: Python files that give back exactly what was written."""

import subprocess
import sys

import pytest

from mjax.config import available_configs, load_config, run
from mjax.config.run import write_config
from mjax.errors import UsageError
from tests.planner.configs import changed


def test_quotes_and_line_ends_survive(tmp_path):
    config = changed(
        load_config("gpt_demo"),
        data={"path": ("it's\\here", "0.5", 'a "b"', "é\n\t"), "eod": 0},
        log={"prompt": '"""', "wandb": None},
        optimizer={"learning_rate": 1 / 3, "epsilon": 1e-300, "warmup_steps": 0},
    )
    file = tmp_path / "written.py"
    write_config(config, file, 'Quotes """ and \\ backslashes\n\nas they come.')
    assert load_config(str(file)) == config
    assert "Quotes ''' and" in file.read_text()


def test_file_that_appeared_meanwhile_stays(tmp_path, monkeypatch):
    file, written = tmp_path / "written.py", run.config_source

    def late(config, about):
        file.write_text("theirs")
        return written(config, about)

    monkeypatch.setattr(run, "config_source", late)
    with pytest.raises(UsageError, match="already exists and is not overwritten"):
        write_config(load_config("gpt_8b"), file, "A.\n\nB.")
    assert file.read_text() == "theirs"


def test_written_configs_are_read_back_and_formatted(tmp_path):
    for name in available_configs():
        file, config = tmp_path / f"{name}.py", load_config(name)
        write_config(config, file, f"{name}, written.\n\nAs it was.")
        assert load_config(str(file)) == config
    text = (tmp_path / "gpt_8b.py").read_text()
    model = "model=GPTConfig(\n        layers=72,\n        hidden=3072,\n        heads=32,\n    ),\n"
    assert model in text  # only what differs from the defaults
    command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "120", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
