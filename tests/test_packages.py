"""What is installed, and of which build."""

import sys
import tomllib
from pathlib import Path

import pytest

from mjax import packages


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Two folders in front of all others on Python's path, and a way to install into them."""

    def install(folder, name, version):
        place = tmp_path / folder / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if version else "")

    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    return install


def test_of_two_versions_the_one_that_python_would_import_is_named(path):
    path("second", "Some_Package", "2.0")
    path("first", "some.package", "1.0")
    path("first", "broken", "")
    assert packages.installed() == {"some-package": "1.0"}


def test_the_cuda_that_jax_is_built_for_is_that_of_the_half_with_the_compiler(path):
    path("first", "jax", "0.10.2")
    path("first", "jax_cuda12_plugin", "0.10.2")
    assert packages.cuda_build() is None
    path("second", "jax_cuda13_pjrt", "0.10.2")
    assert packages.cuda_build() == 13


def test_every_package_of_the_source_is_installed():
    root = Path(__file__).resolve().parent.parent
    named = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {".".join(file.parent.relative_to(root).parts) for file in (root / "mjax").rglob("__init__.py")}
    assert named == there | {"mjax.configs"}
