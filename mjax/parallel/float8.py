"""Matrices in float8: values of one byte, and one scale for all of them ("per-tensor current scaling").

    x ≈ scale · values        values    e4m3 (activations, weights) or e5m2 (gradients), rounded to nearest
                              scale     a power of two: the smallest for which no value overflows

The scale follows from the largest magnitude in the current array, not in earlier steps, and all ranks that hold a shard
of the array agree on it. As a power of two it changes no digit of a value. It only decides which of the very small
values lose digits or become zero: below 2^-6 of the scale in e4m3, below 2^-14 in e5m2. So the scale of another mesh
or micro-batch hardly changes a matmul. It also makes `quantize` exact for arrays that are in float8 already, so that
these can be sent in float8.

Matmuls multiply the result of `dequantize`. On a GPU XLA compiles that to a matmul of the float8 values (cuBLASLt),
with float32 sums; elsewhere the matmul has the dtype of the residual stream, in which the same values are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from mjax.config.axes import MODEL, axes_sharing_weights
from mjax.parallel import mappings
from mjax.parallel.autodiff import blockwise_sum, to_at_least_float32

FORWARD = jnp.float8_e4m3fn  # of activations and weights: 4 significant bits, up to 448
BACKWARD = jnp.float8_e5m2  # of gradients: 3 significant bits, up to 57,344
EXPONENTS = (-60, 60)  # bounds of a scale's exponent: the product of two scales is a float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8:
    """An array in float8.

    Attributes:
      bits: the values as integers. (`jax.checkpoint` rounds what it saves to its dtype; in e4m3 that turns all values
        above 240, which an IEEE type of 4 exponent bits would not have, into NaN.)
      scale: a power of two; the same on every rank that has a part of the array: [], or for stacked arrays one for
        each (`weight_scales`), with as many dims as the values.
      dtype: of the values.
    """

    bits: UInt8[Array, "*dims"]
    scale: Float[Array, ...]
    dtype: Any = field(metadata={"static": True})

    @classmethod
    def from_scaled(cls, values: Array, scale: Array) -> Float8:
        """The array scale · values."""
        return cls(jax.lax.bitcast_convert_type(values, jnp.uint8), scale, values.dtype)

    @property
    def values(self) -> Array:
        """The values in float8."""
        return jax.lax.bitcast_convert_type(self.bits, self.dtype)


def quantize(x: Array, dtype, scale: Array | None = None) -> Float8:
    """`x` in float8; NaN and infinities stay NaN or infinity.

    Args:
      scale: from `tensor_scale`; by default computed from this array over the ranks that hold its shards.
    """
    scale = tensor_scale(x, dtype, (MODEL, *axes_sharing_weights())) if scale is None else scale
    wide = to_at_least_float32(x)
    return Float8.from_scaled((wide * (1 / scale).astype(wide.dtype)).astype(dtype), scale)


def weight_scales(x: Float[Array, ...], dtype, axes: tuple[str, ...], stacked: int) -> Float[Array, ...]:
    """The scale of each of the arrays that are stacked along the first `stacked` dims of `x`."""
    scale = partial(tensor_scale, dtype=dtype, axes=axes)
    for _ in range(stacked):
        scale = jax.vmap(scale)
    return scale(x)


def dequantize(x: Float8, dtype) -> Array:
    """The array scale · values, exactly."""
    return x.values.astype(dtype) * x.scale.astype(dtype)


def fake_quantize(x: Float[Array, "*dims"], dtype, scale: Array | None = None) -> Float[Array, "*dims"]:
    """`x` with its values rounded to float8 values."""
    return dequantize(quantize(x, dtype, scale), x.dtype)


def tensor_scale(x: Float[Array, ...], dtype, axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """The scale of `x` in a float8 dtype.

    Args:
      axes: mesh axes whose ranks have parts of the array, if it varies over them.
    """
    axes = tuple(axis for axis in axes if axis in mappings.varying_axes(x))
    largest = mappings.pmax(blockwise_sum(jnp.abs(x), jnp.max).max().astype(jnp.float32), axes)
    # With largest = m · 2^e and the dtype's limit = M · 2^E: the smallest k with largest ≤ limit · 2^k. No division is
    # rounded. For zero, infinities and NaN e is 0.
    max_fraction, max_exponent = math.frexp(float(jnp.finfo(dtype).max))
    fraction, exponent = jnp.frexp(largest)
    exponent = jnp.where(fraction == 0, max_exponent, exponent)
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent - max_exponent + (fraction > max_fraction), *EXPONENTS))
