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


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Names and shapes as the `state_dict()` of the family's class has them, without the tied output layer."""
    families = {"gpt2": _gpt2, "bert": _bert, "megatron-bert": _bert, "bloom": _bloom, "llama": _llama}
    shapes = families[config["model_type"]](config)
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def _gpt2(config: dict) -> dict[str, tuple[int, ...]]:
    h = config["n_embd"]
    f = config.get("n_inner") or 4 * h
    shapes = {"wte.weight": (config["vocab_size"], h), "wpe.weight": (config["n_positions"], h)}
    for i in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (h,), f"h.{i}.{norm}.bias": (h,)}
        for conv, into, out in (
            ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, f), ("mlp.c_proj", f, h),
        ):  # fmt: skip
            shapes |= {f"h.{i}.{conv}.weight": (into, out), f"h.{i}.{conv}.bias": (out,)}
    shapes |= {"ln_f.weight": (h,), "ln_f.bias": (h,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def _bert(config: dict) -> dict[str, tuple[int, ...]]:
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {
        "bert.embeddings.word_embeddings.weight": (v, h),
        "bert.embeddings.position_embeddings.weight": (config["max_position_embeddings"], h),
        "bert.embeddings.token_type_embeddings.weight": (2, h),
        "cls.predictions.bias": (v,),
    }
    post = config["model_type"] == "bert"
    norms = ["cls.predictions.transform.LayerNorm", "bert.embeddings.LayerNorm" if post else "bert.encoder.ln"]
    linears = {
        "bert.pooler.dense": (h, h),
        "cls.predictions.transform.dense": (h, h),
        "cls.seq_relationship": (2, h),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{i}"
        linears |= {f"{layer}.attention.self.{part}": (h, h) for part in ("query", "key", "value")}
        linears |= {
            f"{layer}.attention.output.dense": (h, h),
            f"{layer}.intermediate.dense": (f, h),
            f"{layer}.output.dense": (h, f),
        }
        inside = ("attention.output.LayerNorm", "output.LayerNorm") if post else ("attention.ln", "ln")
        norms += [f"{layer}.{norm}" for norm in inside]
    for norm in norms:
        shapes |= {f"{norm}.weight": (h,), f"{norm}.bias": (h,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _bloom(config: dict) -> dict[str, tuple[int, ...]]:
    h = config["hidden_size"]
    shapes = {"word_embeddings.weight": (config["vocab_size"], h)}
    norms = ["word_embeddings_layernorm", "ln_f"]
    for i in range(config["n_layer"]):
        norms += [f"h.{i}.input_layernorm", f"h.{i}.post_attention_layernorm"]
        for linear, out, into in (
            ("self_attention.query_key_value", 3 * h, h), ("self_attention.dense", h, h),
            ("mlp.dense_h_to_4h", 4 * h, h), ("mlp.dense_4h_to_h", h, 4 * h),
        ):  # fmt: skip
            shapes |= {f"h.{i}.{linear}.weight": (out, into), f"h.{i}.{linear}.bias": (out,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (h,), f"{norm}.bias": (h,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def _llama(config: dict) -> dict[str, tuple[int, ...]]:
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = h // config["num_attention_heads"]
    k = config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (v, h)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part, shape in {"q": (h, h), "k": (k, h), "v": (k, h), "o": (h, h)}.items():
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = shape
        for part, shape in {"gate": (f, h), "up": (f, h), "down": (h, f)}.items():
            shapes[f"{layer}.mlp.{part}_proj.weight"] = shape
        shapes |= {f"{layer}.{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (v, h)}


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
