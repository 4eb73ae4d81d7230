"""Flags: names from elsewhere lead to ours, help is wrapped once, and the run is one argument everywhere."""

import itertools
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import tyro

from mjax import cli
from mjax.commands import lm_eval as harness_command
from mjax.commands.convert import ToHfArguments
from mjax.commands.evaluate import EvaluateArguments
from mjax.commands.finetune import FinetuneArguments
from mjax.commands.generate import GenerateArguments
from mjax.commands.train import TrainArguments
from mjax.errors import UsageError
from mjax.flags import ELSEWHERE, NOTES, flags_of, parse
from mjax.mixture_config import MixtureConfig

TYPED = {
    ("train", "--lr", "3e-4"): "mjax train has no --lr; type --optimizer.learning-rate 3e-4",
    ("train", "--optimizer.lr", "3e-4"): "no --optimizer.lr; type --optimizer.learning-rate 3e-4",
    ("train", "--learning_rate=3e-4"): "type --optimizer.learning-rate 3e-4",
    ("train", "--train.learning-rate", "3e-4"): "type --optimizer.learning-rate 3e-4",
    ("train", "--batch-size", "32"): "type --train.global-batch 32 (sequences per step over all devices)",
    ("train", "--epochs", "3"): "type --train.steps (mjax counts steps",
    ("train", "--num_train_epochs", "3"): "type --train.steps (mjax counts steps",
    ("train", "--tensor-model-parallel-size", "8"): "type --mesh.model 8",
    ("train", "--expert-model-parallel-size", "8"): "type --mesh.expert 8",
    ("train", "--context-parallel-size", "8"): "type --mesh.context 8",
    ("train", "--cp-comm-type", "a2a"): "type --mesh.context-attention",
    ("train", "--config", "moe_demo", "--num-experts", "8"): "type --model.experts 8",
    ("train", "--num-experts", "8"): "for this model; it is --model.experts, for --model.kind mixture: leave it out",
    ("train", "--micro-batch-size", "4"): "type --train.micro-batch 4",
    ("train", "--num-layers", "12"): "type --model.layers 12",
    ("train", "--hidden-size", "768"): "type --model.hidden 768",
    ("train", "--seq-length", "1024"): "type --model.sequence 1024",
    ("train", "--n_layer", "12"): "type --model.layers 12",
    ("train", "--block_size", "256"): "type --model.sequence 256",
    ("train", "--max_iters", "5000"): "type --train.steps 5000",
    ("train", "--interval", "5"): "type --checkpoint.interval 5 or --log.interval 5",
    ("train", "--checkpoint.every", "5"): "--checkpoint.every; type --checkpoint.interval 5\n",
    ("train", "--eval-every", "5"): "type --train.eval-interval 5",
    ("train", "--data.mock", "True"): "--data.mock True: it takes no value; type --data.mock or --data.no-mock",
    ("train", "--data.no_mock=1"): "--data.no-mock 1: it takes no value; type --data.mock or --data.no-mock",
    ("plan", "--json", "false", "--compile"): "--json false: it takes no value; type --json or --no-json",
    ("train", "--fp16", "--train.steps", "3"): "type --precision.compute (with the value fp16)",
    ("train", "--mesh.dta", "2"): "mjax train has no --mesh.dta, did you mean --mesh.data?",
    ("train", "--zzz"): "mjax train has no --zzz; `mjax train --help` lists its flags",
    ("plan", "--tp", "8"): "mjax plan has no --tp; type --mesh.model 8",
    ("generate", "--max-new-tokens", "5"): "mjax generate has no --max-new-tokens; type --tokens 5",
    ("finetune", "--lr", "1e-5"): "mjax finetune has no --lr; type --learning-rate 1e-5",
    ("finetune", "--num-train-epochs", "3"): "type --epochs",
}  # fmt: skip


@pytest.mark.parametrize("argv", TYPED, ids=" ".join)
def test_a_flag_that_is_not_there_leads_to_ours_in_one_sentence(argv, capsys):
    assert cli.main(list(argv)) == 2
    message = capsys.readouterr().err
    assert TYPED[argv] in message
    assert message.startswith("mjax: error: ")
    assert message.count("\n") == 1


