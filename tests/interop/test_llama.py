"""config.json of Llama, Mistral, Qwen, OLMo 2, Gemma 3 and mixtures: published ones, windows, rotary positions."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mjax.commands import cli
from mjax.config import GPTConfig, MixtureConfig, load_config
from mjax.errors import UsageError
from mjax.interop.convert import export_family, find_family, scale_rope
from mjax.interop.tokenizer_files import collect_tokenizer_files
from mjax.models.build import count_parameters
from mjax.models.gemma3.huggingface import GEMMA3
from mjax.models.huggingface.family import config_values, model_config, unlike
from mjax.models.llama.huggingface import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from mjax.models.mixture.huggingface import MIXTRAL, OLMOE, QWEN3_MOE
from tests.interop.folders import LLAMA as SMALL_LLAMA
from tests.interop.folders import read_folder, tensors_of, write_folder
from tests.interop.whole_weights import assert_same, folder_weights

FAMILIES = {
    "llama3_405b": LLAMA,
    "llama32_1b": LLAMA,
    "mistral_7b": MISTRAL,
    "qwen25_7b": QWEN2,
    "qwen3_0_6b": QWEN3,
    "olmo2_1b": OLMO2,
    "mixtral_8x7b": MIXTRAL,
    "qwen3_30b_a3b": QWEN3_MOE,
    "olmoe_1b_7b": OLMOE,
    "gemma3_4b": GEMMA3,
}
# Llama-3.1-8B as Meta published it, for transformers 4; the others as they are on the Hub.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
GEMMA_3_270M = {
    "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
    "initializer_range": 0.02, "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0.dev0", "use_bidirectional_attention": False, "use_cache": True,
    "vocab_size": 262144,
}  # fmt: skip


# Moonlight-16B-A3B, DeepSeek-V3 and Kimi-K2-Base as they are on the Hub, without their code and token ids.
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.46.3",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
FLOAT8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LARGE = MOONLIGHT | {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536, "rms_norm_eps": 1e-06,
    "quantization_config": FLOAT8,
}  # fmt: skip
LONG = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3 = LARGE | {
    "first_k_dense_replace": 3, "max_position_embeddings": 163840, "n_group": 8, "n_routed_experts": 256,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rope_theta": 10000,
    "rope_scaling": LONG | {"beta_fast": 32, "factor": 40}, "routed_scaling_factor": 2.5, "topk_group": 4,
    "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = LARGE | {
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "rope_scaling": LONG | {"beta_fast": 1.0, "factor": 32.0},
    "routed_scaling_factor": 2.827,
}  # fmt: skip
# DeepSeek-V2-Lite, DeepSeek-V2, GLM-4.5 and GLM-4.5-Air likewise.
V2_SCALE = LONG | {"beta_fast": 32, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
V2_LITE = {name: value for name, value in MOONLIGHT.items() if name != "num_nextn_predict_layers"} | {
    "architectures": ["DeepseekV2ForCausalLM"], "intermediate_size": 10944, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "norm_topk_prob": False, "rms_norm_eps": 1e-06, "rope_scaling": V2_SCALE,
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
    "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V2 = V2_LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
}  # fmt: skip
GLM_45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GLM_45 = GLM_45_AIR | {
    "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip


def read(values):
    return model_config(find_family(values, "config.json"), values, "config.json", 128)


SCALED = {"sequence": 131072, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 8192}
NO_LOSSES = {"aux_loss_coef": 0.0, "z_loss": 0.0}
BEFORE_TRAINING = {"aux_loss_coef": 0.0, "router_bias_update_rate": 0.0}
ALL_GROUPS = BEFORE_TRAINING | {"router_topk_groups": 1}
EXTENDED = {"rope_scaling": "yarn", "rope_original_length": 4096}


@pytest.mark.parametrize(
    ("values", "name", "more"),
    [
        (LLAMA_31, "llama3_8b", SCALED),
        (GEMMA_3_270M, "gemma3_270m", {"sequence": 32768}),
        (MOONLIGHT, "moonlight_16b_a3b", ALL_GROUPS),
        (
            DEEPSEEK_V3,
            "deepseek_v3",
            BEFORE_TRAINING | EXTENDED | {"sequence": 163840, "rope_factor": 40.0, "init_std": 0.02},
        ),
        (
            KIMI_K2,
            "kimi_k2",
            ALL_GROUPS | EXTENDED | {"sequence": 131072, "rope_factor": 32.0, "rope_beta_fast": 1.0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_config_matches_ours(values, name, more):
    expected = replace(load_config(name).model, **more)
    model = read(values)
    assert model == replace(expected, max_position_embeddings=expected.sequence)
    family = export_family(model)
    given = {} if model.kind == "deepseek" else {"head_dim": model.head_size}
    assert read({**config_values(family, model), "model_type": family.model_type}) == replace(model, **given)


@pytest.mark.parametrize(
    ("values", "billions", "fields"),
    [
        (V2_LITE, 15.706, {"router_n_groups": 1, "rope_mscale": 0.707}),
        (DEEPSEEK_V2, 235.741, {"router_n_groups": 8, "router_topk_groups": 3, "router_group_best": 1}),
        (GLM_45_AIR, 106.852, {"qk_norm": "none", "rotary_percent": 0.5, "router_bias": True, "head_dim": 128}),
        (GLM_45, 352.798, {"qk_norm": "head", "qkv_bias": True, "first_dense_layers": 3, "router_scale": 2.5}),
    ],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V2", "GLM-4.5-Air", "GLM-4.5"],
)
def test_published_config_is_read(values, billions, fields):
    """GLM-4.5 without its layer of multi-token prediction."""
    model = read(values)
    assert {name: getattr(model, name) for name in fields} == fields
    assert count_parameters(model) / 1e9 == pytest.approx(billions, abs=5e-4)
    family = export_family(model)
    written = config_values(family, model)
    assert read({**written, "model_type": family.model_type}) == model
    assert {name: written.get(name) for name in ("topk_method", "n_shared_experts")} == {
        name: values.get(name) for name in ("topk_method", "n_shared_experts")
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_export_and_import(name):
    model, family = load_config(name).model, FAMILIES[name]
    assert export_family(model) is family
    assert [other for other in FAMILIES.values() if not unlike(other, model) and other not in (family, MISTRAL)] == []
    again = read({**config_values(family, model), "model_type": family.model_type})
    either = {"kv_heads": None, "head_dim": None, "max_position_embeddings": model.sequence}
    assert again.max_position_embeddings == model.sequence
    if isinstance(model, MixtureConfig):
        assert again.expert_width == model.expert_width
        either |= {"feed_forward": None, "moe_ffn_hidden": None} | NO_LOSSES
    assert replace(again, **either) == replace(model, **either)
    assert (again.groups, again.head_size) == (model.groups, model.head_size)


def test_attention_factor_of_yarn_itself_is_read():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    plain = {**LLAMA_31, "rope_scaling": yarn}
    assert read({**plain, "rope_scaling": {**yarn, "attention_factor": 0.1 * math.log(8) + 1}}) == read(plain)
    with pytest.raises(UsageError, match=r"attention_factor of yarn positions is 1\.1"):
        read({**plain, "rope_scaling": {**yarn, "attention_factor": 1.1}})


def test_fused_experts_equal_single_ones(tmp_path, capsys):
    """transformers 5 holds all experts of a layer in one tensor: [E, 2 · f, h], gate first, and [E, h, f]."""
    config = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 3, "router_aux_loss_coef": 0.02}
    del config["mlp_bias"], config["attention_bias"]
    tensors, random = tensors_of(SMALL_LLAMA), np.random.default_rng(1)
    single = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    fused = dict(single)
    for layer in range(2):
        moe, mlp = (f"model.layers.{layer}.{name}" for name in ("block_sparse_moe", "mlp"))
        w1, w3 = random.normal(size=(2, 3, 24, 16)).astype(np.float32)
        w2, router = (random.normal(size=shape).astype(np.float32) for shape in ((3, 16, 24), (3, 16)))
        single[f"{moe}.gate.weight"] = fused[f"{mlp}.gate.weight"] = router
        for number, matrices in enumerate(zip(w1, w2, w3, strict=True)):
            single |= {f"{moe}.experts.{number}.w{i}.weight": matrix for i, matrix in enumerate(matrices, start=1)}
        fused[f"{mlp}.experts.gate_up_proj"], fused[f"{mlp}.experts.down_proj"] = np.concatenate([w1, w3], axis=1), w2
    source = write_folder(tmp_path / "single", config, single)
    ours = folder_weights(source)
    np.testing.assert_array_equal(ours["blocks.mlp.up"][1, 2, :, 1], w3[2].T)
    np.testing.assert_array_equal(ours["blocks.mlp.down"][1, 2], w2[2].T)
    assert_same(folder_weights(write_folder(tmp_path / "fused", config, fused)), ours)
    for command, given, output in (("from-hf", "fused", "run"), ("to-hf", "run", "out")):
        assert cli.main(["convert", command, str(tmp_path / given), str(tmp_path / output)]) == 0
    assert "to train with it type --model.aux-loss-coef 0.02\n" in capsys.readouterr().out
    assert_same(read_folder(tmp_path / "out"), read_folder(source))


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [None, 2, 4])
def test_qwen_windows_survive_either_spelling(every):
    published = config_values(QWEN2, load_config("qwen25_7b").model) | {"model_type": "qwen2"}
    values = {name: value for name, value in published.items() if name != "layer_types"}
    values |= {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}
    if every:
        values["layer_types"] = (["sliding_attention"] * (every - 1) + ["full_attention"]) * (28 // every)
    model = read(values)
    assert (model.window, model.global_attention_interval) == (512, every)
    written = config_values(QWEN2, model)
    assert read({**written, "model_type": "qwen2"}) == replace(model, head_dim=model.head_size)
    assert written["layer_types"] == values.get("layer_types", ["sliding_attention"] * 28)
    assert read({**values, "use_sliding_window": False, "layer_types": None}).window is None


def test_gemma_layers_survive_any_spelling():
    """Kinds of layers: by a list, by a number, or omitted; positions: by kind since transformers 5, and before."""
    model = read({**GEMMA_3_270M, "num_hidden_layers": 16, "layer_types": None, "rope_theta": 5e5})
    model = replace(model, rope_scaling="linear", rope_factor=8.0, local_rope_theta=2e4)
    assert [count for _, count in model.pattern.runs(model.layers)] == [2, 4]
    written = config_values(GEMMA3, model) | {"model_type": "gemma3_text"}
    assert written["layer_types"] == GEMMA_3_270M["layer_types"][:16]
    new, old = ("rope_parameters", "layer_types"), ("rope_theta", "rope_scaling", "rope_local_base_freq")
    for unread in (new, (*old, "sliding_window_pattern")):
        assert read({name: value for name, value in written.items() if name not in unread}) == model
    third = {"layer_types": GEMMA_3_270M["layer_types"][3:6], "num_hidden_layers": 3}
    assert read({**GEMMA_3_270M, **third}).global_attention_interval == 3


# --- Rotary positions -------------------------------------------------------------------------------------------------


def test_positions_are_written_and_read_in_both_spellings():
    """`rope_parameters` since transformers 5, before it `rope_theta` and `rope_scaling`."""
    model = read(LLAMA_31)
    written = config_values(LLAMA, model) | {"model_type": "llama"}
    scaling = LLAMA_31["rope_scaling"]
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, scaling)
    assert written["rope_parameters"] == {**scaling, "rope_theta": 500000.0}
    for unread in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        values = {name: value for name, value in written.items() if name not in unread}
        assert read(values) == replace(model, head_dim=128)
    assert read({**written, "rope_theta": 10000.0}).rope_theta == 500000.0, "the new spelling counts where both are"


LLAMA3_8B = load_config("llama3_8b").model


@pytest.mark.parametrize(
    ("given", "factor", "original"), [("yarn:8", 8.0, 8192), ("llama3:2.5", 2.5, 8192), ("linear:4", 4.0, None)]
)
def test_rope_flag_lengthens_sequences(given, factor, original):
    model = scale_rope(LLAMA3_8B, given, "DIR")
    changed = {"rope_scaling": given.split(":")[0], "rope_factor": factor, "rope_original_length": original}
    changed |= dict.fromkeys(("sequence", "max_position_embeddings"), round(8192 * factor))
    assert model == replace(LLAMA3_8B, **changed)
    shorter = replace(LLAMA3_8B, sequence=512, max_position_embeddings=8192)
    assert scale_rope(shorter, given, "DIR") == model, "what counts is the model, not its last run"
    assert replace(model, sequence=512).unscaled_sequence == 8192
    written = config_values(LLAMA, model)
    assert written["max_position_embeddings"] == model.sequence
    assert read({**written, "model_type": "llama"}) == replace(model, head_dim=model.head_size)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (read(LLAMA_31), "yarn:8", "DIR already has rotary positions with llama3:8, 131,072 of them; leave --rope out"),
        (GPTConfig(positions="alibi"), "yarn:8", "--rope yarn:8 is for rotary positions and DIR is a GPT without"),
        (LLAMA3_8B, "yarn:nan", "--rope yarn:nan is not"),
        (LLAMA3_8B, "yarn:1.00001", r"makes 8,192.08192 positions; .* use a factor such as yarn:2"),
        (LLAMA3_8B, "linear:10000000", r"must be a whole number below 2\^31: use a factor such as linear:64"),
    ],
)
def test_impossible_rope_flag_is_refused(model, given, words):
    with pytest.raises(UsageError, match=words):
        scale_rope(model, given, "DIR")


def test_tokenizer_limit_grows_with_positions(tmp_path):
    settings = {"model_max_length": 8192, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for positions, limit in ((65_536, 65_536), (4096, 8192), (None, 8192)):
        files = collect_tokenizer_files(tmp_path, {}, positions)
        assert json.loads(files["tokenizer_config.json"]) == settings | {"model_max_length": limit}
