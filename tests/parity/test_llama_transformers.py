"""GPT-2, BLOOM, Llama, Mistral, Qwen, OLMo and mixtures of `transformers` with the same random weights, in float64:
logits, loss and gradients on meshes, runs of AdamW and Muon, slopes, rotary frequencies, and auxiliary losses."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import Config, DataConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.interop.convert import find_family
from mjax.interop.settings import model_config
from mjax.models.build import build_model
from mjax.models.llama import rotary_of
from mjax.models.positions import alibi_slopes
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import plan_storage
from mjax.training.muon import newton_schulz
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402

from tests.parity.outputs import assert_gradients, batch_of, gradients_of, weights_of, with_noise  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "attn_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_implementation": "eager"}
BLOOM = {"vocab_size": 97, "hidden_size": 48, "n_layer": 2, "n_head": 6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN3_MOE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 10,
    "experts_implementation": "eager",
}  # fmt: skip
FSDP = {"data": 2, "model": 2, "zero": 3}
SP = {"model": 4, "sequence_parallel": True}
FAMILIES = {  # the class of transformers, what its config has besides, and our mesh
    "gpt 2": ("GPT2", {**GPT2, **DROPOUT}, FSDP),
    "gpt 2, exact gelu": ("GPT2", {**GPT2, **DROPOUT, "n_layer": 3, "activation_function": "gelu"}, {}),
    "bloom": ("Bloom", BLOOM, {"data": 2, "model": 2}),
    "bloom, three heads": ("Bloom", {**BLOOM, "hidden_size": 36, "n_head": 3}, {"pipe": 2}),
    "llama 2": ("Llama", {"num_key_value_heads": 4}, {"pipe": 2}),
    "llama 3.1": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}, FSDP),
    "llama, yarn": ("Llama", {"rope_parameters": YARN, "tie_word_embeddings": True}, SP),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}, {"model": 4}),
    "mistral": ("Mistral", {"sliding_window": 6}, {"pipe": 2, "model": 2}),
    "qwen 2.5": ("Qwen2", {}, SP),
    "qwen 2.5, windows": ("Qwen2", {**WINDOWS, "num_hidden_layers": 4}, {"data": 2, "model": 2}),
    "qwen 3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}, FSDP),
    "olmo 2": ("Olmo2", {}, {"model": 4}),
    "mixtral, window": (
        "Mixtral",
        {"num_local_experts": 4, "sliding_window": 6, "experts_implementation": "eager"},
        {"data": 2, "model": 2},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}, SP),
    "qwen 3 moe, first layer dense": ("Qwen3Moe", {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [0]}, FSDP),
    "qwen 3 moe, every second layer": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2},
        {"pipe": 2},
    ),
}


class Wide:
    """torch with float64 in the place of float32, for modules that ask for float32 by name: norms, softmax, angles."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    for kind in ("bloom", "llama", "mistral", "qwen2", "qwen3", "olmo2", "mixtral", "qwen3_moe", "olmoe"):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Wide())
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def peer_of(name):
    kind, settings, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(settings if kind in ("GPT2", "Bloom") else SMALL | settings))
    return with_noise(
        getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)
    ).double()


def family_of(peer):
    """The table of a peer's tensors, and our model."""
    values = json.loads(peer.config.to_json_string())
    family = find_family(values, Path("config.json"))
    model = model_config(family, values, "config.json", vocabulary_multiple=32).without_dropout()
    if isinstance(peer, transformers.BloomForCausalLM):
        model = replace(model, sequence=24)
    return replace(family, names={**family.names, **family.fused}), replace(model, attention="xla")


def config_of(architecture, **mesh):
    return Config(
        model=architecture,
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )


def abstract_of(model):
    return jax.eval_shape(lambda: build_model(0, model, jnp.float64))


def logits_of(config, abstract, weights, batch):
    plan = plan_storage(abstract, nnx.get_partition_spec(abstract), config.mesh)
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(config.mesh),
        in_specs=(jax.tree.map(lambda storage: storage.spec, plan), P()),
        out_specs=P(None, None, MODEL),
    )
    return np.asarray(jax.jit(forward)(weights, batch["tokens"]))


def outputs_of(peer, batch, **options):
    """What the peer gives for a batch, and the mean of its loss over all labels."""
    found = peer(torch.tensor(batch["tokens"], dtype=torch.long), **options)
    labels = torch.tensor(batch["labels"], dtype=torch.long)
    return found, torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())


def names_of(model):
    """The means that our model reports."""
    if model.kind != "mixture":
        return None
    return ("loss", "router_entropy", *(["balance_loss"] if model.balance_loss else []), "expert_load")


