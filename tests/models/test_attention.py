"""The attention kernels, and the choice among them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import Config, DataConfig, GPTConfig, MeshConfig, PrecisionConfig, load_config
from mjax.config.kernels import BLOCK, FLASH_INTERPRETED, choose_kernel
from mjax.errors import UsageError
from mjax.models.parts.attention_kernels import attend
from mjax.models.parts.mask import AttentionMask
from mjax.parallel.random import DropoutKey
from mjax.step.layout import with_kernel
from tests.traced import equations

MODEL = GPTConfig(hidden=32, heads=4, sequence=16, attention_dropout=0.0)
ALIBI, WINDOW, DROPOUT = {"positions": "alibi"}, {"window": 4}, {"attention_dropout": 0.1}


def inputs(positions=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, positions, 4, 8)).astype(dtype) for key in keys]


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
@pytest.mark.parametrize(
    ("positions", "packed", "causal", "window"),
    [
        (16, False, True, None),
        (16, True, False, None),
        (16, True, True, 3),
        (16, False, True, 6),
        (13, True, True, 1),
        (13, False, True, 13),
    ],
)
def test_kernels_equal_textbook_formula(kernel, positions, packed, causal, window):
    q, k, v = inputs(positions)
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
    options = {"documents": jnp.asarray(documents) if packed else None, "causal": causal, "window": window}
    found = jax.jit(lambda *arrays: attend(*arrays, AttentionMask(**options), kernel))(q, k, v)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("kernel", "size", "values"),
    [("xla", 24, 16), ("xla_blocks", 16, 24), ("cudnn", 24, 16), ("cudnn", 16, 24), (FLASH_INTERPRETED, 24, 16)],
)
def test_values_may_have_another_width_and_scores_a_scale(kernel, size, values, monkeypatch):
    """The formula and its gradients, in every kernel, with sizes such as those of a latent attention."""
    positions, right = 2 * BLOCK, jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *arrays, **options: right(*arrays, **options | {"implementation": None})
    )
    shapes = [(1, positions, 2, width) for width in (size, size, values, values)]
    q, k, v, upstream = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def formula(q, k, v):
        scores = 0.3 * jnp.einsum("bqnd,bknd->bnqk", q, k)
        visible = jnp.tril(jnp.ones((positions, positions), bool))
        return jnp.einsum("bnqk,bkne->bqne", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)

    expected, expected_gradients = jax.vjp(formula, q, k, v)
    found, gradients = jax.vjp(lambda *arrays: attend(*arrays, AttentionMask(scale=0.3), kernel), q, k, v)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    for one, other in zip(gradients(upstream), expected_gradients(upstream), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_kernel_without_dropout_refuses_it():
    key = DropoutKey.make(0, jnp.int32(1), jnp.arange(2))
    with pytest.raises(UsageError, match=r"cudnn is not supported here \(it has no dropout .* 0.1\); use"):
        attend(*inputs(), AttentionMask(rate=0.1, key=key), "cudnn")


def test_blocks_leave_out_keys_before_window():
    jaxpr = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, AttentionMask(window=3), "xla_blocks"))(*inputs()).jaxpr
    scores = [equation.outvars[0].aval.shape for equation in equations(jaxpr, "dot_general")][::2]
    assert scores == [(2, 4, 4, 4), *[(2, 4, 4, 6)] * 3]


def test_cudnn_gets_window_as_jax_counts_it(monkeypatch):
    right, given = jax.nn.dot_product_attention, []

    def run_by_xla(*inputs, implementation, **options):
        given.append(implementation)
        return right(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run_by_xla)
    found = attend(*inputs(), AttentionMask(window=3), "cudnn")
    np.testing.assert_allclose(found, attend(*inputs(), AttentionMask(window=3), "xla"), atol=2e-6)
    assert given == ["cudnn"]


# --- The choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "compute", "capability", "expected", "why"),
    [
        ({}, "bf16", "8.0", "cudnn", None),
        ({"hidden": 640}, "fp8", "9.0", "cudnn", None),
        ({"attention": "xla"}, "bf16", "9.0", "xla", None),
        (DROPOUT, "bf16", "9.0", "xla", "--model.attention-dropout is 0.1"),
        ({}, "fp32", "9.0", "xla", "--precision.compute is fp32"),
        ({"hidden": 36}, "bf16", "9.0", "xla", "and heads have 9"),
        ({}, "bf16", "7.0", "xla", "it needs compute capability 8.0 (A100) or more, and the GPU has 7.0"),
        ({"hidden": 640}, "bf16", "8.0", "xla", "up to 128 on GPUs before H100, and heads have 160"),
        ({"hidden": 1056}, "bf16", "10.0", "xla", "a multiple of 8 up to 256, and heads have 264"),
    ],
)
def test_auto_announces_why_it_avoids_cudnn(monkeypatch, changes, compute, capability, expected, why):
    said, config = [], load_config("gpt_demo")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    precision = replace(config.precision, compute=compute)
    config = replace(config, model=replace(MODEL, **changes), precision=precision)
    assert with_kernel(config, said.append).model.attention == expected
    assert bool(said) == (why is not None)
    assert why is None or (why in said[0] and "slower kernel xla is used" in said[0])
    if expected == "cudnn":
        with_kernel(replace(config, data=replace(config.data, reset_attention=True)), said.append)
        assert "cuDNN gets the documents as a bias" in said[0]


GPT_1B = {"hidden": 1536, "heads": 16, "sequence": 1024, "attention": "flash"}


@pytest.mark.parametrize(
    ("changes", "compute", "platform", "documents", "why"),
    [
        ({}, "bf16", "cpu", False, "it needs an NVIDIA GPU"),
        ({"sequence": 15}, "bf16", "gpu", True, "with --data.reset-attention it needs an even number of positions"),
        ({"sequence": 15, **ALIBI}, "bf16", "gpu", False, "with ALiBi it needs an even number"),
        (GPT_1B, "bf16", "cpu", False, "it needs an NVIDIA GPU and this process runs on cpu"),
        (GPT_1B, "fp32", "gpu", False, "it computes in bf16 or fp16 and --precision.compute is fp32"),
        (GPT_1B | {"sequence": 1000}, "bf16", "gpu", False, "it needs a multiple of 64 positions"),
        (GPT_1B | {"heads": 8}, "bf16", "gpu", False, "it needs a head size from 16 to 128, and heads have 192"),
    ],
)
def test_kernel_asked_for_is_refused(changes, compute, platform, documents, why):
    """Rather than replaced."""
    model = replace(MODEL, **{"attention": "cudnn", **changes})
    config = Config(model, data=DataConfig(reset_attention=documents), precision=PrecisionConfig(compute))
    with pytest.raises(UsageError, match=rf"attention {model.attention} is not supported here \(.*{why}.*\); change"):
        choose_kernel(config, platform)


def test_cudnn_is_refused_for_fewer_queries_than_keys():
    mesh = MeshConfig(context=2, context_attention="allgather")
    with pytest.raises(UsageError, match=r"as many queries as keys, as with .* ulysses\); change"):
        choose_kernel(Config(replace(MODEL, attention="cudnn"), mesh=mesh), "gpu")


def test_wider_of_keys_and_values_decides(monkeypatch):
    monkeypatch.setattr(GPTConfig, "value_size", 12)
    kernel, why = choose_kernel(Config(MODEL), "gpu")
    assert (kernel, why) == ("xla", "it needs a head size that is a multiple of 8 up to 256, and heads have 12")
    monkeypatch.setattr(GPTConfig, "value_size", 192)
    assert choose_kernel(Config(MODEL), "gpu") == ("cudnn", None)
    kernel, why = choose_kernel(Config(MODEL, mesh=MeshConfig(context=2, context_attention="allgather")), "gpu")
    assert (kernel, why) == ("xla", "it needs a head size from 16 to 128, and heads have 192")


def test_flash_is_chosen_where_it_can_be():
    config = Config(replace(MODEL, **GPT_1B, **DROPOUT), precision=PrecisionConfig("fp8"))
    assert choose_kernel(config, "gpu")[0] == "flash"
