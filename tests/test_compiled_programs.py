"""Compiled programs are kept for the next start: where, and when not."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from filelock import FileLock

from mjax.cluster import launch
from mjax.cluster.launch import enable_compilation_cache
from mjax.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.test_train_command import environment


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setitem(sys.modules, "jax", None)  # as it is where the command line starts
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # what a test sets again is undone before this
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
        yield tmp_path


def test_single_process_keeps_programs_in_bounded_folder(own_home, monkeypatch):
    enable_compilation_cache(multiprocess=False, print_line=pytest.fail)
    place = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert place.parent == own_home / "mjax" / "programs"
    assert place.is_dir()
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(2 * 2**30)
    here = launch.program_cache_folder()
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : fpu sse\n")
    assert launch.program_cache_folder() != here  # XLA would run programs with instructions that this processor lacks


@pytest.mark.parametrize("chosen", ["/elsewhere", ""])
def test_folder_and_limit_of_user_stay(chosen, own_home, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", chosen)
    enable_compilation_cache(multiprocess=False, print_line=pytest.fail)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == chosen
    assert not list(own_home.iterdir())
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1000")
    enable_compilation_cache(multiprocess=False, print_line=pytest.fail)
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1000"


def test_several_processes_keep_nothing(own_home, monkeypatch):
    enable_compilation_cache(multiprocess=True, print_line=pytest.fail)
    monkeypatch.setattr(launch, "find_launcher", lambda: ("srun", 2))
    enable_compilation_cache(print_line=pytest.fail)
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert not list(own_home.iterdir())


def test_folder_is_private(own_home):
    enable_compilation_cache(multiprocess=False, print_line=pytest.fail)
    place = Path(os.environ.pop("JAX_COMPILATION_CACHE_DIR"))
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o775)
    said = []
    enable_compilation_cache(multiprocess=False, print_line=said.append)
    assert f"others can write into {place}" in said[0]
    place.rename(own_home / "elsewhere")
    place.symlink_to(own_home / "elsewhere")
    enable_compilation_cache(multiprocess=False, print_line=said.append)
    assert f"{place} is a link or a file, not a folder; type rm {place}" in said[1]
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_unusable_home_is_one_line(own_home, monkeypatch):
    said = []
    (own_home / "mjax").write_text("a file in the way")
    enable_compilation_cache(multiprocess=False, print_line=said.append)
    monkeypatch.setattr(launch, "cache_home", lambda: None)
    enable_compilation_cache(multiprocess=False, print_line=said.append)
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
    enable_compilation_cache(multiprocess=False)
    names = {
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    }
    assert told.keys() == (set() if folder else names)
    assert [str(value).removesuffix(".0") for value in told.values()] == list(launch.SET_BY_MJAX.values())


def test_half_written_programs_are_removed(tmp_path, monkeypatch):
    for number in range(6):
        for kind in ("cache", "atime"):
            (tmp_path / f"p{number}-{kind}").write_bytes(b"12345678")
            os.utime(tmp_path / f"p{number}-{kind}", (number + 1, number + 1))
    (tmp_path / "p4-cache").write_bytes(b"")  # of a host that lost power
    (tmp_path / "p5-atime").unlink()  # of a process that was killed
    for limit, kept in ((256, [0, 1, 2, 3]), (2, [2, 3])):
        monkeypatch.setattr(launch, "CACHE_PROGRAMS", limit)
        assert launch.prune_programs(tmp_path) is None
        left = sorted(file.name for file in tmp_path.glob("p*"))
        assert left == [f"p{number}-{kind}" for number in kept for kind in ("atime", "cache")]


def test_locked_folder_is_one_line(own_home, monkeypatch):
    """On a shared disk another host may have it, or the lock of one that is gone."""
    monkeypatch.setattr(launch, "LOCK_TIMEOUT", 0.1)
    folder, said = launch.program_cache_folder(), []
    folder.mkdir(parents=True, mode=0o700)
    with FileLock(folder / ".lockfile"):
        enable_compilation_cache(multiprocess=False, print_line=said.append)
    assert f"another process has locked {folder}: programs are compiled at every start" in said[0]
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.mark.ci
def test_second_start_compiles_nothing(tmp_path):
    """It finds every program of the first start on the disk, also from its end; a third start finds all but a torn
    one."""
    found = []
    for name in ("one", "two", "three"):
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "tests" / "counting_config.py")]
        variables = {key: value for key, value in environment().items() if not key.startswith(("JAX_COMP", "JAX_PERS"))}
        done = subprocess.run(
            [*command, "--runs", str(tmp_path), "--name", name],
            env=variables | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "compilation cache" not in done.stderr
        requests, hits = map(int, re.search(r"(\d+) programs, (\d+) from the disk", done.stdout).groups())
        found.append((requests - hits, [record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl")]))
        if name == "two":
            (step,) = (tmp_path / "cache").glob("mjax/programs/*/jit_train_step-*-cache")
            step.write_bytes(step.read_bytes()[:1000])
            step.with_name(step.name.replace("-cache", "-atime")).unlink()
    compiled, losses = zip(*found, strict=True)
    assert compiled[0] > 3
    assert compiled[1:] == (0, 1)
    assert losses[0] == losses[1] == losses[2]
