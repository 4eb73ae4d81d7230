"""Model folders of GPT-2 with random weights, written by the safetensors library and nothing of mjax."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 12,
    "n_head": 3,
    "n_positions": 16,
    "vocab_size": 257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Names and shapes as `GPT2LMHeadModel.state_dict()` has them, without the tied output layer."""
    h, random = config["n_embd"], np.random.default_rng(seed)
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
    draw = lambda shape: random.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
    return {f"transformer.{name}": draw(shape) for name, shape in shapes.items()}


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
