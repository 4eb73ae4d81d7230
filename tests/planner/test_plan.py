"""`mjax plan`: the numbers of a pipeline schedule and its picture, without a device."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from mjax import cli
from mjax.config import Config
from mjax.parallel.schedules import build_schedule, forward_only, slot_times
from mjax.planner.schedule_figure import (
    COLOURS,
    IDLE,
    MARGINS,
    PHASES,
    _passes,
    describe_bubble,
    draw_schedule,
    timeline,
)
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


def test_any_config_can_be_planned_a_pipeline_or_not(capsys):
    assert cli.main(["plan", "--config", "gpt_8b"]) == 0
    sections = printed_sections(capsys.readouterr().out)
    assert "Schedule" not in sections
    assert sections["gpt_8b"] == {
        "parameters": "8,317,040,640",
        "devices": "512 = pipe 1 × data 64 × model 8, sequence parallel",
        "global batch": "512 = 64 replicas × 1 micro-batches of 8",
        "recomputation": "selective",
        "ZeRO": "0",
    }
    assert cli.main(["plan", "--config", "gpt_8b", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schedule"] is None
    assert (printed["run"]["devices"], printed["run"]["sequence_parallel"]) == (512, True)


def test_the_table_says_what_the_schedule_is_and_costs(capsys, tmp_path):
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mesh.schedule", "gpipe"], {"ticks": 21, "bubble": 3 / 8, "in_flight": [8, 8, 8, 8]}),
        (["--mesh.chunks", "2"], {"chunks": 2, "ticks": 26, "bubble": 3 / 16, "in_flight": [11, 9, 7, 5]}),
        (["--mesh.schedule", "zb-h1"], {"ticks": 27, "bubble": 3 / 24, "in_flight": [4, 3, 2, 1]}),
        (["--mesh.data", "2"], {"micro_batches": 4, "bubble": 3 / 4, "in_flight": [4, 4, 3, 1]}),
    ],
)
def test_json_is_one_object_with_every_number(capsys, flags, expected):
    printed = json.loads(plan(capsys, "--json", *flags))["schedule"]
    assert printed["figure"] is None
    assert {name: printed[name] for name in expected} == expected


def test_a_backward_pass_takes_two_forwards_three_with_full_recomputation_and_zb_h1_splits_it():
    config = Config()
    full = replace(config, train=replace(config.train, recompute="full"))
    assert slot_times(config) == (1, 2, 0)
    assert slot_times(full) == (1, 3, 0)
    split = replace(config.mesh, schedule="zb-h1")
    assert slot_times(replace(config, mesh=split)) == (1, 1, 1)
    assert slot_times(replace(full, mesh=split)) == (1, 2, 1)


def test_a_plan_leaves_accelerators_alone_and_its_help_needs_no_jax():
    argv = ["plan", *GPT_8B, "--mesh.pipe", "4"]
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


def test_what_a_device_sends_is_printed_by_axis_and_source_and_drawn(capsys, tmp_path):
    file = tmp_path / "communication.png"
    argv = ["plan", "--config", "gpt_8b", "--mesh.no-sequence-parallel", "--train.recompute", "none"]
    argv += ["--communication-figure", str(file)]
    assert cli.main(argv) == 0
    lines = capsys.readouterr().out.split("--- Communication ---")[1].splitlines()
    rows = [line.split() for line in lines]
    assert rows[2] == ["model", "embedding", "forward", "all-reduce", "1", "84.00", "MiB"]
    assert ["model", "all", "293", "23.79", "GiB"] in rows
    assert file.read_bytes().startswith(b"\x89PNG")

    assert cli.main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["communication"]
    assert printed["figure"] == str(file)
    assert printed["bytes_by_axis"]["model"] + printed["bytes_by_axis"]["data"] == printed["bytes"]
    assert sum(printed["bytes_by_source"].values()) == printed["bytes"]
    assert sum(record["count"] * record["wire_bytes_each"] for record in printed["records"]) == printed["bytes"]
    assert printed["records"][1] == {
        "axes": ["model"],
        "source": "layer forward",
        "kind": "all-reduce",
        "ranks": 8,
        "shape": [8192, 3072],
        "dtype": "bfloat16",
        "count": 144,
        "counts_by_stage": [144],
        "calls_in_program": 144,
        "wire_bytes_each": 88080384.0,
        "wire_bytes": 144 * 88080384.0,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--schedule-figure", "plan.png"],
            "needs a pipeline and gpt_8b has none; add stages, such as --mesh.pipe 2",
        ),
        (["--mesh.pipe", "4", "--schedule-figure", "plan.doc"], "use a name that ends in .png, .pdf or .svg"),
        (["--mesh.pipe", "4", "--schedule-figure", "no/such/plan.png"], "there is no folder no/such; create it"),
        (["--communication-figure", "plan.doc"], "--communication-figure plan.doc is not a picture"),
        (["--mesh.pipe", "5"], "--mesh.pipe 5 does not divide 72 layers"),
        (["--mesh.pipe", "3", "--mesh.chunks", "2"], "and a step has 8; make"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence_and_exit_code_2(capsys, flags, message):
    assert cli.main(["plan", *GPT_8B, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def picture(schedule, *times):
    """The drawn schedule: [height, width, RGB] from 0 to 1."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "schedule.png")
        draw_schedule(schedule, file, *times)
        return imread(file)[..., :3]


