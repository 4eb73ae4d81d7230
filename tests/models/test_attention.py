"""The attention kernels, and the choice among them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import GPTConfig
from mjax.errors import UsageError
from mjax.models import attention_kernels, kernel_trial
from mjax.models.attention_kernels import attend
from mjax.models.kernel_trial import resolve_attention
from mjax.models.positions import alibi_slopes

MODEL = GPTConfig(hidden=32, heads=4, sequence=16, attention_dropout=0.0)


def _inputs(positions=16):
    return [jax.random.normal(key, (2, positions, 4, 8)) for key in jax.random.split(jax.random.key(0), 3)]


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
@pytest.mark.parametrize("positions", [16, 13])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, 1), (True, 3), (True, 6), (True, 16)]
)
def test_kernels_equal_the_textbook_formula(kernel, positions, packed, causal, window):
    q, k, v = _inputs(positions)
    documents = np.sort(np.random.default_rng(0).integers(0, 4, (2, positions)))
    visible = np.ones((1, positions, positions), bool)
    visible = np.tril(visible) if causal else visible
    if window is not None:
        visible = np.triu(visible, 1 - window)
    if packed:
        visible = visible & (documents[:, :, None] == documents[:, None])
    scores = np.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(8)
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bnqk,bknd->bqnd", weights / weights.sum(-1, keepdims=True), v)
    numbers = jnp.asarray(documents) if packed else None
    found = attend(q, k, v, kernel, documents=numbers, causal=causal, window=window)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
def test_the_future_has_no_influence(kernel):
    q, k, v = _inputs()
    changed = attend(q, k.at[:, 9:].add(100.0), v.at[:, 9:].add(100.0), kernel)
    np.testing.assert_array_equal(changed[:, :9], attend(q, k, v, kernel)[:, :9])


def test_blocks_of_queries_leave_out_the_keys_that_none_of_them_sees():
    jaxpr = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, "xla_blocks", window=3))(*_inputs()).jaxpr
    products = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    scores = [equation.outvars[0].aval.shape for equation in products][::2]
    assert scores == [(2, 4, 4, 4), *[(2, 4, 4, 6)] * 3]


@pytest.mark.parametrize("window", [1, 3, 15])
def test_cudnn_is_given_the_window_as_jax_counts_it(monkeypatch, window):
    right, given = jax.nn.dot_product_attention, []

    def run_by_xla(*inputs, implementation, **options):
        given.append(implementation)
        return right(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run_by_xla)
    inputs = _inputs()
    found = attend(*inputs, "cudnn", window=window)
    np.testing.assert_allclose(found, attend(*inputs, "xla", window=window), atol=2e-6)
    assert given == ["cudnn"]


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


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [
        ("7.0", {}, "needs compute capability 8.0 or more, as an A100 has, and the GPU has 7.0"),
        ("8.0", {}, None),
        ("8.0", {"hidden": 640}, "up to 128 on GPUs before H100 and hidden / heads is 160"),
        ("9.0", {"hidden": 640}, None),
        ("10.0", {"hidden": 1056}, "a multiple of 8 up to 256 and hidden / heads is 264"),
    ],
)
def test_auto_takes_cudnn_only_on_a_gpu_that_has_it(monkeypatch, capability, changes, expected):
    said = []
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(kernel_trial, "_self_test", lambda *_: None)
    kernel = resolve_attention(replace(MODEL, **changes), "bf16", "gpu", said.append)
    assert kernel == ("cudnn" if expected is None else "xla")
    assert expected is None or expected in said[0]
    assert bool(said) == bool(expected)


def test_cudnn_is_taken_where_it_can_be_and_is_run_first(monkeypatch):
    ran = []
    monkeypatch.setattr(kernel_trial, "_self_test", lambda kernel, *_: ran.append(kernel))
    assert resolve_attention(MODEL, "bf16", "gpu", pytest.fail) == "cudnn"
    said = []
    assert resolve_attention(MODEL, "bf16", "gpu", said.append, documents=True) == "cudnn"
    assert said == ["attention: cuDNN gets the documents as a bias, as JAX has no public interface for their offsets"]
    assert ran == ["cudnn"] * 2


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
    with pytest.raises(
        UsageError, match="cudnn does not run here"
    ):  # there is no cuDNN, whatever the platform is called
        resolve_attention(MODEL, "bf16", "gpu")
    with pytest.raises(UsageError, match="cudnn does not run here"):
        resolve_attention(replace(MODEL, attention="cudnn"), "bf16", "gpu", documents=True)


def test_where_cudnn_takes_no_document_masks_auto_says_so_and_takes_xla():
    said = []
    assert resolve_attention(MODEL, "bf16", "gpu", said.append, documents=True) == "xla"
    assert len(said) == 1
    assert "the slower kernel xla is used, because cuDNN flash refuses document masks" in said[0]


@pytest.mark.parametrize(("documents", "refused"), [(False, "ALiBi"), (True, "document masks and ALiBi")])
def test_where_cudnn_takes_no_alibi_auto_says_so_and_takes_xla(documents, refused):
    said, alibi = [], replace(MODEL, positions="alibi")
    assert resolve_attention(alibi, "bf16", "gpu", said.append, documents=documents) == "xla"
    assert len(said) == 1
    assert f"the slower kernel xla is used, because cuDNN flash refuses {refused} (" in said[0]
    with pytest.raises(UsageError, match=r"with --model.positions alibi it needs an even number of positions"):
        resolve_attention(replace(alibi, sequence=15, attention="cudnn"), "bf16", "gpu")


def test_where_cudnn_takes_no_window_auto_says_so_and_takes_xla():
    said = []
    assert resolve_attention(replace(MODEL, window=4), "bf16", "gpu", said.append) == "xla"
    assert "the slower kernel xla is used, because cuDNN flash refuses a window (" in said[0]


def test_cudnn_is_not_tried_with_documents_on_an_odd_number_of_positions():
    said, odd = [], replace(MODEL, sequence=15)
    assert resolve_attention(odd, "bf16", "gpu", said.append, documents=True) == "xla"
    assert "--model.sequence is 15" in said[0]
    with pytest.raises(UsageError, match="needs an even number of positions"):
        resolve_attention(replace(odd, attention="cudnn"), "bf16", "gpu", documents=True)


def test_a_kernel_with_wrong_numbers_is_found_at_the_start(monkeypatch):
    right = attention_kernels.attend

    def attend(q, k, v, kernel, **options):
        return right(q, k, v, kernel, **options) * (1.5 if kernel == "xla_blocks" else 1.0)

    monkeypatch.setattr(kernel_trial, "attend", attend)
    with pytest.raises(UsageError, match="gives wrong results here"):
        kernel_trial._self_test("xla_blocks", MODEL, "fp32", documents=False)


def test_a_kernel_that_does_not_keep_to_documents_is_found_at_the_start(monkeypatch):
    right = attention_kernels.attend

    def attend(q, k, v, kernel, documents, **options):
        return right(q, k, v, kernel, documents=documents if kernel == "xla" else None, **options)

    monkeypatch.setattr(kernel_trial, "attend", attend)
    resolve_attention(MODEL, "fp32", "cpu")
    with pytest.raises(UsageError, match="gives wrong results here"):
        resolve_attention(MODEL, "fp32", "cpu", documents=True)


def test_a_kernel_that_leaves_alibi_out_is_found_at_the_start(monkeypatch):
    right = attention_kernels.attend

    def attend(q, k, v, kernel, slopes, **options):
        return right(q, k, v, kernel, slopes=slopes if kernel == "xla" else None, **options)

    monkeypatch.setattr(kernel_trial, "attend", attend)
    resolve_attention(MODEL, "fp32", "cpu")
    with pytest.raises(UsageError, match="gives wrong results here"):
        resolve_attention(replace(MODEL, positions="alibi"), "fp32", "cpu")


@pytest.mark.parametrize("window", [5, 100])
def test_a_kernel_that_leaves_the_window_out_is_found_at_the_start(monkeypatch, window):
    right = attention_kernels.attend

    def attend(q, k, v, kernel, window, **options):
        return right(q, k, v, kernel, window=window if kernel == "xla" else None, **options)

    monkeypatch.setattr(kernel_trial, "attend", attend)
    with pytest.raises(UsageError, match="gives wrong results here"):
        resolve_attention(replace(MODEL, window=window), "fp32", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_cudnn_equals_xla_on_this_gpu(documents, alibi, window):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in _inputs(128))
    numbers = jnp.arange(128) // jnp.array([[5], [60]]) if documents else None
    slopes = jnp.asarray(alibi_slopes(4)) if alibi else None
    found, expected = (
        np.asarray(attend(q, k, v, kernel, documents=numbers, slopes=slopes, window=window), np.float32)
        for kernel in ("cudnn", "xla")
    )
    np.testing.assert_allclose(found, expected, atol=2e-2)
