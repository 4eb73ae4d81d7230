"""The planted mistakes still fit the code; `python tests/planted.py` shows that each is caught."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.planted import planted
from tests.training.test_step_equals_reference import TABLE

CASES = {case.id for case in TABLE}
"""Of the only test whose rows are named."""


def test_planted_rows_are_eighty_in_every_room():
    rows = planted()
    assert len(rows) >= 80
    rooms = {path.name for path in (ROOT / "mjax").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {Path(row.file).parts[1] for row in rows}


@pytest.mark.parametrize("row", planted(), ids=lambda row: row.breaks)
def test_planted_row_fits_the_code(row):
    assert row.old != row.new
    assert (ROOT / row.file).read_text().count(row.old) == 1
    for name in row.tests:
        file, _, test = name.partition("::")
        function, _, case = test.removesuffix("]").partition("[")
        assert (ROOT / file).exists()
        assert not function or f"def {function}(" in (ROOT / file).read_text()
        assert not case or case in CASES
