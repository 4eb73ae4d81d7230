"""README and results show the numbers of docs/numbers.toml, and no other number."""

import subprocess
import sys
import tomllib
from datetime import date

import pytest

from scripts import make_numbers
from scripts.make_numbers import NUMBERS, loose_numbers, record, render
from tests.conftest import ROOT

TABLE = """[speed]
text = "1.10 ×"
means = "speed"
date = 2026-01-01
hardware = "a machine"
command = "python a.py"

[other]
text = "2"
date = 2026-01-01
"""


def test_pages_show_the_numbers_of_the_table():
    check = [sys.executable, ROOT / "scripts" / "make_numbers.py", "--check"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_benchmark_records_a_number(tmp_path):
    file = tmp_path / "numbers.toml"
    file.write_text(TABLE)
    record("speed", "1.25 ×", "2 cores", file, date(2026, 12, 1))
    numbers = tomllib.loads(file.read_text())
    changed = {"text": "1.25 ×", "date": date(2026, 12, 1), "hardware": "2 cores"}
    assert numbers["speed"] == tomllib.loads(TABLE)["speed"] | changed
    assert numbers["other"] == tomllib.loads(TABLE)["other"]
    with pytest.raises(KeyError, match="has no number memory; add it"):
        record("memory", "1", "", file)


def test_page_takes_numbers_and_tables():
    numbers = tomllib.loads(TABLE) | {"tables": {"all": {"header": ["what", "×"], "rows": [["a", "{speed}"]]}}}
    page = "It is <!--num:speed-->0.9 ×<!--/--> as fast.\n\n<!--table:all--><!--/-->\n"
    shown = "It is <!--num:speed-->1.10 ×<!--/--> as fast.\n\n<!--table:all-->\n\n"
    shown += "| what | × |\n| --- | ---: |\n| a | 1.10 × |\n\n<!--/-->\n"
    assert render(page, numbers, "a page") == shown == render(shown, numbers, "a page")
    with pytest.raises(ValueError, match=r"a page: docs/numbers.toml has no num size"):
        render("<!--num:size--><!--/-->", numbers, "a page")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 1.2 × as fast.", ["1.2"]),
        ("`mjax plan --devices 8`, [2.1%](a.md) and float64 on an H100 ([2104.04473](x))", ["2.1"]),
        ("| a | 3,124 |\n```bash\nx 1\n```\n", ["3,124"]),
        ("10⁸ parameters, GPT-2, Llama 3 <!--num:a-->4<!--/-->", ["3"]),
    ],
)
def test_numbers_outside_of_the_table_are_found(text, found):
    assert loose_numbers(text) == found


def test_counts_are_those_of_the_code():
    numbers = tomllib.loads(NUMBERS.read_text())
    rows = tomllib.loads((ROOT / "tests" / "planted.toml").read_text())["planted"]
    configs = [file for file in (ROOT / "configs").glob("*.py") if not file.name.startswith("_")]
    assert numbers["planted_rows"]["text"] == str(len(rows))
    assert numbers["configs"]["text"] == str(len(configs))
    assert make_numbers.pages()[0].name == "README.md"
