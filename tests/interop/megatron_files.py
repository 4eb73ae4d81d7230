"""Megatron's checkpoints written by hand, slowly and without mjax: the other side of every conversion in the tests.

A model is {our name: array} as `tests.small.named` gives it: whole, kernels [in, out], layers stacked.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mjax.config import ModelConfig
from mjax.models.build import abstract_weights


def harmless_arguments() -> dict[str, Any]:
    """Every default of megatron-core 0.19.2 that is neither None nor False, 0 or empty, what its runs add, arguments of
    versions since 2020, and settings of training."""
    written = Path(__file__).with_name("megatron_arguments.txt").read_text().split()
    return {name: json.loads(value) for name, _, value in (each.partition("=") for each in written)}


def draw(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights; the rows that pad the vocabulary are 0."""
    random = np.random.default_rng(seed)
    shapes = {name: shape for name, (shape, _) in abstract_weights(model).items()}
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in weights.keys() & {"embedding.table", "head.table", "mlm.bias"}:
        weights[name][model.vocabulary :] = 0
    return weights


def fused(q_k_v: np.ndarray, version: float) -> np.ndarray:
    """Queries, keys and values [3, n, d, …] of a rank's heads as Megatron fuses them, one output after the other."""
    three, heads, size = q_k_v.shape[:3]
    if version == 0:
        order = [(c, n, d) for c in range(three) for n in range(heads) for d in range(size)]
    elif version == 1:
        order = [(c, n, d) for n in range(heads) for d in range(size) for c in range(three)]
    else:
        order = [(c, n, d) for n in range(heads) for c in range(three) for d in range(size)]
    return np.stack([q_k_v[place] for place in order])


def share(
    weights: dict[str, np.ndarray], model: ModelConfig, version: float, rank: int = 0, ranks: int = 1,
    stage: int = 0, stages: int = 1, padded: int | None = None,
) -> dict:  # fmt: skip
    """Return the share of a rank, nested and named as in 2020.

    Args:
      weights: the model.
      model: its shape.
      version: `checkpoint_version`.
      rank, ranks, stage, stages: which of the tensor ranks, and of the stages of the pipeline.
      padded: rows of Megatron's embedding, numbers that mean nothing in those that pad it.
    """
    padded = padded or model.vocabulary
    part = lambda extent: slice(rank * extent // ranks, (rank + 1) * extent // ranks)  # noqa: E731

    def rows(array):
        junk = np.full((padded - model.vocabulary, *array.shape[1:]), 7.5, np.float32)
        return np.concatenate([array[: model.vocabulary], junk])[part(padded)]

    def norm(name, layer=None):
        scale, bias = weights[f"{name}.scale"], weights[f"{name}.bias"]
        return {"weight": scale, "bias": bias} if layer is None else {"weight": scale[layer], "bias": bias[layer]}

    def linear(name):
        return {"weight": weights[f"{name}.kernel"].T, "bias": weights[f"{name}.bias"]}

    per_stage = model.layers // stages
    layers, post = {}, getattr(model, "layernorm", "pre") == "post"
    for local, i in enumerate(range(stage * per_stage, (stage + 1) * per_stage)):
        of = {name.removeprefix("blocks."): array[i] for name, array in weights.items() if name.startswith("blocks.")}
        heads, wide = part(model.heads), part(model.mlp_width)
        kernel = of["attention.qkv.kernel"].transpose(1, 2, 3, 0)[:, heads]  # [3, n, d, h]
        before = norm("blocks.attention_norm", i)
        if post:
            before = norm("embedding_norm") if i == 0 else norm("blocks.mlp_norm", i - 1)
        modules = {
            "input_layernorm": before,
            "attention.query_key_value": {
                "weight": fused(kernel, version),
                "bias": fused(of["attention.qkv.bias"][:, heads], version),
            },
            "attention.dense": {
                "weight": of["attention.out.kernel"][heads].reshape(-1, model.hidden).T,
                "bias": of["attention.out.bias"],
            },
            "post_attention_layernorm": norm("blocks.attention_norm" if post else "blocks.mlp_norm", i),
            "mlp.dense_h_to_4h": {"weight": of["mlp.up.kernel"][:, wide].T, "bias": of["mlp.up.bias"][wide]},
            "mlp.dense_4h_to_h": {"weight": of["mlp.down.kernel"][wide].T, "bias": of["mlp.down.bias"]},
        }
        layers |= {f"layers.{local}.{at}.{what}": x for at, both in modules.items() for what, x in both.items()}

    first, last, bert = stage == 0, stage == stages - 1, model.kind == "bert"
    if last:
        final = norm("blocks.mlp_norm", model.layers - 1) if post else norm("final_norm")
        layers |= {f"final_layernorm.{what}": array for what, array in final.items()}
    embedding = {
        "word_embeddings": {"weight": rows(weights["embedding.table"])},
        "position_embeddings": {"weight": weights["positions"]},
    }
    if bert:
        embedding["tokentype_embeddings"] = {"weight": weights["token_types"]}
    head = {}
    if bert and last:
        head = {"dense": linear("mlm.transform"), "layernorm": norm("mlm.norm")}
    language = {"transformer": layers}
    if first:
        language["embedding"] = embedding
    model_dict: dict = {"language_model": language}
    if last and not first:
        model_dict["word_embeddings_for_head"] = {"weight": rows(weights["embedding.table"])}
    if head:
        language["pooler"] = {f"dense.{what}": array for what, array in linear("pooler").items()}
        both = {f"{module}.{what}": array for module, pair in head.items() for what, array in pair.items()}
        model_dict["lm_head"] = {"bias": rows(weights["mlm.bias"]), **both}
        model_dict["binary_head"] = linear("order")
    return model_dict
