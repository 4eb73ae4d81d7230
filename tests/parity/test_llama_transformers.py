"""Llama, Mistral, Qwen 2, Qwen 3 and OLMo 2 of `transformers` with the same random weights, in float64: logits, loss,
gradients, runs of AdamW and Muon, and the rotary frequencies of every scaling."""

import re
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import Config, DataConfig, LlamaConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.models.build import build_model
from mjax.models.llama import rotary_of
from mjax.names import leaf_name
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import plan_storage
from mjax.training.muon import newton_schulz
from tests.products import diagonal, seldom
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.outputs import batch_of, loss_of, with_noise  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SMALL = LlamaConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, sequence=24, feed_forward=44, vocabulary=96, vocabulary_multiple=32
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
FAMILIES = {  # ours, the class of transformers, and what its config has besides
    "llama 2": (replace(SMALL, kv_heads=None), "Llama", {}),
    "llama 3.1": (
        replace(SMALL, rope_theta=5e5, rope_scaling="llama3", rope_factor=8.0, rope_original=16),
        "Llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}},
    ),
    "llama, yarn": (
        replace(SMALL, rope_scaling="yarn", rope_factor=4.0, rope_original=64, tied=True),
        "Llama",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
    ),
    "llama, linear": (
        replace(SMALL, kv_heads=1, rope_scaling="linear", rope_factor=2.0),
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": (replace(SMALL, window=6), "Mistral", {"sliding_window": 6}),
    "qwen 2.5": (replace(SMALL, qkv_bias=True, norm_epsilon=1e-6), "Qwen2", {"use_sliding_window": False}),
    "qwen 2.5, windows": (
        replace(SMALL, layers=4, qkv_bias=True, window=6, full_attention_every=2),
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen 3": (replace(SMALL, qk_norm="head", head_dim=10, tied=True), "Qwen3", {}),
    "olmo 2": (replace(SMALL, qk_norm="heads", norms="post"), "Olmo2", {}),
}
NAMES = {
    "embedding.table": "model.embed_tokens.weight",
    "head.table": "lm_head.weight",
    "final_norm.scale": "model.norm.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
}
NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
}


def peer_of(model, kind, settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.mlp_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.groups,
        head_dim=model.head_size,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=model.tied,
        max_position_embeddings=model.sequence,
        attn_implementation="eager",
        pad_token_id=None,  # OLMo 2 has 1, whose row gets no gradient
        **{"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}, **settings},
    )
    return with_noise(getattr(transformers, f"{kind}ForCausalLM")(config)).double()


class Wide:
    """torch with float64 in the place of float32, for modules that ask for float32 by name: norms, softmax, angles."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    for kind in ("llama", "mistral", "qwen2", "qwen3", "olmo2"):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Wide())
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Wide())


def from_peer(tensors, ours, model):
    """Tensors of the peer, by its names, in the tree of `ours`."""
    return tensors_of(tensors, ours, model)


def tensors_of(tensors, ours, model, otherwise=lambda path, leaf: None, of_stack=lambda name, depth: range(depth)):
    """The same, but for those that `otherwise` gives; `of_stack` says which layers a stacked weight has, from 0."""

    def of_layer(name, shape, layer):
        def tensor(theirs):
            return tensors[f"model.layers.{layer}.{theirs}"]

        if name in NAMES:
            return tensor(NAMES[name]).T.reshape(shape)
        module, part = name.split(".", 1)
        if module.endswith("_norm"):
            return tensor(f"{NORMS[model.norms][module]}.weight")
        if name == "mlp.up.kernel":
            return np.stack([tensor("mlp.gate_proj.weight").T, tensor("mlp.up_proj.weight").T], 1)
        which = "weight" if part.endswith("kernel") else "bias"
        if part.startswith("query."):
            return tensor(f"self_attn.q_proj.{which}").T.reshape(shape)
        projections = "qkv" if part.startswith("qkv.") else "kv"
        parts = [tensor(f"self_attn.{one}_proj.{which}").T for one in projections]
        return np.stack(parts, -2).reshape(shape)  # [..., heads · d] each

    def fetch(path, leaf):
        name = leaf_name(path)
        if (own := otherwise(path, leaf)) is not None:
            return own
        if not name.startswith("blocks."):
            return jnp.asarray(tensors[NAMES[name]])
        plain = re.sub(r"^blocks\.(turns\.)?(\d+\.)?", "", name)
        layers = (of_layer(plain, leaf.shape[1:], layer) for layer in of_stack(name, leaf.shape[0]))
        return jnp.stack([jnp.asarray(one) for one in layers])

    return jax.tree_util.tree_map_with_path(fetch, ours)


def config_of(architecture, **mesh):
    return Config(
        model=replace(architecture, attention="xla"),
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )


def numpy(named):
    return {name: tensor.detach().numpy() for name, tensor in named}


MESHES = {
    "one device": {},
    "data 2 × model 2": {"data": 2, "model": 2},
    "model 4": {"model": 4},  # two key-value heads, or one, over four ranks
    "pipe 2": {"pipe": 2},
    "model 4, sequence parallel": {"model": 4, "sequence_parallel": True},
    "data 2 × model 2, FSDP": {"data": 2, "model": 2, "zero": 3},
}


@pytest.mark.parametrize(
    ("family", "mesh"), seldom(product(FAMILIES, MESHES), often=diagonal(3, FAMILIES, MESHES), some=())
)
def test_loss_and_gradients_equal_those_of_transformers(family, mesh):
    model, kind, settings = FAMILIES[family]
    mesh = MESHES[mesh]
    with jax.enable_x64(True):
        peer, batch = peer_of(model, kind, settings), batch_of(model)
        program, build = gradient_program(config_of(model, **mesh))
        loss, gradients = program(from_peer(numpy(peer.named_parameters()), build(), model), batch, 0, 1.0)
        expected_loss = loss_of(peer, batch)
        expected_loss.backward()
        assert abs(float(loss) - expected_loss.item()) < 1e-12
        expected = from_peer(numpy((n, p.grad) for n, p in peer.named_parameters()), gradients, model)
        for (path, ours), theirs in zip(
            jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-12, err_msg=leaf_name(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    model, kind, settings = FAMILIES[family]
    with jax.enable_x64(True):
        config, peer, batch = config_of(model, model=2), peer_of(model, kind, settings), batch_of(model)
        abstract = jax.eval_shape(lambda: build_model(0, config.model, jnp.float64))
        weights = from_peer(numpy(peer.named_parameters()), abstract, model)
        expected = peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits.detach().numpy()
        found = logits_of(config, abstract, weights, batch)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found[..., : model.vocabulary], expected, rtol=0, atol=1e-10)


def logits_of(config, abstract, weights, batch):
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(config.mesh),
        in_specs=(jax.tree.map(lambda storage: storage.spec, storage_on(config.mesh, abstract)), P()),
        out_specs=P(None, None, MODEL),
    )
    return np.asarray(jax.jit(forward)(weights, batch["tokens"]))


def storage_on(mesh, abstract):
    return plan_storage(abstract, nnx.get_partition_spec(abstract), mesh)


@pytest.mark.parametrize(
    "family", ["mistral", "qwen 3", *(pytest.param(name, marks=pytest.mark.all) for name in ("qwen 2.5", "olmo 2"))]
)
def test_twenty_steps_of_adamw_follow_torch(family):
    model, kind, settings = FAMILIES[family]
    with jax.enable_x64(True):
        config, peer = config_of(model, data=2, model=2), peer_of(model, kind, settings)
        abstract = jax.eval_shape(lambda: build_model(0, config.model, jnp.float64))
        weights = from_peer(numpy(peer.named_parameters()), abstract, model)
        ours, theirs = losses_of_both(config, weights, peer, loss_of, lambda step: batch_of(model, seed=step % 4))
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)  # our learning rate is float32
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


@pytest.mark.parametrize(
    ("family", "adjust"),
    [("llama 2", "match_rms_adamw"), pytest.param("qwen 3", "original", marks=pytest.mark.all)],
)
def test_twenty_steps_of_muon_follow_torch(family, adjust, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch iterates in bf16 whatever the weights are
    model, kind, settings = FAMILIES[family]
    with jax.enable_x64(True):
        config, peer = config_of(model, data=2, model=2, zero=1), peer_of(model, kind, settings)
        config = replace(config, optimizer=replace(config.optimizer, name="muon", muon_adjust_lr=adjust))
        abstract = jax.eval_shape(lambda: build_model(0, config.model, jnp.float64))
        weights = from_peer(numpy(peer.named_parameters()), abstract, model)
        ours, theirs = losses_of_both(config, weights, peer, loss_of, lambda step: batch_of(model, seed=step % 4))
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)  # our learning rate is float32
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


def test_one_step_of_muon_in_bf16_is_that_of_torch_within_the_precision_of_bf16():
    weight = torch.nn.Parameter(torch.zeros(48, 32))
    weight.grad = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="original").step()
    found = np.asarray(newton_schulz(jnp.asarray(weight.grad.numpy(), jnp.bfloat16)[None])[0], np.float32)
    theirs = -weight.detach().numpy() / 1.5**0.5
    # Theirs is 1.5% from the result in float64, ours 2%.
    assert np.linalg.norm(found - theirs) < 0.04 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    "family", [name for name, (_, _, settings) in FAMILIES.items() if "rope_parameters" in settings]
)
@pytest.mark.parametrize("size", [64, 128])
def test_frequencies_equal_those_of_transformers(family, size):
    model, kind, settings = FAMILIES[family]
    original = 8192
    model = replace(model, hidden=size * model.heads, rope_original=original)
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": original}
    peer = peer_of(model, kind, {"rope_parameters": rope})
    np.testing.assert_allclose(rotary_of(model).frequencies(), peer.model.rotary_emb.inv_freq, rtol=1e-12)
    assert rotary_of(model).magnitude() == pytest.approx(peer.model.rotary_emb.attention_scaling, rel=1e-12)
