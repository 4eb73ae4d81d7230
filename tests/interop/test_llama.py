"""config.json of Llama, Mistral, Qwen and OLMo 2: what it says, and what is refused."""

import json
import tracemalloc
from dataclasses import replace

import pytest

from mjax import cli
from mjax.config import BERTConfig, GPTConfig, LlamaConfig, MixtureConfig, load_config, read_config
from mjax.errors import UsageError
from mjax.interop.convert import family_of, find_family
from mjax.interop.extend import extended, for_longer_texts
from mjax.interop.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from mjax.interop.mixture import MIXTRAL, OLMOE, QWEN3_MOE
from mjax.interop.settings import config_values, fits, model_config
from tests.interop.folders import LLAMA as SMALL_LLAMA
from tests.interop.folders import tensors_of, write_folder

FAMILIES = {
    "llama2_7b": LLAMA,
    "llama3_405b": LLAMA,
    "llama32_1b": LLAMA,
    "mistral_7b": MISTRAL,
    "qwen25_7b": QWEN2,
    "qwen3_0_6b": QWEN3,
    "olmo2_1b": OLMO2,
    "mixtral_8x7b": MIXTRAL,
    "qwen3_30b_a3b": QWEN3_MOE,
    "olmoe_1b_7b": OLMOE,
}
# Llama-3.1-8B as Meta published it, for transformers 4.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN25_7B = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE_1B_7B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
SHARED = {
    name: value
    for name, value in LLAMA_31.items()
    if name not in ("mlp_bias", "attention_bias", "pretraining_tp")  # which are Llama's alone
}


def read(values):
    return model_config(find_family(values, "config.json"), values, "config.json", 128)


def test_the_published_config_of_llama_31_is_that_of_llama_3_with_scaled_positions():
    scaled = {"sequence": 131072, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 8192}
    assert read(LLAMA_31) == replace(load_config("llama3_8b").model, **scaled)


def test_published_configs_of_others_are_those_of_configs():
    assert read(SMOLLM2_135M) == load_config("smollm2_135m").model
    assert read(QWEN25_7B) == replace(load_config("qwen25_7b").model, sequence=131072)


@pytest.mark.parametrize(
    ("values", "name", "more"),
    [
        (MIXTRAL_8X7B, "mixtral_8x7b", {"sequence": 32768}),
        (QWEN3_30B_A3B, "qwen3_30b_a3b", {"sequence": 40960, "feed_forward": 6144}),
        (OLMOE_1B_7B, "olmoe_1b_7b", {"feed_forward": 1024, "expert_width": None, "kv_heads": 16}),
    ],
)
def test_published_configs_of_mixtures_are_those_of_configs_without_the_losses_of_the_router(values, name, more):
    assert read(values) == replace(load_config(name).model, balance_loss=0.0, z_loss=0.0, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_goes_out_and_comes_back_the_same(name):
    model, family = load_config(name).model, FAMILIES[name]
    assert family_of(model) is family
    assert [other for other in FAMILIES.values() if fits(other, model) and other not in (family, MISTRAL)] == []
    values = {**config_values(family, model), "model_type": family.model_type}
    again = read(values)
    either = {"kv_heads": None, "head_dim": None}
    if isinstance(model, MixtureConfig):
        assert again.width_of_expert == model.width_of_expert
        either |= {"feed_forward": None, "expert_width": None, "balance_loss": 0.0, "z_loss": 0.0}
    assert replace(again, **either) == replace(model, **either)
    assert (again.groups, again.head_size) == (model.groups, model.head_size)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, r"rope_type is \['yarn'\]; mjax knows"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": [8]}, "must be objects"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "does not repeat"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "layer_types is"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
            r"mlp_only_layers is \[1\] and decoder_sparse_step 1; mjax",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2}, "but not both"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1], "num_hidden_layers": 2},
            r"mlp_only_layers is \[0, 1\]",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"model_type": "olmoe", "norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ],
)
def test_a_setting_that_changes_what_is_computed_is_refused_by_name(change, names):
    with pytest.raises(UsageError, match=names):
        read({**(SHARED if "model_type" in change else LLAMA_31), **change})


@pytest.mark.parametrize("settings", [{}, {"use_sliding_window": True, "sliding_window": None}])
def test_a_qwen_of_any_number_of_layers_without_windows_makes_no_list_of_them(settings):
    values = {**SHARED, "model_type": "qwen3", "num_hidden_layers": 2**31 - 1, **settings}
    tracemalloc.start()
    try:
        assert read(values).window is None
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_a_mistral_without_a_word_on_its_window_has_that_of_transformers():
    values = {**SHARED, "model_type": "mistral"}
    assert read(values).window == 4096
    assert read({**values, "sliding_window": None}).window is None


