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

import mjax
from mjax.utils import packages
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    for name in ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE"):
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
    [metadata] = installed.glob("*.dist-info/METADATA")
    fields, _, description = metadata.read_text().partition("\n\n")
    assert f"\nVersion: {mjax.__version__}\n" in fields
    tag = f"{PROJECT['urls']['Source']}/blob/v{mjax.__version__}"
    assert f"]({tag}/docs/get-started/install.md)" in description
    assert f"]({tag.replace('/blob/', '/raw/')}/docs/images/mesh.svg)" in description
    assert not re.search(r"\]\((?!#|https:)", description)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "mjax", "plan", "--config", "gpt_8b", "--gpu", "h100"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    where = [sys.executable, "-c", "import mjax, mjax.configs; print(mjax.__file__, mjax.configs.__file__)"]
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert found.count(str(installed)) == 2


def test_every_file_names_the_same_version_and_addresses():
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    source, pages = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    assert (site["repo_url"], site["site_url"]) == (source, pages)
    assert site["copyright"].startswith(f"mjax {mjax.__version__},")
    assert site["site_description"] == PROJECT["description"]
    citation = (ROOT / "CITATION.cff").read_text()
    for line in (f"version: {mjax.__version__}", f"repository-code: {source}", f"url: {pages}"):
        assert line in citation.splitlines()
    for file in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.yml"),
        ROOT / "setup.py",
    ]:
        own = re.findall(r"https://github\.com/[\w-]+/mjax\b", file.read_text())
        assert set(own) <= {source}, file
    assert source in (ROOT / "README.md").read_text()


def test_every_file_names_the_same_python_versions():
    tested = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    oldest, newest = (int(version.split(".")[1]) for version in (tested[0], tested[-1]))
    assert tested == [f"3.{minor}" for minor in range(oldest, newest + 1)]
    assert PROJECT["requires-python"] == f">=3.{oldest},<3.{newest + 1}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"for version in {' '.join(tested)};" in makefile
    assert f"(3, {oldest}) <= sys.version_info < (3, {newest + 1}) or" in makefile
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert set(re.findall(r"^ +(3\.\d+)$", nightly, re.MULTILINE)) == set(tested)
    numbers = tomllib.loads((ROOT / "docs" / "numbers.toml").read_text())
    assert numbers["python_versions"]["text"] == f"{tested[0]} to {tested[-1]}"


def test_extra_of_gpus_has_bounds_of_requirements():
    """One line has the versions of jax: the extra, and the file for a source tree, name the build only."""
    extras = PROJECT["optional-dependencies"]
    lines = [line.partition("  #")[0] for line in (ROOT / "requirements-cuda.txt").read_text().splitlines()]
    assert set(extras["cuda"]) <= set(lines)
    assert "-r requirements.txt" in lines
