"""`mjax runs`: the list, the comparison and its picture, and what may be removed."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mjax.checkpoint.folders import lock_folder, write_manifest
from mjax.commands import cli
from mjax.commands import runs as runs_command
from mjax.config import save_config
from mjax.models.build import abstract_weights, count_parameters
from mjax.pictures import runs as pictures
from mjax.pictures.runs import Curve, _difference, draw_runs
from mjax.utils import files
from tests.conftest import ROOT
from tests.tiny_config import config as TINY


def make_run(folder, steps=12, level=5.0, checkpoints=(8, 12), **sections):
    """A run folder as training leaves it: the loss falls by 0.1 a step, every fifth step is validated."""
    config = replace(TINY, **{name: replace(getattr(TINY, name), **fields) for name, fields in sections.items()})
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    for step in checkpoints:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": level - step / 10, "tokens": step * config.train.global_batch * 16}
            record |= {"tokens_per_second": 100.0 + step, "skipped": False}
            record |= {"val_loss": level - step / 10 + 0.5} if step % 5 == 0 else {}
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    make_run(tmp_path / "runs" / "base")
    make_run(tmp_path / "runs" / "fast", level=4.5, optimizer={"learning_rate": 2e-2})
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_list_as_json_says_state_of_runs(runs, monkeypatch, capsys):
    make_run(runs / "early", steps=3, checkpoints=())
    make_run(runs / "half", steps=8, checkpoints=(8,))
    file = make_run(runs / "sick") / "metrics.jsonl"
    file.write_text(file.read_text().replace('"skipped": false', '"skipped": true', 7) + '{"step": 13, "lo')
    (make_run(runs / "torn") / "config.json").write_text("{")
    (make_run(runs / "converted", checkpoints=(0,)) / "metrics.jsonl").unlink()
    with lock_folder(runs / "fast", print):
        assert cli.main(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    states = {name: row["state"] for name, row in rows.items()}
    assert states.pop("torn").startswith("cannot be read: runs/torn/config.json is not JSON")
    assert states == {
        "base": "done", "fast": "running", "early": "no checkpoint", "half": "stopped", "converted": "imported",
        "sick": "done, 7 of the last 12 steps skipped",
    }  # fmt: skip
    assert (rows["half"]["step"], rows["half"]["steps"], rows["half"]["loss"]) == (8, 12, pytest.approx(4.2))
    assert (rows["converted"]["step"], rows["converted"]["loss"]) == (0, None)
    monkeypatch.setattr(runs_command, "TAIL", 200)  # of a long run only the end of its metrics is read
    assert cli.main(["runs", "list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (row["step"], row["loss"], row["val_loss"]) == (12, pytest.approx(3.8), None)


def bytes_read():
    """Bytes that this process has read."""
    return int((Path("/proc/self/io").read_text().split())[1])


def test_list_reads_the_end_of_long_metrics(runs, monkeypatch, capsys):
    """Files and bytes count, not seconds: 2,000 runs are listed in 2 s of processor time."""
    opened, open_file = [], io.open
    monkeypatch.setattr(io, "open", lambda file, *options: opened.append(file) or open_file(file, *options))
    for name in ("base", "fast"):
        file = runs / name / "metrics.jsonl"
        *lines, last = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines) * 2000 + last)
        assert file.stat().st_size > 2**20
        (runs / name / "environment.json").write_text(json.dumps([{"parameters": 1000}]))
    assert cli.main(["runs"]) == 0
    opened.clear()
    before = bytes_read()
    assert cli.main(["runs", "--json"]) == 0
    read = bytes_read() - before
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["step"], row["loss"], row["val_loss"]) == (12, pytest.approx(3.3), pytest.approx(4.0))
    assert read < 2 * 80_000
    names = sorted(file.name for file in opened if file.suffix in (".json", ".jsonl"))
    assert names == sorted(["config.json", "metrics.jsonl", "environment.json"] * 2)


def test_list_imports_no_jax(runs):
    """It takes seconds. Parameters are those that the start of a run recorded, or those in a checkpoint."""
    counted = count_parameters(TINY.model)
    (runs / "base" / "environment.json").write_text(json.dumps([{}, {"parameters": counted}]))
    checkpoint = runs / "fast" / "checkpoints" / "12"
    shapes = {f"model.{name}": ["float32", shape] for name, (shape, _) in abstract_weights(TINY.model).items()}
    write_manifest(checkpoint, 12, shapes | {"optimizer.mu": ["float32", [1000]]})
    script = "import sys; from mjax.commands import cli; cli.main(['runs', '--json']); assert 'jax' not in sys.modules"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["name"], row["parameters"]) for row in rows] == [("base", counted), ("fast", counted)]


def test_comparison_has_results_and_different_settings(runs, capsys):
    make_run(runs / "short", steps=4, level=6.0, mesh={"data": 2})
    file = runs / "fast" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 3.3', '"loss": null'))  # the last, not finite
    assert cli.main(["runs", "compare", "base", "runs/fast", "short", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    results = found["runs"].values()
    assert [result["loss at step 4"] for result in results] == pytest.approx([4.6, 4.1, 5.6])
    assert [result["loss"] for result in results] == pytest.approx([3.8, 3.4, 5.6])
    assert [result["best val loss"] for result in results] == [4.5, 4.0, None]
    assert [result["tokens/s"] for result in results] == [107.0, 107.0, 103.0]
    assert found["settings"] == {
        "mesh.data": {"base": 1, "fast": 1, "short": 2},
        "optimizer.learning_rate": {"base": 0.01, "fast": 0.02, "short": 0.01},
    }
    assert (runs / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["runs", "compare", "base", "fast", "--figure", "two.svg"]) == 0
    assert "settings that differ: 1; curves in two.svg" in capsys.readouterr().out
    assert "<svg" in (runs.parent / "two.svg").read_text()


def test_picture_shows_distance_from_first_run(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: drawn.append(figure))
    for x, tokens, points in (("step", (1, 1), [[1.0, 0.5], [2.0, 0.5]]), ("tokens", (8, 16), [[16.0, 1.5]])):
        one = Curve((tokens[0] * i, 5.0 - i) for i in (1, 2, 3)), Curve()
        two = Curve((tokens[1] * i, 5.5 - i) for i in (1, 2)), Curve((tokens[1] * i, 6.0) for i in (1, 2))
        draw_runs({"one": one, "two": two}, tmp_path / "compare.png", x)
        assert drawn[-1].axes[1].get_lines()[0].get_xydata().tolist() == points


def test_distance_of_runs_is_that_of_whole_bins(monkeypatch):
    monkeypatch.setattr(pictures, "MAX_POINTS", 8)
    one, two = (Curve((step, level - step / 100) for step in range(1, steps)) for steps, level in ((40, 5), (21, 6)))
    assert (one.width, two.width) == (8, 4)
    steps, differences = _difference(two, one)
    assert (steps.tolist(), differences.tolist()) == (pytest.approx([4.0, 11.5]), pytest.approx([1.0, 1.0]))


def test_failed_picture_leaves_previous_one(tmp_path, monkeypatch):
    def fill_disk(file):
        raise OSError("No space left on device")

    picture = tmp_path / "loss.png"
    picture.write_bytes(b"whole")
    monkeypatch.setattr(files, "to_disk", fill_disk)
    with pytest.raises(OSError, match="No space"):
        draw_runs({"one": (Curve([(1, 5.0)]), Curve())}, picture)
    assert picture.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [picture]


def test_remove_deletes_runs_but_not_linked_files(runs, tmp_path, capsys):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "tokenizer.json").write_text("{}")
    (runs / "base" / "tokenizer").symlink_to(shared)
    # Of a run that was killed while it saved or drew, and of a start that could not read its metrics.
    for left in (
        "metrics.jsonl.damaged",
        ".shared-12ab",
        "checkpoints/8.damaged",
        "checkpoints/20.writing",
        "checkpoints/0.deleting",
    ):
        (runs / "base" / left).mkdir()
    for left in ("metrics.jsonl.damaged.2", "experts.json.tmp", "loss.tmp.png", "experts.png", "checkpoints/good.json"):
        (runs / "base" / left).touch()
    assert cli.main(["runs", "remove", "base", "runs/fast", "--yes"]) == 0
    assert capsys.readouterr().out == "removed runs/base\nremoved runs/fast\n"
    assert [entry.name for entry in runs.iterdir()] == ["notes"]
    assert (shared / "tokenizer.json").read_text() == "{}"


def test_killed_remove_leaves_no_half_run(runs, monkeypatch, capsys):
    def kill(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", kill)
    assert cli.main(["runs", "remove", "base", "--yes"]) == 130
    assert cli.main(["runs", "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["fast"]


@pytest.mark.parametrize(("answer", "kept"), [("n", True), ("", True), ("y", False)])
def test_remove_asks_first(runs, monkeypatch, capsys, answer, kept):
    terminal = io.StringIO(answer + "\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["runs", "remove", "base"]) == 0
    assert "remove runs/base (step 12/12, 2 checkpoints, " in capsys.readouterr().out
    assert (runs / "base").is_dir() == kept


MISTAKES = {
    "compare base base": "needs two or more runs",
    "compare base fast --figure no/where.png": "there is no folder no",
    "compare base fast --figure curve.txt": "use a name that ends in .png, .pdf or .svg",
    "compare base empty": "empty has no losses to compare",
    "remove --yes": "needs names of runs",
    "remove bse --yes": "runs/bse does not exist; did you mean base?",
    "remove notes --yes": "is not a run folder",
    "remove . --yes": "runs is not a run folder: it has no config.json",
    "remove link --yes": "runs/link is a link to ",
    "remove base": "stdin is not a terminal; add --yes",
    "remove base busy --yes": "runs/busy is in use by another process",
    "remove base person --yes": "runs/person contains thesis.tex, which no run writes",
    "remove base among --yes": "runs/among contains checkpoints/notes.txt",
    "remove base step --yes": "runs/step contains checkpoints/2024, which no run writes",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_user_error_removes_nothing(line, runs, capsys):
    make_run(runs / "empty", steps=0, checkpoints=())
    for name in ("person", "among", "step", "busy"):
        make_run(runs / name)
    (runs / "person" / "thesis.tex").touch()
    (runs / "among" / "checkpoints" / "notes.txt").touch()
    (runs / "step" / "checkpoints" / "2024").mkdir()
    (runs / "link").symlink_to(runs / "base")
    with lock_folder(runs / "busy", print):
        before = sorted(runs.rglob("*"))
        assert cli.main(["runs", *line.split()]) == 2
    message = capsys.readouterr().err
    assert MISTAKES[line] in message
    assert message.count("\n") == 1
    assert sorted(runs.rglob("*")) == before


def test_names_are_looked_up_below_runs_only(runs, tmp_path, monkeypatch, capsys):
    """`../x` is a path as typed, not one next to --runs."""
    make_run(tmp_path / "x")
    make_run(tmp_path / "deep" / "x")
    (tmp_path / "deep" / "here").mkdir()
    monkeypatch.chdir(tmp_path / "deep" / "here")
    assert cli.main(["runs", "remove", "../x", "--runs", "../../runs", "--yes"]) == 0
    assert (tmp_path / "x").exists()
    assert not (tmp_path / "deep" / "x").exists()
    monkeypatch.chdir(tmp_path)
    for name in (".", "..", "../deep", "a\nb"):
        assert cli.main(["runs", "remove", name, "--yes"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
