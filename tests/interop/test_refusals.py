"""Models that `mjax convert` cannot take from or give to `transformers`: one sentence each, and nothing is written."""

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from mjax.commands import cli
from mjax.config import save_config
from mjax.errors import UsageError
from mjax.interop.convert import find_family
from mjax.interop.tensor_files import open_tensors
from mjax.models.huggingface.family import model_config
from tests.data.vocabularies import hf_byte_pairs
from tests.interop.folders import BERT, BLOOM, CONFIG, LLAMA, MEGATRON_BERT, tensors_of, write_folder
from tests.interop.whole_weights import folder_weights
from tests.small import small_config

# --- config.json ------------------------------------------------------------------------------------------------------


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


OTHERS = without(LLAMA, "mlp_bias", "attention_bias")
QWEN = OTHERS | {"model_type": "qwen3"}
MIXTURE = OTHERS | {"model_type": "qwen3_moe"}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 2, "max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 257,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
GLM = DEEPSEEK | {"model_type": "glm4_moe"}
MSCALES = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
SETTINGS = [
    # Fields with one supported value.
    (CONFIG, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    (BERT, {"position_embedding_type": "relative_key"}, "'relative_key', but mjax supports only 'absolute'"),
    (BLOOM, {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
    # Settings that mjax does not know.
    (CONFIG, {"attention_sinks": False}, "attention_sinks is False, which mjax does not know"),
    # Invalid values.
    (CONFIG, {"activation_function": "relu"}, "activation_function is 'relu'"),
    (CONFIG, {"model_type": "t5"}, "model_type is 't5'; mjax supports gpt2, bloom, bert"),
    (without(CONFIG, "n_layer"), {}, "config.json lacks n_layer"),
    (CONFIG, {"n_layer": "2"}, "n_layer is '2', which is not a whole number"),
    (BLOOM, {"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon is inf, which is not a number"),
    # Values that contradict each other.
    (CONFIG, {"embd_pdrop": 0.1}, "embd_pdrop is 0.1 and resid_pdrop 0.0"),
    (CONFIG, {"n_ctx": 8}, "n_ctx is 8 and n_positions 16"),
    # Rotary positions.
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor of llama3 positions is 2.0"),
    # Which layers have a window, or experts.
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has other values"),
    (QWEN, {"use_sliding_window": True, "max_window_layers": 1}, "does not repeat"),
    (GEMMA, {"layer_types": ["full_attention", "sliding_attention"]}, "does not repeat for each of num_hidden_layers"),
    (GEMMA, {"rope_parameters": {"sliding_attention": LLAMA3}}, "rope_type of sliding_attention is 'llama3'"),
    (GEMMA, {"rope_parameters": LLAMA3}, "rope_parameters must have"),
    (DEEPSEEK, {"rope_scaling": MSCALES}, "mscale 1.0, mscale_all_dim 0.7, beta_fast 0; mjax"),
    (DEEPSEEK, {"rope_scaling": MSCALES | {"mscale": 0.7, "beta_fast": "32"}}, "beta_fast '32'; mjax needs"),
    (DEEPSEEK, {"rope_scaling": 4}, "rope_parameters and rope_scaling must be objects"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "awq"}}, "mjax reads {'quant_method': 'fp8'"),
    (DEEPSEEK, {"n_shared_experts": None}, "n_shared_experts is None, not a whole number"),
    (DEEPSEEK, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, and mjax supports 0 and 1"),
    (DEEPSEEK | {"model_type": "deepseek_v2"}, {"topk_method": "group_limited_greedy"}, "{'n_group': None"),
    (GLM, {"use_qk_norm": 1}, "use_qk_norm is 1, not true or false"),
    (MIXTURE, {"mlp_only_layers": [1]}, "mlp_only_layers is [1] and decoder_sparse_step 1; mjax"),
    (MIXTURE, {"mlp_only_layers": 5}, "mlp_only_layers is 5 and"),
    (MIXTURE, {"mlp_only_layers": [0], "decoder_sparse_step": 2}, "but not both"),
]


@pytest.mark.parametrize(("config", "change", "words"), SETTINGS, ids=[words for _, _, words in SETTINGS])
def test_unsupported_settings_are_refused_by_name(config, change, words):
    values, file = config | change, Path("config.json")
    with pytest.raises(UsageError) as refused:
        model_config(find_family(values, file), values, str(file), 128)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


PUBLISHED = {  # settings of published files, without sizes; others are in what transformers writes (tests/parity)
    "gpt2": {
        "n_ctx": 8, "embd_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "output_past": True,
        "scale_attn_weights": True, "predict_special_tokens": True, "reorder_and_upcast_attn": True,
        "pruned_heads": {}, "something_new": None, "task_specific_params": {"text-generation": {"max_length": 50}},
    },
    "bert": {
        "gradient_checkpointing": False, "classifier_dropout": None, "position_embedding_type": "absolute",
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform", "mask_token_id": 4,
    },
    "bloom": {
        "n_embed": 8, "num_attention_heads": 8, "pretraining_tp": 4, "slow_but_exact": False, "offset_alibi": 100,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "masked_softmax_fusion": True, "n_inner": None,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "unk_token_id": 0, "seq_length": 2048,
    },
    "llama": {
        "pretraining_tp": 1, "mlp_bias": False, "rope_scaling": None, "max_sequence_length": 2048,
        "unsloth_fixed": True, "unsloth_version": "2025.6.2", "_attn_implementation_autoset": True,
        "_flash_attn_2_enabled": True, "is_llama_config": True, "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
    },
    "qwen2": {"use_mrope": False, "use_sliding_window": False, "max_window_layers": 21, "pretraining_tp": 1},
    "gemma3_text": {
        "cache_implementation": "hybrid", "sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False,
        "unsloth_fixed": True,
    },
}  # fmt: skip
OF_ALL = {
    "_name_or_path": "a/b", "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3", "use_cache": True, "initializer_range": 0.02, "return_dict": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_settings_are_accepted(kind):
    file = Path("config.json")
    family = find_family({"model_type": kind}, file)
    sizes = {name: 8 for name, (_, default) in family.fields.items() if default is ...}
    values = {"model_type": kind, **sizes} | PUBLISHED[kind] | OF_ALL
    assert model_config(family, values, str(file), 128)
    for name, value in {"auto_map": {"AutoModel": "a.B"}, "is_causal": False, "quantization_config": {"a": 1}}.items():
        with pytest.raises(UsageError, match=f"{name} is .+, which mjax does not know; remove it if"):
            model_config(family, values | {name: value}, str(file), 128)


# --- Tensors ----------------------------------------------------------------------------------------------------------

BIAS, WTE, LN = "transformer.h.0.mlp.c_fc.bias", "transformer.wte.weight", "transformer.h.1.ln_2.bias"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
MLM_NORM, MLM_BIAS, DECODER = "cls.predictions.transform.LayerNorm", "cls.predictions.bias", "cls.predictions.decoder"
WORDS = "bert.embeddings.word_embeddings.weight"


def lost(*prefixes):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def changed(name, change, origin=None):
    """`name` becomes what `change` makes of it, or of the tensor `origin`."""
    return lambda tensors: tensors | {name: change(tensors[origin or name])}


def last_row_differs(tensor):
    return np.concatenate([tensor[:-1], tensor[-1:] + 1])


MANY = CONFIG | {"vocab_size": 5000}
TENSORS = [
    (CONFIG, {}, lost(BIAS), f"lacks the tensor {BIAS}; download"),
    (CONFIG, {"n_layer": 10**6}, lost(), "asks for 1,000,000 layers, and its files have 28 tensors"),
    (CONFIG, {}, changed("score.weight", lambda tensor: tensor[:2].copy(), WTE), "a tensor score.weight"),
    (CONFIG, {}, changed(BIAS, lambda tensor: tensor.astype(np.int8)), f"{BIAS} is of type I8"),
    (CONFIG, {}, changed("wpe.weight", np.copy, "transformer.wpe.weight"), "wpe.weight and transformer.wpe.weight"),
    (CONFIG, {}, changed(LN, lambda tensor: tensor * np.inf), f"{LN} holds numbers that are not finite"),
    (MANY, {}, changed("lm_head.weight", last_row_differs, WTE), f"lm_head.weight differs from {WTE}"),
    (BERT, {}, lambda tensors: tensors_of(MEGATRON_BERT), "not part of BertForPreTraining with 2 layers"),
    (BERT, {}, lost("cls.", "bert.pooler.", QUERY), f"lacks the tensor {QUERY}; download"),
    (BERT, {}, changed(f"{DECODER}.bias", lambda tensor: tensor + 1, MLM_BIAS), f"{DECODER}.bias differs from"),
    (MEGATRON_BERT, {}, changed(f"{MLM_NORM}.gamma", np.copy, f"{MLM_NORM}.weight"), f"has both {MLM_NORM}."),
    (LLAMA, {"num_key_value_heads": 1}, lost(), "_proj.weight has shape (8, 16), and config.json asks for (4, 16)"),
]


@pytest.mark.parametrize(("config", "change", "tensors", "words"), TENSORS, ids=[row[-1] for row in TENSORS])
def test_tensors_that_do_not_fit_are_refused(config, change, tensors, words, tmp_path):
    folder = write_folder(tmp_path / "in", config | change, tensors(tensors_of(config)))
    with pytest.raises(UsageError) as refused:
        folder_weights(folder)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


# --- Files ------------------------------------------------------------------------------------------------------------


def through_a_link(folder):
    (folder / "out").symlink_to(folder.parent)
    content(INDEX, lambda text: text.replace(SECOND.encode(), b"out/model.safetensors"))(folder)


def content(file, change):
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def only_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


ONE, SECOND = "model.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
FILES = {
    "not JSON": (1, content("config.json", lambda _: b"{"), "config.json is not JSON"),
    "truncated": (1, content(ONE, lambda whole: whole[:-8]), "is truncated or not a"),
    "a header larger than the file": (
        1, content(ONE, lambda whole: struct.pack("<Q", 2**40) + whole[8:]), "is truncated or not a",
    ),
    "no tensors": (1, lambda folder: (folder / ONE).unlink(), f"has no {ONE}"),
    "a pickle": (1, only_a_pickle, "in pytorch_model.bin only, a pickle"),
    "a missing file": (2, lambda folder: (folder / SECOND).unlink(), "does not exist, though"),
    "a file elsewhere": (
        2, content(INDEX, lambda text: text.replace(b"model-00002", b"../x")),
        "model.safetensors.index.json: file '../x-of-00002.safetensors' has the part '..'",
    ),
    "a file through a link": (2, through_a_link, "file 'out/model.safetensors' leads out of"),
    "a tensor twice": (2, lambda folder: save_file(tensors_of(CONFIG), folder / SECOND), "is in another file too"),
    "a tokenizer of more ids": (
        1, lambda folder: hf_byte_pairs().save(str(folder / "tokenizer.json")), "has 330 ids and the model's embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_damaged_folders_are_refused_in_one_line(name, tmp_path, capsys):
    parts, damage, words = FILES[name]
    damage(write_folder(tmp_path / "in", parts=parts))
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.startswith("mjax: error: ")
    assert message.count("\n") == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.10.0"])
def test_pickles_need_torch_2_10(version, tmp_path, monkeypatch):
    old, opened = version.startswith("2.9"), []

    def load(file, **how):
        opened.append(how["weights_only"])
        raise RuntimeError("nothing to read")

    names = SimpleNamespace(get_safe_globals=list, clear_safe_globals=list, add_safe_globals=list)
    torch = SimpleNamespace(__version__=version, load=load, serialization=names)
    monkeypatch.setitem(sys.modules, "torch", torch)
    only_a_pickle(write_folder(tmp_path / "in"))
    with pytest.raises(UsageError) as error:
        open_tensors(tmp_path / "in", allow_pickle=True)
    assert (f"torch {version} reads files unsafely; type `pip install 'torch>=2.10'`" in str(error.value)) == old
    assert opened == ([] if old else [True])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="--allow-pickle is for files that are read by torch, which is not installed"):
        open_tensors(tmp_path / "in", allow_pickle=True)


# --- Exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"positions": "alibi"}, {"window": 8}], ids=str)
def test_export_without_class_of_transformers_is_refused(option, tmp_path, capsys):
    save_config(small_config(**option), tmp_path / "config.json")
    assert cli.main(["convert", "to-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "transformers has no class for a GPT with --model." in error
    assert all(f" --model.{name.replace('_', '-')} {value}" in error for name, value in option.items())
    assert not (tmp_path / "out").exists()
