"""Folders that hold no checkpoint, and checkpoints that do not open: refused before anything is lost."""

import json
import zlib
from pathlib import Path

import jax.numpy as jnp
import pytest

from mjax.checkpoint import base
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import Base, Damaged, read_manifest
from mjax.commands import cli
from mjax.errors import RunError, UsageError

NAME = "a name is one path component of 1 to 128 characters without control characters"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--name", "../x"], f"run name '../x' has the part '..'; {NAME}"),
        (["--name", "/elsewhere"], f"run name '/elsewhere' is an absolute path; {NAME}"),
        (["--name", "a/b"], f"run name 'a/b' has a /; {NAME}"),
        (["--name", "a\nb"], f"run name 'a\\nb' has control characters; {NAME}"),
        (["--name", "a" * 129], "has 129 characters"),
        (["--name", ""], "run name '' is empty"),
        (["--name", "lr[3e-4]"], "lr[3e-4] has [ in its path"),
        (["--runs", "what?"], "has ? in its path"),
        (["--runs", "hdfs://bucket/runs"], "is an address"),
    ],
)
def test_folder_without_a_way_back_is_refused(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "gpt_demo", "--data.mock", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_checkpoint_that_does_not_open_is_not_saved(tmp_path):
    """Orbax merges nothing where its path looks like a pattern."""
    notices = []
    state = {"model": {"up": jnp.ones(3)}}
    checkpoints = Checkpoints(tmp_path / "[team]" / "checkpoints", keep_last=1, on_notice=notices.append)
    checkpoints.save(2, state)
    with pytest.raises(RunError, match=r"checkpoint 2 could not be saved .*model.up cannot be read back"):
        checkpoints.check_for_errors()
    assert checkpoints.steps() == []
    assert [line[-43:] for line in notices] == ["intact checkpoints: none; the next save is tried"[-43:]]
    assert not list(checkpoints.folder.iterdir())


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "model//a", "out/secret"])
def test_manifest_with_names_elsewhere_is_damaged(name, tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "checkpoints" / "8"
    folder.mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "manifest.json").write_text(manifest_of({name: [6, 0]}))
    with pytest.raises(Damaged, match=r"manifest.json has names of no checkpoint: file .*; use a relative path"):
        read_manifest(folder)
    (folder / "manifest.json").write_text(manifest_of({"model/a": [6, 0]}))
    assert list(read_manifest(folder)["files"]) == ["model/a"]


def manifest_of(files):
    content = {"step": 8, "arrays": {}, "files": files}
    return json.dumps({"checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode()), **content})


@pytest.mark.parametrize(
    ("run", "named", "fetched"),
    [
        ("strangers/q-lora", "s3://evil/runs/q", False),
        ("strangers/q-lora", "MIRRORS/s3/evil/runs/q", False),
        ("strangers/q-lora", "s3://known/runs/q", True),
        ("MIRRORS/s3/bucket/runs/q-lora", "s3://bucket/runs/q", True),
        ("MIRRORS/s3/bucket/runs/q-lora", "s3://evil/runs/q", False),
        ("MIRRORS/s3/bucket/runs/q-lora", "gs://bucket/runs/q", False),
    ],
)
def test_base_at_address_needs_a_named_store(run, named, fetched, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mirrors = str(tmp_path / "cache" / "mjax" / "stores")
    known = Path(mirrors, "s3/known/runs/q/config.json")
    known.parent.mkdir(parents=True)
    known.touch()
    asked = []
    monkeypatch.setattr(base, "read_folder", lambda address: asked.append(address) or known.parent)
    run, named = tmp_path / run.replace("MIRRORS", mirrors), named.replace("MIRRORS", mirrors)
    if fetched:
        assert base.base_folder(Base(named, 0, ""), run) == known.parent
        assert asked == [named]
        return
    with pytest.raises(
        UsageError,
        match=r"adapters of (s3://evil|gs://bucket)/runs/q, not fetched because .* type: mjax runs --runs (s3|gs)://",
    ):
        base.base_folder(Base(named, 0, ""), run)
    (run.parent / "q").mkdir(parents=True)
    (run.parent / "q" / "config.json").touch()
    assert base.base_folder(Base(named, 0, ""), run) == run.parent / "q"
    assert asked == []
