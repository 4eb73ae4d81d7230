"""What `train` and `plan` take from the data and from the length of a run, so that nobody has to type it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mjax import cli
from mjax.commands.train import TrainArguments
from mjax.config import DataConfig, MeshConfig, OptimizerConfig, load_config, save_config
from mjax.data.metadata import DatasetMetadata, write_metadata
from mjax.errors import UsageError
from mjax.flags import parse, typed_flags
from mjax.resolve import resolve
from mjax.training.origin import Origin, save_origin

GPT = load_config("gpt_345m")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """In the working directory the notes of two datasets of 8,192 ids, and one of Megatron's, without."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        fields = {"append_eod": True, "documents": 1, "tokens": 9, "text_bytes": 9, "inputs": [], "mjax_version": "0"}
        write_metadata(name, DatasetMetadata(tokenizer="sentencepiece", vocabulary=8192, eod=1, **fields))
    return tmp_path


def resolved(*argv, config=GPT, run="runs/it", **data):
    given = replace(config, data=DataConfig(**data))
    return resolve(given, config, typed_flags(argv), "gpt_345m", Path(run))


@pytest.mark.parametrize(
    "paths", [{"path": "a"}, {"path": ("0.3", "a", "0.7", "b")}, {"train_path": ("megatron", "b")}], ids=str
)
def test_the_vocabulary_is_that_of_the_data_and_is_said(data, paths):
    config, lines = resolved(**paths)
    assert config.model == replace(GPT.model, vocabulary=8192)
    assert lines == [f"vocabulary 8,192 as in {'b' if 'train_path' in paths else 'a'} (gpt_345m has 50,257)"]


def test_rows_that_pad_it_are_said(data):
    _, (line,) = resolved(path="a", config=replace(GPT, model=replace(GPT.model, vocabulary_multiple=5000)))
    assert line == "vocabulary 8,192 as in a, 10,000 rows of the embedding (gpt_345m has 50,257)"


@pytest.mark.parametrize("flag", ["--model.vocabulary", "--model.vocabulary=50257"])
def test_a_vocabulary_that_is_typed_stays(data, flag):
    assert resolved(flag, path="a")[0].model == GPT.model


@pytest.mark.parametrize("paths", [{"path": "megatron"}, {"mock": True, "path": "a"}, {}], ids=str)
def test_data_that_do_not_say_it_leave_the_vocabulary_as_it_is(data, paths):
    config, lines = resolved(**paths)
    assert (config.model, lines) == (GPT.model, [])


def test_a_run_that_is_there_keeps_the_vocabulary_of_its_weights(data):
    (data / "run").mkdir()
    save_config(GPT, data / "run" / "config.json")
    assert resolved(path="a", run="run")[0].model == GPT.model
    save_config(replace(GPT, model=replace(GPT.model, vocabulary=8192)), data / "run" / "config.json")
    assert resolved(path="a", run="run")[0].model.vocabulary == 8192


@pytest.mark.parametrize(
    ("flags", "changes", "warmup"),
    [
        (["--train.steps", "5"], {}, 1),
        (["--train.steps", "1"], {}, 0),
        (["--train.steps", "3000"], {}, 30),
        (["--train.steps", "3001"], {}, 3000),  # it fits
        (["--optimizer.decay_steps", "100"], {}, 1),
        (["--train.steps", "5", "--optimizer.warmup_steps", "3000"], {}, 3000),  # refused, see below
        (["--train.steps", "5"], {"schedule": "constant"}, 3000),  # of which a warm-up may be all
        (["--train.steps", "5"], {"warmup_steps": 400_000}, 400_000),  # the file's own mistake
    ],
)
def test_a_warm_up_of_the_file_is_shortened_in_proportion_to_the_length_that_is_typed(
    data, monkeypatch, flags, changes, warmup
):
    given = replace(GPT, optimizer=replace(OptimizerConfig(warmup_steps=3000), **changes))
    assert given.train.steps == 300_000
    arguments = parse(TrainArguments, flags, "mjax train", TrainArguments(settings=given))
    config, lines = resolve(arguments.settings, given, typed_flags(flags), "gpt_345m", data)
    assert config.optimizer.warmup_steps == warmup
    fits = warmup == given.optimizer.warmup_steps
    said = f"warm-up of {warmup} step{'s' * (warmup != 1)} instead of 3,000, in proportion to the run's length"
    assert lines == ([] if fits else [said])


# --- The commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """The configs that `train` and `plan` begin with, in place of training and planning."""
    found = []
    monkeypatch.setattr(
        "mjax.training.loop.train", lambda config, *_, **__: found.append(config) or SimpleNamespace(exit_code=0)
    )
    monkeypatch.setattr("mjax.commands.plan.run_plan", lambda arguments: found.append(arguments.settings) or 0)
    return found


