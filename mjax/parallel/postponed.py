"""Kernels whose gradients the backward pass does not compute: of ZB-H1, which computes them later (arXiv 2401.10241,
section 2), and frozen ones, which have none.

The backward pass of a linear layer has two products: the gradient of its input, which the previous layer waits for (B),
and the gradient of its kernel, which nothing waits for (W). A `PostponedKernel` in place of a kernel computes the first
and returns the two factors of the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.parallel import mappings
from mjax.parallel.mappings import Gathers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PostponedKernel:
    """A kernel whose gradient is not computed in the backward pass: ZB-H1's split (arXiv 2401.10241, section 2).

    `linear` returns the two factors of the gradient, as the "gradients" of two inputs that it does not use. They are
    multiplied later (`kernel_gradient`).

    Attributes:
      kernel: it gets no gradient.
      input: zeros; its gradient is x.
      gradient: zeros; its gradient is the gradient of y.
    """

    kernel: Float[Array, "*into_and_out"]
    input: Float[Array, " t *into"] | None
    gradient: Float[Array, " t *out"] | None

    def __getitem__(self, _) -> PostponedKernel:  # read like the array it stands for: `self.kernel[...]`
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenKernel:
    """A kernel that is not trained: its backward pass is one product, for the input, and keeps no input."""

    kernel: Float[Array, "*into_and_out"]


Kernel = Array | PostponedKernel | FrozenKernel


def array_of(kernel: Kernel) -> Array:
    """The kernel itself."""
    return kernel if isinstance(kernel, Array) else kernel.kernel


def without_factors(kernel: Kernel) -> Kernel:
    """The part of a kernel that its backward pass needs: the zeros of a postponed one would be kept for nothing."""
    return replace(kernel, input=None, gradient=None) if isinstance(kernel, PostponedKernel) else kernel


def zero_factors(
    layers, contracted: list[int | None], gathered: list[Gathers], rows: int, stream: Array
) -> list[tuple[Float[Array, "layers rows *into"], Float[Array, "layers rows *out"]]]:
    """Zeros in place of the input and output gradient of each postponed kernel.

    Args:
      layers: stacked, as they are stored.
      contracted: for each leaf how many dims of it `linear` contracts, or None if it is not a kernel.
      gathered: for each leaf the (axes, dim) along which it is gathered before use.
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
