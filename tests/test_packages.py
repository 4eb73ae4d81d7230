"""Installed packages, and their builds."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from mjax.utils import packages
from tests.conftest import ROOT


def test_installed_packages_are_those_python_imports(tmp_path, monkeypatch):
    """The first of two versions on the path; and the CUDA of the half of jax that has the compiler."""

    def install(folder, name, version):
        place = tmp_path / folder / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if version else "")

    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    install("second", "Some_Package", "2.0")
    install("first", "some.package", "1.0")
    install("first", "broken", "")
    assert packages.list_versions() == {"some-package": "1.0"}
    install("first", "jax_cuda12_plugin", "0.10.2")
    assert packages.cuda_build() is None
    install("second", "jax_cuda13_pjrt", "0.10.2")
    assert packages.cuda_build() == 13


def test_every_package_of_source_is_installed():
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "mjax").rglob("*.py")}
    assert named == there | {"mjax.configs"}


@pytest.mark.ci
def test_package_needs_nothing_of_repository():
    """Neither imports nor messages name its files, which a wheel lacks."""
    folders = {"tests", "benchmarks", "scripts", "notebooks", "configs"}
    for file in (ROOT / "mjax").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            named = re.search("(docs|benchmarks|scripts)/[a-z]", text) and "repository" not in text
            assert not named or node in docstrings or "llm-foundry" in text, text
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not folders & {name.split(".")[0] for name in names}, file


@pytest.mark.ci
def test_wheel_works_outside_repository(tmp_path):
    """The wheel has every source file, config and target, and plans a run in a folder that has nothing else."""
    source, built, installed, elsewhere = (tmp_path / name for name in ("source", "built", "installed", "else where"))
    elsewhere.mkdir()
    source.mkdir()  # a copy: setuptools leaves folders, and takes what an earlier build left
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("mjax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, source]
    subprocess.run(pip, check=True, timeout=300)
    [wheel] = built.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    files = {file.relative_to(source) for folder in ("mjax", "configs") for file in (source / folder).rglob("*.*")}
    names = {str(file if file.parts[0] == "mjax" else "mjax" / file) for file in files}
    assert names == {str(file.relative_to(installed)) for file in (installed / "mjax").rglob("*.*")}
    assert {path.suffix for path in installed.iterdir()} == {"", ".dist-info"}
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "mjax", "plan", "--config", "gpt_8b", "--gpu", "h100"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    where = [sys.executable, "-c", "import mjax, mjax.configs; print(mjax.__file__, mjax.configs.__file__)"]
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert found.count(str(installed)) == 2


def test_extra_of_gpus_has_bounds_of_requirements():
    """One line has the versions of jax: the extra, and the file for a source tree, name the build only."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line.partition("  #")[0] for line in (ROOT / "requirements-cuda.txt").read_text().splitlines()]
    assert set(extras["cuda"]) <= set(lines)
    assert "-r requirements.txt" in lines
