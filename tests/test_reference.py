"""The generated pages of docs/reference say what the code says."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.ci
def test_changed_field_makes_pages_stale(tmp_path):
    for name in ("mjax", "configs", "scripts", "docs/reference"):
        shutil.copytree(ROOT / name, tmp_path / name)
    check = [sys.executable, tmp_path / "scripts" / "make_reference.py", "--check"]
    assert subprocess.run(check, cwd=tmp_path, timeout=300).returncode == 0
    field = tmp_path / "mjax" / "config" / "run.py"
    field.write_text(field.read_text().replace("clip_norm: ", "clip_norm_of_all: ", 1))
    result = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert result.stdout == ("out of date in docs/reference: config.md; run: python scripts/make_reference.py\n")
