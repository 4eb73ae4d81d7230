"""GPT-2, BLOOM, Llama, Mistral, Qwen, OLMo, Gemma and mixtures of `transformers` with random weights, through `mjax
convert`: in float64 logits, loss and gradients on meshes, runs of AdamW and Muon, and auxiliary losses; and exports."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mjax
from mjax.checkpoint.arrays import leaves_by_path
from mjax.commands import cli
from mjax.config import Config, DataConfig, MeshConfig, OptimizerConfig, PrecisionConfig, TrainConfig, read_config
from mjax.config.axes import MODEL
from mjax.data.conversations import ConversationDataset
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.generation.generate import Generator, Sampling
from mjax.interop.convert import export_family
from mjax.interop.tensor_files import open_tensors
from mjax.models.parts.positions import alibi_slopes
from mjax.parallel.mesh import make_mesh
from mjax.parallel.zero import plan_storage
from tests.interop.folders import read_folder
from tests.interop.whole_weights import assert_same
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: E402
from transformers.modeling_layers import MtpModel  # noqa: E402
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # noqa: E402

from tests.parity.outputs import (  # noqa: E402
    assert_gradients,
    batch_of,
    exported,
    gradients_of,
    in_float64,
    in_tree,
    weights_of,
    with_noise,
)
from tests.parity.peers import imported, opened  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "attn_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_implementation": "eager"}
EXACT = {"n_layer": 3, "n_inner": 52, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}
BLOOM = {"vocab_size": 97, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN3_MOE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 10,
    "experts_implementation": "eager",
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 7, "n_shared_experts": 2, "experts_implementation": "eager",
}  # fmt: skip
GROUPS = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "q_lora_rank": 14}
V3 = {**GROUPS, "num_mtp_layers": 0}
GLM = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "head_dim": 12, "experts_implementation": "eager",
}  # fmt: skip
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 24}
GEMMA = {"sliding_window_pattern": 2, "sliding_window": 6, "query_pre_attn_scalar": 20, "head_dim": 10}
FSDP = {"data": 2, "model": 2, "zero": 3}
SP = {"model": 4, "sequence_parallel": True}
FAMILIES = {  # the class of transformers, extra fields of its config, and our mesh
    "gpt 2": ("GPT2", {**GPT2, **DROPOUT}, FSDP),
    "gpt 2, exact gelu": ("GPT2", {**GPT2, **DROPOUT, **EXACT}, {}),
    "bloom": ("Bloom", BLOOM, {"data": 2, "model": 2}),
    "bloom, three heads": ("Bloom", {**BLOOM, "hidden_size": 36, "n_head": 3, "layer_norm_epsilon": 1e-3}, {"pipe": 2}),
    "llama 2": ("Llama", {"num_key_value_heads": 4}, {"pipe": 2}),
    "llama 3.1": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}, FSDP),
    "llama, yarn": ("Llama", {"rope_parameters": YARN, "tie_word_embeddings": True}, SP),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}, {"model": 4}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 10}, {"pipe": 2, "model": 2}),
    "qwen 2.5": ("Qwen2", {}, SP),
    "qwen 2.5, windows": ("Qwen2", {**WINDOWS, "num_hidden_layers": 4}, {"data": 2, "model": 2}),
    "qwen 3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}, FSDP),
    "olmo 2": ("Olmo2", {}, {"model": 4}),
    "gemma 3": ("Gemma3", {**GEMMA, "num_hidden_layers": 4}, {"pipe": 2, "model": 2}),
    "gemma 3, layers after the last group": (
        "Gemma3",
        {**GEMMA, "num_hidden_layers": 5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        FSDP,
    ),
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
    "deepseek 3": ("DeepseekV3", {**V3, "rope_parameters": {**YARN, **MSCALE}}, FSDP),
    "deepseek 3, experts in all layers": ("DeepseekV3", {**V3, "first_k_dense_replace": 0}, {"context": 2, "model": 2}),
    "kimi k2": (
        "DeepseekV3",
        {**V3, "n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, **MSCALE, "beta_fast": 1.0}},
        {"data": 2, "expert": 2},
    ),
    "moonlight": ("DeepseekV3", {**V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3}, SP),
    "deepseek 2": (
        "DeepseekV2",
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rms_norm_eps": 1e-3},
        {"data": 2, "expert": 2},
    ),
    "glm 4.5": ("Glm4Moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}, FSDP),
    "glm 4.5, groups": (
        "Glm4Moe",
        {**GLM, "n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.34, "first_k_dense_replace": 0},
        {"pipe": 3},
    ),
    "deepseek 2 lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {**YARN, **MSCALE}},
        {"data": 2, "model": 2},
    ),
}


class Wide:
    """torch with float64 instead of float32, for modules that ask for float32 by name: norms, softmax, angles; or
    get it by default: the scale of Gemma's embedding."""

    float = float32 = torch.float64

    def tensor(self, value, **options):
        return torch.tensor(value, **{"dtype": torch.float64 if type(value) is float else None} | options)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def wide_modules(monkeypatch):
    for kind in (
        "bloom",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "olmo2",
        "mixtral",
        "qwen3_moe",
        "olmoe",
        "gemma3",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
    ):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Wide())
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def peer_of(name, **more):
    kind, settings, _ = FAMILIES[name]
    settings = {**settings, **more}
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")
    config = cls.config_class(**(settings if kind in ("GPT2", "Bloom") else SMALL | settings))
    peer = with_noise(cls(config).eval())
    for weight in peer.state_dict(keep_vars=True).values():  # some classes ask for float32
        weight.data = weight.data.to(torch.float32)
    return peer


