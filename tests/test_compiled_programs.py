"""Compiled programs are kept for the next start: where, when not, and that a restart reads them."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mjax import compiled_programs, launch
from mjax.compiled_programs import keep_programs
from tests.conftest import COMPILE_QUICKLY, ROOT


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setitem(sys.modules, "jax", None)  # as it is where the command line starts
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"):  # undone when the test ends
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_single_process_keeps_programs_in_bounded_folder(own_home, monkeypatch):
    keep_programs(several=False, say=pytest.fail)
    place = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert place.parent == own_home / "mjax" / "programs"
    assert place.is_dir()
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(2 * 2**30)
    assert set(launch.SET_BY_MJAX) == {"JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"}
    here = compiled_programs.folder()
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : fpu sse\n")
    assert compiled_programs.folder() != here  # XLA would run programs with instructions that this processor lacks


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
    monkeypatch.setattr(compiled_programs, "launched_by", lambda: ("srun", 2))
    keep_programs(say=pytest.fail)
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert not list(own_home.iterdir())


def test_unusable_home_is_one_line(own_home, monkeypatch):
    said = []
    (own_home / "mjax").write_text("a file in the way")
    keep_programs(several=False, say=said.append)
    monkeypatch.setattr(compiled_programs, "cache_home", lambda: None)
    keep_programs(several=False, say=said.append)
    first, second = said
    assert first.startswith(f"{own_home}/mjax/programs/")
    assert "cannot be written (" in first
    assert second.startswith("there is no home folder: programs are compiled at every start; name another folder")
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_imported_jax_is_told(own_home, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", jax)
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    keep_programs(several=False)
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ  # this process has a folder
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_programs(several=False)
        assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
        assert jax.config.jax_compilation_cache_max_size == 2 * 2**30
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_compilation_cache_max_size", before[1])


@pytest.mark.ci
def test_second_start_reads_programs_of_first(own_home):
    """And trains the same."""

    def start(name):
        flags = ["--config", str(ROOT / "tests" / "tiny_config.py"), "--runs", str(own_home), "--name", name]
        variables = os.environ | {
            "XLA_FLAGS": COMPILE_QUICKLY,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_LOG_COMPILES": "1",
        }
        command = [sys.executable, str(ROOT / "train.py"), *flags, "--train.steps", "6"]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        hits = result.stderr.count("Persistent compilation cache hit for 'jit_train_step'")
        lines = (own_home / name / "metrics.jsonl").read_text().splitlines()
        return hits, [line.split('"learning_rate"')[0] for line in lines]

    first, second = start("one"), start("two")
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1]
    assert list((own_home / "mjax" / "programs").glob("*/jit_train_step-*-cache"))
