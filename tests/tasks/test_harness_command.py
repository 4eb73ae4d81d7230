"""`mjax lm-eval` up to the harness; tests/parity/test_lm_eval.py compares its answers."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

from mjax import cli


def test_missing_harness_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "run", "--model", "mjax"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mjax: error: mjax lm-eval needs the package lm-eval (")
    assert "pip install lm-eval" in error
    assert error.count("\n") == 1


def test_run_flag_keeps_other_model_arguments(monkeypatch):
    seen = []
    modules = {
        "lm_eval": SimpleNamespace(),
        "lm_eval.__main__": SimpleNamespace(cli_evaluate=lambda: seen.append(sys.argv)),
        "lm_eval.api": SimpleNamespace(),
        "lm_eval.api.registry": SimpleNamespace(model_registry=Mock()),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    given = ["lm-eval", "run", "--run", "runs/x", "--tasks", "hellaswag", "--model_args", "data=2", "model=4"]
    assert cli.main(given) == 0
    model = ["--model", "mjax", "--model_args", "run=runs/x,data=2,model=4"]
    assert seen == [["lm-eval", "run", *model, "--tasks", "hellaswag"]]