@pytest.mark.parametrize("family", FAMILIES)
def test_model_equals_transformers(family):
    """Logits on two ranks, or one where they do not divide; loss and gradients on the mesh of the family."""
    with jax.enable_x64(True):
        peer = peer_of(family)
        table, model = family_of(peer)
        batch, abstract = batch_of(model), abstract_of(model)
        found, expected_loss = outputs_of(peer, batch)
        two = config_of(model, model=1 + (model.heads % 2 == 0))
        logits = logits_of(two, abstract, weights_of(peer, abstract, table, model), batch)
        expected = found.logits.detach().numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(logits[..., : model.vocabulary], expected, rtol=0, atol=1e-10)

        atol = 1e-11 if "bloom" in family else 1e-12  # its GELU has √(2 / π) with eight digits
        program, build = gradient_program(config_of(model, **FAMILIES[family][2]), names_of(model))
        means, gradients = program(weights_of(peer, build(), table, model), batch, 0, 1.0)
        expected_loss.backward()
        assert abs(float(means if means.ndim == 0 else means[0]) - expected_loss.item()) < atol
        assert_gradients(gradients, gradients_of(peer, gradients, table, model), atol)


@pytest.mark.parametrize("family", ["mixtral, window", "qwen 3 moe, first layer dense"])
def test_auxiliary_loss_equals_transformers(family):
    """With gradients, on one device: transformers has the tokens of the whole batch together."""
    with jax.enable_x64(True):
        peer = peer_of(family)
        table, model = family_of(peer)
        model = replace(model, balance_loss=0.5, balance_over="layers")
        config, batch = config_of(model), batch_of(model)
        config = replace(config, train=replace(config.train, micro_batch=4))
        program, build = gradient_program(config, names_of(model))
        means, gradients = program(weights_of(peer, build(), table, model), batch, 0, 1.0)
        found, loss = outputs_of(peer, batch, output_router_logits=True)
        (loss + 0.5 * found.aux_loss).backward()
        assert abs(float(means[0]) - loss.item()) < 1e-12
        assert abs(float(means[2]) - found.aux_loss.item()) < 1e-12
        assert_gradients(gradients, gradients_of(peer, gradients, table, model))


def test_balance_loss_of_micro_batches_is_megatrons():
    """coefficient · E · Σ (Σ p) (tokens of i) / (k T²) in every layer (megatron-core, switch_load_balancing_loss_func),
    with T the tokens of a micro-batch."""
    with jax.enable_x64(True):
        peer = peer_of("mixtral, window")
        table, model = family_of(peer)
        model = replace(model, balance_loss=1.0, balance_over="micro_batch")
        batch = batch_of(model)
        program, build = gradient_program(config_of(model), names_of(model))
        means, _ = program(weights_of(peer, build(), table, model), batch, 0, 1.0)
        total = 0.0
        for layer in outputs_of(peer, batch, output_router_logits=True)[0].router_logits:
            for scores in layer.softmax(-1).split(2 * model.sequence):
                chosen = torch.bincount(scores.topk(2)[1].flatten(), minlength=model.experts)
                total += (scores.sum(0) * chosen).sum().item() * model.experts / (2 * len(scores) ** 2) / 2
    np.testing.assert_allclose(float(means[2]) * model.layers, total, rtol=1e-12)


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        ("mistral", {}),
        ("qwen 3 moe, first layer dense", {}),
        ("llama 2", {"name": "muon", "muon_adjust_lr": "match_rms_adamw"}),
        pytest.param("qwen 3", {"name": "muon", "muon_adjust_lr": "original"}, marks=pytest.mark.all),
    ],
)
def test_twenty_steps_follow_torch(family, optimizer, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch iterates in bf16 whatever the weights are
    with jax.enable_x64(True):
        peer = peer_of(family)
        table, model = family_of(peer)
        config = config_of(model, data=2, model=2, zero=1)
        config = replace(config, optimizer=replace(config.optimizer, **optimizer))
        weights = weights_of(peer, abstract_of(model), table, model)
        ours, theirs = losses_of_both(
            config,
            weights,
            peer,
            lambda peer, batch: outputs_of(peer, batch)[1],
            lambda step: batch_of(model, seed=step % 4),
        )
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)  # our learning rate is float32
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


def test_muon_in_bf16_is_near_torch():
    weight = torch.nn.Parameter(torch.zeros(48, 32))
    weight.grad = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="original").step()
    found = np.asarray(newton_schulz(jnp.asarray(weight.grad.numpy(), jnp.bfloat16)[None])[0], np.float32)
    theirs = -weight.detach().numpy() / 1.5**0.5
    # Theirs is 1.5% from the result in float64, ours 2%.
    assert np.linalg.norm(found - theirs) < 0.04 * np.linalg.norm(theirs)


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR], ids=lambda rope: rope["rope_type"])
def test_rotary_frequencies_equal_transformers(rope):
    for size in (64, 128):
        rope = rope | ({} if rope is LINEAR else {"original_max_position_embeddings": 8192})
        config = transformers.LlamaConfig(**SMALL | {"hidden_size": 4 * size, "rope_parameters": rope})
        peer = transformers.LlamaForCausalLM(config)
        ours, theirs = rotary_of(family_of(peer)[1]), peer.model.rotary_emb
        np.testing.assert_allclose(ours.frequencies(), theirs.inv_freq, rtol=1e-12)
        assert ours.magnitude() == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_slopes_equal_transformers():
    for heads in (*range(1, 41), 64, 96, 112, 128, 200):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        np.testing.assert_allclose(alibi_slopes(heads), theirs.numpy(), rtol=1e-5)
