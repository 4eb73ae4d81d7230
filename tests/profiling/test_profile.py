"""`train.py --profile START:END` on this machine's CPU: the flag, the files, the table, and a run that is as before."""

import gzip
import json
import shutil

import jax
import pytest
from jax.profiler import ProfileData

import mjax
from mjax.commands import cli
from mjax.config import load_config
from mjax.errors import RunError, UsageError
from mjax.profiling import parse_steps
from mjax.profiling.recorder import Recorder
from mjax.run import loop
from mjax.run.loop import Options
from tests.test_train_command import CONFIG, losses, run_here

pytestmark = pytest.mark.usefixtures("fewer_devices", "quick_runs")


@pytest.mark.parametrize("text", ["10", "0:3", "5:5", "11:14", "1:1000"])
def test_profile_range_is_checked(text):
    message = f"--profile {text} is not START:END from 1 to 13 with at most 100 steps; type --profile 10:13"
    with pytest.raises(UsageError, match=message):
        parse_steps(text, 12)
    assert list(parse_steps("10:13", 12)) == [10, 11, 12]


@pytest.fixture(scope="module")
def unprofiled(tmp_path_factory, quick_runs):
    folder = tmp_path_factory.mktemp("unprofiled")
    run_here(folder)
    return folder


FILES = {"table.txt", "memory.pprof", "plugins"}


def check_table(text):
    """Both tables add up to a step; returns the names of their rows."""
    names = []
    for lines in text.split("\n\n")[1:3]:
        *rows, total = [line.split() for line in lines.splitlines()[1:] if not line.startswith("  ")]
        assert total[0] == "step"
        times = [float(next(word for word in row if "." in word).replace(",", "")) for row in (*rows, total)]
        assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.02 * len(rows))
        assert rows[-1][0] == "idle"
        names += [line.split("  ")[0] for line in lines.splitlines()[1:]]
    return set(names)


def test_profile_changes_no_number_and_its_table_adds_up(tmp_path, unprofiled, capsys):
    """It began with 8:11, and the run continues after step 8: one that is over is announced."""
    shutil.copytree(unprofiled / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    run_here(tmp_path, "--profile", "8:11")
    output, folder = capsys.readouterr().out, tmp_path / "run" / "profile" / "steps_9_to_10"
    assert "note: the run continues after step 8, and --profile records later steps only" in output
    assert "profile     steps 9 to 10 on 1 device of process 0: " in output
    assert {file.name for file in folder.iterdir()} == FILES
    table = (folder / "table.txt").read_text()
    assert table in output
    assert {"matmuls", "attention", "optimizer", "layer forward", "layer backward", "head forward"} <= check_table(
        table
    )
    assert losses(tmp_path) == losses(unprofiled)


@pytest.mark.ci
def test_profile_of_four_devices_is_a_trace_of_each(tmp_path, capsys):
    # Step 4 saves, and step 5 evaluates: both lie between profiled steps.
    run_here(tmp_path, "--profile", "4:7", "--mesh.data", "2", "--mesh.model", "2")
    folder = tmp_path / "run" / "profile" / "steps_4_to_6"
    assert "collectives (exposed)" in check_table((folder / "table.txt").read_text())
    (file,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {"train", "profiled steps", "between steps"} <= {event.get("name") for event in events}
    # The profiler's own, for TensorBoard: the steps have their numbers.
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(file)).planes for line in plane.lines]
    steps = [dict(event.stats)["step_num"] for line in lines for event in line.events if event.name == "train"]
    assert [int(step) for step in steps] == [4, 5, 6]
    assert b"bytes" in gzip.decompress((folder / "memory.pprof").read_bytes())  # pprof's unit of a sample
    assert cli.main(["runs", "remove", str(tmp_path / "run"), "--yes"]) == 0  # the folder is known to be a run's


def test_error_within_profiled_steps_stops_the_profiler(tmp_path, unprofiled, capsys):
    class Fails(mjax.Callback):
        def on_step(self, run, step, metrics):
            if step == 4:
                raise RunError("of the caller")

    options = Options(callbacks=[Fails(), Recorder(range(3, 9))])
    with pytest.raises(RunError):
        loop.train(load_config(CONFIG), tmp_path, options=options)
    assert "the profile that began with step 3 is incomplete and was removed" in capsys.readouterr().out
    assert not list((tmp_path / "profile").iterdir())
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


@pytest.mark.ci
@pytest.mark.parametrize("breaks", ["jax.profiler.start_trace", "jax.profiler.stop_trace", "write_whole"])
def test_profile_that_fails_is_one_line(breaks, tmp_path, unprofiled, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"mjax.profiling.recorder.{breaks}", full)
    run_here(tmp_path, "--profile", "3:5")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the profile")]
    assert said == ["the profile failed ([Errno 28] No space left on device): the run continues"]
    assert losses(tmp_path) == losses(unprofiled)
    monkeypatch.undo()
    if breaks == "jax.profiler.stop_trace":
        jax.profiler.stop_trace()  # it could not be stopped above
