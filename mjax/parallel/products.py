"""The products of linear layers with f in front of them, and the order of their backward passes.

f and the products behind it are differentiated as one, `into_columns`, so that the sum over the ranks in the backward
pass is beside the gradients of the weights. A kernel may be a `PostponedKernel`, whose gradient is computed later.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.postponed import PostponedKernel, array_of, without_factors
from mjax.parallel.sums import add_bias, sum_rows
from mjax.parallel.tokens import Tokens

Kernel = Array | PostponedKernel


def linear(kernel: Kernel, x: Array, dims: int) -> Array:
    """y = x A, contracting the last `dims` dims of x with the first of the kernel; both vary over the same mesh axes.

    Shapes: kernel [*into, *out], x [t, *into] → y [t, *out].
    """
    return _linear(x, kernel, dims)


# The backward pass is written out for the order of dims in the weight's gradient: autodiff computes the transpose of
# gᵀ x, for which XLA copies g on a CPU (a sixth of the step); xᵀ g needs no copy.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: Array, kernel: Kernel, dims: int) -> Array:
    return _product(x, array_of(kernel), dims)


def _linear_backward(dims: int, residuals, gradient: Array):
    x, kernel = residuals
    return input_gradient(gradient, x.shape, array_of(kernel)), _to_kernel(kernel, x, gradient)


_linear.defvjp(
    lambda x, kernel, dims: (_product(x, array_of(kernel), dims), (x, without_factors(kernel))), _linear_backward
)


def _product(x: Array, kernel: Array, dims: int) -> Array:
    out = kernel.shape[dims:]
    y = _matrix(x, dims) @ _matrix(kernel, len(out))
    return y.reshape(*x.shape[: x.ndim - dims], *out)


def input_gradient(gradient: Array, shape: tuple[int, ...], kernel: Array) -> Array:
    """g Aᵀ, the gradient of the input of `linear`: g [t, *out] → `shape` [t, *into]."""
    out = gradient.ndim - 1
    return (_matrix(gradient, out) @ _matrix(kernel, out).T).reshape(shape)


def kernel_gradient(x: Array, gradient: Array) -> Array:
    """xᵀ g, the gradient of the kernel of `linear`: x [t, *into], g [t, *out] → [*into, *out]."""
    product = _matrix(x, x.ndim - 1).T @ _matrix(gradient, gradient.ndim - 1)
    return product.reshape(*x.shape[1:], *gradient.shape[1:])


def _to_kernel(kernel: Kernel, x: Array, gradient: Array) -> Kernel:
    """The gradient of a kernel, or of a postponed one its two factors."""
    if isinstance(kernel, PostponedKernel):
        return PostponedKernel(jnp.zeros_like(kernel.kernel), x, gradient)
    return kernel_gradient(x, gradient)


def _matrix(x: Array, columns: int) -> Array:
    """`x` as a matrix: its last `columns` dims in one dim and the others in another."""
    return x.reshape(math.prod(x.shape[: x.ndim - columns]), -1)


# --- f, and the products of the same input ----------------------------------------------------------------------------


def into_columns(
    x: Array, kernels: tuple[Kernel, ...], biases: tuple[Array | None, ...], tokens: Tokens, apart: tuple[bool, ...]
) -> tuple[Array, ...]:
    """y = f(x) A + b for each kernel; for one that is `apart` each of the parts along its first dim of columns.

    Shapes: x [t, h], this rank's rows of the stream; kernels [h, *out], biases [*out] → [b · s, *out] each.
    """
    axes = mappings.varying_axes(array_of(kernels[0])) | mappings.varying_axes(x)
    biases = tuple(None if bias is None else mappings.vary(bias, axes) for bias in biases)
    return _columns(x, kernels, biases, tokens, apart)


# f and the products behind it are differentiated as one, for their order (`summed_beside`).
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _columns(x: Array, kernels: tuple[Kernel, ...], biases: tuple, tokens: Tokens, apart: tuple) -> tuple[Array, ...]:
    return _columns_forward(x, kernels, biases, tokens, apart)[0]


def _columns_forward(x: Array, kernels: tuple[Kernel, ...], biases: tuple, tokens: Tokens, apart: tuple):
    x, back = jax.vjp(tokens.enter, x)
    outputs = []
    for kernel, bias, cut in zip(map(array_of, kernels), biases, apart, strict=True):
        for part in range(kernel.shape[1]) if cut else [...]:
            y = _product(x, kernel[:, part], 1)
            outputs.append(y if bias is None else add_bias(y, bias[part]))
    return tuple(outputs), (x, back, tuple(map(without_factors, kernels)), biases)


def _columns_backward(tokens: Tokens, apart: tuple, residuals, gradients: tuple[Array, ...]):
    (x, back, kernels, biases), parts = residuals, iter(gradients)
    arrays = tuple(map(array_of, kernels))
    wholes = [
        _joined([next(parts) for _ in range(kernel.shape[1])]) if cut else next(parts)
        for kernel, cut in zip(arrays, apart, strict=True)
    ]
    to_x = sum(input_gradient(gradient, x.shape, kernel) for gradient, kernel in zip(wholes, arrays, strict=True))
    to_kernels = tuple(_to_kernel(kernel, x, gradient) for kernel, gradient in zip(kernels, wholes, strict=True))
    if isinstance(kernels[0], PostponedKernel):  # nothing is computed beside the sum
        (to_x,) = back(to_x)
    else:
        to_x, to_kernels = summed_beside(back, to_x, to_kernels, tokens)
    to_biases = (None if bias is None else sum_rows(whole) for whole, bias in zip(wholes, biases, strict=True))
    return to_x, to_kernels, tuple(to_biases)


_columns.defvjp(_columns_forward, _columns_backward)


def _joined(parts: list[Array]) -> Array:
    """Arrays [t, …] as one [t, parts, …]: a sum of them with zeros around, which XLA joins and sums over rows in one
    kernel, as it does no concatenation."""
    zero, last = jnp.zeros((), parts[0].dtype), len(parts) - 1
    zero = mappings.vary(zero, mappings.varying_axes(parts[0]))
    edges = [(0, 0, 0)] * (parts[0].ndim - 1)
    return sum(
        jax.lax.pad(part[:, None], zero, [(0, 0, 0), (place, last - place, 0), *edges])
        for place, part in enumerate(parts)
    )


def summed_beside(back, gradient: Array, products, tokens: Tokens):
    """`gradient` summed over the ranks by `back`, the backward pass of f, and `products`, computed during that sum.

    With sequence parallelism neither is used before both are there: left alone, XLA may compute the gradients of
    weights at the end of a layer, and a sum has nothing beside it. Without, the sum is typed as replicated, and a
    barrier with values that differ from rank to rank would not keep that type.
    """
    (summed,) = back(gradient)
    return jax.lax.optimization_barrier((summed, products)) if tokens.split else (summed, products)
