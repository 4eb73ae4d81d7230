"""A damaged small file of one run: one sentence in the list, in a comparison and at a start; no run is hidden."""

import contextlib
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mjax.checkpoint import folders
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import read_base, write_manifest
from mjax.commands import cli
from mjax.commands import runs as runs_command
from mjax.config import to_dict
from mjax.config.model_file import read_model_file
from mjax.errors import RunError, UsageError
from mjax.run.callbacks import Goodput, read_starts
from mjax.run.continuing import _find_changed_data, read_origin
from mjax.run.health import Guard, check_start
from mjax.run.metrics import MetricsLog
from mjax.utils import files
from tests.faults.damage import DEEP, Raw, _containers, _written
from tests.faults.mutated_files import HOST, RECORDS, RUN_FILES, START
from tests.tiny_config import config as TINY

VALUES = (None, True, -1, 1.5, 10**400, Raw("NaN"), "x", [], [1], {}, {"x": 1})
CONTENTS = (b"", b"null", b"[]", b"[1]", b"{}", b'"x"', b"\xff\xfe", b"\0" * 100, b"[" * DEEP, b"NaN", ...)
"""Contents of a whole file; `...`: a folder of its name."""


def damages(name):
    """The contents of a file with each damage: of the whole, and another value or none for each of its fields."""
    whole = _content(name, RUN_FILES[name])
    yield from CONTENTS
    yield whole[: len(whole) // 2]
    yield whole[:-3]
    for container, key in [pair for pair in _containers({"": RUN_FILES[name]}) if pair[1] != ""]:
        before = container[key]
        for value in VALUES:
            container[key] = value
            yield _content(name, RUN_FILES[name])
        if isinstance(container, dict):
            del container[key]
            yield _content(name, RUN_FILES[name])
        container[key] = before


def _content(name, values):
    if name == "metrics.jsonl" and isinstance(values, list):
        return "".join(_written(value) + "\n" for value in values).encode()
    return _written(values).encode()


def write(folder, name, content):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if content is ...:
        file.mkdir()
    elif name.endswith("manifest.json"):
        with contextlib.suppress(ValueError, RecursionError):
            return write_manifest(file.parent, 3, {"model.a": ["float32", [10, 100]]}, json.loads(content))
        file.write_bytes(content)
    else:
        file.write_bytes(content)


def start(folder):
    """Read what a start of the run reads."""
    say = [].append
    readers = (read_base, read_origin, read_model_file, lambda folder: _find_changed_data(folder, TINY.data, TINY.data))
    with Checkpoints(folder / "checkpoints", on_notice=say) as checkpoints:
        guard = Guard(TINY, checkpoints, say)
        for read in (lambda folder: check_start(folder, None), lambda _: guard.begin(3), *readers):
            with contextlib.suppress(UsageError, RunError):
                str(read(folder))
    Goodput().begin(folder, 3, say)
    read_starts(dict[str, Any], folder / "environment.json", say)
    with contextlib.suppress(UsageError):
        MetricsLog(folder, 3, print_line=say).close()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs_command, "draw_runs", lambda *_: None)
    for name, values in RUN_FILES.items():
        write(tmp_path / "runs" / "whole", name, _content(name, values))
    return tmp_path / "runs"


COMMANDS = ("--json", "--goodput", "--goodput --json", "compare whole damaged", "compare damaged whole --json")


@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_file_ends_no_command(runs, monkeypatch, capsys, name):
    monkeypatch.setattr(files, "_sync", lambda path: None)
    monkeypatch.setattr(folders, "RETRY_INTERVAL", 0.0)
    cases = [*damages(name)]
    assert len(cases) > 20
    others = Random(0).sample(cases[len(CONTENTS) :], min(len(cases) - len(CONTENTS), 40))
    for number, content in enumerate([*CONTENTS, *others]):
        folder = Path(f"runs{number}") / "damaged"
        shutil.copytree(runs / "whole", folder)
        (folder.parent / "whole").symlink_to(runs / "whole")
        (folder / name).unlink()
        write(folder, name, content)
        about = f"{content!r:.300}"
        for command in COMMANDS:
            code = cli.main(["runs", *command.split(), "--runs", str(folder.parent)])
            out, err = capsys.readouterr()
            assert "Traceback" not in err, about
            assert err.count("\n") <= 1, about
            assert code in ((0, 2) if "compare" in command else (0,)), about
            if "compare" not in command:
                assert "whole" in out, about
            if command == "--json" and (name != "config.json" or content is not ...):
                rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
                assert rows["whole"]["state"] == "stopped", about
                assert "damaged" in rows, about
        if name != "config.json":
            start(folder)


SENTENCES = {
    "metrics.jsonl": ([*RECORDS, {"step": 4, "loss": 1.0}], "the last line of metrics.jsonl has no tokens"),
    "config.json": (
        to_dict(TINY) | {"train": {"batch_history": None}},
        "train.batch_history is None, which is not a list of",
    ),
    "environment.json": ([{"parameters": "x"}], "[0].parameters is 'x', which is not a whole number; remove it"),
    "init.json": ([], "the config must be an object, not []; remove it if you do not need"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_list_shows_the_problem_of_a_run(runs, capsys, name):
    values, words = SENTENCES[name]
    write(runs / "whole", name, _content(name, values))
    assert cli.main(["runs", "--json"]) == 0
    assert words in json.loads(capsys.readouterr().out)["state"]


GOODPUT = {
    "there is no [0].began": [{name: value for name, value in START.items() if name != "began"} | {"seconds": {}}],
    "[0].seconds.steps is 'x', which is not a number": [START | {"seconds": {"steps": "x"}}],
    "has a time that cannot be used": [START | {"seconds": {}}, START | {"began": "today", "seconds": {}}],
}


@pytest.mark.parametrize("words", GOODPUT)
def test_hours_of_other_runs_are_shown(runs, capsys, words):
    for name, values in RUN_FILES.items():
        write(runs / "damaged", name, _content(name, GOODPUT[words] if name == "goodput.json" else values))
    assert cli.main(["runs", "--goodput"]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert "\nwhole  " in out


REFUSED = {
    "unhealthy.json": ([], "is [], which is not an object; restore it, or remove it"),
    "passed_over.json": ([{"steps": [1]}], "there is no [0].from; restore it"),
    "checkpoints/3/manifest.json": (HOST | {"suspect": "x"}, "suspect is 'x', which is not true or false; continue"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_start_is_refused_with_the_problem(runs, name):
    values, words = REFUSED[name]
    (runs / "whole" / "unhealthy.json").unlink()
    write(runs / "whole", name, _content(name, values))

    def begin():
        check_start(runs / "whole", None)
        with Checkpoints(runs / "whole" / "checkpoints", on_notice=print) as checkpoints:
            Guard(TINY, checkpoints, print).begin(3)

    with pytest.raises(UsageError) as refused:
        begin()
    assert words in str(refused.value)


def test_damaged_hours_are_set_aside(runs):
    (runs / "whole" / "goodput.json").write_text("[1]")
    said = []
    Goodput().begin(runs / "whole", 3, said.append)
    assert said == [f"{runs}/whole/goodput.json is damaged: renamed to goodput.json.damaged, started a new one"]
