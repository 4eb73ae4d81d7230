"""Parametrizations against the paper's form, with multipliers in the forward pass, in models of `transformers`: muP by
the package `mup` 1.0 (`pip install --no-deps mup`), CompleteP by the table of arXiv 2505.01618."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mjax.config import Config, DataConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from mjax.config.checks import validate
from mjax.config.model import convert_kind
from mjax.interop.convert import export_family
from mjax.interop.weights import tensor_layouts
from mjax.models.gpt.config import GPTConfig
from mjax.parallel.mesh import make_mesh
from mjax.step.parametrization import WeightScale, weight_scales
from mjax.step.step import build_program
from tests.small import named

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.outputs import batch_of  # noqa: E402

pytestmark = pytest.mark.parity

RATE, DECAY, EPSILON, STD, CLIP = (
    2.0**-7,
    0.1,
    1e-3,
    0.02,
    0.3,
)  # a rate that float32 has; an epsilon as large as gradients
BASE_WIDTH, BASE_DEPTH, BASE_HEAD = 16, 2, 4
WIDTH, DEPTH, HEAD = 64, 4, 8
MODEL = GPTConfig(
    layers=DEPTH, hidden=WIDTH, heads=WIDTH // HEAD, sequence=16, vocabulary=60, vocabulary_multiple=60,
    hidden_dropout=0.0, attention_dropout=0.0, attention="xla",
)  # fmt: skip
MODELS = {"gpt": MODEL, "llama": replace(convert_kind(MODEL, "llama"), kv_heads=4, feed_forward=160)}


def config_of(kind, parametrization, **mesh):
    base = {"base_depth": BASE_DEPTH} if parametrization == "completep" else {}
    config = Config(
        model=MODELS[kind],
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(
            learning_rate=RATE, schedule="constant", weight_decay=DECAY, epsilon=EPSILON, clip_norm=CLIP,
            parametrization=parametrization, base_width=BASE_WIDTH, base_head_size=BASE_HEAD, **base,
        ),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(global_batch=4, micro_batch=2),
    )  # fmt: skip
    validate(config)
    return config


def peer_of(kind, width=WIDTH):
    """The model of `transformers` of this width."""
    model = MODELS[kind]
    if kind == "gpt":
        sizes = {"n_embd": width, "n_layer": DEPTH, "n_head": width // HEAD, "n_positions": model.sequence}
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=60, attn_implementation="eager", **sizes, **rates)
        return transformers.GPT2LMHeadModel(config).double()
    sizes = {"hidden_size": width, "intermediate_size": width * 5 // 2, "num_hidden_layers": DEPTH, "head_dim": HEAD}
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": width // HEAD // 2}
    fixed = {"rms_norm_eps": model.norm_epsilon, "attn_implementation": "eager", "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **sizes, **heads, **fixed)).double()


def with_readout(mup, peer):
    """The peer with mup's output layer: its own, or tied."""
    if peer.config.tie_word_embeddings:
        peer.lm_head = mup.MuSharedReadout(peer.transformer.wte.weight, bias=False)
    else:
        peer.lm_head = mup.MuReadout(peer.config.hidden_size, 60, bias=False)
    return peer.double()


def in_paper_form(peer, depth):
    """Scale attention by √d₀ / d, and the results of attention and MLP by 1 / depth."""
    for name, module in peer.named_modules():
        if name.endswith((".attn", ".self_attn")):
            assert module.scaling == HEAD**-0.5
            module.scaling = BASE_HEAD**0.5 / HEAD
        if name.endswith(("c_proj", "o_proj", "down_proj")):
            module.register_forward_hook(lambda module, inputs, y: y / depth)
    return peer


def load(peer, config, weights, scales):
    """Give the peer weights, each divided by its multiplier."""
    layouts = tensor_layouts(export_family(config.model), config.model)
    plain = {name: array / scales[name].multiplier for name, array in weights.items()}
    tensors = {name: torch.tensor(layout.to_file(plain[layout.weight]).copy()) for name, layout in layouts.items()}
    parameters = dict(peer.named_parameters())
    assert tensors.keys() == parameters.keys() - ({"lm_head.weight"} if peer.config.tie_word_embeddings else set())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def decayed(peer, which):
    return [weight for weight in peer.parameters() if (weight.ndim > 1) == which]


def losses_of_peer(peer, optimizer, steps=8):
    """Return the same as `our_losses`."""
    losses = []
    for step in range(steps):
        batch = batch_of(MODEL, step % 2)
        scores = peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits
        labels = torch.tensor(batch["labels"], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), CLIP)
        optimizer.step()
        losses.append((loss.item(), norm.item()))
    return np.array(losses)


def our_losses(config, steps=8):
    """Loss and norm of the gradient of each step, the initial weights, and their scales."""
    program = build_program(config, make_mesh(config.mesh))
    state = program.initialize()
    weights, scales, losses = named(state.model), weight_scales(config, state.model), []
    for step in range(steps):
        state, metrics = program.train_step(state, program.put_on_devices(batch_of(MODEL, step % 2)))
        losses.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(losses), weights, scales


