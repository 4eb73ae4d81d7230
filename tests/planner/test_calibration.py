"""The file of a calibration: what is written is read again, and what is wrong with a file is said."""

import json
from dataclasses import replace

import pytest

from mjax.errors import UsageError
from mjax.planner.calibration import MEGATRON_V100, MJAX_FROM_PAPERS, read_calibration, write_calibration


def test_a_calibration_comes_back_from_its_file(tmp_path):
    file = tmp_path / "rates.json"
    measured = replace(MEGATRON_V100, date="2026-11-22", versions={"jax": "0.10.2"})
    write_calibration(measured, file)
    assert read_calibration(file) == measured


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "is not a calibration of this version of mjax; write one with: python benchmarks"),
        ({"matmul": 40.0}, "matmul is 40, and a fraction of what a GPU promises lies in 0 to 1"),
        ({"matmul": "fast"}, "matmul is 'fast', which is not a float"),
        ({"launch": -1.0}, "launch is -1 and cannot be negative; measure it again"),
        ({"gpu": "h1000"}, "gpu 'h1000' is not known; mjax/hardware.py says how to add it"),
        ({"devices": [8]}, r"devices is \(8,\); it holds two numbers"),
        ({"speed": 1.0}, "unknown field 'speed'"),
        ({"half": None}, "half is None, which is not a float"),
        ({"software": {"name": "x"}}, "software has no 'stream_bytes'; measure it again"),
        ({"software": 3}, "software must be an object, not 3"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong_in_it(tmp_path, change, sentence):
    file = tmp_path / "rates.json"
    write_calibration(MJAX_FROM_PAPERS, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "is not JSON"), ("[1]", "is not a calibration"), (None, "cannot")]
)
def test_a_file_that_is_none_is_refused(tmp_path, text, sentence):
    file = tmp_path / "rates.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)
