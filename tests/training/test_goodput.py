"""The hours of a run by activity, over all its starts."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest

import mjax
from mjax.cluster.launch import STEP
from mjax.commands import cli
from mjax.config import CheckpointConfig
from mjax.parallel.mesh import make_mesh
from mjax.run import callbacks, loop
from mjax.run.callbacks import GOODPUT, Goodput, read_goodput
from mjax.step.layout import with_kernel
from mjax.step.step import build_program
from tests.tiny_config import config as TINY


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_steps_are_repeated_until_a_new_one(tmp_path, clock):
    """A start that continues before the last step of another, and goes back itself."""
    (tmp_path / GOODPUT).write_text(json.dumps([{"began": "", "seen": "", "first": 0, "last": 2, "seconds": {}}]))
    hours = Goodput()
    clock(5)
    hours.begin(tmp_path, 1)
    for step, seconds in (2, 10), (3, 20), (4, 30):
        hours.on_activity(None, step, "compiling" if step == 2 else "waiting for its batch")
        clock(1)
        hours.on_activity(None, step, STEP)
        clock(seconds)
    hours.on_activity(None, 4, "saving")
    clock(2)
    hours.on_start(SimpleNamespace(step=3))
    for step in 4, 5:
        hours.on_activity(None, step, STEP)
        clock(100 * step)
    hours.close()
    expected = {"steps": 550, "repeated": 410, "starting": 5, "compiling": 1, "data": 2, "saving": 2}
    _, start = read_goodput(tmp_path)
    assert start["seconds"] == expected
    assert (start["first"], start["last"]) == (1, 5)
    clock(61)  # a run that is killed has told where it was
    hours.on_activity(None, 6, STEP)
    assert read_goodput(tmp_path)[1]["seconds"] == expected | {"steps": 611}


def test_seconds_of_two_starts_add_up_to_their_time(tmp_path, quick_runs, capsys, monkeypatch):
    program = build_program(with_kernel(TINY), make_mesh(TINY.mesh))
    monkeypatch.setattr(loop, "build_program", lambda *_, **__: program)
    monkeypatch.setattr(loop, "check_devices", lambda *_: None)
    config = replace(TINY, checkpoint=CheckpointConfig(interval=2))
    folder = tmp_path / "run"
    for steps in 4, 6:
        mjax.Trainer(replace(config, train=replace(config.train, steps=steps)), folder, show=False).train()
        shutil.rmtree(folder / "checkpoints" / "4", ignore_errors=True)
    starts = read_goodput(folder)
    assert [(start["first"], start["last"]) for start in starts] == [(0, 4), (2, 6)]
    assert "repeated" not in starts[0]["seconds"]
    assert {"steps", "repeated", "starting", "compiling", "saving"} <= starts[1]["seconds"].keys()
    for start in starts:
        began, seen = (datetime.fromisoformat(start[name]) for name in ("began", "seen"))
        assert sum(start["seconds"].values()) == pytest.approx((seen - began).total_seconds(), abs=0.05)
    capsys.readouterr()
    assert cli.main(["runs", "--runs", str(tmp_path), "--goodput"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("run       2  0:")