MESHES = {"gpt": {"pipe": 2, "model": 2}, "llama": {"data": 2, "model": 2, "zero": 3}}
COLUMNS = "initial std", "multiplier", "learning rate", "weight decay"


def our_factors(scale, decays):
    """Return the factors in `COLUMNS` of one weight, relative to the base."""
    rate = np.unique(scale.rate / scale.multiplier).item()
    initial = np.unique(scale.initial / scale.multiplier).item() if decays else 1.0
    return initial, np.min(scale.multiplier).item(), rate, 1 / rate if decays else 0.0


def their_factors(mup, peer, name, optimizer):
    """Return those of a parameter of the peer, from the package."""
    weight = peer.get_parameter(name)
    group = next(group for group in optimizer.param_groups if any(weight is other for other in group["params"]))
    initial, multiplier = 1.0, 1.0
    if weight.ndim > 1:
        copies = weight.detach().clone(), torch.empty_like(weight)
        copies[0].infshape = weight.infshape
        for normal, copy in zip((mup.init.normal_, torch.nn.init.normal_), copies, strict=True):
            torch.manual_seed(0)
            normal(copy, std=STD)
        initial = (copies[0] / copies[1]).mean().item()
    if name.partition("_")[0] == "lm" or (peer.config.tie_word_embeddings and "ln_f" in name):
        multiplier = 1 / peer.lm_head.width_mult()
    if "q_proj" in name or "c_attn" in name:  # the package leaves 1 / d to its user
        multiplier = peer.get_submodule(name.rpartition(".")[0].rpartition(".")[0]).scaling / HEAD**-0.5
    return initial, multiplier, group["lr"] / RATE, group["weight_decay"] / DECAY


@pytest.mark.parametrize("kind", MODELS)
def test_mup_equals_its_package(kind):
    """Every factor of every weight, and the losses of a run."""
    mup = pytest.importorskip("mup", reason="mup is not installed: pip install --no-deps mup")
    base, delta, peer = (with_readout(mup, peer_of(kind, width)) for width in (BASE_WIDTH, 2 * BASE_WIDTH, WIDTH))
    mup.set_base_shapes(peer, base, delta=delta, rescale_params=False)
    with jax.enable_x64(True):
        config = config_of(kind, "mup", **MESHES[kind])
        ours, weights, scales = our_losses(config)
    load(in_paper_form(peer, 1.0), config, weights, scales)
    groups = [{"params": decayed(peer, True), "weight_decay": DECAY}, {"params": decayed(peer, False)}]
    epsilon = EPSILON * BASE_WIDTH / WIDTH  # the package leaves ε to the user; CompleteP's table scales it
    optimizer = mup.MuAdamW(groups, lr=RATE, weight_decay=0.0, betas=(0.9, 0.999), eps=epsilon)
    for name, layout in tensor_layouts(export_family(config.model), config.model).items():
        found = our_factors(scales[layout.weight], peer.get_parameter(name).ndim > 1)
        expected = their_factors(mup, peer, name, optimizer)
        print(f"{name:45} {layout.weight:35}", *(f"{a:.4g}={b:.4g}" for a, b in zip(found, expected, strict=True)))
        np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=f"{name}: {', '.join(COLUMNS)}")
    np.testing.assert_allclose(ours, losses_of_peer(peer, optimizer), rtol=1e-7)


@pytest.mark.parametrize("kind", MODELS)
def test_completep_equals_its_table(kind):
    """The losses of a run with an ε that matters; and the stored weights are those of an ordinary model."""
    peer = in_paper_form(peer_of(kind), DEPTH / BASE_DEPTH)
    with jax.enable_x64(True):
        config = config_of(kind, "completep", **MESHES[kind])
        ours, weights, scales = our_losses(config)
    load(peer, config, weights, scales)
    m, depth = WIDTH / BASE_WIDTH, DEPTH / BASE_DEPTH
    peer.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / m,))
    groups = []
    for name, weight in peer.named_parameters():
        in_layer = ".h." in name or ".layers." in name
        hidden = m if in_layer and weight.ndim > 1 else 1.0
        epsilon = EPSILON / m / (depth if in_layer else 1)
        decay = DECAY * hidden if weight.ndim > 1 else 0.0
        groups.append({"params": [weight], "lr": RATE / hidden, "weight_decay": decay, "eps": epsilon})
    theirs = losses_of_peer(peer, torch.optim.AdamW(groups, betas=(0.9, 0.999)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-7)
    assert theirs[-1, 0] < theirs[0, 0] - 0.02
    load(standard := peer_of(kind), config, weights, dict.fromkeys(scales, WeightScale(1.0, 1.0, 1.0, 1.0)))
    optimizer = torch.optim.AdamW(standard.parameters())
    np.testing.assert_allclose(ours[0, 0], losses_of_peer(standard, optimizer, steps=1)[0, 0], rtol=1e-7)
