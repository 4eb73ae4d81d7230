"""`mjax plan`: the numbers of a pipeline schedule and its picture, without a device."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mjax import cli
from mjax.config import Config
from mjax.parallel.schedules import build_schedule, forward_only, slot_times
from mjax.planner import compile as ahead
from mjax.planner.schedule_figure import _passes, describe_bubble, draw_schedule, timeline
from tests.conftest import ROOT

# 72 layers; data 1 and micro-batches of 1, so the global batch is M. It has no data.
GPT_8B = ["--config", "gpt_8b", "--mesh.data", "1", "--train.micro-batch", "1", "--train.global-batch", "8"]


def plan(capsys, *flags):
    assert cli.main(["plan", *GPT_8B, "--mesh.pipe", "4", *flags]) == 0
    return capsys.readouterr().out


def printed_sections(text):
    """The lines below each headline, as {headline: {name: value}}."""
    sections = {}
    for section in text.split("\n\n--- Communication")[0].split("\n\n"):
        title, *lines = section.splitlines()
        rows = (line.split("  ", 1) for line in lines)
        sections[title.strip("- ")] = {name: value.strip() for name, value in rows}
    return sections


def test_plan_prints_and_draws_its_sections(capsys, tmp_path):
    files = [tmp_path / name for name in ("communication.png", "memory.png")]
    argv = ["plan", "--config", "gpt_8b", "--mesh.no-sequence-parallel", "--train.recompute", "none", "--gpu", "a100"]
    assert cli.main([*argv, "--communication-figure", str(files[0]), "--memory-figure", str(files[1])]) == 0
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    printed = capsys.readouterr().out
    sections = printed_sections(printed)
    assert "Schedule" not in sections
    assert sections["gpt_8b"] == {
        "parameters": "8,317,040,640",
        "devices": "512 = pipe 1 × data 64 × model 8",
        "global batch": "512 = 64 replicas × 1 micro-batches of 8",
        "recomputation": "none",
        "ZeRO": "0",
    }
    assert "GiB on each device" in sections["Memory"]["total"]
    rows = [line.split() for line in printed.split("--- Communication ---")[1].splitlines()]
    assert rows[2] == ["model", "embedding", "forward", "all-reduce", "1", "84.00", "MiB"]
    assert ["model", "all", "293", "23.79", "GiB"] in rows
    assert "--- Time on a100, predicted ---" in printed
    assert "error bar  ±35% of the measured time, so " in printed
    assert "rates      none measured on a100; matmul, inner: fitted to 18 runs of Megatron-LM" in printed


def test_plan_of_a_pipeline_tells_its_cost(capsys, tmp_path):
    file = tmp_path / "schedule.png"
    sections = printed_sections(plan(capsys, "--schedule-figure", str(file)))
    assert sections["Schedule"] == {
        "schedule": "1F1B",
        "stages, P": "4",
        "micro-batches, M": "8",
        "chunks per stage, V": "1",
        "ticks": "14",
        "bubble": "37.5% of the ideal time = (P − 1) / M",
        "in flight": "7 on stage 0, 1 on stage 3",
        "picture": str(file),
    }
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mesh.chunks", "2"], {"chunks": 2, "ticks": 26, "bubble": 3 / 16, "in_flight": [11, 9, 7, 5]}),
        (["--mesh.schedule", "zb-h1"], {"ticks": 27, "bubble": 3 / 24, "in_flight": [4, 3, 2, 1]}),
    ],
)
def test_json_has_numbers_of_schedule(capsys, flags, expected):
    printed = json.loads(plan(capsys, "--json", *flags))["schedule"]
    assert printed["figure"] is None
    assert {name: printed[name] for name in expected} == expected


def test_backward_pass_takes_two_or_three_forwards():
    config = Config()
    full = replace(config, train=replace(config.train, recompute="full"))
    assert slot_times(config) == (1, 2, 0)
    assert slot_times(full) == (1, 3, 0)
    split = replace(config.mesh, schedule="zb-h1")
    assert slot_times(replace(config, mesh=split)) == (1, 1, 1)
    assert slot_times(replace(full, mesh=split)) == (1, 2, 1)


@pytest.mark.ci
def test_plan_leaves_accelerators_alone():
    argv = ["plan", "--config", "gpt_demo", "--gpu", "h100"]
    code = f"""
