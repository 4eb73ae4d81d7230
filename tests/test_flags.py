"""Flags: names from elsewhere lead to ours, and the run is one argument everywhere."""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import get_args, get_type_hints

import pytest
import tyro

from mjax.commands import cli
from mjax.commands.flags import OLD_FLAGS, list_flags, parse, rename_old_flags
from mjax.commands.lm_eval import LmEvalArguments
from mjax.commands.plan import PlanArguments
from mjax.commands.sft import SftArguments
from mjax.commands.train import TrainArguments, default_name
from mjax.config.marks import Synonyms, short_name
from mjax.errors import UsageError


def flags_of(cls, default=None):
    """Names of the flags of a class, without leading dashes."""
    return (flag.name for flag in list_flags(cls, default))


TYPED = {
    "train --lr 3e-4": "python train.py has no --lr; type --optimizer.learning-rate 3e-4",
    "train --train.learning-rate 3e-4": "type --optimizer.learning-rate 3e-4",
    "train --batch-size 32": "type --train.global-batch 32 (sequences per step over all devices)",
    "train --num_train_epochs 3": "type --train.steps (optimizer steps, an epoch being",
    "train --config moe_demo --num-experts 8": "type --model.experts 8",
    "train --num-experts 8": "mjax: error: --model.experts is an option of deepseek",
    "plan --config llama3_8b --model.positions alibi": "mjax: error: --model.positions is an option of gpt",
    "train --checkpoint.every 5": "--checkpoint.every; type --checkpoint.interval 5\n",
    "train --data.mock True": "--data.mock True: it takes no value; type --data.mock or --data.no-mock",
    "plan --json false --compile": "--json false: it takes no value; type --json or --no-json",
    "train --fp16 --train.steps 3": "type --precision.compute fp16",
    "train --adam-beta1 0.8": "python train.py has no --adam-beta1; set optimizer.beta1 in a config file",
    "train --mesh.schedule gpipe": "python train.py has no --mesh.schedule; set mesh.schedule in a config file",
    "train --log.no-tensorboard": "python train.py has no --log.no-tensorboard; set log.tensorboard in a config file",
    "plan --log.wandb x": "mjax plan has no --log.wandb; no result depends on log: remove it",
    "train --mesh.dta 2": "python train.py has no --mesh.dta; did you mean --mesh.data?",
    "train --zzz": "python train.py has no --zzz; `python train.py --help` lists its flags",
    "generate --max-new-tokens 5": "mjax generate has no --max-new-tokens; type --tokens 5",
    "finetune --num-train-epochs 3": "type --epochs 3",
    "train --health.spike announce": "--health.spike announce has a new name; type --health.spike warn\n",
    "train --mesh.context-attention=heads": "type --mesh.context-attention ulysses\n",
    "train --tensor-model-parallel-size 2": "type --mesh.model 2\n",
    "train --parallelism.tensor_parallel_degree 2": "type --mesh.model 2\n",
    "train --virtual-pipeline-model-parallel-size 2": "type --mesh.virtual-stages 2\n",
    "train --train-samples 1000": "type --train.steps (optimizer steps",  # not --data.train-samples
    "train --rampup-batch-size 8 8 1000": "type --train.batch-rampup 8 8 1000\n",
    "train --per_device_train_batch_size 8": "type --train.micro-batch 8\n",
    "train --lora_target_modules q v": "type --lora.targets q v\n",
    "train --activation_checkpoint.mode full": "type --train.recompute full\n",
    "train --tokenizer-type GPT2": "the data have a tokenizer, that of `mjax prepare --tokenizer`",
    "train --overlap-grad-reduce": "python train.py has no --overlap-grad-reduce; remove it\n",
    "train --mesh.tp 3 --data.mock": "--mesh.model 3 does not divide heads",
    "plan --mesh.pp=5": "--mesh.pipe 5 is more than a GPT can fill with 4 layers",
    "prepare --input a": "mjax prepare has no --input; give FILES … by its place, without a flag",
    "prepare --json-keys body": "mjax prepare has no --json-keys; type --key body",
    "finetune --train.global-batch 8": "mjax finetune has no --train.global-batch; type --batch 8",
    "prepare --max-seq-length 8": "mjax prepare has no --max-seq-length; type --max-length 8",
}


