"""f, g and the matmuls between them, with custom backward passes; operands may be in float8.

A `frozen` kernel has no gradient, so its input is not saved.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.parallel import float8, mappings
from mjax.parallel.autodiff import linear_call, optimization_barrier
from mjax.parallel.float8 import Float8
from mjax.parallel.reductions import add_bias, sum_rows
from mjax.parallel.token_layout import TokenLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Float8Rows:
    """Rows that are multiplied in float8.

    Attributes:
      rows: in the dtype of the residual stream, for their gradient alone; None in residuals for the backward pass.
      quantized: the rows in float8.
      quantize_gradient: whether the matmul has to round its gradient; g rounds the one that it gathers.
    """

    rows: Float[Array, " t *into"] | None
    quantized: Float8 | None
    quantize_gradient: bool = field(metadata={"static": True})


Rows = Float[Array, " bs *into"] | Float8Rows


# --- f and g ----------------------------------------------------------------------------------------------------------


def column_parallel_input(
    x: Float[Array, "t h"], kernels: tuple, tokens: TokenLayout, frozen: bool = False
) -> tuple[Rows, tuple]:
    """f of x, in float8 for layers that multiply in it, and the kernels that will multiply the result.

    The kernels pass through, so that the backward pass computes their gradients while it reduces the gradient of x over
    the ranks; `frozen` kernels have no gradient.
    """
    if frozen:
        return _column_parallel_input(x, (), tokens)[0], kernels
    return _column_parallel_input(x, kernels, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _column_parallel_input(x: Array, kernels: tuple, tokens: TokenLayout) -> tuple[Rows, tuple]:
    return _column_input_forward(x, kernels, tokens)[0]


# It does not call `_column_parallel_input`: a checkpoint's policy would save what passes through.
def _column_input_forward(x: Array, kernels: tuple, tokens: TokenLayout):
    if not tokens.float8:
        return (tokens.gather_rows(x), kernels), None
    quantized = _gather_float8(x, float8.FORWARD, tokens)
    return (Float8Rows(float8.dequantize(quantized, x.dtype), quantized, True), kernels), None


def _column_input_backward(tokens: TokenLayout, _, gradients):
    dx, dkernels = gradients
    return reduce_with_overlap(dx.rows if tokens.float8 else dx, dkernels, tokens)


_column_parallel_input.defvjp(_column_input_forward, _column_input_backward)


def reduce_with_overlap(dx: Float[Array, "bs h"], gradients, tokens: TokenLayout) -> tuple[Float[Array, "t h"], Any]:
    """The backward pass of f: dx reduced over the ranks, and `gradients` of weights, computed during that reduction.

    With sequence parallelism neither is used before both are computed: XLA might otherwise compute the gradients of
    weights at the end of a layer, and the reduction would overlap with nothing. Without, the sum is typed as
    replicated, and a barrier with values that vary over ranks would change its type.
    """
    reduced = tokens.reduce_rows(dx), gradients
    return optimization_barrier(reduced) if tokens.sequence_parallel else reduced


def row_parallel_output(partial: Float[Array, " bs *dims"], tokens: TokenLayout) -> Float[Array, " t *dims"]:
    """g, whose gradient is rounded before it is gathered for layers that multiply in float8."""
    if not tokens.float8:
        return tokens.reduce_rows(partial)

    def gather(gradient, _):
        return float8.dequantize(_gather_float8(gradient, float8.BACKWARD, tokens), gradient.dtype)

    return linear_call(lambda partial, _: tokens.reduce_rows(partial), gather, partial)


def _gather_float8(x: Float[Array, " t *dims"], dtype, tokens: TokenLayout) -> Float8:
    """Quantize this rank's rows and gather the rows of all ranks."""
    quantized = float8.quantize(x, dtype)
    return Float8.from_scaled(tokens.gather_rows(quantized.values), quantized.scale)


# --- Matmuls ----------------------------------------------------------------------------------------------------------


def linear(kernel: Array, x: Rows, dims: int = 1, frozen: bool = False) -> Float[Array, " t *out"]:
    """y = x A, contracting the last `dims` dims of x with the first of the kernel, [*into, *out]; both vary over the
    same mesh axes."""
    return linear_with_bias(x, kernel, None, dims, frozen, False)[0]


def row_parallel_input(x: Float[Array, " t *into"], tokens: TokenLayout) -> Rows:
    """The operand of a matmul before g, in float8 for layers that multiply in it."""
    return Float8Rows(x, float8.quantize(jax.lax.stop_gradient(x), float8.FORWARD), False) if tokens.float8 else x


# A custom backward pass, for the order of dims in the weight's gradient: autodiff computes the transpose of gᵀ x, for
# which XLA copies g on a CPU (a sixth of the step); xᵀ g needs no copy.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def linear_with_bias(
    x: Rows, kernel: Array, bias: Array | None, dims: int, frozen: bool, by_part: bool
) -> tuple[Float[Array, " t *out"], ...]:
    """x A + b, as for `linear`; with `by_part` a matmul for each part of a kernel [h, parts, *out], so that no output
    has to be copied out of a larger one."""
    return _linear_forward(x, kernel, bias, dims, frozen, by_part)[0]


