"""The file of a calibration: what is written is read again, and what is wrong with a file is said."""

import json
import math
from dataclasses import replace

import pytest

from mjax.errors import UsageError
from mjax.planner.calibration import FORMAT, H100, MEGATRON_V100, read_calibration, write_calibration


def test_a_calibration_comes_back_from_its_file(tmp_path):
    file = tmp_path / "rates.json"
    measured = replace(MEGATRON_V100, date="2026-11-22", versions={"jax": "0.10.2"})
    write_calibration(measured, file)
    assert read_calibration(file) == measured


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "is not a calibration of this version of mjax; write one with: python benchmarks"),
        ({"matmul": 40.0}, r"matmul is 40.0; it must be above 0 and at most 1.2; write one with: python benchmarks"),
        ({"matmul": "fast"}, "matmul is 'fast', which is not a number"),
        ({"launch": -1.0}, "launch is -1.0; it must be at least 0"),
        ({"error": math.nan}, "error is nan"),
        ({"inner": 10**400}, "inner is 1000000000000000000000000000000000000000"),
        ({"inner": 1e16}, r"inner is 1e\+16; it must be at least 0 and at most 1,000,000,000,000,000"),
        ({"matmul": 0}, "matmul is 0; it must be above 0"),
        ({"attention": []}, "attention has no rows; give at least"),
        ({"attention": [[128, 1024, 0.4]]}, r"attention is \[\[128, 1024, 0.4\]\], which is not a list of"),
        (
            {"attention": [[128, 0, 0.4, 0.3]]},
            r"attention has the row \[128, 0, 0.4, 0.3\]; give a head size and posit",
        ),
        ({"attention": [[128, 1024, 0.4, math.nan]]}, r"attention has the row \[128, 1024, 0.4, nan\]"),
        ({"attention": [[128, 1024, 1.3, 0.3]]}, "two fractions of the peak above 0 and at most 1.2"),
        ({"sequences": [2048, 512]}, r"sequences is \[2048, 512\]; give the smallest and the largest"),
        ({"measured": [3]}, r"measured is \[3\], which is not a list of text"),
        ({"format": "mjax calibration 1"}, "is not a calibration of this version of mjax"),
        ({"gpu": "h1000"}, "gpu 'h1000' is not known; mjax/hardware.py describes how to add it"),
        ({"devices": [8]}, r"devices is \[8\], which is not \[a whole number, a whole number\]"),
        ({"devices": [8, 1]}, r"devices is \[8, 1\]; give the smallest and the largest"),
        ({"devices": [0, 8]}, r"devices is \[0, 8\]; give the smallest and the largest, both above 0"),
        ({"parameters": [1e9, math.nan]}, r"parameters is \[1000000000.0, nan\]; give the smallest"),
        ({"versions": {"jax": 10}}, "versions is {'jax': 10}, which is not an object in which each value is text"),
        ({"speed": 1.0}, "unknown field speed"),
        ({"inner": None}, "inner is None, which is not a number"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong_in_it(tmp_path, change, sentence):
    file = tmp_path / "rates.json"
    write_calibration(H100, file)
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | change))
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)


def test_a_file_in_which_a_rate_is_missing_is_refused(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"format": FORMAT, "gpu": "h100"}))
    with pytest.raises(UsageError, match=r"there is no matmul; write one with"):
        read_calibration(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[1]", "is not a calibration"), (None, "does not exist")],
    ids=["damaged", "deep", "list", "missing"],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, sentence):
    file = tmp_path / "rates.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)