def test_names_from_elsewhere_are_not_ours_and_lead_to_flags_that_are_there():
    train = set(flags_of(TrainArguments, TrainArguments()))
    ours = train.union(*map(flags_of, (GenerateArguments, EvaluateArguments, FinetuneArguments)))
    assert not (set(ELSEWHERE) & train) - {"resume"}
    ours |= {f"model.{field.name.replace('_', '-')}" for field in fields(MixtureConfig)}
    assert {flag for flags in ELSEWHERE.values() for flag in flags.split()} <= ours
    assert set(NOTES) <= set(ELSEWHERE)


def test_flags_are_read_as_tyro_writes_them():
    @dataclass(frozen=True)
    class Arguments:
        source: tyro.conf.Positional[str]
        some_words: tuple[str, ...] = ()
        yes: bool = False

    argv = ["a", "--some_words", "x", "-1", "--no-yes"]
    assert parse(Arguments, argv, "program") == Arguments("a", ("x", "-1"), False)
    assert parse(Arguments, ["a", "--some-words=x"], "program").some_words == ("x",)
    with pytest.raises(UsageError, match="program has no --source"):
        parse(Arguments, ["--source", "a"], "program")


COMMANDS = [[name] for name in cli.COMMANDS if name not in ("data", "convert", "lm-eval", "runs")] + [
    *(["data", name] for name in cli.DATA_COMMANDS), *(["convert", name] for name in cli.CONVERT_COMMANDS),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_lines_of_help_are_full(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    lines = [line.strip("│").rstrip() for line in capsys.readouterr().out.splitlines()]
    assert any("--" in line for line in lines)
    for line, after in itertools.pairwise(lines):
        indent = len(line) - len(line.lstrip())
        if indent == len(after) - len(after.lstrip()) and not after.lstrip().startswith(("-", "─")) and indent > 5:
            assert len(line) + 1 + len(after.split()[0]) > 97, f"{line!r} breaks before {after!r}"


@pytest.mark.parametrize("spelling", ["--run", "--checkpoint"])
@pytest.mark.parametrize("arguments", [GenerateArguments, EvaluateArguments, FinetuneArguments])
def test_the_run_has_one_name_in_every_command_and_its_old_one(arguments, spelling):
    rest = ["--prompt", "a"] if arguments is GenerateArguments else ["--task", "t"]
    rest += {EvaluateArguments: ["--data", "d"], FinetuneArguments: ["--train", "t", "--validation", "v"]}.get(
        arguments, []
    )
    assert parse(arguments, [spelling, "runs/x", *rest], "mjax").checkpoint == Path("runs/x")


@pytest.mark.parametrize("argv", [["runs/x", "out"], ["--run", "runs/x", "out"], ["out", "--run", "runs/x"]])
def test_to_hf_takes_the_run_by_place_or_by_name(argv, monkeypatch):
    taken = []
    monkeypatch.setattr("mjax.commands.convert.to_hf", lambda arguments: taken.append(arguments) or 0)
    assert cli.main(["convert", "to-hf", *argv]) == 0
    assert taken == [ToHfArguments(Path("runs/x"), Path("out"))]


@pytest.mark.parametrize("spelling", ["--run", "--resume"])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_that_is_not_there_is_named(command, spelling, capsys):
    assert cli.main([command, spelling, "nowhere"]) == 2
    assert "--run nowhere has no checkpoint" in capsys.readouterr().err


def test_the_harness_takes_the_run_by_name_beside_its_own_arguments():
    rest = ["--tasks", "hellaswag", "--model_args", "model=2,data=2"]
    expected = ["run", "--model", "mjax", "--model_args", "run=runs/x,model=2,data=2", "--tasks", "hellaswag"]
    assert harness_command._with_run("runs/x", rest) == expected
    assert harness_command._with_run("runs/x", ["run", *rest]) == expected


def test_the_harness_has_help_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["lm-eval", "--help"]) == 0
    assert "--run RUN" in capsys.readouterr().out
