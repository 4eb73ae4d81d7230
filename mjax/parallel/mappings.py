"""Megatron's conjugate operators: the only file with communication between devices.

Inside `shard_map` every value is typed by the mesh axes it varies over. A pair of linear layers split over `model`
opens a region in which activations differ from rank to rank, and closes it again (arXiv 1909.08053, section 3, figure
3):

    x ── f ──▶ X A_i ──▶ gelu ──▶ (…) B_i ── g ──▶ y
         forward: nothing                    forward: sum over ranks
         backward: sum over ranks            backward: nothing

f is a cast of the type, whose transpose is the all-reduce, and g a sum. Each is the transpose of the other, so autodiff
writes the backward pass. The types reject a region that is opened twice or never closed. They accept a region that is
closed twice, which multiplies by the number of ranks: `reduce_from_region` checks for that.

With sequence parallelism the tokens between two regions are split over `model` as well (arXiv 2205.05198, section
4.2.2). Then f is an all-gather of the tokens and g a reduce-scatter; again each is the transpose of the other. An
all-reduce is one of each, so the same number of bytes is sent. Megatron's functions (core/tensor_parallel/mappings.py):

    here                           in Megatron                                  forward          backward
    copy_to_region          f      copy_to_tensor_model_parallel_region         nothing          all-reduce
    reduce_from_region      g      reduce_from_tensor_model_parallel_region     all-reduce       nothing
    all_gather_tokens       f      gather_from_sequence_parallel_region         all-gather       reduce-scatter
    reduce_scatter_tokens   g      reduce_scatter_to_sequence_parallel_region   reduce-scatter   all-gather

For `data` and `pipe` there is one rule: weights are cast to varying, or gathered from shards, before differentiation,
so that every device accumulates a gradient of its tokens, which is summed once afterwards. Activations are sent to the
next stage of the pipeline by `send_to_next_stage`, and their gradients back by `send_to_previous_stage`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from mjax.config.axes import CONTEXT, MODEL, PIPE, axes_splitting

Axes = str | tuple[str, ...]  # a mesh axis, or several together, the first outermost
Gathers = tuple[tuple[tuple[str, ...], int], ...]  # the axes and dims along which shards become a weight, in order


def varying_axes(x: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Mesh axes along which `x` may differ from rank to rank; empty outside `shard_map`."""
    return jax.typeof(x).mat.varying


def rank(axis: Axes) -> Int[Array, ""]:
    """Index of this device on an axis, or on several together, varying over them."""
    return lax.axis_index(axis)


def size(axis: Axes) -> int:
    """Number of ranks of an axis, or of several together."""
    return lax.axis_size(axis)


def vary(x: Shaped[Array, "*dims"], axes: frozenset[str]) -> Shaped[Array, "*dims"]:
    """Cast `x` to also vary over `axes`. Its transpose sums the gradient over the added axes."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# --- Over the model axis ----------------------------------------------------------------------------------------------


def copy_to_region(x: Shaped[Array, "*dims"], axis: str = MODEL) -> Shaped[Array, "*dims"]:
    """f: open a region in which values differ along `axis`; replicated → varying. Its transpose is the all-reduce.

    Raises:
      ValueError: `x` already varies over `axis`, so a region was left open.
    """
    if axis in varying_axes(x):
        raise ValueError(f"copy_to_region() of a value that varies over `{axis}`: a reduce_from_region() is missing")
    return lax.pcast(x, axis, to="varying")


def reduce_from_region(partial: Shaped[Array, "*dims"], axis: str = MODEL) -> Shaped[Array, "*dims"]:
    """g: close a region by summing the partial results of all ranks. Its transpose is the identity.

    Raises:
      ValueError: `partial` is already the same on every rank, so the sum would multiply it by the number of ranks.
    """
    if axis not in varying_axes(partial):
        raise ValueError(f"reduce_from_region() of a value that is already the same on every rank of `{axis}`")
    return lax.psum(partial, axis)


def all_gather_tokens(x: Shaped[Array, " t *dims"], axis: str = MODEL) -> Shaped[Array, " bs *dims"]:
    """f of sequence parallelism: concatenate the rows of all ranks. Its transpose is `reduce_scatter_tokens`."""
    if axis not in varying_axes(x):
        raise ValueError(f"all_gather_tokens() of rows that are the same on every rank of `{axis}`")
    return lax.all_gather(x, axis, axis=0, tiled=True)


def reduce_scatter_tokens(partial: Shaped[Array, " bs *dims"], axis: str = MODEL) -> Shaped[Array, " t *dims"]:
    """g of sequence parallelism: sum partial results, return this rank's rows. Its transpose is `all_gather_tokens`."""
    if axis not in varying_axes(partial):
        raise ValueError(f"reduce_scatter_tokens() of rows that are already complete on every rank of `{axis}`")
    return lax.psum_scatter(partial, axis, scatter_dimension=0, tiled=True)