@pytest.mark.parametrize("line", TYPED)
def test_unknown_flag_leads_to_ours(line, capsys):
    assert cli.main(shlex.split(line)) == 2
    message = capsys.readouterr().err
    assert TYPED[line] in message
    assert message.startswith("mjax: error: ")
    assert message.count("\n") == 1


def old_flags(command):
    return OLD_FLAGS[command]


@pytest.mark.parametrize("command", OLD_FLAGS)
def test_old_flags_are_renamed_with_a_note(command, capsys):
    for old, new in old_flags(command).items():
        words = rename_old_flags(["x", f"--{old}", f"--{old.replace('-', '_')}=a=b", f"a=--{old}"], f"mjax {command}")
        assert words == ["x", f"--{new}", f"--{new}=a=b", f"a=--{old}"]
        assert f"note: --{old} is now --{new}; mjax 0.4" in capsys.readouterr().err
    assert rename_old_flags(["--limit", "5"], "mjax lm-eval") == ["--limit", "5"]


def test_old_fields_are_renamed_with_a_note_and_short_axes_without(capsys):
    typed = ["--mesh.chunks", "2", "--model.no-tied", "--model.balance_loss=0.1", "--mesh.tp=2", "--mesh.dp", "4"]
    now = ["--mesh.virtual-stages", "2", "--model.no-tie-embeddings", "--model.aux-loss-coef=0.1", "--mesh.model=2"]
    assert rename_old_flags(typed, "python train.py") == [*now, "--mesh.data", "4"]
    notes = capsys.readouterr().err.splitlines()
    assert (
        notes[1] == "note: --model.no-tied is now --model.no-tie-embeddings; mjax 0.4 will not accept --model.no-tied"
    )
    assert len(notes) == 3


@pytest.mark.parametrize("line", ["plan --longest 8", "plan --keep mesh.zero", "prepare x --turns last --output o"])
def test_old_flag_reaches_its_command(line, capsys):
    assert cli.main(line.split()) == 2
    flag, name = next((old, new) for old, new in old_flags(line.split()[0]).items() if f"--{old}" in line)
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: --{flag} is now --{name}; mjax 0.4")
    assert error.startswith(f"mjax: error: --{name}")


