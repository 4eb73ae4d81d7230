"""BLOOM's variant against `transformers`' BloomForCausalLM with the same random weights: slopes, logits, loss,
gradients, and a run of AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import Config, DataConfig, GPTConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.models.build import build_model
from mjax.models.positions import alibi_slopes
from mjax.names import leaf_name
from mjax.parallel.axes import DATA, MODEL
from mjax.parallel.mesh import make_mesh
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402

from tests.parity.outputs import batch_of, logits_of, loss_of, with_noise  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "three heads": {"layers": 3, "hidden": 36, "heads": 3, "sequence": 17, "vocabulary": 100},
    "four heads": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 24, "vocabulary": 96},
    "six heads, padded rows": {"layers": 2, "hidden": 48, "heads": 6, "sequence": 40, "vocabulary": 101},
    "twelve heads": {"layers": 2, "hidden": 96, "heads": 12, "sequence": 33, "vocabulary": 128},
}


def _config(shape, data=1, parallel=1):
    model = GPTConfig(
        positions="alibi", embedding_layernorm=True, attention="xla", hidden_dropout=0.0, attention_dropout=0.0,
        vocabulary_multiple=32 if "padded" in shape else 1, **SHAPES[shape],
    )  # fmt: skip
    return Config(
        model=model,
        mesh=MeshConfig(data=data, model=parallel),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )


def _peer(model):
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=model.vocabulary, hidden_size=model.hidden, n_layer=model.layers, n_head=model.heads
    )
    return with_noise(transformers.BloomForCausalLM(config))


PLACES = {
    "embedding_norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
    "blocks.attention_norm": "input_layernorm",
    "blocks.attention.qkv": "self_attention.query_key_value",
    "blocks.attention.out": "self_attention.dense",
    "blocks.mlp_norm": "post_attention_layernorm",
    "blocks.mlp.up": "mlp.dense_h_to_4h",
    "blocks.mlp.down": "mlp.dense_4h_to_h",
}


def from_peer(tensors, ours, model):
    """Tensors of BloomForCausalLM, by its names, in the tree of `ours`.

    torch keeps [out, in], and BLOOM its queries, keys and values head by head: rows [n, 3, d] where ours are [3, n, d].
    """

    def tensor(module, part):
        found = tensors[f"transformer.{module}.{'bias' if part == 'bias' else 'weight'}"]
        if module.endswith("query_key_value"):
            by_head = found.reshape(model.heads, 3, model.head_size, *found.shape[1:])
            found = by_head.swapaxes(0, 1).reshape(found.shape)
        return found.T if part == "kernel" else found

    def fetch(path, leaf):
        name = leaf_name(path)
        if name == "embedding.table":
            table = tensors["transformer.word_embeddings.weight"]
            return jnp.asarray(np.pad(table, [(0, leaf.shape[0] - len(table)), (0, 0)]))
        module, part = name.rsplit(".", 1)
        if not name.startswith("blocks."):
            return jnp.asarray(tensor(PLACES[module], part))
        layers = [tensor(f"h.{layer}.{PLACES[module]}", part) for layer in range(leaf.shape[0])]
        return jnp.asarray(np.stack(layers).reshape(leaf.shape))

    return jax.tree_util.tree_map_with_path(fetch, ours)


def _numpy(named):
    return {name: tensor.detach().numpy() for name, tensor in named}


def _pair(config):
    """A peer of random weights, and the same weights as ours."""
    peer, abstract = _peer(config.model), jax.eval_shape(lambda: build_model(0, config.model))
    return peer, from_peer(_numpy(peer.named_parameters()), abstract, config.model)


@pytest.mark.parametrize("heads", [*range(1, 41), 64, 96, 112, 128, 200])
def test_slopes_equal_those_of_transformers(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(alibi_slopes(heads), theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [*((shape, 1) for shape in SHAPES), ("six heads, padded rows", 2), ("twelve heads", 4)],
)
def test_logits_equal_those_of_transformers(shape, parallel):
    config = _config(shape, parallel=parallel)
    (peer, weights), batch = _pair(config), batch_of(config.model)
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(config.mesh),
        in_specs=(nnx.get_partition_spec(jax.eval_shape(lambda: build_model(0, config.model))), P(DATA)),
        out_specs=P(DATA, None, MODEL),
    )
    logits = np.asarray(jax.jit(forward)(weights, batch["tokens"]))
    expected = logits_of(peer, batch).detach().numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits[..., : config.model.vocabulary], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_those_of_transformers(shape):
    config = _config(shape)
    (peer, weights), batch = _pair(config), batch_of(config.model)
    program, _ = gradient_program(config)
    loss, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = loss_of(peer, batch)
    expected_loss.backward()
    assert float(loss) == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = from_peer(_numpy((n, p.grad) for n, p in peer.named_parameters()), weights, config.model)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(
        jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4 * largest, err_msg=leaf_name(path))


@pytest.mark.parametrize(
    ("shape", "data", "parallel"),
    [pytest.param("four heads", 1, 1, marks=pytest.mark.all), ("six heads, padded rows", 2, 2)],
)
def test_twenty_steps_of_adamw_follow_torch(shape, data, parallel):
    config = _config(shape, data, parallel)
    peer, weights = _pair(config)
    ours, theirs = losses_of_both(config, weights, peer, loss_of, lambda step: batch_of(config.model, seed=step % 4))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"