def both(name, folder):
    """A peer in float64; our model, as `mjax convert` makes it of the peer; and its weights."""
    peer = peer_of(name)
    config, weights = imported(peer, folder)
    return peer.double(), config.model, in_float64(weights)


def table_of(model):
    """Map tensors of `transformers`, which holds some fused, to our model."""
    family = export_family(model)
    return replace(family, names={**family.names, **family.fused})


def config_of(architecture, **mesh):
    return Config(
        model=architecture,
        mesh=MeshConfig(**mesh),
        data=DataConfig(mock=True),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1, clip_norm=1.0),
        precision=PrecisionConfig(compute="fp64"),
        train=TrainConfig(steps=100, global_batch=4, micro_batch=2),
    )


def logits_of(config, weights, batch):
    abstract = jax.eval_shape(lambda: weights)
    plan = plan_storage(abstract, nnx.get_partition_spec(abstract), config.mesh)
    forward = jax.shard_map(
        lambda weights, tokens: weights(tokens),
        mesh=make_mesh(config.mesh),
        in_specs=(jax.tree.map(lambda storage: storage.spec, plan), P()),
        out_specs=P(None, None, MODEL),
    )
    return np.asarray(jax.jit(forward)(weights, batch["tokens"]))


def outputs_of(peer, batch, **options):
    """Return the peer's output for a batch, and the mean of its loss over all labels."""
    found = peer(torch.tensor(batch["tokens"], dtype=torch.long), **options)
    labels = torch.tensor(batch["labels"], dtype=torch.long)
    return found, torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())


def names_of(model):
    """The means that our model reports."""
    if not model.experts:
        return None
    return ("loss", "router_entropy", *(["balance_loss"] if model.aux_loss_coef else []), "expert_load")


@pytest.mark.parametrize("family", FAMILIES)
def test_model_equals_transformers(family, tmp_path):
    """Logits on two ranks, or one where they do not divide; loss and gradients on the mesh of the family; and the
    export, as its class opens it."""
    with jax.enable_x64(True):
        peer, model, weights = both(family, tmp_path)
        batch = batch_of(model)
        found, expected_loss = outputs_of(peer, batch)
        logits = logits_of(config_of(model, model=1 + (model.heads % 2 == 0)), weights, batch)
        expected = found.logits.detach().numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(logits[..., : model.vocabulary], expected, rtol=0, atol=1e-10)

        atol = 1e-11 if "bloom" in family else 1e-12  # its GELU has √(2 / π) with eight digits
        program, _ = gradient_program(config_of(model, **FAMILIES[family][2]), names_of(model))
        means, gradients = program(weights, batch, 0, 1.0)
        expected_loss.backward()
        assert abs(float(means if means.ndim == 0 else means[0]) - expected_loss.item()) < atol
        assert_gradients(gradients, gradients_of(peer, gradients, table_of(model), model), atol)
    again = exported(peer, tmp_path)
    assert torch.equal(outputs_of(again, batch)[0].logits, found.logits)


