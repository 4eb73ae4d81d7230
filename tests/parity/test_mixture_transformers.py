"""Mixtral, Qwen 3 MoE and OLMoE of `transformers` with the same random weights, in float64: logits, loss with and
without its auxiliary loss, gradients, runs of AdamW; and Megatron's auxiliary loss by its equation."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import MixtureConfig
from mjax.models.build import build_model
from mjax.names import leaf_name
from tests.mixture_reference import place_of
from tests.products import diagonal, one_in, seldom
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
from tests.parity.outputs import batch_of, with_noise  # noqa: E402
from tests.parity.test_llama_transformers import Wide, config_of, logits_of, numpy, tensors_of  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SMALL = MixtureConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, sequence=24, feed_forward=20, vocabulary=96, vocabulary_multiple=32,
    experts=4, experts_per_token=2,
)  # fmt: skip
FAMILIES = {  # ours, the class of transformers, and what its config has besides
    "mixtral": (SMALL, "Mixtral", {"num_local_experts": 4}),
    "mixtral, window": (replace(SMALL, window=6), "Mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "qwen 3 moe": (
        replace(SMALL, qk_norm="head", head_dim=10, experts=8, experts_per_token=3, expert_width=12),
        "Qwen3Moe",
        {"num_experts": 8, "norm_topk_prob": True, "moe_intermediate_size": 12, "mlp_only_layers": []},
    ),
    "olmoe": (
        replace(SMALL, qk_norm="heads", router_normalized=False),
        "Olmoe",
        {"num_experts": 4, "norm_topk_prob": False},
    ),
}
PARTLY_DENSE = {
    "first layer dense": (
        replace(FAMILIES["qwen 3 moe"][0], layers=3, dense_layers=1),
        "Qwen3Moe",
        {**FAMILIES["qwen 3 moe"][2], "mlp_only_layers": [0]},
    ),
    "experts in every second layer": (
        replace(FAMILIES["qwen 3 moe"][0], layers=4, expert_interval=2),
        "Qwen3Moe",
        {**FAMILIES["qwen 3 moe"][2], "decoder_sparse_step": 2},
    ),
}
MESHES = {
    "one device": {},
    "data 2 × model 2": {"data": 2, "model": 2},
    "pipe 2": {"pipe": 2},
    "model 4, sequence parallel": {"model": 4, "sequence_parallel": True},
    "data 2 × model 2, FSDP": {"data": 2, "model": 2, "zero": 3},
}


def peer_of(family):
    model, kind, settings = {**FAMILIES, **PARTLY_DENSE}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.mlp_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.groups,
        head_dim=model.head_size,
        num_experts_per_tok=model.experts_per_token,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=False,
        max_position_embeddings=model.sequence,
        attn_implementation="eager",
        experts_implementation="eager",
        pad_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        **settings,
    )
    return with_noise(getattr(transformers, f"{kind}ForCausalLM")(config)).double()


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    for kind in ("mixtral", "qwen3_moe", "olmoe"):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Wide())
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def from_peer(tensors, ours, model):
    """Tensors of the peer, by its names, in the tree of `ours`."""

    def of_stack(name, _):
        return [layer for layer in range(model.layers) if name.startswith(place_of(layer, model)[0])]

    def experts(path, leaf):
        name = leaf_name(path)
        if not name.endswith(("mlp.router.kernel", "mlp.down", "mlp.up")):
            return None
        layers = [f"model.layers.{layer}.mlp" for layer in of_stack(name, None)]
        if name.endswith("mlp.router.kernel"):
            return jnp.stack([tensors[f"{layer}.gate.weight"].T for layer in layers])
        if name.endswith("mlp.down"):
            return jnp.stack([tensors[f"{layer}.experts.down_proj"].swapaxes(1, 2) for layer in layers])
        both = (tensors[f"{layer}.experts.gate_up_proj"].swapaxes(1, 2) for layer in layers)  # [E, h, 2 f]
        return jnp.stack([each.reshape(leaf.shape[1:]) for each in both])

    return tensors_of(tensors, ours, model, experts, of_stack)


def loss_of(peer, batch, coefficient=0.0):
    found = peer(torch.tensor(batch["tokens"], dtype=torch.long), output_router_logits=True)
    labels = torch.tensor(batch["labels"], dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    return loss, loss + coefficient * found.aux_loss, found.router_logits


@pytest.mark.parametrize(
    ("family", "mesh"), seldom(product(FAMILIES, MESHES), often=diagonal(2, FAMILIES, MESHES), some=())
)
def test_loss_and_gradients_equal_those_of_transformers(family, mesh):
    _compare(family, MESHES[mesh], 0.0)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param("first layer dense", "one device", marks=pytest.mark.all),
        ("first layer dense", "data 2 × model 2, FSDP"),
        pytest.param("experts in every second layer", "model 4, sequence parallel", marks=pytest.mark.all),
        ("experts in every second layer", "pipe 2"),
    ],
)
def test_with_dense_layers_loss_and_gradients_equal_those_of_transformers(family, mesh):
    _compare(family, MESHES[mesh], 0.0)


@pytest.mark.parametrize("family", one_in(2, [*FAMILIES, *PARTLY_DENSE], others=pytest.mark.all))
def test_with_the_auxiliary_loss_of_all_layers_they_do_on_one_device(family):
    _compare(family, {}, 0.5, micro_batch=4)


def _compare(family, mesh, coefficient, micro_batch=2):
    model = {**FAMILIES, **PARTLY_DENSE}[family][0]
    if coefficient:
        model = replace(model, balance_loss=coefficient, balance_over="layers")
    with jax.enable_x64(True):
        peer, batch = peer_of(family), batch_of(model)
        config = config_of(model, **mesh)
        config = replace(config, train=replace(config.train, micro_batch=micro_batch))
        names = ("loss", "router_entropy", *(["balance_loss"] if coefficient else []), "expert_load")
        program, build = gradient_program(config, names)
        found, gradients = program(from_peer(numpy(peer.named_parameters()), build(), model), batch, 0, 1.0)
        loss, total, _ = loss_of(peer, batch, coefficient)
        total.backward()
        assert abs(float(found[0]) - loss.item()) < 1e-12
        if coefficient:
            assert abs(float(found[2]) * coefficient - (total - loss).item()) < 1e-12
        expected = from_peer(numpy((n, p.grad) for n, p in peer.named_parameters()), gradients, model)
        for (path, ours), theirs in zip(
            jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(expected), strict=True
        ):
            assert np.abs(theirs).max() > 1e-7, leaf_name(path)
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-12, err_msg=leaf_name(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    model = FAMILIES[family][0]
    with jax.enable_x64(True):
        peer, batch = peer_of(family), batch_of(model)
        abstract = jax.eval_shape(lambda: build_model(0, model, jnp.float64))
        weights = from_peer(numpy(peer.named_parameters()), abstract, model)
        expected = peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits.detach().numpy()
        found = logits_of(config_of(model, model=2), abstract, weights, batch)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found[..., : model.vocabulary], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "family", ["qwen 3 moe", *(pytest.param(name, marks=pytest.mark.all) for name in ("mixtral", "olmoe"))]
)
def test_twenty_steps_of_adamw_follow_torch(family):
    model = FAMILIES[family][0]
    with jax.enable_x64(True):
        config, peer = config_of(model, data=2, model=2), peer_of(family)
        abstract = jax.eval_shape(lambda: build_model(0, config.model, jnp.float64))
        weights = from_peer(numpy(peer.named_parameters()), abstract, model)

        def peer_loss(peer, batch):
            return loss_of(peer, batch)[0]

        ours, theirs = losses_of_both(config, weights, peer, peer_loss, lambda step: batch_of(model, seed=step % 4))
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)  # our learning rate is float32
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_balance_loss_of_a_micro_batch_is_megatrons(micro_batch):
    """coefficient · E · Σ (Σ p) (tokens of i) / (k T²) in every layer (megatron-core, switch_load_balancing_loss_func),
    with T the tokens of a micro-batch: another number for every size of it."""
    model = replace(SMALL, balance_loss=1.0, balance_over="micro_batch")
    with jax.enable_x64(True):
        peer, batch = peer_of("mixtral"), batch_of(model)
        config = config_of(model)
        config = replace(config, train=replace(config.train, micro_batch=micro_batch))
        program, build = gradient_program(config, ("loss", "router_entropy", "balance_loss", "expert_load"))
        found, _ = program(from_peer(numpy(peer.named_parameters()), build(), model), batch, 0, 1.0)
        total = 0.0
        for layer in loss_of(peer, batch)[2]:
            for scores in layer.softmax(-1).split(micro_batch * model.sequence):
                of_experts = torch.zeros(model.experts, dtype=torch.float64)
                of_experts.scatter_add_(
                    0, scores.topk(2)[1].flatten(), torch.ones(2 * len(scores), dtype=torch.float64)
                )
                share = (scores.sum(0) * of_experts).sum() * model.experts / (2 * len(scores) ** 2)
                total += share.item() * micro_batch / 4
    np.testing.assert_allclose(float(found[2]) * model.layers, total, rtol=1e-12)
