"""The attention kernels, and the choice among them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import ModelConfig
from mjax.errors import UsageError
from mjax.models import attention
from mjax.models.attention import attend, resolve_attention

MODEL = ModelConfig(hidden=32, heads=4, sequence=16, attention_dropout=0.0)


def _inputs(positions=16):
    return [jax.random.normal(key, (2, positions, 4, 8)) for key in jax.random.split(jax.random.key(0), 3)]


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
@pytest.mark.parametrize("positions", [16, 13])
def test_kernels_equal_the_textbook_formula(kernel, positions):
    q, k, v = _inputs(positions)
    scores = np.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((positions, positions), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bnqk,bknd->bqnd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attend(q, k, v, kernel), expected, atol=2e-6)


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
def test_the_future_has_no_influence(kernel):
    q, k, v = _inputs()
    changed = attend(q, k.at[:, 9:].add(100.0), v.at[:, 9:].add(100.0), kernel)
    np.testing.assert_array_equal(changed[:, :9], attend(q, k, v, kernel)[:, :9])


@pytest.mark.parametrize(
    ("changes", "compute", "platform", "expected"),
    [
        ({}, "bf16", "cpu", "xla_blocks"),
        ({"attention": "xla"}, "bf16", "cpu", "xla"),
        ({"attention_dropout": 0.1}, "bf16", "gpu", "xla"),
        ({}, "fp32", "gpu", "xla"),
        ({"hidden": 36}, "bf16", "gpu", "xla"),
    ],
)
def test_auto_follows_its_table_and_announces_a_slower_kernel(changes, compute, platform, expected):
    said = []
    assert resolve_attention(replace(MODEL, **changes), compute, platform, said.append) == expected
    assert bool(said) == (platform == "gpu")
    assert all("slower kernel xla is used" in line for line in said)


def test_cudnn_is_taken_where_it_can_be_and_is_run_first(monkeypatch):
    ran = []
    monkeypatch.setattr(attention, "_self_test", lambda kernel, *_: ran.append(kernel))
    assert resolve_attention(MODEL, "bf16", "gpu", pytest.fail) == "cudnn"
    assert ran == ["cudnn"]


@pytest.mark.parametrize(
    ("changes", "compute", "platform", "words"),
    [
        ({}, "bf16", "cpu", "it needs an NVIDIA GPU"),
        ({"attention_dropout": 0.1}, "bf16", "gpu", "--model.attention-dropout is 0.1"),
        ({}, "fp32", "gpu", "--precision.compute is fp32"),
        ({"hidden": 36}, "bf16", "gpu", "hidden / heads is 9"),
    ],
)
def test_a_kernel_asked_for_by_name_is_refused_rather_than_replaced(changes, compute, platform, words):
    with pytest.raises(UsageError, match=words):
        resolve_attention(replace(MODEL, attention="cudnn", **changes), compute, platform)


def test_a_kernel_that_does_not_run_is_found_at_the_start():
    with pytest.raises(UsageError, match="cudnn does not run here"):
        attention._self_test("cudnn", MODEL, "bf16")


def test_a_kernel_with_wrong_numbers_is_found_at_the_start(monkeypatch):
    right = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda q, k, v, kernel: right(q, k, v, kernel) * (1.5 if kernel == "xla_blocks" else 1.0)
    )
    with pytest.raises(UsageError, match="gives wrong numbers here"):
        attention._self_test("xla_blocks", MODEL, "fp32")


@pytest.mark.gpu
def test_cudnn_equals_xla_on_this_gpu():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in _inputs(128))
    np.testing.assert_allclose(
        np.asarray(attend(q, k, v, "cudnn"), np.float32), np.asarray(attend(q, k, v, "xla"), np.float32), atol=2e-2
    )
