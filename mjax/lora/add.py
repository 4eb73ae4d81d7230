"""LoRA: a model whose weights are frozen, with adapters that are trained (arXiv 2106.09685; `adapters.py`).

Any model gets them, after it is built: every column- or row-parallel layer of its stacked layers whose name is among
`lora.targets`. The experts of a mixture, which are no such layers, stay frozen without adapters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import jax
from flax import nnx
from jax import Array

from mjax.config.axes import MODEL
from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.lora.adapters import ColumnAdapter, RowAdapter
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, parameter

PARTS = {"qkv": ("q", "k", "v"), "query": ("q",), "key_value": ("k", "v")}
"""The targets in a layer with this name; any other layer is a target by its own name."""
GATED = ("gate", "up")
"""Those of `up` in a gated MLP."""

Linear = ColumnParallelLinear | RowParallelLinear


def add_adapters(model: nnx.Module, key: Array, dtype) -> nnx.Module:
    """Freeze the weights of `model` and add the adapters that its config asks for; A is drawn from `key` and the name
    of the layer, and B is zero, so that the model computes what it did.

    Raises:
      UsageError: the model has no such layer, or the rank is above that of a matrix.
    """
    config, found = model.config, set()
    for _, weight in nnx.iter_graph(model):
        if isinstance(weight, nnx.Param):
            weight.set_metadata(frozen=True)
    wanted = set(config.lora_targets)
    for path, name, layer in list(linear_layers(model)):
        targets = targets_of(name, layer)
        parts = tuple(i for i, target in enumerate(targets) if target in wanted or "all" in wanted)
        found |= set(targets)
        if parts:
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            make = _beside_columns if isinstance(layer, ColumnParallelLinear) else _beside_rows
            layer.adapter = make(own, layer, config, parts, dtype)
    if unknown := sorted(wanted - found - {"all"}):
        raise UsageError(f"--lora.targets {unknown[0]}: the layers of {config.title} are {', '.join(sorted(found))}")
    return model


def linear_layers(model: nnx.Module) -> Iterator[tuple[str, str, Linear]]:
    """The column- and row-parallel layers of the stacked layers: dotted path, last name, and the layer."""
    for path, layer in nnx.iter_modules(model):
        if path and path[0] == "blocks" and isinstance(layer, Linear):
            yield ".".join(map(str, path)), str(path[-1]), layer


def targets_of(name: str, layer: Linear) -> tuple[str, ...]:
    """The names in `lora.targets` of the parts of a layer, in order."""
    gated = name == "up" and isinstance(layer, ColumnParallelLinear) and layer.split
    return GATED if gated else PARTS.get(name, (name,))


def _beside_columns(
    key: Array, layer: ColumnParallelLinear, config: ModelConfig, parts: tuple[int, ...], dtype
) -> ColumnAdapter:
    """For a kernel [*layers, h, (parts,) *out]."""
    (rows,), _ = layer.kernel.get_metadata()["matrix"]
    shape, rank = layer.kernel.shape, config.lora_rank
    (*layers, width), out = shape[: len(shape) + rows + 1], shape[len(shape) + rows + 1 + layer.split :]
    _check_rank(rank, width, math.prod(out))
    lead = (None,) * len(layers)
    a = (*layers, width, len(parts), rank)
    a = parameter(key, uniform(width), a, (*lead, None, None, None), dtype, grad_partial_over_model=True)
    spec = (*lead, None, None, MODEL, *(None,) * (len(out) - 1))
    b = parameter(key, jax.nn.initializers.zeros, (*layers, len(parts), rank, *out), spec, dtype)
    return ColumnAdapter(a, b, config.lora_scale, config.lora_dropout, parts=parts)


def _beside_rows(key: Array, layer: RowParallelLinear, config: ModelConfig, _, dtype) -> RowAdapter:
    """For a kernel [*layers, *into, h]."""
    rows, _ = layer.kernel.get_metadata()["matrix"]
    shape, rank = layer.kernel.shape, config.lora_rank
    layers, into, width = shape[: len(shape) + rows[0]], shape[len(shape) + rows[0] : -1], shape[-1]
    _check_rank(rank, math.prod(into), width)
    lead = (None,) * len(layers)
    a = parameter(key, uniform(math.prod(into)), (*layers, *into, rank), (*lead, MODEL, *(None,) * len(into)), dtype)
    b = parameter(
        key, jax.nn.initializers.zeros, (*layers, rank, width), (*lead, None, None), dtype,
        grad_partial_over_model=True,
    )  # fmt: skip
    return RowAdapter(a, b, config.lora_scale, config.lora_dropout)


def uniform(inputs: int):
    """PyTorch's initial weights of a linear layer, and peft's of A: uniform up to 1 / √inputs."""
    bound = 1 / math.sqrt(inputs)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _check_rank(rank: int, rows: int, columns: int) -> None:
    if rank > min(rows, columns):
        raise UsageError(
            f"--lora.rank {rank} is above the rank of a matrix of {rows:,} × {columns:,}; use at most "
            f"{min(rows, columns)}"
        )
