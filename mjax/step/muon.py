"""Muon: momentum, orthogonalized matrix by matrix (Keller Jordan, https://kellerjordan.github.io/posts/muon/).

    m ← μ m + (1 − μ) g                the first moment, the only one of a matrix
    u = μ m + (1 − μ) g                Nesterov's look-ahead
    O ≈ U Vᵀ, for u = U S Vᵀ           five Newton-Schulz iterations, which are matmuls
    w ← w − η (scale · O + λ w)        decoupled weight decay, as in AdamW

The dims of a weight (`weights.make_param`) define its matrices, each orthogonalized separately: every layer of a stack;
q, k and v; gate and up. Embeddings, heads, norms and biases use AdamW. The result is the same on every mesh, because
`MatrixLayout` collects each matrix on one rank.

The iteration runs in the compute dtype: bf16 as in torch and in the author's code, fp32 or fp64; with fp16, whose small
numbers underflow, in fp32. It does not converge: its coefficients raise small singular values as fast as possible, and
the singular values of O end between about 0.7 and 1.2.
"""

import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from mjax.config import MeshConfig
from mjax.parallel.autodiff import optimization_barrier
from mjax.parallel.muon_resharding import MatrixLayout
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.weights import leaf_name, muon_matrices
from mjax.step.layout import Layout

MOMENTUM = 0.95  # as Keller Jordan and arXiv 2502.16982
RMS_OF_ADAMW = 0.2
"""An update is scaled by this × √max(in, out), so that AdamW's rates and weight decay fit (arXiv 2502.16982)."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7  # the least Frobenius norm that a matrix is divided by: without gradient there is no update
ITERATE_IN = {"fp8": "bf16", "bf16": "bf16", "fp16": "fp32", "fp32": "fp32", "fp64": "fp64"}
"""By compute dtype, the dtype of the iteration."""


def newton_schulz(x: Float[Array, "k rows columns"]) -> Float[Array, "k rows columns"]:
    """Matrices with the singular vectors of `x` and singular values near 1.

    Each is scaled to Frobenius norm 1 first, so that the iteration X ← aX + (bA + cA²)X, A = XXᵀ, is defined.
    """
    a, b, c = COEFFICIENTS
    wide, tall = accumulation_dtype(x.dtype), x.shape[1] > x.shape[2]

    def sum_squares(first: float, x: Array, second: float, y: Array) -> Array:
        return (first * x.astype(wide) + second * y.astype(wide)).astype(x.dtype)

    norm = jnp.sqrt(jnp.square(x.astype(wide)).sum((1, 2), keepdims=True))
    x = (x / jnp.maximum(norm, MIN_NORM)).astype(x.dtype)
    for _ in range(ITERATIONS):
        square = jnp.einsum("kji,kjl->kil" if tall else "kij,klj->kil", x, x)  # the smaller of XᵀX and XXᵀ
        polynomial = sum_squares(b, square, c, square @ square)
        x = sum_squares(a, x, 1.0, x @ polynomial if tall else polynomial @ x)
        x = optimization_barrier(x)  # else XLA stores every matmul to compute the next x from all of them
    return x


def collect_matrices(layout: Layout, mesh: MeshConfig) -> dict[str, MatrixLayout]:
    """The weights that are matrices, by name."""
    weights = jax.tree_util.tree_leaves_with_path(layout.abstract_model)
    specs, dims = jax.tree.leaves(layout.specs), muon_matrices(layout.abstract_model)
    return {
        leaf_name(path): MatrixLayout(weight.shape, spec, *matrix, mesh)
        for (path, weight), spec, matrix in zip(weights, specs, dims, strict=True)
        if matrix
    }


def scale_by_muon(dtype, matrices: dict[str, MatrixLayout]) -> optax.GradientTransformation:
    """Muon's update for the weights in `matrices`, without weight decay and learning rate, inside `shard_map`.

    Args:
      dtype: of the iteration.
    """

    def orthogonalize(path: tuple, update: Array) -> Array:
        layout = matrices[leaf_name(path)]
        # Written once, with the moment: for each use XLA would compute it again, from a copy of the old moment.
        narrow = optimization_barrier(update.astype(dtype))
        orthogonal = layout.map(newton_schulz, narrow).astype(update.dtype)
        return RMS_OF_ADAMW * math.sqrt(max(layout.matrix_shape)) * orthogonal

    return optax.chain(
        optax.scale(1 - MOMENTUM),
        optax.trace(MOMENTUM, nesterov=True),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(orthogonalize, updates)),
    )
