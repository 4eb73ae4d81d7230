"""The model against `transformers`' GPT-2 with the same random weights: logits, loss, gradients, and a run of AdamW."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import Config, DataConfig, GPTConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.models.build import build_model
from mjax.names import leaf_name
from mjax.parallel.axes import DATA, MODEL
from mjax.parallel.mesh import make_mesh
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.outputs import batch_of, loss_of  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "four heads": GPTConfig(layers=2, hidden=32, heads=4, sequence=24, vocabulary=96, vocabulary_multiple=32),
    "odd heads": GPTConfig(layers=3, hidden=36, heads=3, sequence=17, vocabulary=100, vocabulary_multiple=1),
}


def _model(name):
    return replace(SHAPES[name], hidden_dropout=0.0, attention_dropout=0.0, attention="xla")


def _peer(model):
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.padded_vocabulary,
            n_positions=model.sequence,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            activation_function="gelu_new" if model.activation == "gelu_tanh" else "gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )


def _peer_name(name, layer):
    places = {
        "embedding.table": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "final_norm.scale": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "blocks.attention_norm": "ln_1",
        "blocks.mlp_norm": "ln_2",
        "blocks.attention.qkv": "attn.c_attn",
        "blocks.attention.out": "attn.c_proj",
        "blocks.mlp.up": "mlp.c_fc",
        "blocks.mlp.down": "mlp.c_proj",
    }
    if name in places:
        return places[name]
    module, part = name.rsplit(".", 1)
    return f"transformer.h.{layer}.{places[module]}.{'bias' if part == 'bias' else 'weight'}"


def _from_peer(tensors, ours):
    """Tensors of the peer, by its names, in the tree of `ours`."""

    def fetch(path, leaf):
        name = leaf_name(path)
        if not name.startswith("blocks."):
            return jnp.asarray(tensors[_peer_name(name, 0)]).reshape(leaf.shape)
        layers = [tensors[_peer_name(name, layer)].reshape(leaf.shape[1:]) for layer in range(leaf.shape[0])]
        return jnp.asarray(np.stack(layers))

    return jax.tree_util.tree_map_with_path(fetch, ours)


def _numpy(named):
    return {name: tensor.detach().numpy() for name, tensor in named}


def _config(model, data=1, parallel=1):
    return Config(
        model=model,
        mesh=MeshConfig(data=data, model=parallel),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(name, activation):
    model = replace(_model(name), activation=activation)
    peer, batch = _peer(model), batch_of(model)
    mesh = make_mesh(MeshConfig())
    abstract = jax.eval_shape(lambda: build_model(0, model))
    weights = _from_peer(_numpy(peer.named_parameters()), abstract)
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(abstract), P(DATA)),
        out_specs=P(DATA, None, MODEL),
    )
    expected = peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits.detach().numpy()
    np.testing.assert_allclose(np.asarray(jax.jit(forward)(weights, batch["tokens"])), expected, atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_equal_those_of_transformers(name):
    model = _model(name)
    peer, batch = _peer(model), batch_of(model)
    program, build = gradient_program(_config(model))
    weights = _from_peer(_numpy(peer.named_parameters()), build())
    loss, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = loss_of(peer, batch)
    expected_loss.backward()
    assert float(loss) == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = _from_peer(_numpy((n, p.grad) for n, p in peer.named_parameters()), weights)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(
        jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4 * largest, err_msg=leaf_name(path))


@pytest.mark.parametrize(("data", "parallel"), [(1, 1), (2, 4)])
def test_twenty_steps_of_adamw_follow_torch(data, parallel):
    model = _model("four heads")
    config, peer = _config(model, data, parallel), _peer(model)
    abstract = jax.eval_shape(lambda: build_model(0, model))
    weights = _from_peer(_numpy(peer.named_parameters()), abstract)
    ours, theirs = losses_of_both(config, weights, peer, loss_of, lambda step: batch_of(model, seed=step % 4))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"
