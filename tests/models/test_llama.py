"""Llama and its relatives: a serial reference in float64, on every kind of mesh."""

from dataclasses import replace
from functools import cache
from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import Config, DataConfig, LlamaConfig, MeshConfig, PrecisionConfig, TrainConfig
from mjax.models.llama import rotary_of
from mjax.parallel.zero import sums_by_layer
from tests.products import diagonal, one_in, seldom
from tests.reference import QUICKLY
from tests.small import batch_of, gradient_program, named, weights_of
from tests.training.test_step_equals_reference import CASES

MODEL = LlamaConfig(
    layers=2,
    hidden=32,
    heads=8,
    kv_heads=4,
    sequence=16,
    feed_forward=24,
    vocabulary=60,
    vocabulary_multiple=64,
    attention="xla",
)
FAMILIES = {
    "llama": MODEL,
    "llama 3.1": replace(MODEL, rope_scaling="llama3", rope_factor=8.0, rope_original=8, rope_theta=50.0),
    "mistral": replace(MODEL, window=5),
    "alternating windows": replace(MODEL, layers=4, window=3, full_attention_every=2),
    "qwen 2": replace(MODEL, qkv_bias=True, tied=True, rope_theta=1e6),
    "qwen 3": replace(MODEL, qk_norm="head", head_dim=6, rope_theta=1e6),
    "olmo 2": replace(MODEL, qk_norm="heads", norms="post", kv_heads=None),
    "one key-value head": replace(MODEL, kv_heads=1, qk_norm="heads"),
    "two key-value heads with a bias": replace(MODEL, kv_heads=2, qkv_bias=True, qk_norm="head"),
    "geglu, half a head turned, yarn": replace(
        MODEL, activation="gelu_tanh", rope_share=0.5, rope_scaling="yarn", rope_factor=4.0, rope_original=64
    ),
}
MESHES = {
    "2 × 4": {"data": 2, "model": 4},
    "model 8": {"model": 8},
    "2 × 4, sequence parallel, FSDP": {"data": 2, "model": 4, "sequence_parallel": True, "zero": 3},
    "pipe 2, ZeRO-1": {"pipe": 2, "data": 2, "model": 2, "zero": 1},
    "pipe 2, split backward passes": {"pipe": 2, "schedule": "zb-h1"},
    "pipe 2 × model 4, split backward passes": {"pipe": 2, "model": 4, "schedule": "zb-h1"},
}
PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


def config_of(architecture, recompute="none", **mesh):
    return Config(
        model=architecture,
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True, **PACKED),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(global_batch=8, micro_batch=1, recompute=recompute),
    )


# --- The same, serially -----------------------------------------------------------------------------------------------


def norm(x, scale, model, dims=-1):
    return x / jnp.sqrt((x**2).mean(dims, keepdims=True) + model.norm_epsilon) * scale


def turned(x, places, model):
    """Pairs (i, i + dims / 2) as complex numbers, turned by an angle: x [b, s, n, d]."""
    rotary = rotary_of(model)
    turn = jnp.exp(1j * places[..., None] * rotary.frequencies())[:, :, None] * rotary.magnitude()
    half = model.turned // 2
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def projected(w, x, model):
    if model.groups == model.heads:
        qkv = jnp.einsum("bsh,hcnd->cbsnd", x, w["attention.qkv.kernel"])
        return qkv + w["attention.qkv.bias"][:, None, None] if model.qkv_bias else qkv
    q = jnp.einsum("bsh,hnd->bsnd", x, w["attention.query.kernel"])
    kv = jnp.einsum("bsh,hckd->cbskd", x, w["attention.key_value.kernel"])
    if model.qkv_bias:
        q, kv = q + w["attention.query.bias"], kv + w["attention.key_value.bias"][:, None, None]
    return q, *kv


