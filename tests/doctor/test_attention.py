"""The kernel that is used is run, and a wrong one is found by NumPy."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mjax.config import load_config
from mjax.doctor.attention import check_attention, reference
from mjax.doctor.finding import GREEN, RED, YELLOW
from mjax.errors import UsageError
from mjax.models import attention_kernels, kernel_trial


@pytest.fixture
def chosen(monkeypatch):
    """Have mjax choose the kernel `xla` without a word."""
    monkeypatch.setattr(kernel_trial, "resolve_attention", lambda *_: "xla")


def small(name, **changes):
    config = load_config(name)
    precision = replace(config.precision, compute="fp32")
    return replace(config, model=replace(config.model, sequence=32, **changes), precision=precision)


def test_reference_gradient_is_that_of_its_output():
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 2, 6, 2, 4))
    documents, slopes = np.arange(6) // np.array([[2], [4]]), np.array([0.5, 0.25])
    every = {"causal": True, "documents": documents, "slopes": slopes}
    for options in ({"causal": False}, every, {"causal": True, "window": 3}):
        gradients = reference(q, k, v, **options)[1:]
        for index, gradient in enumerate(gradients):
            direction = random.standard_normal(q.shape)
            sums = []
            for sign in (1, -1):
                moved = [x + sign * 1e-5 * direction * (i == index) for i, x in enumerate((q, k, v))]
                sums.append(np.square(reference(*moved, **options)[0]).sum())
            np.testing.assert_allclose((sums[0] - sums[1]) / 2e-5, (gradient * direction).sum(), rtol=1e-5)


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
    (finding,) = check_attention(config)
    assert finding.status == RED
    assert "xla is wrong in fp32" in finding.found


def test_kernel_that_gives_nan_is_red(monkeypatch, chosen):
    monkeypatch.setattr(attention_kernels, "attend", lambda q, k, v, kernel, **options: q * np.nan)
    assert check_attention(small("gpt_demo"))[0].status == RED


def test_fp64_is_told_to_be_untested(chosen):
    config = small("gpt_demo")
    (finding,) = check_attention(replace(config, precision=replace(config.precision, compute="fp64")))
    assert finding.found.startswith("xla, fp32, head size")
    assert finding.found.endswith("; the config's fp64 is not tested")


def test_slower_kernel_is_yellow_with_reason(monkeypatch):
    def resolve(model, compute, platform, announce, documents):
        announce("attention: the slower kernel xla is used instead of cuDNN flash, because it has no dropout")
        return "xla"

    monkeypatch.setattr(kernel_trial, "resolve_attention", resolve)
    monkeypatch.setattr("mjax.doctor.attention.largest_error", lambda *_: 1e-6)
    (finding,) = check_attention(small("gpt_demo", attention_dropout=0.1))
    assert (finding.status, finding.advice) == (YELLOW, "--model.attention-dropout 0")
    assert "the slower kernel xla is used" in finding.found


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("the attention kernel cudnn does not run here (no plan); use --model.attention xla", "use --model.att"),
        (
            "cudnn does not run here (RESOURCE_EXHAUSTED: Out of memory); use xla",
            "nvidia-smi shows which process holds",
        ),
    ],
)
def test_kernel_that_does_not_run_is_red(monkeypatch, error, advice):
    def resolve(*_):
        raise UsageError(error)

    monkeypatch.setattr(kernel_trial, "resolve_attention", resolve)
    (finding,) = check_attention()
    assert finding.status == RED
    assert finding.found == error.partition(";")[0]
    assert finding.advice.startswith(advice)
