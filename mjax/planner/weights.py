"""The weights of a model as numbers alone: their shapes, and what of each one device stores and computes with.

The layout rules are those of `parallel/zero.py`, which decides by the arrays of a traced model. Here they are applied
to shapes that follow from the config, without JAX: thousands of configs a second. A test holds the two equal for every
published config under every mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mjax.config import MeshConfig, ModelConfig


@dataclass(frozen=True)
class Weight:
    """One weight of the model.

    Attributes:
      name: as `names.leaf_name` gives it.
      shape: of the whole weight; of stacked layers, that of one layer.
      split: the dim that is split over `model`; None: whole on every rank.
      layers: how many layers have it; 0: it belongs to no layer.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    layers: int


@dataclass(frozen=True)
class Held:
    """Elements that one device holds, of the stage of a pipeline that has its share of the layers.

    Attributes:
      stored: of master weights between steps, over layers and all else; moments and float32 gradients are as many each.
      layers: of the weights of its layers, as the computation uses them: split over `model` only.
      shared: of all other weights, as the computation uses them.
      gathered: of `layers`, those that are gathered layer by layer inside the loop (ZeRO-3) and never held as a whole.
      gathered_shards: of `stored`, the shards of those.
      table: of `shared`, the embedding of the tokens.
    """

    stored: int
    layers: int
    shared: int
    gathered: int
    gathered_shards: int
    table: int


@lru_cache(maxsize=64)
def weights_of(model: ModelConfig) -> tuple[Weight, ...]:
    """Every weight of a model, in no particular order."""
    h, f, n, d, v = model.hidden, model.mlp_width, model.heads, model.head_size, model.padded_vocabulary
    found: list[Weight] = []

    def add(name: str, *shape: int, split: int | None = None) -> None:
        found.append(Weight(name, shape, split, model.layers if name.startswith("blocks.") else 0))

    def add_norm(name: str) -> None:
        add(f"{name}.scale", h)
        add(f"{name}.bias", h)

    def add_linear(name: str, width: int, out: int) -> None:  # whole on every rank
        add(f"{name}.kernel", width, out)
        add(f"{name}.bias", out)

    # --- Layers ---
    add_norm("blocks.attention_norm")
    add("blocks.attention.qkv.kernel", h, 3, n, d, split=2)
    add("blocks.attention.qkv.bias", 3, n, d, split=1)
    add("blocks.attention.out.kernel", n, d, h, split=0)
    add("blocks.attention.out.bias", h)
    add_norm("blocks.mlp_norm")
    add("blocks.mlp.up.kernel", h, f, split=1)
    add("blocks.mlp.up.bias", f, split=0)
    add("blocks.mlp.down.kernel", f, h, split=0)
    add("blocks.mlp.down.bias", h)

    # --- Before and after them ---
    add("embedding.table", v, h, split=0)
    if model.positions == "learned":
        add("positions", model.sequence, h)
    if model.kind == "gpt":
        if model.embedding_layernorm:
            add_norm("embedding_norm")
        add_norm("final_norm")
        return tuple(found)
    add("token_types", 2, h)
    add_norm("final_norm" if model.layernorm == "pre" else "embedding_norm")
    if model.head != "span":
        add_linear("pooler", h, h)
    if model.head == "pretraining":
        add_linear("order", h, 2)
        add_linear("mlm.transform", h, h)
        add_norm("mlm.norm")
        add("mlm.bias", v, split=0)
    else:
        add_linear("head", h, model.outputs)
    return tuple(found)


@lru_cache(maxsize=4096)
def held(model: ModelConfig, pipe: int, data: int, ranks: int, zero: int) -> Held:
    """What one device holds of `model` on a mesh of `pipe` × `data` × `ranks` (those of `model`)."""
    stored = layers = shared = gathered = gathered_shards = table = 0
    for weight in weights_of(model):
        split = _stored(weight, pipe, data, ranks, zero)
        count = weight.layers // pipe if weight.layers else 1
        stored += split.stored * count
        if not weight.layers:
            shared += split.computed
            table += split.computed * (weight.name == "embedding.table")
            continue
        layers += split.computed * count
        if split.in_loop:
            gathered += split.computed * count
            gathered_shards += split.stored * count
    return Held(stored, layers, shared, gathered, gathered_shards, table)


def held_by(model: ModelConfig, mesh: MeshConfig) -> Held:
    """`held` for a `MeshConfig`."""
    return held(model, mesh.pipe, mesh.data, mesh.model, mesh.zero)


@dataclass(frozen=True)
class _Split:
    computed: int  # elements of the weight of the computation, of one layer
    stored: int  # elements of the master weight
    in_loop: bool


def _stored(weight: Weight, pipe: int, data: int, ranks: int, zero: int) -> _Split:
    """`zero._plan` in numbers: over each axis in turn, the first dim whose local rows divide is split."""
    local = list(weight.shape)
    if weight.split is not None:
        local[weight.split] //= ranks
    computed = math.prod(local)
    gathered = False
    for axis_ranks, wanted in ((pipe, pipe > 1 and not weight.layers), (data, zero > 0 and data > 1)):
        dim = next((dim for dim, rows in enumerate(local) if rows % axis_ranks == 0), None) if wanted else None
        if dim is not None:
            local[dim] //= axis_ranks
            gathered = True
    return _Split(computed, math.prod(local), zero == 3 and weight.layers > 0 and gathered)
