"""XLA_FLAGS: what ends a process is found by a process that it ends."""

import os

import pytest

from mjax.doctor import RED, software
from mjax.doctor.software import check_flags

UNKNOWN = "--xla_gpu_enable_latency_hiding_schedular=true"


@pytest.mark.ci
def test_unknown_flag_is_found_by_a_child():
    """The words are those of the installed XLA; it takes seconds to read them all."""
    environment = {**os.environ, "XLA_FLAGS": f"{UNKNOWN} --xla_gpu_autotune_level=3"}
    (finding,) = check_flags(environment, 120)
    assert finding.status == RED
    assert "does not know --xla_gpu_enable_latency_hiding_schedular," in finding.found
    assert "--xla_gpu_enable_latency_hiding_scheduler" in finding.advice
    assert environment["XLA_FLAGS"] == "--xla_gpu_autotune_level=3"


@pytest.mark.parametrize(
    ("value", "said", "words", "left"),
    [
        (f"{UNKNOWN} --xla_gpu_autotune_level=3", f"Unknown flags in XLA_FLAGS: {UNKNOWN}", "latency_hiding_schedular",
         "--xla_gpu_autotune_level=3"),
        ("--xla_a=1 --xla_b=2", "F1122 parse.cc:234] Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b=2",
         "--xla_a and --xla_b", ""),
        ("--xla_gpu_autotune_level=x", "E1122 f.cc:63] Couldn't interpret value x for flag xla_gpu_autotune_level.",
         "'x' of --xla_gpu_autotune_level", ""),
    ],
)  # fmt: skip
def test_each_refusal_of_xla_gets_a_sentence(monkeypatch, value, said, words, left):
    monkeypatch.setattr(software, "refusal", lambda given, *_: said if given == value else None)
    monkeypatch.setattr(software, "known_flags", lambda: ["xla_gpu_autotune_level"])
    environment = {"XLA_FLAGS": value}
    (finding,) = check_flags(environment, 60)
    assert finding.status == RED
    assert words in finding.found
    assert environment["XLA_FLAGS"] == left
