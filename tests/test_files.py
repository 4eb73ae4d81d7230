"""Names from outside become paths below one folder, and predictable names are opened without following links."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mjax.errors import UsageError
from mjax.utils.files import check_run_name, path_below

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
}


@pytest.mark.parametrize(("name", "reason"), BAD_PATHS.items(), ids=map(ascii, BAD_PATHS))
def test_path_below_rejects(name, reason, tmp_path):
    with pytest.raises(UsageError, match=rf"^key {re.escape(repr(name)[:60])}.* {re.escape(reason)}; "):
        path_below(tmp_path, name, "key")


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, b"a"])
def test_path_below_rejects_values_without_text(value, tmp_path):
    with pytest.raises(UsageError, match="is not text"):
        path_below(tmp_path, value)


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


@pytest.mark.parametrize("name", ["", ".", "..", "/elsewhere", "../x", "a/b", "a\nb", "a" * 129])
def test_check_run_name_rejects(name):
    with pytest.raises(UsageError, match=r"^run name .*; a name is one path component of 1 to 128 characters"):
        check_run_name(name)
