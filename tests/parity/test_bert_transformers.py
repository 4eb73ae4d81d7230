"""BERT against `transformers` with the same random weights: BertForPreTraining is post-LN, MegatronBertForPreTraining
pre-LN. Scores of both heads, both losses, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import BERTConfig, Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from mjax.models.build import build_model
from mjax.names import leaf_name
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from tests.small import gradient_program, pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.outputs import outputs_of_pretraining, random_bert  # noqa: E402

pytestmark = pytest.mark.parity

SHAPES = {
    "four heads": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 24, "vocabulary": 96},
    "odd heads": {"layers": 3, "hidden": 36, "heads": 3, "sequence": 17, "vocabulary": 100},
}


def _config(shape, layernorm, activation="gelu_erf", parallel=1):
    model = BERTConfig(
        layernorm=layernorm, activation=activation, attention="xla", vocabulary_multiple=1,
        hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=1e-12, **SHAPES[shape],
    )  # fmt: skip
    return Config(
        model=model,
        mesh=MeshConfig(model=parallel),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=6, micro_batch=3),
    )


PLACES = {
    "embedding.table": "bert.embeddings.word_embeddings.weight",
    "positions": "bert.embeddings.position_embeddings.weight",
    "token_types": "bert.embeddings.token_type_embeddings.weight",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "final_norm": "bert.encoder.ln",
    "mlm.transform": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.bias": "cls.predictions.bias",
    "pooler": "bert.pooler.dense",
    "order": "cls.seq_relationship",
    "blocks.attention.out": "attention.output.dense",
    "blocks.mlp.up": "intermediate.dense",
    "blocks.mlp.down": "output.dense",
}
NORMS = {
    "post": {"blocks.attention_norm": "attention.output.LayerNorm", "blocks.mlp_norm": "output.LayerNorm"},
    "pre": {"blocks.attention_norm": "attention.ln", "blocks.mlp_norm": "ln"},
}


def _from_peer(tensors, ours, layernorm, more_places=()):
    """Tensors of the peer, by its names, in the tree of `ours`."""
    places = PLACES | NORMS[layernorm] | dict(more_places)

    def tensor(module, part):
        found = tensors[f"{module}.{'bias' if part == 'bias' else 'weight'}"]
        return found.T if part == "kernel" else found  # torch keeps [out, in]

    def fetch(path, leaf):
        name = leaf_name(path)
        if name in places:
            return jnp.asarray(tensors[places[name]])
        module, part = name.rsplit(".", 1)
        if not name.startswith("blocks."):
            return jnp.asarray(tensor(places[module], part))
        layers = []
        for layer in range(leaf.shape[0]):
            at = f"bert.encoder.layer.{layer}"
            if module == "blocks.attention.qkv":
                three = [tensor(f"{at}.attention.self.{what}", part) for what in ("query", "key", "value")]
                layers.append(np.stack(three, axis=-2))
            else:
                layers.append(tensor(f"{at}.{places[module]}", part))
        return jnp.asarray(np.stack(layers).reshape(leaf.shape))

    return jax.tree_util.tree_map_with_path(fetch, ours)


def _numpy(named):
    return {name: tensor.detach().numpy() for name, tensor in named}


@pytest.mark.parametrize("parallel", [1, "heads"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layernorm", ["pre", "post"])
def test_scores_of_both_heads_equal_those_of_transformers(layernorm, shape, activation, parallel):
    parallel = parallel if parallel == 1 else {"four heads": 4, "odd heads": 1}[shape]
    config = _config(shape, layernorm, activation, parallel)
    peer, batch = random_bert(config.model, "ForPreTraining"), pairs_of(config, 0)
    abstract = jax.eval_shape(lambda: build_model(0, config.model))
    weights = _from_peer(_numpy(peer.named_parameters()), abstract, layernorm)
    forward = jax.shard_map(
        lambda weights, *arrays: weights(*arrays),
        mesh=make_mesh(config.mesh),
        in_specs=(nnx.get_partition_spec(abstract), P(), P(), P()),
        out_specs=(P(None, None, MODEL), P()),
    )
    found = jax.jit(forward)(weights, *(batch[name] for name in ("tokens", "token_types", "documents")))
    expected = outputs_of_pretraining(peer, batch)
    text = batch["documents"] == 0  # padding attends to padding here and to text there: nobody reads what comes of it
    np.testing.assert_allclose(
        np.asarray(found[0])[text], expected.prediction_logits.detach().numpy()[text], atol=2e-5, rtol=0
    )
    np.testing.assert_allclose(found[1], expected.seq_relationship_logits.detach().numpy(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layernorm", ["pre", "post"])
def test_loss_and_gradients_equal_those_of_transformers(layernorm, shape):
    config = _config(shape, layernorm)
    peer, batch = random_bert(config.model, "ForPreTraining"), pairs_of(config, 1)
    batch["tokens"] = np.maximum(batch["tokens"], 1)  # torch gives the row of id 0, padding, no gradient
    program, build = gradient_program(config)
    weights = _from_peer(_numpy(peer.named_parameters()), build(), layernorm)
    figures, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected_loss = outputs_of_pretraining(peer, batch).loss
    expected_loss.backward()
    assert float(figures[0] + figures[1]) == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = _from_peer(_numpy((n, p.grad) for n, p in peer.named_parameters()), weights, layernorm)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(
        jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4 * largest, err_msg=leaf_name(path))