def test_old_flag_names_a_flag_of_today():
    commands = {name: command for group in (cli.COMMANDS, *GROUPS.values()) for name, command in group.items()}
    for name in OLD_FLAGS:
        flags = old_flags(name)
        function = cli._import_object(commands[name].run)
        hints = [*get_type_hints(function).values()]
        arguments = {"train": TrainArguments, "sft": SftArguments, "plan": PlanArguments, "lm-eval": LmEvalArguments}
        cls = arguments.get(name) or hints[0]
        assert set(flags.values()) <= set(flags_of(cls))
        assert not set(flags) & set(flags_of(cls))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.steps many", "--train.steps many is not a whole number; write --train.steps 250"),
        ("--train.steps=1.5", "--train.steps 1.5 is not a whole number; write --train.steps 250"),
        (
            "--train.batch-rampup 8 8 --data.mock",
            "8 8 needs START INCREMENT SAMPLES, such as --train.batch-rampup 16 16 100000",
        ),
        (
            "--optimizer.learning-rate",
            "--optimizer.learning-rate needs a value, such as --optimizer.learning-rate 0.001",
        ),
        ("--precision.compute x", "x is not a value of --precision.compute; use bf16, fp8, fp16, fp32 or fp64"),
        ("--precision.compute float16", "float16 is not a value of --precision.compute; did you mean fp16?"),
        ("--optimizer.name adam", "adam is not a value of --optimizer.name; did you mean adamw?"),
        ("--step x", "--step x is not a whole number; write --step N"),
        ("gpt_demo", "gpt_demo belongs to no flag of python train.py; type --config gpt_demo"),
        ("-n 1", "-n belongs to no flag of python train.py; `python train.py --help` lists its flags"),
    ],
)
def test_value_of_another_kind_is_one_sentence(flags, words, capsys):
    assert cli.main(["train", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("cls", [TrainArguments, PlanArguments])
def test_names_elsewhere_are_not_ours_and_values_are(cls):
    flags = list(list_flags(cls, cls()))
    for flag in flags:
        for mark in flag.marks:
            names = mark.names.split() if isinstance(mark, Synonyms) else ()
            assert all(
                name.partition("=")[0].rstrip("~") == short_name(name.partition("=")[0].rstrip("~")) for name in names
            )
            assert not {name.rstrip("~") for name in names} & {flag.name for flag in flags}
            values = {name.partition("=")[2] for name in names} - {""}
            assert values <= set(map(str, get_args(flag.kind)))


def test_plan_has_no_flags_that_it_ignores():
    assert len({(flag.owner, flag.field) for flag in list_flags(TrainArguments, TrainArguments())}) <= 88
    assert len(list(flags_of(PlanArguments, PlanArguments()))) <= 57


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


GROUPS = {"data": cli.DATA_COMMANDS, "convert": cli.CONVERT_COMMANDS, "runs": cli.RUNS_COMMANDS}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_command_has_help(command, capsys):
    for name in GROUPS.get(command, [""]):
        try:
            code = cli.main([command, *name.split(), "--help"])
        except SystemExit as stop:
            code = stop.code
        assert code == 0
        said = capsys.readouterr().out
        assert "--" in said
        assert "default: " not in said
        assert "{None}" not in said
        assert "required:" not in said or said.index("required:") < said.index("flags:")


def test_helps_import_no_large_package():
    """All in one process, because each takes a quarter of a second."""
    words = [[command, *name.split(), "--help"] for command in cli.COMMANDS for name in GROUPS.get(command, [""])]
    code = (
        "import contextlib, sys; from mjax.commands import cli\n"
        f"for words in {words}:\n    with contextlib.suppress(SystemExit):\n        cli.main(words)\n"
        "sys.exit(' '.join({'jax', 'numpy', 'tokenizers', 'ftfy', 'requests'} & set(sys.modules)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert not ended.stderr


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_is_a_screen_and_help_all_has_every_flag(command, capsys):
    said = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, flag])
        assert stop.value.code == 0
        said[flag] = capsys.readouterr().out
    assert said["--help"].count("\n") < 70
    example = {"train": "python train.py --run runs/first", "plan": "mjax plan --config llama3_8b"}[command]
    assert example in said["--help"]
    assert "--help-all" in said["--help"]
    train = [flag for flag in flags_of(TrainArguments, TrainArguments()) if "." in flag]
    assert command == "plan" or not [flag for flag in train if f"--{flag}" not in said["--help-all"]]


def test_command_passes_exit_code_and_hides_accelerators(monkeypatch):
    hidden = []
    monkeypatch.setattr("mjax.cluster.launch.hide_accelerators", lambda: hidden.append(True))
    monkeypatch.setattr("mjax.commands.train.train", lambda argv: 75)
    monkeypatch.setattr("mjax.commands.plan.plan", lambda argv: 3)
    assert cli.main(["train"]) == 75
    assert not hidden
    assert cli.main(["plan"]) == 3
    assert hidden


@pytest.mark.parametrize("flag", ["--run", "--checkpoint"])
def test_positional_typed_as_flag_is_explained(flag, capsys):
    assert cli.main(["convert", "to-hf", flag, "runs/x", "out"]) == 2
    assert f"has no {flag}; give RUN by its place, without a flag" in capsys.readouterr().err


def test_run_is_named_after_its_config(tmp_path):
    assert default_name("configs/gpt_8b.py") == default_name("gpt_8b") == "gpt_8b"
    assert default_name(str(tmp_path / "mine" / "config.json")) == "mine"
