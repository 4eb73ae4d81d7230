"""The file of a calibration: what is written is read again, and what is wrong with a file is said."""

import json
import math
from dataclasses import replace

import pytest

from mjax.errors import UsageError
from mjax.planner.calibration import FORMAT, MEGATRON_V100, MJAX_FROM_PAPERS, read_calibration, write_calibration


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
        ({"half": 10**400}, "half is 1000000000000000000000000000000000000000"),
        ({"half": 1e16}, r"half is 1e\+16; it must be at least 0 and at most 1,000,000,000,000,000"),
        ({"matmul": 0}, "matmul is 0; it must be above 0"),
        ({"software": {"kernels": -3}}, "software.kernels is -3; it must be at least 0"),
        ({"software": {"stream_bytes": math.inf}}, "software.stream_bytes is inf"),
        ({"software": {"gradient_bytes": 0}}, "software.gradient_bytes is 0; it must be at least 1"),
        ({"gpu": "h1000"}, "gpu 'h1000' is not known; mjax/hardware.py describes how to add it"),
        ({"devices": [8]}, r"devices is \[8\], which is not \[a whole number, a whole number\]"),
        ({"devices": [8, 1]}, r"devices is \[8, 1\]; give the smallest and the largest"),
        ({"devices": [0, 8]}, r"devices is \[0, 8\]; give the smallest and the largest, both above 0"),
        ({"parameters": [1e9, math.nan]}, r"parameters is \[1000000000.0, nan\]; give the smallest"),
        ({"versions": {"jax": 10}}, "versions is {'jax': 10}, which is not an object in which each value is text"),
        ({"speed": 1.0}, "unknown field speed"),
        ({"half": None}, "half is None, which is not a number"),
        ({"software": {"speed": 1.0}}, "unknown field software.speed"),
        ({"software": 3}, "software. must be an object, not 3"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong_in_it(tmp_path, change, sentence):
    file = tmp_path / "rates.json"
    write_calibration(MJAX_FROM_PAPERS, file)
    values = json.loads(file.read_text())
    if isinstance(change.get("software"), dict):
        change = {"software": values["software"] | change["software"]}
    file.write_text(json.dumps(values | change))
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)


def test_a_program_of_which_something_is_missing_is_refused(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"format": FORMAT, "software": {"name": "x"}}))
    with pytest.raises(UsageError, match=r"there is no software\.stream_bytes; write one with"):
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