def attention(w, x, model, batch, window):
    q, k, v = projected(w, x, model)
    if model.qk_norm != "none":
        dims = -1 if model.qk_norm == "head" else (-2, -1)
        q = norm(q, w["attention.query_norm.scale"], model, dims)
        k = norm(k, w["attention.key_norm.scale"], model, dims)
    q, k = (turned(part, batch["positions"], model) for part in (q, k))
    k, v = (jnp.repeat(part, model.heads // model.groups, axis=2) for part in (k, v))
    scores = jnp.einsum("bqnd,bpnd->bnqp", q, k) / np.sqrt(model.head_size)
    same = batch["documents"][:, :, None] == batch["documents"][:, None]
    near = np.tri(x.shape[1], dtype=bool) & ~np.tri(x.shape[1], k=-(window or x.shape[1]), dtype=bool)
    context = jnp.einsum("bnqp,bpnd->bqnd", jax.nn.softmax(jnp.where((near & same)[:, None], scores, -jnp.inf)), v)
    return jnp.einsum("bsnd,ndh->bsh", context, w["attention.out.kernel"])


def mlp(w, x, model):
    gate, up = jnp.einsum("bsh,hcf->cbsf", x, w["mlp.up.kernel"])
    return ((jax.nn.silu if model.activation == "silu" else jax.nn.gelu)(gate) * up) @ w["mlp.down.kernel"]


def serial_loss(weights, model, batch):
    x = weights["embedding.table"][batch["tokens"]]
    for number in range(model.layers):
        window = model.window if not model.full_attention_every or (number + 1) % model.full_attention_every else None
        w = {name.removeprefix("blocks."): part[number] for name, part in weights.items() if "blocks." in name}
        if model.norms == "pre":
            x = x + attention(w, norm(x, w["attention_norm.scale"], model), model, batch, window)
            x = x + mlp(w, norm(x, w["mlp_norm.scale"], model), model)
        else:
            x = x + norm(attention(w, x, model, batch, window), w["attention_norm.scale"], model)
            x = x + norm(mlp(w, x, model), w["mlp_norm.scale"], model)
    head = weights["embedding.table" if model.tied else "head.table"]
    scores = (norm(x, weights["final_norm.scale"], model) @ head.T)[..., : model.vocabulary]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["labels"][..., None], -1)[..., 0]
    return -(chosen * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


@cache
def expected_of(family):
    config = config_of(FAMILIES[family])
    loss = jax.jit(jax.value_and_grad(serial_loss), static_argnums=1, compiler_options=QUICKLY)
    return loss(named(weights_of(config)), config.model, batch_of(config))


# Every family and every mesh, both at least once.
OFTEN = [
    ("llama", "2 × 4", "none"),
    ("llama 3.1", "pipe 2, ZeRO-1", "selective"),
    ("mistral", "pipe 2, split backward passes", "none"),
    ("qwen 2", "2 × 4, sequence parallel, FSDP", "selective"),
    ("qwen 3", "2 × 4", "selective"),
    ("olmo 2", "2 × 4, sequence parallel, FSDP", "full"),
    ("geglu, half a head turned, yarn", "2 × 4", "full"),
    ("alternating windows", "pipe 2, ZeRO-1", "full"),
    ("one key-value head", "model 8", "selective"),
    ("two key-value heads with a bias", "pipe 2 × model 4, split backward passes", "none"),
]
RECOMPUTE = ("none", "selective")
SOME = [
    *diagonal(10, FAMILIES, MESHES, RECOMPUTE),
    ("alternating windows", "2 × 4", "none"),
    ("alternating windows", "2 × 4, sequence parallel, FSDP", "selective"),
    ("alternating windows", "pipe 2, split backward passes", "none"),
    ("llama", "model 8", "none"),
    ("one key-value head", "pipe 2, ZeRO-1", "none"),
    ("two key-value heads with a bias", "2 × 4", "none"),
    ("two key-value heads with a bias", "2 × 4, sequence parallel, FSDP", "full"),
]
EVERY = dict.fromkeys([*product(FAMILIES, MESHES, RECOMPUTE), *OFTEN, *SOME])


@pytest.mark.parametrize(("family", "mesh", "recompute"), seldom(EVERY, OFTEN, SOME))
def test_loss_and_gradients_equal_the_serial_reference_in_float64(family, mesh, recompute):
    assert_equals_reference(family, config_of(FAMILIES[family], recompute, **MESHES[mesh]))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_they_do_where_gradients_are_summed_layer_by_layer_and_ranks_share_heads(micro_batch):
    family = "two key-value heads with a bias"
    config = config_of(FAMILIES[family], data=2, model=4, sequence_parallel=True, zero=1)
    config = replace(config, train=replace(config.train, unroll="on", micro_batch=micro_batch))
    assert sums_by_layer(config)
    assert_equals_reference(family, config)


def assert_equals_reference(family, config):
    with jax.enable_x64(True):
        program, place = gradient_program(config)
        loss, gradients = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))
        expected_loss, expected = expected_of(family)
        assert abs(float(loss) - float(expected_loss)) < 1e-13
        assert {name for name, gradient in expected.items() if not np.abs(gradient).max() > 1e-6} == set()
        for name, gradient in named(gradients).items():
            np.testing.assert_allclose(
                gradient.reshape(expected[name].shape), expected[name], rtol=0, atol=1e-14, err_msg=name
            )


