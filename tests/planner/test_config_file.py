"""Configs that the planner writes: Python files that give back exactly what was written."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mjax.config import available_configs, load_config
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.planner import config_file
from mjax.planner.config_file import check_new, config_source, write_config


@pytest.mark.parametrize("name", available_configs())
def test_a_written_config_is_read_back_exactly(name, tmp_path):
    file, config = tmp_path / "written.py", load_config(name)
    write_config(config, file, f"{name}, written.\n\nparameters   {count_parameters(config.model):,}")
    assert load_config(str(file)) == config


def test_words_with_quotes_and_line_ends_survive(tmp_path):
    config = load_config("gpt_demo")
    config = replace(
        config,
        data=replace(config.data, path=("it's\\here", "0.5", 'a "b"', "é\n\t"), eod=0),
        log=replace(config.log, prompt='"""', wandb=None),
        optimizer=replace(config.optimizer, learning_rate=1 / 3, epsilon=1e-300),
    )
    file = tmp_path / "written.py"
    write_config(config, file, 'Quotes """ and \\ backslashes\n\nas they come.')
    assert load_config(str(file)) == config
    assert "Quotes ''' and" in file.read_text()


def test_a_file_that_would_not_give_the_config_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        config_file, "config_source", lambda config, about: "from mjax.config import Config\nconfig = 3"
    )
    with pytest.raises(UsageError, match="defines no `config = Config"):
        write_config(load_config("gpt_8b"), tmp_path / "written.py", "A.\n\nB.")
    assert not list(tmp_path.glob("*.py"))


def test_a_file_that_came_in_the_meantime_stays_as_it_is(tmp_path, monkeypatch):
    file, source = tmp_path / "written.py", config_file.config_source

    def late(config, about):
        file.write_text("theirs")
        return source(config, about)

    monkeypatch.setattr(config_file, "config_source", late)
    with pytest.raises(UsageError, match="already exists and is not overwritten"):
        write_config(load_config("gpt_8b"), file, "A.\n\nB.")
    assert file.read_text() == "theirs"


def test_only_what_differs_from_the_defaults_is_written():
    source = config_source(load_config("gpt_8b"), "Short.\n\nAnd good.")
    assert source == (
        '"""Short.\n\nAnd good.\n"""\n\n'
        "from mjax.config import CheckpointConfig, Config, GPTConfig, MeshConfig, OptimizerConfig, TrainConfig\n\n"
        "config = Config(\n"
        "    model=GPTConfig(layers=72, hidden=3072, heads=32),\n"
        "    mesh=MeshConfig(data=64, model=8, sequence_parallel=True),\n"
        "    optimizer=OptimizerConfig(warmup_steps=3000),\n"
        '    train=TrainConfig(recompute="selective"),\n'
        "    checkpoint=CheckpointConfig(keep_every=50_000),\n"
        ")\n"
    )


def test_a_written_config_has_the_form_that_ruff_gives(tmp_path):
    for name in available_configs():
        write_config(load_config(name), tmp_path / f"{name}.py", f"{name}.\n\nAs it was.")
    command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "120", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


def test_a_file_that_is_there_or_has_no_place_is_refused(tmp_path):
    there = tmp_path / "there.py"
    there.write_text("mine")
    for file, message in (
        (there, "already exists and is not overwritten"),
        (tmp_path / "no" / "such.py", "there is no folder"),
        (Path("plan.json"), "use a name that ends in .py"),
    ):
        with pytest.raises(UsageError, match=message):
            check_new(file)
        with pytest.raises(UsageError, match=message):
            write_config(load_config("gpt_8b"), file, "A.\n\nB.")
    assert there.read_text() == "mine"
