"""The file of a calibration: round trip, and errors in a file."""

import json
import os
from dataclasses import replace
from unittest.mock import Mock

import pytest

from benchmarks.published import MEGATRON_V100
from mjax.errors import UsageError
from mjax.planner.time import FORMAT, H100, read_calibration, write_calibration


def test_calibration_comes_back_from_file(tmp_path):
    file = tmp_path / "rates.json"
    measured = replace(MEGATRON_V100, date="2026-11-22", versions={"jax": "0.10.2"})
    write_calibration(measured, file)
    assert read_calibration(file) == measured


def test_interrupted_write_leaves_old_calibration(tmp_path, monkeypatch):
    file = tmp_path / "rates.json"
    write_calibration(H100, file)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_calibration(MEGATRON_V100, file)
    assert read_calibration(file) == H100


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"format": "other"}, "is not a calibration of this version of mjax; in mjax.s repository, python benchmarks"),
        ({"matmul": 40.0}, r"matmul is 40.0; it must be above 0 .* in mjax.s repository, python benchmarks"),
        ({"sequences": [2048, 512]}, r"the shortest and the longest, all above 0; they are .* and \[2048, 512\]"),
        ({"attention": [[128, 1024, 0.5, 40.0]]}, r"two fractions of the peak up to 1.2, .* 40.0\]\] and "),
        ({"gpu": "h1000"}, "gpu 'h1000' is not known; add it in mjax/cluster/hardware.py"),
        ({"speed": 1.0}, "unknown field speed"),
        ("{", "is not JSON"),
        (json.dumps({"format": FORMAT, "gpu": "h100"}), "there is no matmul"),
    ],
    ids=str,
)
def test_wrong_calibration_is_rejected(tmp_path, wrong, sentence):
    """`test_plan.py` has a file that does not exist."""
    file = tmp_path / "rates.json"
    write_calibration(H100, file)
    file.write_text(wrong if isinstance(wrong, str) else json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UsageError, match=sentence):
        read_calibration(file)