def _linear_forward(x: Rows, kernel: Array, bias: Array | None, dims: int, frozen: bool, by_part: bool):
    rows, operand, scale, saved, outputs = x, kernel, None, None if frozen else x, []
    if isinstance(x, Float8Rows):
        quantized, operand = optimization_barrier((x.quantized, kernel))
        scale = float8.tensor_scale(operand, float8.FORWARD, (MODEL,))
        operand, saved = float8.fake_quantize(operand, float8.FORWARD, scale), replace(x, rows=None)
    for part in range(operand.shape[1]) if by_part else [...]:
        if isinstance(x, Float8Rows):  # XLA would join small matmuls of the same rows, and not see that they are float8
            quantized = optimization_barrier(quantized)
            rows = float8.dequantize(quantized, x.rows.dtype)
        y = _matmul(rows, operand[:, part], dims)
        outputs.append(y if bias is None else add_bias(y, bias[part]))
    return tuple(outputs), (saved, kernel, scale, bias)


def _linear_backward(dims: int, frozen: bool, by_part: bool, residuals, gradients):
    x, kernel, scale, bias = residuals
    dy = _stack_parts(gradients) if by_part else gradients[0]
    dbias, rows = None if bias is None else sum_rows(dy), x
    if isinstance(x, Float8Rows):
        rows = float8.dequantize(x.quantized, dy.dtype)
        kernel = float8.fake_quantize(optimization_barrier(kernel), float8.FORWARD, scale)
        dy = float8.fake_quantize(dy, float8.BACKWARD) if x.quantize_gradient else dy
    dx = _input_gradient(dy, dims, kernel)
    dkernel = None if frozen else _kernel_gradient(rows, dy)
    return replace(x, rows=dx, quantized=None) if isinstance(x, Float8Rows) else dx, dkernel, dbias


linear_with_bias.defvjp(_linear_forward, _linear_backward)


def _matmul(x: Array, kernel: Array, dims: int) -> Array:
    out = kernel.shape[dims:]
    y = _to_matrix(x, dims) @ _to_matrix(kernel, len(out))
    return y.reshape(*x.shape[: x.ndim - dims], *out)


def _input_gradient(dy: Float[Array, " t *out"], dims: int, kernel: Array) -> Float[Array, " t *into"]:
    """dy Aᵀ, the gradient of the input of `linear`, whose last `dims` dims A contracts."""
    out = dy.ndim - 1
    return (_to_matrix(dy, out) @ _to_matrix(kernel, out).T).reshape(len(dy), *kernel.shape[:dims])


def _kernel_gradient(x: Float[Array, " t *into"], dy: Float[Array, " t *out"]) -> Array:
    """xᵀ dy, the gradient of the kernel of `linear`, [*into, *out]."""
    gradient = _to_matrix(x, x.ndim - 1).T @ _to_matrix(dy, dy.ndim - 1)
    return gradient.reshape(*x.shape[1:], *dy.shape[1:])


def _to_matrix(x: Array, columns: int) -> Array:
    """`x` as a matrix: its last `columns` dims in one dim and the others in another."""
    return x.reshape(math.prod(x.shape[: x.ndim - columns]), -1)


def _stack_parts(parts: tuple[Float[Array, " t *out"], ...]) -> Float[Array, "t parts *out"]:
    """Stack the parts along dim 1 as a sum of arrays padded with zeros, which XLA computes and sums over rows in one
    kernel; it does that for no concatenation."""
    zero, last = jnp.zeros((), parts[0].dtype), len(parts) - 1
    zero = mappings.vary(zero, mappings.varying_axes(parts[0]))
    edges = [(0, 0, 0)] * (parts[0].ndim - 1)
    return sum(jax.lax.pad(part[:, None], zero, [(0, 0, 0), (i, last - i, 0), *edges]) for i, part in enumerate(parts))


# --- Logits of the vocabulary -----------------------------------------------------------------------------------------


# A custom backward pass, for its order. XLA alone computes the table's gradient only after the backward pass of all
# layers, and the gradient of the logits, [b·s, v / t], stays in memory until then. With a bias it would compute that
# gradient twice, and save the logits for the second time.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def vocab_parallel_logits(
    x: Float[Array, "t h"], table: Array, bias: Float[Array, " v"] | None, tokens: TokenLayout, frozen: bool
) -> Float[Array, "bs v"]:
    """f(x) Eᵀ + b, for a table E [v, h]."""
    return _vocab_logits_forward(x, table, bias, tokens, frozen)[0]


def _vocab_logits_forward(x: Array, table: Array, bias: Array | None, tokens: TokenLayout, frozen: bool):
    x = tokens.gather_rows(x)
    y = x @ table.T
    return y if bias is None else y + bias, (None if frozen else x, table, bias)


def _vocab_logits_backward(tokens: TokenLayout, frozen: bool, residuals, dy: Array):
    x, table, bias = residuals
    dy = dy if bias is None else optimization_barrier(dy)
    dweights = None if frozen else dy.T @ x, None if bias is None else sum_rows(dy)
    gradients = dy @ table, dweights
    gradients = gradients if tokens.sequence_parallel else optimization_barrier(gradients)
    dx, dweights = reduce_with_overlap(*gradients, tokens)
    return dx, *dweights


vocab_parallel_logits.defvjp(_vocab_logits_forward, _vocab_logits_backward)