@pytest.mark.parametrize(  # llama has a table of its own for the output; in qwen 2 it is the embedding
    ("family", "mesh"),
    [
        pytest.param("llama", "2 × 4, sequence parallel, FSDP", marks=pytest.mark.ci),
        ("qwen 2", "2 × 4, sequence parallel, FSDP"),
        ("llama", "pipe 2, ZeRO-1"),
        pytest.param("qwen 2", "pipe 2, ZeRO-1", marks=pytest.mark.ci),
    ],
)
def test_with_the_loss_in_chunks_they_equal_it_too(family, mesh):
    with jax.enable_x64(True):
        config = config_of(FAMILIES[family], **MESHES[mesh])
        config = replace(config, train=replace(config.train, loss_chunks=3))
        loss, gradients = found_on(config)
        expected_loss, expected = expected_of(family)
        assert abs(loss - float(expected_loss)) < 1e-13
        for name, gradient in gradients.items():
            wanted = expected[name]
            np.testing.assert_allclose(gradient.reshape(wanted.shape), wanted, rtol=0, atol=1e-14, err_msg=name)


def config_of_case(family, case):
    return Config(
        model=replace(
            FAMILIES[family],
            layers=8,
            attention=case.kernel,
            hidden_dropout=case.dropout,
            attention_dropout=case.dropout,
        ),
        mesh=MeshConfig(
            pipe=case.pipe,
            data=case.data,
            model=case.tensor,
            sequence_parallel=case.sequence_parallel,
            zero=case.zero,
            chunks=case.chunks,
            **({"schedule": case.schedule} if case.schedule else {}),
        ),
        data=DataConfig(mock=True, **(PACKED if case.packed else {})),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(
            global_batch=8,
            micro_batch=1 if case.schedule else 4 // case.data,
            recompute=case.recompute,
            unroll="off" if case.layers == "loop" else "on",
            streams=2 if case.layers == "halves" else 1,
            loss_chunks=case.loss_chunks,
        ),
    )


def found_on(config):
    program, place = gradient_program(config)
    loss, gradients = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))
    return float(loss), {name: np.asarray(gradient) for name, gradient in named(gradients).items()}


@pytest.mark.parametrize(
    ("family", "case"),
    one_in(3, zip(cycle(FAMILIES), CASES, strict=False), often=pytest.mark.ci, others=pytest.mark.all),
    ids=lambda each: str(each)[:60],
)
def test_every_two_choices_of_a_run_give_what_one_device_gives(family, case):
    """The one device is compared with the serial reference above; it draws the same dropout masks."""
    with jax.enable_x64(True):
        config = config_of_case(family, case)
        alone = replace(config, mesh=MeshConfig(), train=replace(config.train, micro_batch=8, recompute="none"))
        loss, gradients = found_on(config)
        expected_loss, expected = found_on(alone)
    assert abs(loss - expected_loss) < 1e-12
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient.reshape(expected[name].shape), expected[name], rtol=0, atol=1e-12, err_msg=name
        )
