"""The products of linear layers with f in front of them, and the order of their backward passes.

f and the products behind it are differentiated as one, `into_columns`, so that the sum over the ranks in the backward
pass is beside the gradients of the weights. A kernel that is `frozen` has no gradient, and its input is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.parallel import float8, mappings
from mjax.parallel.float8 import Float8
from mjax.parallel.sums import add_bias, sum_rows
from mjax.parallel.tokens import Tokens


def linear(kernel: Array, x: Float[Array, " t *into"], dims: int, frozen: bool = False) -> Float[Array, " t *out"]:
    """y = x A, contracting the last `dims` dims of x with the first of the kernel, [*into, *out]; both vary over the
    same mesh axes."""
    return _linear(x, kernel, dims, frozen)


# The backward pass is written out for the order of dims in the weight's gradient: autodiff computes the transpose of
# gᵀ x, for which XLA copies g on a CPU (a sixth of the step); xᵀ g needs no copy.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _linear(x: Array, kernel: Array, dims: int, frozen: bool) -> Array:
    return _product(x, kernel, dims)


def _linear_backward(dims: int, frozen: bool, residuals, gradient: Array):
    x, kernel = residuals
    return input_gradient(gradient, dims, kernel), None if frozen else _kernel_gradient(x, gradient)


_linear.defvjp(
    lambda x, kernel, dims, frozen: (_product(x, kernel, dims), (None if frozen else x, kernel)), _linear_backward
)


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


# --- Operands, which may be in float8 ---------------------------------------------------------------------------------


def _entered(x: Array, tokens: Tokens) -> tuple[Array | Float8, Callable | None]:
    """f(x), and the backward pass of f. In float8 f gathers bytes, and its backward pass is not known here."""
    if not tokens.float8:
        return jax.vjp(tokens.enter, x)
    narrow = float8.rounded(x, float8.FORWARD)
    return Float8.of(tokens.enter(narrow.values), narrow.scale), None


def _restored(x: Array | Float8, dtype) -> Array:
    return float8.restored(x, dtype) if isinstance(x, Float8) else x


def _operand(kernel: Array, tokens: Tokens, scale: Array | None = None) -> tuple[Array, Array | None]:
    """A kernel as it is multiplied, and its scale if that is in float8; in the backward pass with the same scale."""
    if not tokens.float8:
        return kernel, None
    # XLA would round the weights of all layers together, and compile three times as long.
    kernel = jax.lax.optimization_barrier(kernel)
    scale = float8.scale_of(kernel, float8.FORWARD, (MODEL,)) if scale is None else scale
    return float8.on_grid(kernel, float8.FORWARD, scale), scale


# --- f, and the products of the same input ----------------------------------------------------------------------------


# f and the products behind it are differentiated as one, for their order (`overlapped_sum`).
@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def into_columns(
    x: Float[Array, "t h"],
    kernels: tuple[Array, ...],
    biases: tuple[Array | None, ...],
    tokens: Tokens,
    unfused: tuple[bool, ...],
    frozen: tuple[bool, ...],
) -> tuple[Float[Array, "bs ..."], ...]:
    """y = f(x) A + b for each kernel; for one that is `unfused` each of the parts along its first dim of columns.

    Kernels [h, *out] and biases [*out] vary over the same axes as the results.
    """
    return _columns_forward(x, kernels, biases, tokens, unfused, frozen)[0]


def _columns_forward(x: Array, kernels: tuple[Array, ...], biases: tuple, tokens: Tokens, unfused, frozen):
    outputs = []
    entered, back = _entered(x, tokens)
    saved = None if all(frozen) else entered
    operands, scales = zip(*(_operand(kernel, tokens) for kernel in kernels), strict=True)
    for operand, bias, cut in zip(operands, biases, unfused, strict=True):
        for part in range(operand.shape[1]) if cut else [...]:
            if tokens.float8:  # XLA joins small products of the same x, and would then not see that they are in float8
                entered = jax.lax.optimization_barrier(entered)
            y = _product(_restored(entered, x.dtype), operand[:, part], 1)
            outputs.append(y if bias is None else add_bias(y, bias[part]))
    return tuple(outputs), (saved, back, kernels, scales, biases)


def _columns_backward(tokens: Tokens, unfused: tuple[bool, ...], frozen: tuple[bool, ...], residuals, gradients):
    x, back, kernels, scales, biases = residuals
    back = back or (lambda gradient: (tokens.leave(gradient),))
    parts = iter(gradients)
    operands = [_operand(kernel, tokens, scale)[0] for kernel, scale in zip(kernels, scales, strict=True)]
    wholes = [
        _joined([next(parts) for _ in range(operand.shape[1])]) if cut else next(parts)
        for operand, cut in zip(operands, unfused, strict=True)
    ]
    to_biases = (None if bias is None else sum_rows(whole) for whole, bias in zip(wholes, biases, strict=True))
    if tokens.float8:
        x = None if x is None else _restored(x, wholes[0].dtype)
        wholes = [float8.on_grid(whole, float8.BACKWARD) for whole in wholes]
    to_x = sum(input_gradient(gradient, 1, operand) for gradient, operand in zip(wholes, operands, strict=True))
    to_kernels = tuple(None if no else _kernel_gradient(x, g) for no, g in zip(frozen, wholes, strict=True))
    to_x, to_kernels = overlapped_sum(back, to_x, to_kernels, tokens)
    return to_x, to_kernels, tuple(to_biases)


into_columns.defvjp(_columns_forward, _columns_backward)


def _joined(parts: list[Float[Array, " t *out"]]) -> Float[Array, "t parts *out"]:
    """The parts as one array: a sum of them with zeros around, which XLA joins and sums over rows in one
    kernel, as it does no concatenation."""
    zero, last = jnp.zeros((), parts[0].dtype), len(parts) - 1
    zero = mappings.vary(zero, mappings.varying_axes(parts[0]))
    edges = [(0, 0, 0)] * (parts[0].ndim - 1)
    return sum(
        jax.lax.pad(part[:, None], zero, [(0, 0, 0), (place, last - place, 0), *edges])
        for place, part in enumerate(parts)
    )


def overlapped_sum(back: Callable, gradient: Array, products, tokens: Tokens):
    """`gradient` summed over the ranks by `back`, the backward pass of f, and `products`, computed during that sum.

    With sequence parallelism neither is used before both are there: left alone, XLA may compute the gradients of
    weights at the end of a layer, and a sum has nothing beside it. Without, the sum is typed as replicated, and a
    barrier with values that differ from rank to rank would not keep that type.
    """
    (summed,) = back(gradient)
    return jax.lax.optimization_barrier((summed, products)) if tokens.split else (summed, products)


# --- Products, and g --------------------------------------------------------------------------------------------------


def from_rows(
    kernel: Array, x: Float[Array, " bs *into"], tokens: Tokens, adapter: Callable | None = None, frozen: bool = False
) -> Float[Array, "t h"]:
    """y = g(x A), this rank's rows of the stream, for a kernel [*into, h]; g also sums what `adapter` makes of x."""
    if tokens.float8:
        return _rows(x, kernel, tokens)
    y = linear(kernel, x, x.ndim - 1, frozen)
    return tokens.leave(y if adapter is None else y + adapter(x))


# The product and g are differentiated as one, because the gradient is rounded to float8 before it is gathered.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(x: Array, kernel: Array, tokens: Tokens) -> Array:
    return _rows_forward(x, kernel, tokens)[0]


def _rows_forward(x: Array, kernel: Array, tokens: Tokens):
    saved, (operand, scale) = float8.rounded(x, float8.FORWARD), _operand(kernel, tokens)
    partial = _product(float8.restored(saved, x.dtype), operand, x.ndim - 1)
    return tokens.leave(partial), (saved, kernel, scale)


def _rows_backward(tokens: Tokens, residuals, gradient: Array):
    saved, kernel, scale = residuals
    x, narrow = float8.restored(saved, gradient.dtype), float8.rounded(gradient, float8.BACKWARD)
    gradient = float8.restored(Float8.of(tokens.enter(narrow.values), narrow.scale), gradient.dtype)
    operand, _ = _operand(kernel, tokens, scale)
    return input_gradient(gradient, x.ndim - 1, operand), _kernel_gradient(x, gradient)


_rows.defvjp(_rows_forward, _rows_backward)
