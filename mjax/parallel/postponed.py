"""ZB-H1's split of the backward pass: kernels whose gradients are computed later (arXiv 2401.10241, section 2).

The backward pass of a linear layer has two products: the gradient of its input, which the previous layer waits for (B),
and the gradient of its kernel, which nothing waits for (W). A `PostponedKernel` in place of a kernel computes the first
and returns the two factors of the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.layers import input_gradient, into_columns, linear, linear_forward, own_columns
from mjax.parallel.sums import add_bias
from mjax.parallel.tokens import Tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PostponedKernel:
    """A kernel whose gradient is not computed in the backward pass: ZB-H1's split (arXiv 2401.10241, section 2).

    `linear` returns the two factors of the gradient, as the "gradients" of two inputs that it does not use. They are
    multiplied later (`kernel_gradient`).

    Attributes:
      kernel: [*into, *out]; it gets no gradient.
      input: zeros [t, *into]; its gradient is x.
      gradient: zeros [t, *out]; its gradient is the gradient of y.
    """

    kernel: Array
    input: Array
    gradient: Array

    def __getitem__(self, _) -> PostponedKernel:  # read like the array it stands for: `self.kernel[...]`
        return self


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_postponed(x: Array, kernel: Array, for_input: Array, for_gradient: Array, dims: int) -> Array:
    return linear_forward(x, kernel, dims)[0]


def _linear_postponed_backward(dims: int, residuals, gradient: Array):
    x, kernel = residuals
    return input_gradient(gradient, x.shape, kernel), jnp.zeros_like(kernel), x, gradient


_linear_postponed.defvjp(
    lambda x, kernel, for_input, for_gradient, dims: linear_forward(x, kernel, dims), _linear_postponed_backward
)


@linear.register
def _(kernel: PostponedKernel, x: Array, dims: int) -> Array:
    return _linear_postponed(x, kernel.kernel, kernel.input, kernel.gradient, dims)


@into_columns.register
def _(_: PostponedKernel, x: Array, kernels: tuple, biases: tuple, tokens: Tokens, apart: tuple) -> tuple[Array, ...]:
    x, outputs = tokens.enter(x), []
    for kernel, bias, cut in zip(kernels, biases, apart, strict=True):
        y = linear(kernel, x, 1)
        y = y if bias is None else add_bias(y, bias)
        outputs += [y[:, part] for part in range(y.shape[1])] if cut else [y]
    return tuple(outputs)


@own_columns.register
def _(weight: PostponedKernel, columns: int, dim: int) -> PostponedKernel:
    kernel, gradient = (own_columns(part, columns, dim) for part in (weight.kernel, weight.gradient))
    return replace(weight, kernel=kernel, gradient=gradient)


def zero_factors(
    layers, contracted: list[int | None], gathered: list[tuple[tuple[str, int], ...]], rows: int, stream: Array
) -> list[tuple[Array, Array]]:
    """Zeros in place of the input and output gradient of each postponed kernel, [layers, b · s, …] each.

    Args:
      layers: stacked, as they are stored.
      contracted: for each leaf how many dims of it `linear` contracts, or None if it is not a kernel.
      gathered: for each leaf the (axis, dim) along which it is gathered before use.
      rows: tokens of a micro-batch, b · s.
      stream: an array with the dtype and the varying axes of activations.
    """
    factors = []
    for kernel, dims, shards in zip(jax.tree.leaves(layers), contracted, gathered, strict=True):
        if not dims:
            continue
        count, *shape = kernel.shape
        for axis, dim in shards:
            shape[dim] *= mappings.size(axis)
        zeros = [jnp.zeros((count, rows, *part), stream.dtype) for part in (shape[:dims], shape[dims:])]
        axes = mappings.varying_axes(stream) | mappings.varying_axes(kernel)
        factors.append(tuple(mappings.vary(part, axes) for part in zeros))
    return factors
