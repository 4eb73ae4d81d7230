"""Settings that `train` and `plan` read from the data and from the length of a run."""

import json
import shlex
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from mjax.commands import cli
from mjax.commands.flags import flag_names, parse
from mjax.commands.train import TrainArguments
from mjax.config import DataConfig, load_config, save_config
from mjax.config.checks import resolve
from mjax.config.datasets import DatasetMetadata
from mjax.data.indexed import write_metadata
from mjax.errors import UsageError
from mjax.run.continuing import Origin, save_origin

GPT = load_config("gpt_345m")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The working directory, with the notes of two datasets of 8,192 ids, and a Megatron dataset without."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        fields = {"append_eod": True, "documents": 1, "tokens": 9, "text_bytes": 9, "inputs": [], "mjax_version": "0"}
        write_metadata(name, DatasetMetadata(tokenizer="sentencepiece", vocabulary=8192, eod=1, **fields))
    return tmp_path


def resolved(typed, file="", run="runs/it", settings=GPT):
    """The config and the lines of a command line, with a config file that holds `file` too."""
    given = parse(TrainArguments, shlex.split(file), "python train.py", TrainArguments(settings=settings))
    argv = shlex.split(typed)
    settings = parse(TrainArguments, argv, "python train.py", given).settings
    return resolve(settings, given.settings, flag_names(argv), "gpt_345m", Path(run))


VOCABULARY, WARMUP, STEPS = "model.vocabulary", "optimizer.warmup_steps", "train.steps"
TAKEN = [
    ("--data.path a", "", VOCABULARY, 8192, "vocabulary 8,192 as in a (gpt_345m has 50,257)"),
    ("--data.path 0.3 a 0.7 b", "", VOCABULARY, 8192, "as in a "),
    ("--data.train-path megatron b", "", VOCABULARY, 8192, "as in b "),
    ("--data.path a --model.vocabulary 50257", "", VOCABULARY, 50257, None),
    ("--data.path megatron", "", VOCABULARY, 50257, None),
    ("--data.path a --data.mock", "", VOCABULARY, 50257, None),
    ("--train.steps 5", "", WARMUP, 1, "warm-up of 1 step instead of 3,000, in proportion to the run's length"),
    ("--train.steps 1", "", WARMUP, 0, "warm-up of 0 steps"),
    ("--train.steps 3001", "", WARMUP, 3000, None),
    ("--optimizer.decay_steps 100", "", WARMUP, 1, "warm-up of 1 step"),
    ("--train.steps 5 --optimizer.warmup_steps 3000", "", WARMUP, 3000, None),  # refused later
    ("--train.steps 5", "--optimizer.schedule constant", WARMUP, 3000, None),
    ("--train.steps 5", "--optimizer.warmup-steps 400000", WARMUP, 400_000, None),  # the file's own mistake
    ("--train.tokens 300B", "", STEPS, 572_205, "300B tokens are 572,205 steps (300,000,215,040 tokens)"),
    ("--train.global-batch 64 --model.sequence 512", "--train.tokens 100B", STEPS, 3_051_758, "3,051,758 steps"),
    ("--train.batch-rampup 8 8 800 --train.global-batch 16", "--train.tokens 1M", STEPS, 112, "112 steps"),
    ("--train.steps 300000", "--train.tokens 1B", STEPS, 300_000, None),
]


@pytest.mark.parametrize(("typed", "file", "field", "value", "line"), TAKEN)
def test_setting_is_taken_and_announced(data, typed, file, field, value, line):
    config, lines = resolved(typed, file)
    assert attrgetter(field)(config) == value
    assert config.train.tokens is None
    assert lines == [] if line is None else line in "\n".join(lines)


def test_padded_vocabulary_is_announced(data):
    padded = replace(GPT, model=replace(GPT.model, vocabulary_multiple=5000))
    assert "10,000 rows of the embedding" in resolved("--data.path a", settings=padded)[1][0]


@pytest.mark.parametrize(
    ("typed", "file", "words"),
    [
        ("--train.tokens 300GB", "", "--train.tokens 300GB is not a number of tokens above 0; write 300B"),
        ("--train.tokens 0", "", "--train.tokens 0 is not a number"),
        ("--train.tokens 1B --train.steps 5", "", "--train.steps 5 and --train.tokens 1B both set the length"),
        ("", "--train.tokens 1B --train.steps 5", "both set the length; remove one"),
        ("--train.tokens 1B --train.batch-rampup 8 0 9", "", "in whole increments"),
    ],
)
def test_contradictory_tokens_are_rejected(typed, file, words):
    with pytest.raises(UsageError, match=words):
        resolved(typed, file)


# --- The commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """The configs and steps that `train` and `plan` begin with, in place of training and planning."""
    found = []

    def train(config, folder, options):
        found.append((config, options.step))
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr("mjax.run.loop.train", train)
    monkeypatch.setattr("mjax.commands.plan.run_plan", lambda arguments: found.append((arguments.settings, None)) or 0)
    return found


def run_of(folder, config=GPT):
    """A run with one checkpoint, of step 3."""
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "checkpoints" / "3" / "manifest.json").touch()
    save_config(replace(config, mesh=replace(config.mesh, data=1), data=DataConfig(mock=True)), folder / "config.json")
    return folder


SHORT = shlex.split("--config gpt_345m --data.path a --train.steps 5 --mesh.data 1 --train.global-batch 8")


@pytest.mark.parametrize("command", ["train", "plan"])
def test_command_starts_with_resolved_config(command, data, started, capsys):
    assert cli.main([command, *SHORT]) == 0
    ((config, _),) = started
    assert (config.model.vocabulary, config.optimizer.warmup_steps) == (8192, 1)
    printed = capsys.readouterr()
    said = printed.out if command == "train" else printed.err  # where nothing else but the plan may be
    assert said.count("vocabulary 8,192 as in a (gpt_345m has 50,257)") == 1


def test_resumed_run_keeps_config_but_takes_tokens(data, started):
    run = run_of(data / "run")
    assert cli.main(["train", "--run", str(run), "--train.tokens", "200B", "--step", "3"]) == 0
    ((config, step),) = started
    assert (config.model.vocabulary, config.train.steps, step) == (50_257, 381_470, 3)
    assert json.loads((run / "config.json").read_text())["model"]["vocabulary"] == 50_257


def test_existing_weights_keep_their_vocabulary(data, started, capsys):
    """The vocabulary is read from the run, or from the run that gave the weights, which may be gone later."""
    run = run_of(data / "runs" / "new")
    assert resolved("--data.path a", run=run)[0].model.vocabulary == 50_257
    save_origin(run, Origin(str(data / "gone"), 0, {}))
    command = ["train", *SHORT, "--name", "new", "--init", "gone", "--allow-change"]
    assert cli.main(command) == 0, capsys.readouterr().err
    assert started[0][0].model.vocabulary == 50_257


def test_init_step_is_not_step_of_new_run(data, started, monkeypatch):
    monkeypatch.setattr("mjax.run.continuing.choose_origin", lambda *_: None)
    assert cli.main(["train", *SHORT, "--name", "new", "--init", str(run_of(data / "old")), "--step", "3"]) == 0
    assert started[0][1] is None
