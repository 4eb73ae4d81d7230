"""`mjax runs`: the list, the comparison and its picture, and what may be removed."""

import io
import json
import math
import os
from dataclasses import replace

import pytest

from mjax import cli
from mjax.commands import runs as runs_command
from mjax.config import save_config
from mjax.models.build import count_parameters
from mjax.runs_figure import draw_runs
from mjax.state.runs import locked
from tests.tiny_config import config as TINY


def _make(folder, steps=12, every=5, level=5.0, checkpoints=(8, 12), **sections):
    """A run folder as training leaves it."""
    changes = {name: replace(getattr(TINY, name), **fields) for name, fields in sections.items()}
    config = replace(TINY, **changes)
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    for step in checkpoints:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    lines = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": level - step / 10, "tokens": step * config.train.global_batch * 16}
        record |= {"tokens_per_second": 100.0 + step, "skipped": False}
        lines.append(record | ({"val_loss": level - step / 10 + 0.5} if step % every == 0 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    _make(tmp_path / "runs" / "base")
    _make(tmp_path / "runs" / "fast", level=4.5, optimizer={"learning_rate": 2e-2})
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_the_list_has_a_line_for_each_run(runs, capsys):
    assert cli.main(["runs"]) == 0
    head, base, fast = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "model", "parameters", "step", "loss", "val", "loss", "last", "step", "state"]
    assert base.split()[:8] == ["base", "gpt", "2", "×", "32", f"{count_parameters(TINY.model):,}", "12/12", "3.8000"]
    assert base.split()[8] == "4.5000"
    assert base.rstrip().endswith("done")
    assert fast.startswith("fast")


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (80, ["run", "step", "loss", "val", "loss", "last", "step", "state"]),
        (60, ["run", "step", "loss", "val", "loss", "state"]),
        (40, ["run", "step", "loss", "state"]),
    ],
)
def test_a_narrow_list_leaves_out_columns_and_keeps_a_line_a_run(runs, monkeypatch, capsys, columns, titles):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == titles
    assert [line.split()[0] for line in lines[1:]] == ["base", "fast"]
    assert max(map(len, lines)) <= columns


