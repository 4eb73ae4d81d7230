"""f, g and the matrix products between them, whose backward passes are written out; operands may be in float8.

A kernel that is `frozen` has no gradient, and its input is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.parallel import float8, mappings
from mjax.parallel.float8 import Float8
from mjax.parallel.overlap import linear_map, tie
from mjax.parallel.reductions import add_bias, sum_rows
from mjax.parallel.token_layout import TokenLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """Rows that are multiplied in float8.

    Attributes:
      rows: in the dtype of the stream, for their gradient alone; None where only the others are kept.
      narrow: the rows in float8.
      rounds_gradient: whether the gradient of the product is to be rounded: g has done that already.
    """

    rows: Float[Array, " t *into"] | None
    narrow: Float8 | None
    rounds_gradient: bool = field(metadata={"static": True})


Rows = Float[Array, " bs *into"] | Rounded


# --- f and g ----------------------------------------------------------------------------------------------------------


def enter(x: Float[Array, "t h"], kernels: tuple, tokens: TokenLayout, frozen: bool = False) -> tuple[Rows, tuple]:
    """f of x, in float8 for layers that multiply so. The kernels that x meets pass, so that the backward pass computes
    their gradients during its sum over the ranks; `frozen` ones have none."""
    if frozen:
        return _enter(x, (), tokens)[0], kernels
    return _enter(x, kernels, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _enter(x: Array, kernels: tuple, tokens: TokenLayout) -> tuple[Rows, tuple]:
    return _enter_forward(x, kernels, tokens)[0]


def _enter_forward(x: Array, kernels: tuple, tokens: TokenLayout):
    if not tokens.float8:
        entered, back = jax.vjp(tokens.enter, x)
        return (entered, kernels), back  # not by calling `_enter`: a checkpoint's policy would save what passes
    narrow = float8.quantize(x, float8.FORWARD)
    narrow = Float8.from_scaled(tokens.enter(narrow.values), narrow.scale)
    return (Rounded(float8.dequantize(narrow, x.dtype), narrow, True), kernels), None


def _enter_backward(tokens: TokenLayout, back: Callable | None, gradients):
    to_x, to_kernels = gradients
    if back is None:  # of float8 there is no gradient
        return reduce_overlapped(lambda gradient: (tokens.leave(gradient),), to_x.rows, to_kernels, tokens)
    return reduce_overlapped(back, to_x, to_kernels, tokens)


_enter.defvjp(_enter_forward, _enter_backward)


def reduce_overlapped(back: Callable, gradient: Array, products, tokens: TokenLayout) -> tuple[Array, Any]:
    """`gradient` summed over the ranks by `back`, the backward pass of f, and `products`, computed during that sum.

    With sequence parallelism neither is used before both are there: left alone, XLA may compute the gradients of
    weights at the end of a layer, and a sum has nothing to run during. Without, the sum is typed as replicated, and a
    tie with values that differ from rank to rank would not keep that type.
    """
    (summed,) = back(gradient)
    return tie((summed, products)) if tokens.split else (summed, products)


def leave(partial: Float[Array, " bs *dims"], tokens: TokenLayout) -> Float[Array, " t *dims"]:
    """g, whose gradient is rounded before it is gathered for layers that multiply in float8."""
    if not tokens.float8:
        return tokens.leave(partial)

    def gather(gradient, _):
        narrow = float8.quantize(gradient, float8.BACKWARD)
        return float8.dequantize(Float8.from_scaled(tokens.enter(narrow.values), narrow.scale), gradient.dtype)

    return linear_map(lambda partial, _: tokens.leave(partial), gather, partial)


# --- Products ---------------------------------------------------------------------------------------------------------


def linear(kernel: Array, x: Rows, dims: int = 1, frozen: bool = False) -> Float[Array, " t *out"]:
    """y = x A, contracting the last `dims` dims of x with the first of the kernel, [*into, *out]; both vary over the
    same mesh axes."""
    return linear_with_bias(x, kernel, None, dims, frozen, False)[0]


def flatten_rows(x: Float[Array, " t *into"], tokens: TokenLayout) -> Rows:
    """The operand of a product before g."""
    return Rounded(x, float8.quantize(jax.lax.stop_gradient(x), float8.FORWARD), False) if tokens.float8 else x


# The backward pass is written out for the order of dims in the weight's gradient: autodiff computes the transpose of
# gᵀ x, for which XLA copies g on a CPU (a sixth of the step); xᵀ g needs no copy.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def linear_with_bias(
    x: Rows, kernel: Array, bias: Array | None, dims: int, frozen: bool, by_part: bool
) -> tuple[Float[Array, " t *out"], ...]:
    """x A + b, as for `linear`; or for each of the parts of a kernel [h, parts, *out], by products of their own, so
    that nothing has to be copied out of the whole."""
    return _linear_forward(x, kernel, bias, dims, frozen, by_part)[0]


def _linear_forward(x: Rows, kernel: Array, bias: Array | None, dims: int, frozen: bool, by_part: bool):
    rows, operand, scale, saved, outputs = x, kernel, None, None if frozen else x, []
    if isinstance(x, Rounded):
        narrow, operand = tie((x.narrow, kernel))
        scale = float8.tensor_scale(operand, float8.FORWARD, (MODEL,))
        operand, saved = float8.fake_quantize(operand, float8.FORWARD, scale), replace(x, rows=None)
    for part in range(operand.shape[1]) if by_part else [...]:
        if isinstance(x, Rounded):  # XLA joins small products of the same rows, and would not see that they are float8
            narrow = tie(narrow)
            rows = float8.dequantize(narrow, x.rows.dtype)
        y = _product(rows, operand[:, part], dims)
        outputs.append(y if bias is None else add_bias(y, bias[part]))
    return tuple(outputs), (saved, kernel, scale, bias)


def _linear_backward(dims: int, frozen: bool, by_part: bool, residuals, gradients):
    x, kernel, scale, bias = residuals
    gradient = _stack_parts(gradients) if by_part else gradients[0]
    to_bias, rows = None if bias is None else sum_rows(gradient), x
    if isinstance(x, Rounded):
        rows, kernel = (
            float8.dequantize(x.narrow, gradient.dtype),
            float8.fake_quantize(tie(kernel), float8.FORWARD, scale),
        )
        gradient = float8.fake_quantize(gradient, float8.BACKWARD) if x.rounds_gradient else gradient
    to_x = input_gradient(gradient, dims, kernel)
    to_kernel = None if frozen else _kernel_gradient(rows, gradient)
    return replace(x, rows=to_x, narrow=None) if isinstance(x, Rounded) else to_x, to_kernel, to_bias


linear_with_bias.defvjp(_linear_forward, _linear_backward)


def _product(x: Array, kernel: Array, dims: int) -> Array:
    out = kernel.shape[dims:]
    y = _matrix(x, dims) @ _matrix(kernel, len(out))
    return y.reshape(*x.shape[: x.ndim - dims], *out)


def input_gradient(gradient: Float[Array, " t *out"], dims: int, kernel: Array) -> Float[Array, " t *into"]:
    """g Aᵀ, the gradient of the input of `linear`, whose last `dims` dims A contracts."""
    out = gradient.ndim - 1
    return (_matrix(gradient, out) @ _matrix(kernel, out).T).reshape(len(gradient), *kernel.shape[:dims])


def _kernel_gradient(x: Float[Array, " t *into"], gradient: Float[Array, " t *out"]) -> Array:
    """xᵀ g, the gradient of the kernel of `linear`, [*into, *out]."""
    product = _matrix(x, x.ndim - 1).T @ _matrix(gradient, gradient.ndim - 1)
    return product.reshape(*x.shape[1:], *gradient.shape[1:])


def _matrix(x: Array, columns: int) -> Array:
    """`x` as a matrix: its last `columns` dims in one dim and the others in another."""
    return x.reshape(math.prod(x.shape[: x.ndim - columns]), -1)


def _stack_parts(parts: tuple[Float[Array, " t *out"], ...]) -> Float[Array, "t parts *out"]:
    """The parts as one array: a sum of them with zeros around, which XLA joins and sums over rows in one
    kernel, as it does no concatenation."""
    zero, last = jnp.zeros((), parts[0].dtype), len(parts) - 1
    zero = mappings.vary(zero, mappings.varying_axes(parts[0]))
    edges = [(0, 0, 0)] * (parts[0].ndim - 1)
    return sum(
        jax.lax.pad(part[:, None], zero, [(0, 0, 0), (place, last - place, 0), *edges])
        for place, part in enumerate(parts)
    )


# --- Scores of the vocabulary -----------------------------------------------------------------------------------------


# The backward pass is written out for its order. By itself XLA computes the table's gradient only after the backward
# pass of all layers, and the gradient of the logits, [t, v / p], stays in memory until then. With a bias it would
# compute that gradient twice, and keep the logits for the second time.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def scores(
    x: Float[Array, "t h"], table: Array, bias: Float[Array, " v"] | None, tokens: TokenLayout, frozen: bool
) -> Float[Array, "bs v"]:
    """f(x) Eᵀ + b, for a table [v, h]."""
    return _scores_forward(x, table, bias, tokens, frozen)[0]


def _scores_forward(x: Array, table: Array, bias: Array | None, tokens: TokenLayout, frozen: bool):
    x, back = jax.vjp(tokens.enter, x)
    y = x @ table.T
    return y if bias is None else y + bias, (None if frozen else x, back, table, bias)


def _scores_backward(tokens: TokenLayout, frozen: bool, residuals, gradient: Array):
    x, back, table, bias = residuals
    gradient = gradient if bias is None else tie(gradient)
    to_weights = None if frozen else gradient.T @ x, None if bias is None else sum_rows(gradient)
    products = gradient @ table, to_weights
    to_x, to_weights = reduce_overlapped(back, *(products if tokens.split else tie(products)), tokens)
    return to_x, *to_weights


scores.defvjp(_scores_forward, _scores_backward)
