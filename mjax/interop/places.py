"""Where each of our weights lies in the files of others: the tensor's name, and the order of its dims.

A family of models is a table, a row for each weight of ours. BLOOM, which fuses queries, keys and values head by head
into a `torch.nn.Linear` [out, in], has the row

    "blocks.attention.qkv.kernel": ("(n c d) h", "transformer.h.{}.self_attention.query_key_value.weight")

where ours is [h, c, n, d] (`DIMS`). The form on the left is what the tensor's dims are made of, in their order; dims in
parentheses are one. So both ways are a transposition and a reshape, which the form alone describes. `{}` stands for the
number of the layer; ours has all layers stacked.

BERT has three tensors there, so its row has three names and a form without c: ours is the three, stacked along c.

    "blocks.attention.qkv.kernel": ("(n d) h", "….query.weight", "….key.weight", "….value.weight")
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import groupby

import numpy as np

from mjax.config import ModelConfig

Place = tuple[str, ...]
"""The form, and a name or several."""

DIMS = {
    "embedding.table": "v h",
    "embedding_norm.scale": "h",
    "embedding_norm.bias": "h",
    "positions": "s h",
    "token_types": "t h",
    "blocks.attention_norm.scale": "h",
    "blocks.attention_norm.bias": "h",
    "blocks.attention.qkv.kernel": "h c n d",
    "blocks.attention.qkv.bias": "c n d",
    "blocks.attention.out.kernel": "n d h",
    "blocks.attention.out.bias": "h",
    "blocks.mlp_norm.scale": "h",
    "blocks.mlp_norm.bias": "h",
    "blocks.mlp.up.kernel": "h f",
    "blocks.mlp.up.bias": "f",
    "blocks.mlp.down.kernel": "f h",
    "blocks.mlp.down.bias": "h",
    "final_norm.scale": "h",
    "final_norm.bias": "h",
    "mlm.transform.kernel": "h k",
    "mlm.transform.bias": "k",
    "mlm.norm.scale": "h",
    "mlm.norm.bias": "h",
    "mlm.bias": "v",
    "pooler.kernel": "h k",
    "pooler.bias": "k",
    "order.kernel": "h o",
    "order.bias": "o",
    "head.kernel": "h o",
    "head.bias": "o",
}
"""The dims of our weights: v vocabulary, s positions, t token types, h hidden and k once more, c the three of queries,
keys and values, n heads, d head size, f feed-forward, o the two orders, or what the head of a task gives. Layers are
stacked before these."""
STACKED = "c"
"""The dim along which a weight is several tensors, where they have names of their own."""
LAYERS = "blocks."
"""How the names of weights begin that each layer has."""


def sizes(model: ModelConfig) -> dict[str, int]:
    """How large each dim is, without the padding of the vocabulary."""
    return {
        "v": model.vocabulary,
        "s": model.sequence,
        "t": 2,
        "h": model.hidden,
        "k": model.hidden,
        "c": 3,
        "n": model.heads,
        "d": model.head_size,
        "f": model.mlp_width,
        "o": 2 if model.head == "pretraining" else model.outputs,
    }


def norm(ours: str, theirs: str) -> dict[str, Place]:
    """The two rows of a LayerNorm."""
    return {f"{ours}.scale": ("h", f"{theirs}.weight"), f"{ours}.bias": ("h", f"{theirs}.bias")}


def linear(ours: str, form: str, *theirs: str) -> dict[str, Place]:
    """The two rows of a linear layer: a bias is laid out as the outputs are in the `form` of the weight."""
    outputs = [group for group in _groups(form) if set(group) <= set(DIMS[f"{ours}.bias"])]
    bias = " ".join(f"({' '.join(group)})" for group in outputs)
    return {
        f"{ours}.kernel": (form, *(f"{name}.weight" for name in theirs)),
        f"{ours}.bias": (bias, *(f"{name}.bias" for name in theirs)),
    }


def shapes(places: Mapping[str, Place], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model: in the order of the table, and layer by layer."""
    size = sizes(model)
    found = {}
    for in_layers, rows in groupby(places.items(), key=lambda row: row[0].startswith(LAYERS)):
        rows = list(rows)
        for layer in range(model.layers if in_layers else 1):
            for _, (form, *names) in rows:
                shape = tuple(math.prod(size[dim] for dim in group) for group in _groups(form))
                found |= {name.format(layer): shape for name in names}
    return found


def to_ours(array: np.ndarray, name: str, form: str, size: Mapping[str, int]) -> np.ndarray:
    """A view of a tensor with the dims of our weight `name`, but for those that are not in its form.

    Args:
      array: the tensor.
      name: of our weight.
      form: of the tensor.
      size: what `sizes` gives.
    """
    dims = "".join(_groups(form))
    split = array.reshape([size[dim] for dim in dims])
    return split.transpose([dims.index(dim) for dim in _dims(name) if dim in dims])


def to_theirs(array: np.ndarray, name: str, form: str) -> np.ndarray:
    """The reverse of `to_ours`: a view where the form allows one, else a copy."""
    ours, groups = [dim for dim in _dims(name) if dim in form], _groups(form)
    size = dict(zip(ours, array.shape, strict=True))
    turned = array.transpose([ours.index(dim) for group in groups for dim in group])
    return turned.reshape([math.prod(size[dim] for dim in group) for group in groups])


def stacked_dim(name: str) -> int:
    """Where STACKED is among the dims of our weight `name`, one layer of it."""
    return _dims(name).index(STACKED)


def _dims(name: str) -> list[str]:
    return DIMS[name].split()


def _groups(form: str) -> list[str]:
    """'(n c d) h' → ['ncd', 'h']."""
    return [found.replace(" ", "").strip("()") for found in re.findall(r"\([^)]*\)|\w", form)]
