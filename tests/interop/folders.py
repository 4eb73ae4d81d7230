"""Model folders of each family with random weights, written by the safetensors library and nothing of mjax."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 12, "n_head": 3,
    "n_positions": 16, "vocab_size": 257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForPreTraining"], "num_hidden_layers": 2, "hidden_size": 12,
    "num_attention_heads": 3, "intermediate_size": 24, "max_position_embeddings": 16, "vocab_size": 257,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02,
    "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1,
}  # fmt: skip
MEGATRON_BERT = BERT | {"model_type": "megatron-bert", "architectures": ["MegatronBertForPreTraining"]}
BLOOM = {
    "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 2, "hidden_size": 12, "n_head": 3,
    "seq_length": 16, "vocab_size": 257, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24,
    "max_position_embeddings": 16, "vocab_size": 257, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "attention_dropout": 0.0,
}  # fmt: skip


# Shapes by name; {} is a layer. A name that ends in neither `weight` nor `bias` has both; the bias is as long as the
# weight's outputs, which GPT-2 has last. v vocabulary, s positions, h hidden, f feed-forward, k keys of all heads.
_BERT_LAYER = "bert.encoder.layer.{}"
_BERT = {
    "bert.embeddings.word_embeddings.weight": "v h", "bert.embeddings.position_embeddings.weight": "s h",
    "bert.embeddings.token_type_embeddings.weight": "2 h", "bert.pooler.dense": "h h", "cls.predictions.bias": "v",
    "cls.predictions.transform.dense": "h h", "cls.predictions.transform.LayerNorm": "h", "cls.seq_relationship": "2 h",
    f"{_BERT_LAYER}.attention.self.query": "h h", f"{_BERT_LAYER}.attention.self.key": "h h",
    f"{_BERT_LAYER}.attention.self.value": "h h", f"{_BERT_LAYER}.attention.output.dense": "h h",
    f"{_BERT_LAYER}.intermediate.dense": "f h", f"{_BERT_LAYER}.output.dense": "h f",
}  # fmt: skip
SHAPES = {
    "gpt2": {
        "transformer.wte.weight": "v h", "transformer.wpe.weight": "s h", "transformer.ln_f": "h",
        "transformer.h.{}.ln_1": "h", "transformer.h.{}.attn.c_attn": "h 3h", "transformer.h.{}.attn.c_proj": "h h",
        "transformer.h.{}.ln_2": "h", "transformer.h.{}.mlp.c_fc": "h f", "transformer.h.{}.mlp.c_proj": "f h",
    },
    "bert": _BERT
    | dict.fromkeys(("bert.embeddings.LayerNorm", f"{_BERT_LAYER}.attention.output.LayerNorm"), "h")
    | {f"{_BERT_LAYER}.output.LayerNorm": "h"},
    "megatron-bert": _BERT
    | dict.fromkeys(("bert.encoder.ln", f"{_BERT_LAYER}.attention.ln", f"{_BERT_LAYER}.ln"), "h"),
    "bloom": {
        "transformer.word_embeddings.weight": "v h", "transformer.word_embeddings_layernorm": "h",
        "transformer.ln_f": "h", "transformer.h.{}.input_layernorm": "h",
        "transformer.h.{}.self_attention.query_key_value": "3h h", "transformer.h.{}.self_attention.dense": "h h",
        "transformer.h.{}.post_attention_layernorm": "h", "transformer.h.{}.mlp.dense_h_to_4h": "f h",
        "transformer.h.{}.mlp.dense_4h_to_h": "h f",
    },
    "llama": {
        "model.embed_tokens.weight": "v h", "model.norm.weight": "h", "lm_head.weight": "v h",
        "model.layers.{}.self_attn.q_proj.weight": "h h", "model.layers.{}.self_attn.k_proj.weight": "k h",
        "model.layers.{}.self_attn.v_proj.weight": "k h", "model.layers.{}.self_attn.o_proj.weight": "h h",
        "model.layers.{}.mlp.gate_proj.weight": "f h", "model.layers.{}.mlp.up_proj.weight": "f h",
        "model.layers.{}.mlp.down_proj.weight": "h f", "model.layers.{}.input_layernorm.weight": "h",
        "model.layers.{}.post_attention_layernorm.weight": "h",
    },
}  # fmt: skip


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Names and shapes as the `state_dict()` of the family's class has them, without the tied output layer."""
    kind, h = config["model_type"], config.get("n_embd") or config["hidden_size"]
    lengths = {"v": config["vocab_size"], "h": h, "3h": 3 * h, "2": 2}
    lengths["s"] = config.get("n_positions") or config.get("max_position_embeddings")
    lengths["f"] = config.get("n_inner") or config.get("intermediate_size") or 4 * h
    lengths["k"] = h // config.get("num_attention_heads", 1) * config.get("num_key_value_heads", 1)
    shapes = {}
    for name, letters in SHAPES[kind].items():
        shape = tuple(lengths[letter] for letter in letters.split())
        both = {"": shape}
        if not name.endswith(("weight", "bias")):
            both = {".weight": shape, ".bias": shape[-1:] if kind == "gpt2" else shape[:1]}
        for layer in range(config.get("n_layer") or config["num_hidden_layers"]) if "{}" in name else [0]:
            shapes |= {name.format(layer) + ending: each for ending, each in both.items()}
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict | None = None, tensors: dict | None = None, parts: int = 1) -> Path:
    config = CONFIG if config is None else config
    tensors = tensors_of(CONFIG) if tensors is None else tensors
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
