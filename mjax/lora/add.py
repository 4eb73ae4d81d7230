"""LoRA: a model whose weights are frozen, with adapters that are trained (arXiv 2106.09685; `adapters.py`).

Any model gets them, after it is built: every column- or row-parallel layer of its stacked layers whose name is among
`lora.targets`. The experts of a mixture, which are no such layers, stay frozen without adapters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from functools import partial

import jax
from flax import nnx
from jax import Array

from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.lora.adapters import ColumnAdapter, RowAdapter
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mjax.parallel.weights import COLUMNS, IN, INPUTS, LAYER, OUT, OUTPUTS, PART, ROWS, parameter

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
        if isinstance(layer, Linear) and LAYER in layer.kernel.get_metadata()["dims"]:
            yield ".".join(map(str, path)), str(path[-1]), layer


def targets_of(name: str, layer: Linear) -> tuple[str, ...]:
    """The names in `lora.targets` of the parts of a layer, in order: a layer without parts has its own name."""
    return getattr(layer, "parts", ()) or (name,)


def _beside_columns(
    key: Array, layer: ColumnParallelLinear, config: ModelConfig, parts: tuple[int, ...], dtype
) -> ColumnAdapter:
    """For a kernel [*layers, h, (parts,) *out]."""
    (layers, (width,), out), rank = _sizes_of(layer), config.lora_rank
    _check_rank(rank, width, math.prod(out))
    make, count = partial(_matrix, key, layers, dtype=dtype), len(parts)
    a = make((width, count, rank), (IN, PART, OUT), uniform(width), grad_partial_over_model=True)
    b = make((count, rank, *out), (PART, IN, COLUMNS, *(OUT,) * (len(out) - 1)))
    return ColumnAdapter(a, b, config.lora_scale, config.lora_dropout, parts=parts)


def _beside_rows(key: Array, layer: RowParallelLinear, config: ModelConfig, _, dtype) -> RowAdapter:
    """For a kernel [*layers, *into, h]."""
    (layers, into, (width,)), rank = _sizes_of(layer), config.lora_rank
    _check_rank(rank, math.prod(into), width)
    make = partial(_matrix, key, layers, dtype=dtype)
    a = make((*into, rank), (ROWS, *(IN,) * (len(into) - 1), OUT), uniform(math.prod(into)))
    b = make((rank, width), (IN, OUT), grad_partial_over_model=True)
    return RowAdapter(a, b, config.lora_scale, config.lora_dropout)


def _matrix(key: Array, layers, shape, dims, initializer=jax.nn.initializers.zeros, *, dtype, **marks) -> nnx.Param:
    """A matrix of an adapter, in all stacked `layers`; by default zero."""
    shape, dims = (*layers, *shape), ((LAYER,) * len(layers) + dims)
    return parameter(key, initializer, shape, dims, dtype, muon=False, **marks)


def _sizes_of(layer: Linear) -> list[tuple[int, ...]]:
    """The sizes of a layer's kernel along dims that are layers, inputs, and outputs."""
    sizes = list(zip(layer.kernel.get_metadata()["dims"], layer.kernel.shape, strict=True))
    return [tuple(size for dim, size in sizes if dim in kind) for kind in ((LAYER,), INPUTS, OUTPUTS)]


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