# --- Over context -----------------------------------------------------------------------------------------------------


def zigzag_permute(x: Shaped[Array, "... s"]) -> Shaped[Array, "... s"]:
    """Exchange half of the positions of every rank, so that causal attention costs all ranks the same.

    Of 2c chunks rank r has 2r and 2r + 1 before, r and 2c − 1 − r after.
    """
    ranks = size(CONTEXT)
    even, odd = (lax.ppermute(half, CONTEXT, [(r, _chunk_rank(2 * r + i, ranks)) for r in range(ranks)])
                 for i, half in enumerate(jnp.split(x, 2, axis=-1)))  # fmt: skip
    is_even = rank(CONTEXT) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=-1)


def _chunk_rank(chunk: int, ranks: int) -> int:
    return min(chunk, 2 * ranks - 1 - chunk)


def mask_to_first_context_rank(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """`x` on rank 0 of `context` and 0 on the others, so that a sum over ranks counts a replicated value once."""
    return jnp.where(rank(CONTEXT) == 0, x, jnp.zeros_like(x)) if size(CONTEXT) > 1 else x


def mask_count_to_first_context_rank(count: int) -> Int[Array, ""] | int:
    """`mask_to_first_context_rank` of a number that all parts of the batch share, as of `Model.counts`."""
    if size(CONTEXT) == 1:
        return count
    return vary(mask_to_first_context_rank(jnp.int32(count)), frozenset(axes_splitting("batch")))


# --- Over pipe --------------------------------------------------------------------------------------------------------


def send_to_next_stage(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Send `x` to the next stage and receive from the previous one; the last sends to the first."""
    stages = size(PIPE)
    return lax.ppermute(x, PIPE, [(stage, (stage + 1) % stages) for stage in range(stages)])


def send_to_previous_stage(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """The reverse of `send_to_next_stage`, and its transpose."""
    stages = size(PIPE)
    return lax.ppermute(x, PIPE, [(stage, (stage - 1) % stages) for stage in range(stages)])


def broadcast_from_first_stage(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """The value of stage 0, on every stage."""
    return lax.psum(jnp.where(rank(PIPE) == 0, x, jnp.zeros_like(x)), PIPE)


# --- Over any axes: weights, gradients, metrics -----------------------------------------------------------------------


def all_gather(shard: Array, axis: Axes, dim: int) -> Array:
    """All-gather the shards of an axis, or of several, the first outermost, along `dim`; the result is typed as varying
    over them, so that its gradient stays on its rank."""
    return lax.all_gather(shard, axis, axis=dim % shard.ndim, tiled=True)


def all_gather_invariant(shard: Array, axis: Axes, dim: int) -> Array:
    """Like `all_gather`, but typed as replicated over `axis` (`lax.all_gather_invariant`): without a gradient."""
    return lax.all_gather(shard, axis, axis=dim % shard.ndim, tiled=True, to="invarying")


def reduce_scatter(x: Array, axis: Axes, dim: int) -> Array:
    """Sum `x` over the ranks of `axis` and return this rank's shard along `dim`: the transpose of `all_gather`."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim % x.ndim, tiled=True)


def all_to_all(x: Array, axis: str, split: int, join: int) -> Array:
    """Exchange shards along dim `join` for shards along dim `split`; its inverse has the two dims swapped."""
    return lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def exchange_rows(x: Shaped[Array, " t *dims"], axis: str, ranks: int, stride: int) -> Shaped[Array, " t *dims"]:
    """All-to-all of equal parts of the rows within groups of `ranks` ranks of an axis with this stride: its transpose.

    Groups of 2 of 4 ranks are 0 2 │ 1 3 with a stride of 2, and 0 1 │ 2 3 with 1.
    """
    groups = np.arange(size(axis)).reshape(-1, ranks, stride).swapaxes(1, 2).reshape(-1, ranks).tolist()
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)


def psum(x: Shaped[Array, "*dims"], axes: frozenset[str]) -> Shaped[Array, "*dims"]:
    """Sum over the ranks of all `axes`; the identity if there are none."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x


def pmax(x: Shaped[Array, "*dims"], axis: Axes = MODEL) -> Shaped[Array, "*dims"]:
    """Maximum over the ranks of an axis, or of several; carries no gradient."""
    return lax.pmax(lax.stop_gradient(x), axis) if axis else x