SHORT = ["--data.path", "a", "--train.steps", "5", "--mesh.data", "1", "--train.global-batch", "8"]


def test_train_and_plan_begin_with_what_was_taken_and_say_it_once(data, started, capsys):
    for command in ("train", "plan"):
        assert cli.main([command, "--config", "gpt_345m", *SHORT]) == 0
        printed = capsys.readouterr()
        (config,) = started
        assert (config.model.vocabulary, config.optimizer.warmup_steps) == (8192, 1)
        said = printed.out if command == "train" else printed.err  # where nothing else but the plan may be
        assert said.count("vocabulary 8,192 as in a (gpt_345m has 50,257)") == 1
        assert said.count("warm-up of 1 step instead of 3,000") == 1
        started.clear()


def test_a_warm_up_that_is_typed_and_too_long_is_refused(data, started, capsys):
    assert cli.main(["train", "--config", "gpt_345m", *SHORT, "--optimizer.warmup-steps", "5"]) == 2
    assert "--optimizer.warmup-steps 5 must be below the 5 steps" in capsys.readouterr().err
    assert not started


def test_a_run_goes_on_with_the_numbers_in_its_config(data, started, capsys):
    run = data / "run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "manifest.json").touch()
    kept = replace(GPT, mesh=replace(GPT.mesh, data=1), data=DataConfig(mock=True))
    save_config(kept, run / "config.json")
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert started[0].model.vocabulary == 50_257
    assert json.loads((run / "config.json").read_text())["model"]["vocabulary"] == 50_257


def test_a_run_that_began_from_another_keeps_its_vocabulary_when_that_one_is_gone(data, started, capsys):
    run = data / "runs" / "new"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "manifest.json").touch()
    save_config(GPT, run / "config.json")
    save_origin(run, Origin(str(data / "gone"), 0, {}))
    command = ["train", "--config", "gpt_345m", "--name", "new", "--init", "gone", "--allow-change", *SHORT]
    assert cli.main(command) == 0, capsys.readouterr().err
    assert started[0].model.vocabulary == 50_257


# --- Tokens in place of steps -----------------------------------------------------------------------------------------


def _with_tokens(*argv, **train):
    config = replace(GPT, train=replace(GPT.train, **train), mesh=MeshConfig(), data=DataConfig(mock=True))
    given = parse(TrainArguments, argv, "mjax train", TrainArguments(settings=config)).settings
    return resolve(given, config, typed_flags(argv), "gpt_345m", Path("runs/it"))


def test_tokens_become_whole_steps_and_are_said():
    config, (line,) = _with_tokens("--train.tokens", "300B")
    steps = -(-300 * 10**9 // (512 * 1024))
    assert (config.train.steps, config.train.tokens) == (steps, None)
    assert line == f"300B tokens are {steps:,} steps ({steps * 512 * 1024:,} tokens)"


def test_tokens_of_a_file_follow_the_batch_and_the_sequence_of_the_command_line():
    config, _ = _with_tokens("--train.global-batch", "64", "--model.sequence", "512", tokens="1B", steps=300_000)
    assert config.train.steps == -(-(10**9) // (64 * 512))
    config, _ = _with_tokens("--train.batch-rampup", "8", "8", "800", "--train.global-batch", "16", tokens="1M")
    assert config.train.steps == 100 + -(-(10**6 - 800 * 1024) // (16 * 1024))


def test_the_command_line_goes_before_the_file():
    assert _with_tokens("--train.steps", "7", tokens="1B")[0].train.steps == 7
    assert _with_tokens("--train.tokens", "1M", steps=7)[0].train.steps == 2


@pytest.mark.parametrize(
    ("argv", "train", "words"),
    [
        (("--train.tokens", "300GB"), {}, "--train.tokens 300GB is not a number of tokens above 0; write it like 300B"),
        (("--train.tokens", "0"), {}, "--train.tokens 0 is not a number"),
        (("--train.tokens", "1B", "--train.steps", "5"), {}, "--train.steps 5 and --train.tokens 1B both set the len"),
        ((), {"tokens": "1B", "steps": 5}, "--train.steps 5 and --train.tokens 1B both set the length; leave one"),
        (("--train.tokens", "1B", "--train.batch-rampup", "8", "0", "9"), {}, "INCREMENT and SAMPLES must each be"),
    ],
)
def test_tokens_that_say_nothing_or_two_things_are_refused(argv, train, words):
    with pytest.raises(UsageError, match=words):
        _with_tokens(*argv, **train)


def test_a_run_that_is_resumed_takes_tokens_too(data, started):
    run = data / "run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "manifest.json").touch()
    save_config(replace(GPT, mesh=replace(GPT.mesh, data=1), data=DataConfig(mock=True)), run / "config.json")
    assert cli.main(["train", "--resume", str(run), "--train.tokens", "200B"]) == 0
    assert started[0].train.steps == -(-200 * 10**9 // (512 * 1024))
