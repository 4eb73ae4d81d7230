"""`mjax lm-eval` up to the harness; tests/parity/test_lm_eval.py compares its answers."""

import sys

from mjax.commands import cli
from mjax.commands.lm_eval import _with_run


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


def test_config_of_own_model_is_told_from_the_harness_own():
    passed = ["run", "--model", "mjax", "--model_args"]
    assert _with_run("r", ["--config", "palm.py", "--tasks", "x"]) == [*passed, "run=r,config=palm.py", "--tasks", "x"]
    assert _with_run("r", ["--tasks", "x", "--config", "a.yaml"]) == [
        *passed,
        "run=r",
        "--tasks",
        "x",
        "--config",
        "a.yaml",
    ]
