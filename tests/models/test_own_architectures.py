"""Architectures that mjax does not have, a file each: equal numbers on every mesh, and text from their own caches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import MeshConfig
from mjax.config.model import convert_kind
from mjax.generation.generate import Generator, Sampling
from mjax.models.build import build_model
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import split_into_virtual_stages
from mjax.planner.layer import scores_in_chunks
from mjax.planner.memory import predict_memory
from tests import reference
from tests.models.own_models import hybrid, mtp
from tests.models.own_models.mla import LatentConfig
from tests.models.test_own_model import compare
from tests.small import MEANS, batch_of, gradient_program
from tests.traced import equations, traced_step


def means_of(config, **mesh):
    names = ("loss", "mtp", "router_entropy", "expert_load") if config.model.experts else ("loss",)
    with jax.enable_x64(True):
        program, place = gradient_program(replace(config, mesh=MeshConfig(**mesh)), names)
        means, _ = program(place(), batch_of(config), jnp.int32(0), jnp.float64(1.0))
    return np.asarray(means)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("config", "meshes"),
    [
        (mtp.config, [{"data": 2, "model": 2, "sequence_parallel": True, "zero": 3}, {"data": 2, "expert": 2}]),
        (mtp.config, [{"context": 2, "context_attention": way} for way in ("ulysses", "allgather")]),
        (mtp.config, [{"pipe": 2}, {"pipe": 3, "data": 2, "zero": 1}]),
        (hybrid.config, [{"data": 2, "model": 2, "sequence_parallel": True}, {"pipe": 2, "zero": 1}]),
    ],
    ids=["latent attention", "latent attention over context", "latent attention in a pipeline", "hybrid"],
)
def test_means_are_those_of_one_device(config, meshes):
    expected = means_of(config)
    for mesh in meshes:
        np.testing.assert_allclose(means_of(config, **mesh), expected, rtol=1e-12, err_msg=str(mesh))


def neighbors(weights, model):
    """The weights of a DeepSeek, whose rotated pairs of dims are neighbors, and not in two halves."""
    dims = model.qk_rope_head_dim
    order = np.arange(dims).reshape(2, -1).T.reshape(-1)
    rotated = ("q_up.kernel", "kv_down.kernel")
    both = {name: jnp.split(w, [w.shape[-1] - dims], axis=-1) for name, w in weights.items() if name.endswith(rotated)}
    return weights | {name: jnp.concatenate([w, rope[..., order]], -1) for name, (w, rope) in both.items()}


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "model": 2, "sequence_parallel": True, "zero": 3},
        pytest.param({"data": 4, "expert": 4}, marks=pytest.mark.ci),
        pytest.param({"pipe": 2}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_gradients_of_latent_attention_equal_the_serial_reference(mesh):
    sizes = mtp.SIZES | mtp.LATENTS | mtp.SPARSE | mtp.ROUTER | {"feed_forward": 48, "attention": "xla"}
    model = LatentConfig(**sizes, aux_loss_coef=0.1, z_loss=0.01)
    config = replace(mtp.config, model=model, mesh=MeshConfig(**mesh))

    def total(weights):
        loss, (means, _) = reference.total(neighbors(weights, model), convert_kind(model, "deepseek"), batch_of(config))
        return loss, means

    compare(config, total, MEANS["mixture"])


def test_all_losses_of_a_model_are_in_chunks():
    model = replace(mtp.config.model, vocabulary=100, vocabulary_multiple=8)
    config = replace(mtp.config, model=model, precision=replace(mtp.config.precision, compute="fp32"))
    whole, chunked = (replace(config, train=replace(config.train, loss_chunks=chunks)) for chunks in (1, 3))
    np.testing.assert_allclose(means_of(chunked), means_of(whole), rtol=1e-6)
    logits = (config.train.micro_batch * config.model.sequence, config.model.padded_vocabulary)

    def count_logits(config):
        return sum(v.aval.shape == logits for e in equations(traced_step(config)[1]) for v in e.outvars)

    assert count_logits(whole) > 0 == count_logits(chunked)
    assert scores_in_chunks(config)
    one, two = (replace(config.model, predict=predict) for predict in (0, 1))
    assert predict_memory(replace(config, model=two)).logits == 2 * predict_memory(replace(config, model=one)).logits


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (hybrid.config, {"model": 2}),
        pytest.param(hybrid.config, {"pipe": 2}, marks=pytest.mark.ci),
        pytest.param(mtp.config, {"model": 2, "context": 2}, marks=pytest.mark.ci),
        pytest.param(mtp.config, {"pipe": 2}, marks=pytest.mark.ci),
    ],
    ids=["state", "state in a pipeline", "latent", "latent in a pipeline"],
)
def test_text_from_own_cache_is_that_of_whole_forward_passes(config, mesh):
    prompts, new = [[1, 2, 3], [4], [5, 6, 7, 8, 9]], 6
    config = replace(config, mesh=MeshConfig(**mesh), precision=replace(config.precision, compute="fp32"))
    generator = Generator(config, make_mesh(config.mesh))
    model = jax.tree.map(lambda weight: 4 * weight, build_model(3, config.model))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, generator.abstract_model)
    weights = jax.device_put(split_into_virtual_stages(model, config.mesh), shardings)

    def generated(prompts, tokens):
        texts = generator.generate(weights, prompts, Sampling(tokens=tokens, temperature=0), eod=-1)
        return [text.tokens for text in texts]

    texts = generated(prompts, new)
    read = [prompt + text[:count] for prompt, text in zip(prompts, texts, strict=True) for count in range(new)]
    assert [token for text in texts for token in text] == [token for (token,) in generated(read, 1)]
    assert len(set(map(tuple, texts))) == len(prompts)