def test_the_list_as_json_says_what_state_a_run_is_in(runs, capsys):
    _make(runs / "early", steps=3, checkpoints=())
    _make(runs / "half", steps=8, checkpoints=(8,))
    file = _make(runs / "sick") / "metrics.jsonl"
    file.write_text(file.read_text().replace('"skipped": false', '"skipped": true', 7) + '{"step": 13, "lo')
    (_make(runs / "torn") / "config.json").write_text("{")
    _make(runs / "converted", checkpoints=(0,))
    (runs / "converted" / "metrics.jsonl").unlink()
    with locked(runs / "fast", print):
        assert cli.main(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    states = {name: row["state"] for name, row in rows.items()}
    assert states.pop("torn").startswith("cannot be read: runs/torn/config.json is not JSON")
    assert states == {
        "base": "done", "fast": "running", "early": "no checkpoint", "half": "stopped", "converted": "stopped",
        "sick": "done, 7 of the last 12 steps skipped",
    }  # fmt: skip
    assert (rows["half"]["step"], rows["half"]["steps"], rows["half"]["loss"]) == (8, 12, pytest.approx(4.2))
    assert (rows["converted"]["step"], rows["converted"]["loss"]) == (0, None)


def test_a_long_run_is_listed_by_the_end_of_its_metrics(runs, monkeypatch, capsys):
    monkeypatch.setattr(runs_command, "TAIL", 200)
    assert cli.main(["runs", "list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (row["step"], row["loss"], row["val_loss"]) == (12, pytest.approx(3.8), None)


def test_a_comparison_has_results_the_settings_that_differ_and_a_picture(runs, capsys):
    _make(runs / "short", steps=4, level=6.0, mesh={"data": 2})
    assert cli.main(["runs", "compare", "base", "runs/fast", "short"]) == 0
    text = capsys.readouterr().out
    rows = {line[:27].strip(): line[27:].split() for line in text.splitlines() if line.strip()}
    assert next(iter(text.splitlines())).split() == ["base", "fast", "short"]
    table = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in text.splitlines()[1:] if line.strip()}
    assert rows
    assert table["loss at step 4"] == ["4.6", "4.1", "5.6"]
    assert table["loss"] == ["3.8", "3.3", "5.6"]
    assert table["best val loss"] == ["4.5", "4", "–"]
    assert table["optimizer.learning_rate"] == ["0.01", "0.02", "0.01"]
    assert table["mesh.data"] == ["1", "1", "2"]
    assert "2 settings differ; curves in runs/compare.png" in text
    assert (runs / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_as_json(runs, capsys):
    assert cli.main(["runs", "compare", "base", "fast", "--figure", "two.svg", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"optimizer.learning_rate": {"base": 0.01, "fast": 0.02}}
    assert found["runs"]["fast"]["val loss"] == pytest.approx(4.0)
    assert found["figure"] == "two.svg"
    assert "<svg" in (runs.parent / "two.svg").read_text()


@pytest.mark.parametrize("by_tokens", [False, True])
def test_the_picture_shows_each_curve_and_its_distance_from_the_first(tmp_path, monkeypatch, by_tokens):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: (drawn.append(figure), file.touch()))
    one = [{"step": i, "tokens": 8 * i, "loss": 5.0 - i} for i in (1, 2, 3)]
    two = [{"step": i, "tokens": 16 * i, "loss": 5.5 - i, "val_loss": 6.0} for i in (1, 2)]
    draw_runs({"one": one, "two": two}, tmp_path / "compare.png", by_tokens)
    above, below = drawn[0].axes
    assert above.get_legend_handles_labels()[1] == ["one, 2.0000", "two, 3.5000"]
    (distance, _) = below.get_lines()
    points = [(float(x), float(y)) for x, y in distance.get_xydata()]
    assert points == ([(16.0, 1.5)] if by_tokens else [(1.0, 0.5), (2.0, 0.5)])
    assert below.get_xlabel() == ("tokens" if by_tokens else "step")
    assert [file.name for file in tmp_path.iterdir()] == ["compare.png"]


def test_runs_are_removed_and_what_they_link_to_stays(runs, tmp_path, capsys):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "tokenizer.json").write_text("{}")
    (runs / "base" / "tokenizer").symlink_to(shared)
    for name in ("metrics.jsonl.damaged", ".shared-12ab", "checkpoints/8.damaged", "checkpoints/20.writing"):
        (runs / "base" / name).mkdir()
    (runs / "base" / "metrics.jsonl.damaged.2").touch()  # kept by a start that could not read it
    for picture in ("loss.tmp.png", "experts.json", "experts.json.tmp", "experts.png", "experts.tmp.png"):
        (runs / "base" / picture).touch()  # some of a run that was killed while it drew
    for left in ("README.md", "checkpoints/good.json", "passed_over.json", "unhealthy.json"):
        (runs / "base" / left).write_text("{}")
    assert cli.main(["runs", "remove", "base", "runs/fast", "--yes"]) == 0
    assert capsys.readouterr().out == "removed runs/base\nremoved runs/fast\n"
    assert [entry.name for entry in runs.iterdir()] == ["notes"]
    assert (shared / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("answer", "kept"), [("n", True), ("", True), ("y", False)])
def test_a_person_is_asked(runs, monkeypatch, capsys, answer, kept):
    terminal = io.StringIO(answer + "\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["runs", "remove", "base"]) == 0
    assert "remove runs/base (step 12/12, 2 checkpoints, " in capsys.readouterr().out
    assert (runs / "base").is_dir() == kept


def _link(runs):
    (runs / "link").symlink_to(runs / "base")
    return ["link"]


def _file_of_a_person(runs):
    (runs / "base" / "thesis.tex").write_text("")
    return ["fast", "base"]


def _file_among_checkpoints(runs):
    (runs / "base" / "checkpoints" / "notes.txt").write_text("")
    return ["base"]


def _folder_of_a_person(runs):
    (runs / "base" / "checkpoints" / "2024").mkdir()
    (runs / "base" / "checkpoints" / "2024" / "notes.txt").write_text("")
    return ["base"]


REFUSED = {
    "no run": (lambda runs: ["bse"], "there is no run 'bse' in runs, did you mean 'base'?"),
    "another folder": (lambda runs: ["notes"], "is not a run folder"),
    "the folder of runs": (lambda runs: ["."], "there is no run '.' in runs"),
    "a file": (lambda runs: ["runs/base/config.json"], "is not a run folder"),
    "a link": (_link, "runs/link is a link to "),
    "a run beside one with a file of a person": (
        _file_of_a_person,
        "runs/base contains thesis.tex, which no run writes",
    ),
    "a file among checkpoints": (_file_among_checkpoints, "runs/base contains checkpoints/notes.txt"),
    "a folder among checkpoints": (_folder_of_a_person, "runs/base contains checkpoints/2024, which no run writes"),
    "nothing": (lambda runs: [], "takes names of runs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_a_run_is_not_removed(what, runs, capsys):
    arguments, words = REFUSED[what]
    argv = ["runs", "remove", *arguments(runs), "--yes"]
    before = sorted(runs.rglob("*"))
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert sorted(runs.rglob("*")) == before


def test_a_run_in_use_is_not_removed_and_nobody_to_ask_is_an_error(runs, capsys):
    with locked(runs / "fast", print):
        assert cli.main(["runs", "remove", "base", "fast", "--yes"]) == 2
    assert "runs/fast is in use by another process" in capsys.readouterr().err
    assert cli.main(["runs", "remove", "base"]) == 2
    assert "cannot ask before removing runs/base: stdin is not a terminal; add --yes" in capsys.readouterr().err
    assert (runs / "base").is_dir()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["compare", "base"], "takes two or more runs"),
        (["compare", "base", "base"], "takes two or more runs"),
        (["compare", "base", "fst"], "there is no run 'fst' in runs, did you mean 'fast'?"),
        (["compare", "base", "fast", "--figure", "no/where.png"], "there is no folder no"),
        (
            ["compare", "base", "fast", "--figure", "curve.txt"],
            "--figure curve.txt is not a picture; use a name that ends in .png, .pdf or .svg",
        ),
        (["compare", "base", "empty"], "empty has no losses to compare"),
        (["--runs", "nowhere"], "there is no folder nowhere"),
        (["delete", "base"], "mjax runs has no command 'delete'"),
    ],
)
def test_mistakes_get_one_sentence(runs, argv, words, capsys):
    _make(runs / "empty", steps=0, checkpoints=())
    assert cli.main(["runs", *argv]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_a_loss_that_is_not_finite_is_left_out_of_a_comparison(runs, capsys):
    file = runs / "fast" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 3.3', '"loss": null'))
    assert cli.main(["runs", "compare", "base", "fast", "--json"]) == 0
    assert math.isclose(json.loads(capsys.readouterr().out)["runs"]["fast"]["loss"], 3.4)
    assert os.path.exists("runs/compare.png")
