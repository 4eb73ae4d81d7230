"""Names from outside become paths below one folder, and predictable names are opened without following links."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mjax.checkpoint.folders import lock_folder
from mjax.data.indexed import IndexedDatasetWriter
from mjax.errors import UsageError
from mjax.run.metrics import MetricsLog
from mjax.utils.files import check_run_name, copy_whole, path_below, write_whole

BAD_PATHS = {
    "": "is empty",
    "/etc/passwd": "is an absolute path",
    "..": "has the part '..'",
    "a/../b": "has the part '..'",
    "./a": "has the part '.'",
    "a/.": "has the part '.'",
    "a//b": "has an empty part",
    "a/": "has an empty part",
    "a\0b": "has control characters",
    "a\nb": "has control characters",
    "a\x7f": "has control characters",
    "a\u2028b": "has control characters",
    "\udcff": "has control characters",
    "é" * 128: "has a part of more than 255 bytes",
    **dict.fromkeys((None, 3, ("a",), b"a"), "is not text"),
}


@pytest.mark.parametrize(("name", "reason"), BAD_PATHS.items(), ids=map(ascii, BAD_PATHS))
def test_path_below_rejects(name, reason, tmp_path):
    with pytest.raises(UsageError, match=rf"^key {re.escape(repr(name)[:60])}.* {re.escape(reason)}; "):
        path_below(tmp_path, name, "key")


def test_path_below_rejects_links_that_lead_out(tmp_path):
    folder = tmp_path / "run"
    (folder / "real").mkdir(parents=True)
    (folder / "inside").symlink_to("real")
    (folder / "outside").symlink_to(tmp_path)
    (tmp_path / "link-to-run").symlink_to(folder)
    assert path_below(folder, "inside/a") == folder / "inside/a"
    assert path_below(tmp_path / "link-to-run", "inside/a").parent.resolve() == folder / "real"
    with pytest.raises(UsageError, match=r"'outside/a' leads out of .* through a link"):
        path_below(folder, "outside/a")
    assert path_below(Path(), "a/b") == Path("a/b")


PARTS = st.one_of(st.text(max_size=6), st.sampled_from(["", ".", "..", "a", "link", "out", "\n", "é" * 200]))


@given(parts=st.lists(PARTS, max_size=5))
@example(parts=["link", "..", ".."])
@example(parts=["", "etc"])
@example(parts=["out", "a"])
def test_path_below_never_leaves_its_folder(parts, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "below" / "folder"
    if not folder.exists():
        (folder / "inside").mkdir(parents=True)
        (folder / "link").symlink_to("inside")
        (folder / "out").symlink_to("..")
    name = "/".join(parts)
    try:
        path = path_below(folder, name)
    except UsageError:
        return
    assert os.path.normpath(name) == name
    assert not set(name) & {"\0", "\n", "\r"}
    assert path.parent.resolve().is_relative_to(folder.resolve())
    assert path.relative_to(folder).as_posix() == name


@given(name=st.text(min_size=1, max_size=140))
@example(name="a" * 128)
@example(name="a" * 129)
@example(name="..")
@example(name="a/b")
def test_run_name_is_one_short_component(name):
    try:
        check_run_name(name)
    except UsageError:
        return
    assert len(name) <= 128
    assert "/" not in name
    assert name not in {".", ".."}
    assert path_below(Path("/runs"), name).parent == Path("/runs")


@pytest.fixture
def diary(tmp_path):
    """A file of the user, to which a stranger's folder has links."""
    (tmp_path / "run").mkdir()
    file = tmp_path / "diary.txt"
    file.write_text("dear diary\n")
    yield file
    assert file.read_text() == "dear diary\n"


def test_lock_that_is_a_link_empties_no_file(diary, tmp_path):
    (tmp_path / "run" / ".lock").symlink_to(diary)
    with pytest.raises(UsageError, match=r"\.lock is a link, through which mjax does not write; remove it"):
        lock_folder(tmp_path / "run", print).__enter__()
    (tmp_path / "run" / ".lock").unlink()
    os.link(diary, tmp_path / "run" / ".lock")
    with lock_folder(tmp_path / "run", print):
        pass


def test_lock_that_is_a_pipe_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match="No such device"):
        lock_folder(tmp_path, print).__enter__()


def test_write_whole_replaces_links(diary, tmp_path):
    for name in ("config.json", "config.json.tmp", "merges.txt"):
        (tmp_path / "run" / name).symlink_to(diary)
    write_whole(tmp_path / "run" / "config.json", "{}")
    (tmp_path / "source").write_text("a b")
    copy_whole(str(tmp_path / "source"), str(tmp_path / "run" / "merges.txt"))
    assert not (tmp_path / "run" / "config.json").is_symlink()
    assert (tmp_path / "run" / "merges.txt").read_text() == "a b"


def test_locked_removes_temporary_files_of_killed_writer(tmp_path):
    mine = tmp_path / "config.json.0a1b2c3d.tmp"
    for file in (mine, tmp_path / "notes.tmp"):
        file.touch()
    with lock_folder(tmp_path, print):
        assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "notes.tmp"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.tmp", "samples.jsonl", "loss.png", "loss.tmp.png"])
def test_metrics_log_writes_through_no_link(name, diary, tmp_path):
    (tmp_path / "run" / name).symlink_to(diary)
    said = []
    if name == "metrics.jsonl":
        with pytest.raises(UsageError, match=r"metrics\.jsonl is a link"):
            MetricsLog(tmp_path / "run", 0, print_line=said.append)
        return
    log = MetricsLog(tmp_path / "run", 0, print_line=said.append)
    log.records = [{"step": step, "loss": 1.0, "tokens": step, "learning_rate": 1.0} for step in (1, 2)]
    log.write_samples(1, ["a"], ["b"])
    log.draw()
    log.close()
    assert len(said) == (name == "samples.jsonl")


def test_dataset_writer_writes_through_no_link(diary, tmp_path):
    (tmp_path / "run" / "corpus.tmp").symlink_to(diary)
    with pytest.raises(UsageError, match=r"corpus\.tmp is a link"):
        IndexedDatasetWriter(tmp_path / "run" / "corpus", 100).__enter__()
