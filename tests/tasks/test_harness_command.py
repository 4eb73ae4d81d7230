"""`mjax lm-eval` up to the harness; tests/parity/test_lm_eval.py compares its answers."""

import sys

import pytest

from mjax.commands import cli
from mjax.commands.flags import parse_known
from mjax.commands.lm_eval import LmEvalArguments, harness_arguments


def test_missing_harness_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "run", "--model", "mjax"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mjax: error: mjax lm-eval needs the package lm-eval (")
    assert "pip install lm-eval" in error
    assert error.count("\n") == 1


def test_run_without_a_chat_template_is_refused_before_its_weights(tmp_path, capsys):
    assert cli.main(["lm-eval", "--run", str(tmp_path), "--tasks", "x", "--apply_chat_template"]) == 2
    assert f"--apply_chat_template: {tmp_path}/tokenizer has no chat template;" in capsys.readouterr().err


RUN = "run --model mjax"


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ("--run r --config palm.py --tasks x", f"{RUN} --tasks x --model_args run=r,config=palm.py"),
        ("run --tasks x --run=r --config a.yaml", f"{RUN} --tasks x --model_args run=r --config a.yaml"),
        ("--tasks x --run r -a seed=1 step=2", f"{RUN} --tasks x --model_args run=r,seed=1,step=2"),
        (f"{RUN} --model_args run=r --config a.py --limit 5", f"{RUN} --limit 5 --model_args run=r --config a.py"),
        ("ls tasks", "ls tasks"),
        ("--simulate 2 run --help", "run --help"),
    ],
)
def test_flags_of_the_harness_are_passed_on(typed, passed):
    arguments, rest = parse_known(LmEvalArguments, typed.split(), "mjax lm-eval")
    assert harness_arguments(arguments, rest) == passed.split()


def test_flag_of_lm_eval_with_another_type_is_refused(capsys):
    assert cli.main(["lm-eval", "--simulate", "two", "--tasks", "x"]) == 2
    assert capsys.readouterr().err == "mjax: error: --simulate two is not a whole number; write --simulate N\n"
