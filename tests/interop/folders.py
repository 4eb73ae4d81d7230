"""Model folders of each family with random weights, written by the safetensors library."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from mjax.interop.convert import find_family
from mjax.interop.weights import tensor_layouts
from mjax.models.huggingface.family import model_config

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


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by the names of the family's table, which tests/parity compares with `transformers`."""
    random, family = np.random.default_rng(seed), find_family(config, Path("config.json"))
    table = tensor_layouts(family, model_config(family, config, "config.json", 1))
    return {name: random.normal(0, 0.3, place.shape).astype(np.float32) for name, place in table.items()}


def write_folder(folder: Path, config: dict | None = None, tensors: dict | None = None, parts: int = 1) -> Path:
    config = CONFIG if config is None else config
    tensors = tensors_of(CONFIG) if tensors is None else tensors
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    tensor_layouts = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(tensor_layouts.values()):
        save_file({name: tensors[name] for name in tensors if tensor_layouts[name] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": tensor_layouts}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
