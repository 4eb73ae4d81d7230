"""ZB-H1's split of the backward pass: kernels whose gradients are multiplied out later (arXiv 2401.10241, section 2).

The backward pass of a linear layer has two products: the gradient of its input, which the layer before waits for (B),
and the gradient of its kernel, which nobody waits for (W). A `PostponedKernel` in the place of a kernel computes the
first and hands back the two factors of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.layers import input_gradient, linear, linear_forward


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PostponedKernel:
    """A kernel whose gradient is not multiplied out in the backward pass: ZB-H1's split (arXiv 2401.10241, section 2).

    `linear` hands back the two factors of the gradient, as the "gradients" of two inputs that it does not look at.
    Whoever asked for them multiplies them later (`kernel_gradient`).

    Attributes:
      kernel: [*into, *out]; no gradient comes back for it.
      input: zeros [t, *into]; x comes back.
      gradient: zeros [t, *out]; the gradient of y comes back.
    """

    kernel: Array
    input: Array
    gradient: Array

    def __getitem__(self, _) -> PostponedKernel:  # as the array it stands for is read: `self.kernel[...]`
        return self


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_postponed(x: Array, kernel: Array, for_input: Array, for_gradient: Array, dims: int) -> Array:
    return linear_forward(x, kernel, dims)[0]


def _linear_postponed_backward(dims: int, residuals, gradient: Array):
    x, kernel = residuals
    return input_gradient(gradient, x, kernel, dims), jnp.zeros_like(kernel), x, gradient


_linear_postponed.defvjp(
    lambda x, kernel, for_input, for_gradient, dims: linear_forward(x, kernel, dims), _linear_postponed_backward
)


@linear.register
def _(kernel: PostponedKernel, x: Array, dims: int) -> Array:
    return _linear_postponed(x, kernel.kernel, kernel.input, kernel.gradient, dims)


def contracted_dims(weights) -> list[int | None]:
    """For each leaf of `weights`, as `jax.tree.leaves` lists them: how many dims of it `linear` contracts, or None for
    what is no kernel."""
    parameters = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, nnx.Param))
    return [parameter.get_metadata().get("contracted") for parameter in parameters]


def zero_factors(
    layers, contracted: list[int | None], gathered: list[tuple[tuple[str, int], ...]], rows: int, stream: Array
) -> list[tuple[Array, Array]]:
    """Zeros in the place of input and output gradient of each postponed kernel, [layers, b · s, …] each.

    Args:
      layers: stacked, as they are stored.
      contracted: of each leaf, as `contracted_dims` gives it.
      gathered: of each leaf the (axis, dim) along which it is put together before it is used.
      rows: tokens of a micro-batch, b · s.
      stream: of the dtype and the varying axes of activations.
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
