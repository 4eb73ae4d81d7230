"""The kernel that is used is run, and a wrong one is found by NumPy."""

from dataclasses import replace
from unittest.mock import Mock

import jax
import pytest

from mjax.config import load_config
from mjax.doctor import GREEN, RED
from mjax.doctor.numerics import check_attention
from mjax.errors import UsageError
from mjax.models import attention_kernels
from mjax.step import kernel_trial


@pytest.fixture
def chosen(monkeypatch):
    """Have mjax choose the kernel `xla` without a word."""
    monkeypatch.setattr(kernel_trial, "resolve_attention", lambda *_: "xla")


def small(name, **changes):
    config = load_config(name)
    precision = replace(config.precision, compute="fp32")
    return replace(config, model=replace(config.model, sequence=32, **changes), precision=precision)


def test_kernel_of_this_machine_is_right():
    (finding,) = check_attention()
    assert finding.status == GREEN
    assert finding.found.startswith("cudnn" if jax.default_backend() == "gpu" else "xla_blocks")
    assert 0 < finding.figures["largest_error_relative"] < 3e-2


@pytest.mark.parametrize(
    ("name", "change", "model"),
    [
        ("gpt_demo", {"causal": False}, {}),
        ("bert_demo", {"documents": None}, {}),
        ("bloom_560m", {"slopes": None}, {}),
        ("gpt_demo", {"window": None}, {"window": 4}),
    ],
)
def test_wrong_kernel_is_red(monkeypatch, chosen, name, change, model):
    """The attention of the config itself is checked: its mask, documents, slopes and window."""
    config, right = small(name, **model), attention_kernels.attend
    assert check_attention(config)[0].status == GREEN

    def attend(q, k, v, kernel, **options):
        return right(q, k, v, kernel, **{**options, **change})

    monkeypatch.setattr(attention_kernels, "attend", attend)
    assert check_attention(config)[0].status == RED


def test_kernel_that_does_not_run_is_red(monkeypatch):
    error = UsageError("cudnn does not run here (RESOURCE_EXHAUSTED: Out of memory); use xla")
    monkeypatch.setattr(kernel_trial, "resolve_attention", Mock(side_effect=error))
    (finding,) = check_attention()
    assert (finding.status, finding.found) == (RED, "cudnn does not run here (RESOURCE_EXHAUSTED: Out of memory)")
    assert finding.advice.startswith("nvidia-smi shows which process holds")
