"""Exports as vLLM reads them: settings and tensors that its loader asks for, and adapters by its names.

vLLM needs a GPU, so its rules are written out here: `load_weights` and the settings of
vllm/model_executor/models/llama/model.py and qwen3.py, PEFTHelper of vllm/lora/peft_helper.py, and
`parse_fine_tuned_lora_name` of vllm/lora/utils.py.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from safetensors import safe_open

from mjax.checkpoint.base import digest_of, own_part
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import Base, save_base
from mjax.commands import cli
from mjax.config import Config, DataConfig, LlamaConfig, PrecisionConfig, save_config
from mjax.models.build import build_model
from tests.small import named

LLAMA = LlamaConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, sequence=16, vocabulary=97, vocabulary_multiple=32, feed_forward=48,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "llama 3.1": replace(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original=8, rope_theta=5e5),
    "qwen 3": replace(LLAMA, qk_norm="head", head_dim=12, tied=True),
}
pytestmark = pytest.mark.ci
STACKED = [  # parameter, name in the files, part
    (".qkv_proj", ".q_proj", "q"), (".qkv_proj", ".k_proj", "k"), (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", 0), (".gate_up_proj", ".up_proj", 1),
]  # fmt: skip


def export(model, folder, flag=None, **lora):
    """A run of `model` as a folder, or its adapters."""
    config = Config(model=replace(model, **lora), data=DataConfig(mock=True), precision=PrecisionConfig(compute="fp32"))
    weights = jax.tree.map(lambda w: w + 0.01, build_model(1, config.model))
    for name, saved in {"q": config.model.without_lora(), "run": config.model}.items():
        state = own_part(weights) if name == "run" else build_model(1, saved)
        with Checkpoints(folder / name / "checkpoints", on_notice=lambda line: None) as checkpoints:
            checkpoints.save(1, {"model": state, "step": jnp.int32(1)})
        save_config(replace(config, model=saved), folder / name / "config.json")
    if lora:
        base = digest_of(named(build_model(1, model)))
        save_base(folder / "run", Base(str(folder / "q"), 1, base))
    flags = [flag] if flag else []
    assert cli.main(["convert", "to-hf", str(folder / "run"), str(folder / "out"), *flags]) == 0
    return folder / "out"


def shapes_in(file):
    with safe_open(file, framework="np") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def parameters_of(config):
    """Shapes of vLLM's parameters, part by part, from the settings that it reads."""
    hidden, size = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    q, kv = (config[name] * size for name in ("num_attention_heads", "num_key_value_heads"))
    wide, rows = config["intermediate_size"], config["vocab_size"]
    found = {("model.embed_tokens.weight", None): (rows, hidden), ("model.norm.weight", None): (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight", None] = rows, hidden
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, out in (("q", q), ("k", kv), ("v", kv)):
            found[f"{name}.self_attn.qkv_proj.weight", part] = out, hidden
        for part in (0, 1):
            found[f"{name}.mlp.gate_up_proj.weight", part] = wide, hidden
        found[f"{name}.self_attn.o_proj.weight", None] = hidden, q
        found[f"{name}.mlp.down_proj.weight", None] = hidden, wide
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {(f"{name}.{norm}.weight", None): (hidden,) for norm in norms}
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            found |= {(f"{name}.self_attn.{part}_norm.weight", None): (size,) for part in "qk"}
    return found


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
@pytest.mark.parametrize("name", MODELS)
def test_vllm_finds_every_parameter_and_setting(name, merged, tmp_path):
    folder = export(MODELS[name], tmp_path, *(["--merged"] if merged else []), **({"lora_rank": 2} if merged else {}))
    config, loaded = json.loads((folder / "config.json").read_text()), {}
    for tensor, shape in shapes_in(folder / "model.safetensors").items():
        where = next((row for row in STACKED if row[1] in tensor), None)
        if where is None:
            loaded[tensor, None] = shape
        else:
            loaded[tensor.replace(where[1], where[0]), where[2]] = shape
    assert loaded == parameters_of(config)
    model = MODELS[name]
    assert (config["hidden_act"], config["rms_norm_eps"]) == ("silu", model.norm_epsilon)
    assert config["max_position_embeddings"] == model.sequence
    assert config["rope_theta"] == model.rope_theta  # old readers; new ones take rope_parameters
    assert config["rope_parameters"]["rope_theta"] == model.rope_theta
    assert (config["rope_scaling"] or {"rope_type": "default"})["rope_type"] == config["rope_parameters"]["rope_type"]
    assert not any(config.get(field) for field in ("attention_bias", "bias", "mlp_bias", "quantization_config"))


@pytest.mark.parametrize("name", MODELS)
def test_vllm_reads_an_adapter(name, tmp_path):
    targets = ("q", "k", "v", "down")
    folder = export(MODELS[name], tmp_path, "--adapter", lora_rank=4, lora_targets=targets)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (4, 8, "none")
    assert isinstance(config["lora_alpha"], int)
    assert not {"modules_to_save", "use_dora"} & {name for name, value in config.items() if value}
    known = {theirs.removeprefix(".") for _, theirs, _ in STACKED} | {"o_proj", "down_proj"}
    assert set(config["target_modules"]) <= known
    of_base = shapes_in(export(MODELS[name], tmp_path / "base") / "model.safetensors")
    modules = {}
    for tensor, shape in shapes_in(folder / "adapter_model.safetensors").items():
        parts = tensor.split(".")
        assert parts[:2] == ["base_model", "model"]
        assert parts[-1] == "weight"
        assert parts[-2] in ("lora_A", "lora_B")
        modules.setdefault(".".join(parts[2:-2]), {})[parts[-2]] = shape
    assert len(modules) == 2 * len(targets)
    for module, shapes in modules.items():
        out, into = of_base[f"{module}.weight"]
        assert shapes == {"lora_A": (4, into), "lora_B": (out, 4)}
        assert module.rpartition(".")[2] in config["target_modules"]
