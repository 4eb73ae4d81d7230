"""benchmarks/dedup.py runs, finds every similar pair that all pairs have, and shows datasketch beside mjax."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.parity, pytest.mark.all]


def test_benchmark_finds_all_similar_pairs(tmp_path):
    random = np.random.default_rng(0)
    texts = []
    for family in range(40):
        for _ in range(5):
            words = [f"f{family}w{number}" for number in range(200)]
            for place in random.choice(200, random.integers(12), replace=False):
                words[place] = f"x{random.integers(10**12)}"
            texts.append(" ".join(words))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, str(ROOT / "benchmarks" / "dedup.py"), str(file), str(file), "--rounds", "1"]
    result = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True)
    # The exit code is not looked at: so few texts are done before either program has started.
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
    measured = [line for line in result.stdout.splitlines() if "85 × 3" in line or "42 × 6" in line]
    assert len(measured) == 2
    for line in measured:
        assert line.count("100.00%") == 2, "candidates, found"
        assert line.endswith("0 │           yes │"), "false removals, clusters true"
    assert "datasketch" in result.stdout