def boxes_at(schedule, time, image):
    """What every row shows at `time`."""
    left, right, top, bottom = MARGINS
    width, height = image.shape[1] - left - right, image.shape[0] - top - bottom
    x = left + int(width * time / schedule.makespan(1, 2))
    # High in a row, above the number in its middle.
    pixels = [image[top + int(height * (stage + 0.15) / schedule.stages), x] for stage in range(schedule.stages)]
    names = {"idle": IDLE} | COLOURS
    return [min(names, key=lambda name: np.abs(pixel - to_rgb(names[name])).sum()) for pixel in pixels]


def test_every_box_of_the_picture_is_where_the_table_says():
    schedule = build_schedule("1f1b", 4, 8)
    image = picture(schedule)
    assert boxes_at(schedule, 0.5, image) == ["forward", "idle", "idle", "idle"]
    assert boxes_at(schedule, 3.5, image) == ["forward"] * 4
    assert boxes_at(schedule, 5, image) == ["idle", "idle", "idle", "backward"]  # B of tick 3
    assert boxes_at(schedule, 14.5, image) == ["backward"] * 4
    assert boxes_at(schedule, 32, image) == ["backward", "idle", "idle", "idle"]


@pytest.mark.parametrize(
    "schedule",
    [
        build_schedule("gpipe", 1, 1),
        build_schedule("1f1b", 2, 2),
        build_schedule("1f1b", 8, 16, 3),
        build_schedule("zb-h1", 4, 8),
        build_schedule("1f1b", 64, 128),
        forward_only(4, 8),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.stages}-{schedule.micro_batches}-{schedule.chunks}",
)
def test_pictures_are_of_a_size_one_can_look_at_and_hold_every_kind_of_pass(schedule):
    image = picture(schedule, 1, 1, 1)
    height, width, _ = image.shape
    assert 300 < height < 2500
    assert 1200 < width < 4500
    shown = set(np.unique(np.rint(255 * image).astype(int) @ (65536, 256, 1)))
    kinds = (schedule.forward, schedule.backward, schedule.weight)
    for colour, slots in zip(COLOURS.values(), kinds, strict=True):
        assert (int(colour[1:], 16) in shown) == (slots is not None)


LONG = [("1f1b", 8, 96, 1), ("1f1b", 4, 96, 2), ("gpipe", 4, 96, 1), ("zb-h1", 4, 96, 1), ("1f1b", 16, 192, 1)]


@pytest.mark.parametrize("arguments", LONG, ids=str)
def test_of_a_long_schedule_only_the_middle_of_the_steady_state_is_left_out(arguments):
    schedule = build_schedule(*arguments)
    lengths = _passes(schedule, [1, 2, 0] if schedule.weight is None else [1, 1, 1])[1]
    time = timeline(schedule, lengths, 1.0)
    assert lengths.sum() > 2 * time.span
    assert time.span < 250
    ran = sum(slots.on for slots in (schedule.forward, schedule.backward, schedule.weight) if slots is not None)
    assert (ran[~time.shown].min(axis=0) > 0).all()  # no stage is idle in what is left out
    assert time.shown[: schedule.stages - 1].all()
    assert time.shown[1 - schedule.stages :].all()
    assert sum(ticks for _, _, ticks in time.gaps) == (~time.shown).sum() > 0
    assert [name for name, _, _ in time.phases][:2] == ["warm-up", "steady state"]
    ends = [edge for _, *edges in time.phases for edge in edges]
    assert (ends[0], ends[-1]) == (0, time.span)
    assert ends[1:-1:2] == ends[2::2]
    assert (np.diff(time.begin) >= 0).all()


def test_in_the_picture_of_a_long_schedule_boxes_and_gap_are_where_the_timeline_says():
    schedule = build_schedule("1f1b", 8, 96)
    time = timeline(schedule, _passes(schedule, [1, 2, 0])[1], 1.0)
    image = picture(schedule)
    left, right, top, bottom = MARGINS
    scale = max(1.0, (image.shape[1] - left - right) / 2100)
    width = image.shape[1] - scale * (left + right)
    height = image.shape[0] - scale * (top + PHASES + bottom)

    def shown_at(drawn):
        x = round(scale * left + width * drawn / time.span)
        y = [round(scale * (top + PHASES) + height * (stage + 0.15) / 8) for stage in range(8)]
        names = {"idle": IDLE, "gap": "#FFFFFF"} | COLOURS
        return [min(names, key=lambda name: np.abs(image[row, x] - to_rgb(names[name])).sum()) for row in y]

    ((begin, end, _),) = time.gaps
    assert shown_at(0.5) == ["forward", *["idle"] * 7]
    assert shown_at(begin + 0.2) == shown_at(end - 0.2) == ["gap"] * 8
    assert shown_at(begin - 1) == ["backward"] * 8
    assert shown_at(end + 0.5) == ["forward"] * 8
    assert shown_at(time.span - 1) == ["backward", *["idle"] * 7]


def test_a_schedule_that_can_be_seen_whole_is_drawn_whole():
    schedule = build_schedule("1f1b", 4, 24)
    time = timeline(schedule, _passes(schedule, [1, 2, 0])[1], 1.0)
    assert time.shown.all()
    assert (time.gaps, time.phases, time.span) == ([], [], schedule.makespan(1, 2))
    assert (time.begin == time.start).all()


def test_the_formula_of_the_bubble_is_named_only_where_it_holds():
    assert describe_bubble(build_schedule("1f1b", 4, 8, 2), 1, 3) == "18.8% of the ideal time = (P − 1) / (V M)"
    split = build_schedule("zb-h1", 4, 8)
    assert describe_bubble(split, 1, 1, 1) == "12.5% of the ideal time = (P − 1) / (3 M)"
    assert "=" not in describe_bubble(split, 1, 2, 1)
