"""`mjax plan`: the numbers of a pipeline schedule and its picture, without a device."""

import json
import subprocess
import sys

import pytest

from mjax.commands import cli, plan
from mjax.planner import command
from tests.conftest import ROOT

# 72 layers; data 1 and micro-batches of 1, so the global batch is M. It has no data.
GPT_8B = ["--config", "gpt_8b", "--mesh.data", "1", "--train.micro-batch", "1", "--train.global-batch", "8"]


def test_plan_prints_and_draws_its_sections(capsys, tmp_path):
    files = [tmp_path / name for name in ("communication.png", "memory.png")]
    argv = ["plan", "--config", "gpt_8b", "--mesh.no-sequence-parallel", "--train.recompute", "none", "--gpu", "a100"]
    assert (
        cli.main([*argv, "--details", "--communication-figure", str(files[0]), "--memory-figure", str(files[1])]) == 0
    )
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["parameters", "8,317,040,640"] in rows
    assert ["model", "total", "293", "23.79", "GiB"] in rows
    assert "GiB per device, in the backward pass of the layers" in printed
    assert "Schedule" not in printed
    assert " ms (±35%: " in printed


def test_plan_answers_with_verdict_and_command(capsys):
    assert cli.main(["plan", *GPT_8B, "--gpu", "h100", "--mesh.model", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- gpt_8b on 4 × h100, predicted ---"
    assert len(lines) <= 20
    (memory,) = (line for line in lines if line.startswith("memory"))
    assert "GiB per device: fits in the 71.7 GiB usable on h100" in memory
    command = (
        "  python train.py --config gpt_8b --mesh.data 1 --mesh.model 4 --train.global-batch 8 --train.micro-batch 1"
    )
    assert lines[-2] == f"{command} --data.path PREFIX"
    assert cli.main(["plan", *GPT_8B, "--gpu", "h100", "--mesh.model", "1"]) == 0
    printed = capsys.readouterr().out
    assert "does not fit in the 71.7 GiB usable on h100\n  " in printed
    assert "train.py" not in printed


def test_plan_has_numbers_of_schedule(capsys):
    assert cli.main(["plan", *GPT_8B, "--mesh.pipe", "4", "--mesh.virtual-stages", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["schedule"]
    expected = {"virtual_stages": 2, "ticks": 26, "bubble": 3 / 16, "max_in_flight": [11, 9, 7, 5]}
    assert expected.items() <= printed.items()


def test_plan_compares_both_ways_to_experts(capsys):
    """An all-gather over 8 ranks sends 7 rows for each token, an all-to-all to two experts 2.5 · 7 / 8."""
    argv = ["plan", "--config", "mixtral_8x7b", "--gpu", "h100", "--mesh.expert", "8", "--json"]
    assert cli.main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    gathered, exchanged = (printed["dispatch"][way] for way in ("allgather", "alltoall"))
    assert printed["dispatch"]["chosen"] == "alltoall"
    assert exchanged["bytes"] / gathered["bytes"] == pytest.approx(2.5 / 8, rel=1e-2)
    assert printed["communication"]["bytes_by_axis"]["expert"] == exchanged["bytes"]
    assert (printed["time"]["seconds"], printed["memory"]["total"]) == (exchanged["seconds"], exchanged["memory"])
    assert exchanged["seconds"] < gathered["seconds"]
    assert exchanged["memory"] < gathered["memory"]


@pytest.mark.ci
def test_plan_leaves_accelerators_alone():
    argv = ["plan", "--config", "gpt_demo", "--gpu", "h100"]
    code = f"""
import sys
from mjax.commands import cli
try:
    cli.main(["plan", "--help"])
except SystemExit:
    assert "jax" not in sys.modules
assert cli.main({argv!r}) == 0
import jax
assert jax.default_backend() == "cpu"
"""
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"}  # JAX would take a GPU, or fail without one
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


REFUSALS = {
    # Pictures
    "--schedule-figure plan.png": "needs a pipeline; add stages to gpt_8b, such as --mesh.pipe 2",
    "--mesh.pipe 4 --schedule-figure plan.doc": "use a name that ends in .png, .pdf or .svg",
    # Flags without effect, and configs that cannot run
    "--log.interval 3": "has no --log.interval; no result depends on log: remove it",
    "--mesh.pipe 80": "--mesh.pipe 80 is more than a GPT can fill with 72 layers; use at most 72 stages",
    "--gpu v100 --model.attention cudnn --model.attention-dropout 0": "needs compute capability 8.0 (A100) or more",
    # The GPU
    "--gpu h10": "--gpu h10 is not known; did you mean h100?",
    "--calibration x.json": "--calibration x.json needs --gpu h100; add it",
    "--gpu h100 --calibration none.json": "none.json does not exist; in mjax's repository, python",
    "--devices-per-node 4": "--devices-per-node 4 needs --gpu h100; add it",
    "--network -1 --gpu h100": "--network is -1.0; it must be above 0",
    "--max-sequence-on 8": "--max-sequence-on 8 needs --gpu h100; add it",
    # The search
    "--devices 8": "--devices 8 needs --gpu h100; add it",
    "--fix mesh.zero": "--fix mesh.zero needs --devices 8; add it",
    "--devices 8 --gpu v100": "no bf16 peak is known for v100",
    "--devices 8 --gpu h100 --fix mesh.zeros": "did you mean mesh.zero?",
    "--devices 8 --gpu h100 --write no/such.py": "there is no folder",
    "--devices 8 --gpu h100 --write plan.json": "use a name that ends in .py",
    # The budget
    "--gpu h100 --days 3": "--days 3 needs --devices 8; add it",
    "--gpu h100 --devices 8 --days 3 --train.tokens 1B": "--train.tokens and --days both",
    # Ahead-of-time compilation
    "--compile": "--compile needs a GPU to compile for; add --gpu with one of a100, b200, h100, h200",
    "--compile --gpu v100": "--gpu v100 cannot be compiled for; use one of a100, b200, h100, h200",
    "--compile --gpu h100": "type: pip install 'jax[cuda13]'",
    "--compile --gpu h100 --mesh.data 3 --train.global-batch 24 --mesh.model 4": "or type --devices-per-node 6",
}


@pytest.mark.parametrize(
    ("flags", "config"), {"": "gpt_demo", "--devices 64": "llama3_8b", "--max-sequence-on 64": "llama3_8b"}.items()
)
def test_search_plans_a_model_of_its_size(monkeypatch, flags, config):
    planned = []
    monkeypatch.setattr(plan, "run_plan", lambda arguments: planned.append(arguments.config) or 0)
    assert cli.main(["plan", "--gpu", "h100", *flags.split()]) == 0
    assert planned == [config]


@pytest.mark.parametrize("flags", REFUSALS)
def test_plan_rejects_flags_in_one_sentence(capsys, monkeypatch, flags):
    monkeypatch.setattr(command, "cuda_build", lambda: None)
    assert cli.main(["plan", *GPT_8B, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert REFUSALS[flags] in error
    assert error.count("\n") == 1