@pytest.mark.parametrize("every", [None, 2, 4])
def test_windows_of_a_qwen_come_from_either_spelling_and_go_out(every):
    values = {**QWEN25_7B, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}
    if every:
        values["layer_types"] = (["sliding_attention"] * (every - 1) + ["full_attention"]) * (28 // every)
    model = read(values)
    assert (model.window, model.full_attention_every) == (512, every)
    written = config_values(QWEN2, model)
    assert read({**written, "model_type": "qwen2"}) == replace(model, head_dim=model.head_size)
    assert written["layer_types"] == values.get("layer_types", ["sliding_attention"] * 28)
    assert read({**values, "use_sliding_window": False, "layer_types": None}).window is None


def test_a_model_that_no_class_has_is_refused_with_what_they_have():
    with pytest.raises(UsageError, match=r"--model\.rope-share 0\.5"):
        family_of(LlamaConfig(rope_share=0.5))


# --- Longer sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "factor", "original"), [("yarn:8", 8.0, 8192), ("llama3:2.5", 2.5, 8192), ("linear:4", 4.0, None)]
)
def test_rope_makes_sequences_longer_by_the_factor_and_goes_out_and_comes_back(given, factor, original):
    trained = load_config("llama3_8b").model
    model = extended(trained, given, "DIR")
    changed = {"rope_scaling": given.split(":")[0], "rope_factor": factor, "rope_original": original}
    assert model == replace(trained, sequence=round(8192 * factor), **changed)
    written = config_values(LLAMA, model)
    assert written["rope_scaling"]["factor"] == written["rope_parameters"]["factor"] == factor
    assert written["rope_scaling"].get("original_max_position_embeddings") == original
    assert written["max_position_embeddings"] == model.sequence
    assert read({**written, "model_type": "llama"}) == replace(model, head_dim=model.head_size)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("yarn", "--rope yarn is not a scaling and a factor above 1; the scalings are linear, llama3 or yarn: use"),
        ("yarn:1", "--rope yarn:1 is not a scaling and a factor above 1; "),
        ("llama3:-2", "use --rope llama3:8 for sequences eight times as long"),
        ("yarn:nan", "--rope yarn:nan is not"),
        ("yarn:inf", "--rope yarn:inf is not"),
        ("longrope:8", "--rope longrope:8 is not .* linear, llama3 or yarn: use --rope yarn:8 for"),
        ("none:8", "--rope none:8 is not"),
        ("yarn:1.00001", r"makes 8,192.08192 of the 8,192 positions of DIR; .* use a factor such as yarn:2"),
        ("linear:1e7", r"must be a whole number below 2\^31: use a factor such as linear:64"),
    ],
)
def test_a_rope_that_no_config_can_have_is_refused(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        extended(load_config("llama3_8b").model, given, "DIR")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (read(LLAMA_31), "DIR already has rotary positions with llama3:8, 131,072 of them; leave --rope out"),
        (GPTConfig(), "--rope yarn:8 is for rotary positions and DIR is a GPT without; leave it out"),
        (GPTConfig(positions="alibi"), "DIR is a GPT without"),
        (BERTConfig(), "DIR is a BERT without"),
    ],
)
def test_a_model_whose_positions_cannot_be_scaled_keeps_them(model, sentence):
    assert extended(model, None, "DIR") is model
    with pytest.raises(UsageError, match=sentence):
        extended(model, "yarn:8", "DIR")


def test_a_tokenizer_that_would_cut_longer_texts_off_does_so_no_more():
    files = {"tokenizer_config.json": b'{"model_max_length": 8192, "bos_token": "<s>"}', "chat_template.jinja": b"x"}
    longer = for_longer_texts(files, 65_536)
    assert json.loads(longer["tokenizer_config.json"]) == {"model_max_length": 65_536, "bos_token": "<s>"}
    assert longer["chat_template.jinja"] == b"x"
    assert for_longer_texts(files, 8192) == files
    assert for_longer_texts({}, 8192) == {}


def test_a_conversion_with_rope_says_what_it_did_and_is_not_repeated(tmp_path, capsys):
    write_folder(tmp_path / "hf", SMALL_LLAMA, tensors_of(SMALL_LLAMA))
    argv = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "--rope", "yarn:8"]
    assert cli.main(argv) == 0
    assert "--rope yarn:8, 128 positions instead of 16; evaluate it with --task positions" in capsys.readouterr().out
    assert "with --rope yarn:8, 128 positions instead of 16" in (tmp_path / "run" / "README.md").read_text()
    model = read_config(tmp_path / "run" / "config.json").model
    assert (model.sequence, model.rope_scaling, model.rope_factor, model.rope_original) == (128, "yarn", 8.0, 16)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert cli.main(["convert", "from-hf", str(tmp_path / "out"), str(tmp_path / "again"), "--rope", "yarn:2"]) == 2
    assert "already has rotary positions with yarn:8, 128 of them" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
