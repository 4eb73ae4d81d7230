"""Compiled programs are kept for the next start: where, and when not."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from mjax.cluster import launch
from mjax.cluster.launch import keep_programs


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setitem(sys.modules, "jax", None)  # as it is where the command line starts
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # what a test sets again is undone before this
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
        yield tmp_path


def test_single_process_keeps_programs_in_bounded_folder(own_home, monkeypatch):
    keep_programs(several=False, say=pytest.fail)
    place = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert place.parent == own_home / "mjax" / "programs"
    assert place.is_dir()
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(2 * 2**30)
    here = launch.programs_folder()
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : fpu sse\n")
    assert launch.programs_folder() != here  # XLA would run programs with instructions that this processor lacks


@pytest.mark.parametrize("chosen", ["/elsewhere", ""])
def test_folder_and_limit_of_user_stay(chosen, own_home, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", chosen)
    keep_programs(several=False, say=pytest.fail)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == chosen
    assert not list(own_home.iterdir())
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1000")
    keep_programs(several=False, say=pytest.fail)
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1000"


def test_several_processes_keep_nothing(own_home, monkeypatch):
    keep_programs(several=True, say=pytest.fail)
    monkeypatch.setattr(launch, "launched_by", lambda: ("srun", 2))
    keep_programs(say=pytest.fail)
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert not list(own_home.iterdir())


def test_folder_is_private(own_home):
    keep_programs(several=False, say=pytest.fail)
    place = Path(os.environ.pop("JAX_COMPILATION_CACHE_DIR"))
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o775)
    said = []
    keep_programs(several=False, say=said.append)
    assert f"others can write into {place}" in said[0]
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_unusable_home_is_one_line(own_home, monkeypatch):
    said = []
    (own_home / "mjax").write_text("a file in the way")
    keep_programs(several=False, say=said.append)
    monkeypatch.setattr(launch, "cache_home", lambda: None)
    keep_programs(several=False, say=said.append)
    first, second = said
    assert "cannot be written (" in first
    assert "there is no home folder" in second
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("folder", [None, "/elsewhere"])
def test_imported_jax_is_told(folder, monkeypatch):
    """A config file may have imported JAX; a folder set before stays."""
    told = {}
    config = SimpleNamespace(jax_compilation_cache_dir=folder, update=told.__setitem__)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    keep_programs(several=False)
    names = {"jax_compilation_cache_dir", "jax_compilation_cache_max_size"}
    assert told.keys() == (set() if folder else names)
    assert [str(value) for value in told.values()] == list(launch.SET_BY_MJAX.values())