import sys
from mjax import cli
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
    "--schedule-figure plan.png": "needs a pipeline and gpt_8b has none; add stages, such as --mesh.pipe 2",
    "--mesh.pipe 4 --schedule-figure plan.doc": "use a name that ends in .png, .pdf or .svg",
    "--mesh.pipe 4 --schedule-figure no/such/plan.png": "there is no folder no/such; create it",
    "--longest-figure a.png --gpu h100": "--longest-figure plots what --longest finds; add --longest 64",
    # Configs that cannot run
    "--mesh.pipe 5": "--mesh.pipe 5 does not divide 72 layers",
    "--gpu v100 --model.attention cudnn --model.attention-dropout 0": "needs compute capability 8.0 or more",
    "--gpu a100 --precision.compute fp8": "use --precision.compute bf16",
    # The GPU
    "--gpu h10": "--gpu h10 is not known, did you mean 'h100'?",
    "--calibration x.json": "--calibration x.json is for a GPU; add --gpu, such as --gpu h100",
    "--gpu h100 --calibration none.json": "none.json does not exist; write one with",
    "--devices-per-node 4": "--devices-per-node 4 describes the server of a GPU; add --gpu, such as",
    "--devices-per-node 0 --gpu h100": "--devices-per-node is 0; it must be at least 1",
    "--network -1 --gpu h100": "--network is -1.0; it must be above 0",
    "--network inf --gpu h100": "--network is inf",
    "--longest 8": "--longest 8 needs a GPU to plan for; add --gpu, such as",
    # The search
    "--devices 8": "--devices 8 needs a GPU to plan for; add --gpu, such as --gpu h100",
    "--devices 8 --gpu h100 --top 0": "--top is 0; it must be at least 1",
    "--devices 8 --gpu h100 --price inf": "--price is inf",
    "--price 2": "--price is for the search; add --devices, such as --devices 8",
    "--write plan.py": "--write is for the search; add --devices, such as --devices 8",
    "--devices 8 --gpu v100": "no bf16 peak is known for v100",
    "--devices 8 --gpu h100 --keep mesh.zeros": "did you mean 'mesh.zero'?",
    # The budget
    "--gpu h100 --days 3": "--days is for the search; add --devices",
    "--gpu h100 --devices 8 --family gpt": "--family gpt is for a budget of time; add --days",
    "--gpu h100 --devices 8 --days 3 --train.tokens 1B": "--train.tokens and --days both",
    "--gpu h100 --devices 8 --days 3 --family gpt": "--family and --config both",
    "--gpu h100 --devices 8 --days 3 --optimizer.decay-steps 9": "--optimizer.decay-steps counts steps",
    "--gpu h100 --devices 8 --days 0": "--days is 0.0; it must be above 0",
    # Ahead-of-time compilation
    "--compile": "--compile needs a GPU to compile for; add --gpu with one of a100, b200, h100, h200",
    "--compile --gpu v100": "--gpu v100 cannot be compiled for; use one of a100, b200, h100, h200",
    "--compile --gpu h100": "type: pip install -r requirements-cuda.txt",
    "--compile --gpu h100 --mesh.data 3 --train.global-batch 24 --mesh.model 4": "or use --devices-per-node 6",
    "--save-program step.mjax": "add --compile",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_plan_rejects_flags_in_one_sentence(capsys, monkeypatch, flags):
    monkeypatch.setattr(ahead, "cuda_build", lambda: None)
    assert cli.main(["plan", *GPT_8B, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert REFUSALS[flags] in error
    assert error.count("\n") == 1


def lengths_of(schedule):
    return _passes(schedule, [1, 2, 0] if schedule.weight is None else [1, 1, 1])[1]


@pytest.mark.parametrize(
    "schedule",
    [build_schedule("gpipe", 1, 1), build_schedule("zb-h1", 4, 8), build_schedule("1f1b", 8, 96), forward_only(4, 8)],
    ids=lambda schedule: f"{schedule.name}-{schedule.stages}-{schedule.micro_batches}",
)
def test_schedule_is_drawn(schedule, tmp_path):
    draw_schedule(schedule, tmp_path / "schedule.png", 1, 1, 1)
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [("1f1b", 4, 96, 2), ("gpipe", 4, 96, 1), ("zb-h1", 4, 96, 1)], ids=str)
def test_long_schedule_omits_middle_of_steady_state(arguments):
    schedule = build_schedule(*arguments)
    lengths = lengths_of(schedule)
    time = timeline(schedule, lengths, 1.0)
    assert lengths.sum() > 2 * time.span
    assert time.span < 250
    ran = sum(slots.on for slots in (schedule.forward, schedule.backward, schedule.weight) if slots is not None)
    assert (ran[~time.shown].min(axis=0) > 0).all()  # no stage is idle in what is left out
    assert time.shown[: schedule.stages - 1].all()
    assert time.shown[1 - schedule.stages :].all()
    assert sum(ticks for _, _, ticks in time.gaps) == (~time.shown).sum() > 0
    assert (np.diff(time.begin) >= 0).all()


def test_bubble_formula_is_named_where_it_holds():
    assert describe_bubble(build_schedule("1f1b", 4, 8, 2), 1, 3) == "18.8% of the ideal time = (P − 1) / (V M)"
    split = build_schedule("zb-h1", 4, 8)
    assert describe_bubble(split, 1, 1, 1) == "12.5% of the ideal time = (P − 1) / (3 M)"
    assert "=" not in describe_bubble(split, 1, 2, 1)