def published(mtp, layer, tensors):
    """Tensors of the layer of multi-token prediction by the names of DeepSeek's files."""
    found = {}
    for name, tensor in zip(mtp.layers[0].state_dict(), tensors, strict=True):
        name = f"model.layers.{layer}.{name.removeprefix('mtp_block.').replace('post_norm', 'shared_head.norm')}"
        if ".experts." not in name:
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for part, matrices in zip(parts, tensor.chunk(len(parts), 1), strict=True):
            prefix = name[: name.index("experts.")]
            found |= {f"{prefix}experts.{i}.{part}.weight": matrix for i, matrix in enumerate(matrices)}
    return found


def prediction_loss(peer, mtp, batch):
    """The mean loss of the tokens two after each, from transformers' modules for drafts of text."""
    ids, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("tokens", "labels"))
    states, positions = peer.model(ids).last_hidden_state, torch.arange(ids.shape[1])[None]
    y = mtp.forward_layer(0, states, positions, None, input_ids=labels)
    return torch.nn.functional.cross_entropy(peer.lm_head(y)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_multi_token_prediction_equals_transformers(tmp_path, monkeypatch):
    """Loss and gradients on meshes, from a folder as DeepSeek publishes it; and the export, as both classes open it."""
    with jax.enable_x64(True):
        peer = peer_of("deepseek 3")
        peer.config.num_mtp_layers, layer = 1, peer.config.num_hidden_layers
        peer.save_pretrained(tmp_path / "hf")
        mtp = MtpModel(peer, 1).eval()
        weights = mtp.layers[0].state_dict(keep_vars=True).values()
        for weight in weights:
            weight.data = 0.1 * torch.randn(weight.shape) + (weight.ndim == 1)
        file = tmp_path / "hf" / "model.safetensors"
        tensors = load_file(file) | published(mtp, layer, [weight.detach() for weight in weights])
        copy = {f"model.layers.{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        save_file({name: tensor.clone() for name, tensor in {**tensors, **copy}.items()}, file, {"format": "pt"})
        assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
        config, ours = opened(tmp_path / "run", global_batch=4, micro_batch=2)
        peer, mtp, model, ours = peer.double(), mtp.double(), config.model, in_float64(ours)
        batch = batch_of(model)
        loss, further = outputs_of(peer, batch)[1], prediction_loss(peer, mtp, batch)
        (loss + model.mtp_loss_coef * further).backward()
        expected = {name: np.zeros(tensor.shape) for name, tensor in peer.named_buffers()}
        expected |= {name: tensor.grad.numpy() for name, tensor in peer.named_parameters()}
        weights = mtp.layers[0].state_dict(keep_vars=True).values()
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        expected |= {name: gradient.numpy() for name, gradient in published(mtp, layer, grads).items()}
        for mesh in ({}, FSDP, {"context": 2, "model": 2, "sequence_parallel": True}, {"data": 2, "expert": 2}):
            names = "loss", "mtp_loss", "router_entropy", "expert_load"
            program, _ = gradient_program(config_of(model, **mesh), names)
            means, gradients = program(ours, batch, 0, 1.0)
            assert abs(float(means[0]) - loss.item()) < 1e-12, mesh
            assert abs(float(means[1]) - further.item()) < 1e-12, mesh
            assert_gradients(gradients, in_tree(expected, gradients, table_of(model), model))
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_same(read_folder(tmp_path / "out"), {name: tensor.numpy() for name, tensor in tensors.items()})
    monkeypatch.setattr(type(peer), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{layer}.*"])
    again = MtpModel.from_pretrained(type(peer).from_pretrained(tmp_path / "out"))
    for name, weight in mtp.layers.state_dict().items():
        assert torch.equal(again.layers.state_dict()[name].double(), weight), name


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("deepseek 3", {}),
        ("deepseek 3", {"model": 2, "context": 2}),
        pytest.param("moonlight", {"data": 2, "model": 2}, marks=pytest.mark.all),
        pytest.param("deepseek 2 lite", {}, marks=pytest.mark.all),
    ],
)
def test_text_from_latents_equals_transformers(family, mesh, tmp_path):
    """64 tokens after prompts of several lengths, by the absorbed matrices here, from keys and values there."""
    peer = peer_of(family, max_position_embeddings=96)
    config, weights = imported(peer, tmp_path)
    peer, config = peer.double(), replace(config, mesh=MeshConfig(**mesh))
    generator = Generator(config, make_mesh(config.mesh))
    weights = jax.tree.map(lambda ours, there: jax.device_put(ours, there.sharding), weights, generator.abstract_model)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10] * 12]
    texts = generator.generate(weights, prompts, Sampling(tokens=64, temperature=0), eod=-1)
    for prompt, text in zip(prompts, texts, strict=True):
        scores = peer(torch.tensor([prompt + text.tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = scores[torch.arange(64), torch.tensor(text.tokens)]
        assert (chosen > scores.amax(-1) - 1e-5).all()


def test_float8_weights_equal_transformers(tmp_path):
    """Blocks of 128 × 128 with a scale each, as DeepSeek publishes V3, and smaller ones at the ends of 200 × 130."""
    dequantize, file = Fp8Dequantize(None)._dequantize_one, tmp_path / "model.safetensors"
    values = torch.randn(256, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    parts = {"whole": values, "cut": values[:200, :130].contiguous()}
    save_file({**parts, **{f"{name}_scale_inv": scales.clone() for name in parts}}, file)
    tensors, expected = open_tensors(tmp_path), dequantize(values, scales, torch.bfloat16).float().numpy()
    for name, part in parts.items():
        assert (tensors[name].dtype, tensors[name].shape) == ("BF16", tuple(part.shape))
        np.testing.assert_array_equal(tensors[name][:].astype(np.float32), expected[: len(part), : part.shape[1]])

    peer = peer_of("deepseek 3")
    peer.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    matrices = [name for name, tensor in tensors.items() if "_proj" in name and tensor.ndim == 2]
    for name in matrices:
        quantized, scale = tensors[name].to(torch.float8_e4m3fn), torch.rand(1, 1)
        tensors |= {name: quantized, f"{name}_scale_inv": scale}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert read_config(tmp_path / "run" / "config.json").precision.compute == "bf16"
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert exported[bias].dtype == torch.float32, "which transformers computes with"
    assert len(matrices) > 50
    for name in matrices:
        assert torch.equal(exported[name], dequantize(tensors[name], tensors[f"{name}_scale_inv"], torch.bfloat16))


INSIDE = ("gpt 2", "bloom", "llama 3.1", "mistral", "qwen 3", "olmo 2", "gemma 3", "olmoe")


@pytest.mark.parametrize("family", INSIDE)
def test_inside_of_model_equals_transformers(family, tmp_path):
    """Hidden states by layer, attention weights, log-probabilities and gradients of a run on four devices."""
    peer = peer_of(family)
    config, weights = imported(peer, tmp_path)
    peer, tokens = peer.double(), np.random.default_rng(0).integers(0, 97, (3, 20))
    ids = torch.tensor(tokens)
    out = peer(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    out.loss.backward()
    run = mjax.open_run(tmp_path / "run", mesh=FSDP)
    states = torch.tensor(np.stack(mjax.hidden_states(run, tokens, compute="fp32"), 1), dtype=torch.float64)
    *states, last = states
    base = peer.base_model
    states.append((base.norm if hasattr(base, "norm") else base.ln_f)(last))
    assert len(states) == len(out.hidden_states)
    for found, expected in zip(states, out.hidden_states, strict=True):
        np.testing.assert_allclose(*(part.detach().numpy() for part in (found, expected)), atol=1e-4)
    heads = np.stack(mjax.attention_weights(run, tokens, compute="fp32"), 1)
    for found, expected in zip(heads, out.attentions, strict=True):
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    every = torch.log_softmax(out.logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    np.testing.assert_allclose(mjax.log_probs(run, tokens, compute="fp32"), every.detach().numpy(), atol=1e-4)
    loss, gradients = mjax.gradients(run, tokens, compute="fp32")
    assert loss == pytest.approx(out.loss.item(), abs=1e-5)
    expected = leaves_by_path(gradients_of(peer, jax.device_get(weights), table_of(config.model), config.model))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(np.asarray(gradient), expected[name], atol=1e-4, err_msg=name)


CHATS = [
    ({}, 4),
    ({"data": 2, "model": 2, "zero": 3}, 2),
    ({}, 1),
    ({"data": 2}, 1),
    ({"model": 2, "sequence_parallel": True}, 2),
    ({"pipe": 2}, 1),
    ({"context": 2}, 2),
]
"""Meshes and micro-batches."""


@pytest.mark.parametrize(("family", "meshes"), [("llama 2", 7), ("qwen 3", 2), ("olmoe", 2)])
def test_packed_conversations_equal_transformers(family, meshes, tmp_path):
    """Packed into a sequence here; one by one in transformers, with labels of -100 for untrained tokens."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "chats", SMALL["vocab_size"]) as writer:
        for length in random.integers(2, 22, 12):
            tokens, trained = random.integers(0, 97, length), random.random(length) < 0.5
            writer.add_documents(tokens, np.array([length]), np.array([1]), trained)
    with jax.enable_x64(True):
        peer, model, weights = both(family, tmp_path)
        data = ConversationDataset(IndexedDataset(tmp_path / "chats"), range(12), 8, model.sequence, seed=0)
        batch = {name: np.stack([data[i][name] for i in range(8)]) for name in data[0]}
        total, count = 0.0, 0
        for number in np.concatenate([data.conversation_ids(i) for i in range(8)]):
            ids = torch.tensor(data.indexed.get(number).astype(np.int64))
            labels = torch.where(torch.tensor(data.indexed.loss_mask(number)), ids, -100)[1:]
            logits = peer(ids[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels >= 0).sum())
        (total / count).backward()
        for mesh, micro_batch in CHATS[:meshes]:
            config = config_of(model, **mesh)
            train = replace(config.train, global_batch=8, micro_batch=micro_batch)
            config = replace(config, data=DataConfig(mock=True, conversations=True), train=train)
            program, build = gradient_program(config, names_of(model))
            placed = jax.tree.map(lambda ours, there: jax.device_put(ours, there.sharding), weights, build())
            means, gradients = program(placed, batch, 0, 1.0)
            assert abs(float(means if means.ndim == 0 else means[0]) - total.item() / count) < 1e-12, mesh
            assert_gradients(gradients, gradients_of(peer, gradients, table_of(model), model))


@pytest.mark.parametrize("family", ["mixtral, window", "qwen 3 moe, first layer dense"])
def test_auxiliary_loss_equals_transformers(family, tmp_path):
    """Compares gradients too, on one device: transformers has the tokens of the whole batch together."""
    with jax.enable_x64(True):
        peer, model, _ = both(family, tmp_path)
        model = replace(model, aux_loss_coef=0.5, aux_loss_scope="micro_batch")
        config, batch = config_of(model), batch_of(model)
        config = replace(config, train=replace(config.train, micro_batch=4))
        program, build = gradient_program(config, names_of(model))
        means, gradients = program(weights_of(peer, build(), table_of(model), model), batch, 0, 1.0)
        found, loss = outputs_of(peer, batch, output_router_logits=True)
        # Theirs pools the layers, and is k when balanced: it is computed for each layer, and divided by k.
        k = model.experts_per_token
        theirs = [load_balancing_loss_func((each,), model.experts, k) / k for each in found.router_logits]
        (loss + 0.5 * sum(theirs)).backward()
        assert abs(float(means[0]) - loss.item()) < 1e-12
        assert abs(float(means[2]) - sum(theirs).item() / len(theirs)) < 1e-12
        assert_gradients(gradients, gradients_of(peer, gradients, table_of(model), model))


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        ("gpt 2", {}),
        ("qwen 3 moe, first layer dense", {}),
        ("llama 2", {"name": "muon"}),
        pytest.param("qwen 3", {"name": "muon"}, marks=pytest.mark.all),
    ],
)
def test_twenty_steps_follow_torch(family, optimizer, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch iterates in bf16 whatever the weights are
    with jax.enable_x64(True):
        peer, model, weights = both(family, tmp_path)
        config = config_of(model, data=2, model=2, zero=1)
        config = replace(config, optimizer=replace(config.optimizer, **optimizer))
        batches = [batch_of(model, seed) for seed in range(4)]
        ours, theirs = losses_of_both(config, weights, peer, lambda batch: outputs_of(peer, batch)[1], batches)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)  # our learning rate is float32
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


def test_slopes_equal_transformers():
    for heads in (*range(1, 41), 64, 96, 112, 128, 200):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        np.testing.assert_allclose(alibi_slopes(heads), theirs.numpy(), rtol=1e-5)
