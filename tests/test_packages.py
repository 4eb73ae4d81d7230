"""Installed packages, and their builds."""

import sys
import tomllib

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
    assert packages.installed() == {"some-package": "1.0"}
    install("first", "jax_cuda12_plugin", "0.10.2")
    assert packages.cuda_build() is None
    install("second", "jax_cuda13_pjrt", "0.10.2")
    assert packages.cuda_build() == 13


def test_every_package_of_source_is_installed():
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "mjax").rglob("__init__.py")}
    assert named == there | {"mjax.configs"}
