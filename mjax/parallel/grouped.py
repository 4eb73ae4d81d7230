"""Grouped matmuls: every row times the matrix of its group, as the experts of a mixture compute.

Rows are sorted by group, and each group begins at a tile's boundary; the rows that fill its last tile are zero. A tile
therefore has one matrix, and a matmul of tiles has neither ragged edges nor masks:

    x [tiles · rows, h]     tile 0   tile 1   tile 2   tile 3   tile 4   tile 5
    group (of_tile)            0        0        2        2        3     unused
    y = x W[group]          x₀ W₀    x₁ W₀    x₂ W₂    x₃ W₂    x₄ W₃     zeros
    dx = dy W[group]ᵀ       the same matmul with transposed matrices
    dW[g] = Σ xᵀ dy         over the tiles of g, in float32: x₀ᵀ dy₀ + x₁ᵀ dy₁ for group 0, zeros for group 1

Float8 is not supported: rounded by the recipe of dense layers (`float8.py`), one scale per expert, the operands give
the error of dense layers (3.7% of a matmul, 7.3% of a gradient; a loss 0.0004 to 0.0012 above that of bf16 after 150
steps of a small mixture), but no kernel multiplies them: Pallas' `triton.dot` takes no gradient in e5m2 with values in
e4m3 (JAX 0.10.2), and `xla` multiplies what is dequantized.

The number of tiles is static, enough for any distribution (`max_tiles`). Only the device has the number of tiles in
use, and only these cost FLOPs. (`lax.ragged_dot` becomes E dense matmuls of all rows on CPUs and on NVIDIA GPUs.)

    kernel   runs on       implementation
    xla      everything    loops over groups and over their tiles, with as many iterations as there are tiles in use
    pallas   NVIDIA GPUs   three Triton kernels; programs of unused tiles write zeros; float32 as XLA's matmuls, in
                           TF32 unless `jax_default_matmul_precision` asks for more

    kernel of pallas    a program has               and loops over
    matmul              a tile, a block of f        steps of h
    transposed          a tile, a block of h        steps of f
    gradients           a group, blocks of h and f  the rows of the group's tiles
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from mjax.parallel import named_scopes
from mjax.parallel.autodiff import match_varying_axes, with_backward
from mjax.parallel.reductions import accumulation_dtype

TILE_ROWS = {"xla": 64, "pallas": 128}
"""Rows of a tile. xla: the fewest that are about as fast as any on a CPU (`benchmarks/grouped.py`); pallas: enough for
the tensor cores of an H100, not measured."""
STAND_IN = "traced only"
"""The kernel of a program that is only traced, for its arrays, which have room for every distribution: one matmul of
all rows with one matrix."""
INTERPRETED = "pallas, interpreted"
"""The kernel `pallas` without a GPU, for tests; not inside `shard_map(check_vma=True)`."""


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Groups:
    """Rows sorted by group, each group's rows beginning at a tile's boundary.

    Attributes:
      of_tile: the group of each tile; E - 1 for unused tiles, which come last.
      used: the number of tiles in use.
      first: each group's first tile; the next group's first tile if it has no rows.
      tiles: the number of tiles of each group.
      counts: the number of rows of each group, without the zeros that fill its last tile.
      rows: rows of a tile.
    """

    of_tile: Int[Array, " tiles"]
    used: Int[Array, ""]
    first: Int[Array, " E"]
    tiles: Int[Array, " E"]
    counts: Int[Array, " E"]
    rows: int = field(metadata={"static": True})


def max_tiles(assignments: int, groups: int, rows: int, max_group_rows: int | None = None) -> int:
    """The most tiles that any distribution of assignments over groups uses.

    Args:
      assignments: A, of rows to groups; k for each token of a router that chooses k experts.
      groups: E.
      rows: of a tile.
      max_group_rows: the most assignments that one group can have, if these are fewer than all: the number of tokens,
        where a token's experts differ.
    """
    busy = min(assignments, groups)  # each has a tile for its first row; the other rows fill tiles
    more = (assignments - busy) // rows
    return busy + (more if max_group_rows is None else min(more, busy * ((max_group_rows - 1) // rows)))


def assign_rows(
    group_ids: Int[Array, " A"], groups: int, rows: int, max_group_rows: int | None = None
) -> tuple[Groups, Int[Array, " A"]]:
    """Assign a row of a buffer of `max_tiles` tiles, sorted by group, to each assignment.

    Args:
      group_ids: the group of each assignment; one below 0 or from `groups` on gets no row.
      groups: E.
      rows: of a tile.
      max_group_rows: as in `max_tiles`.

    Returns:
      The groups, and the row of each assignment: within a group in the order of the assignments, so the same rows every
      time. Assignments without a group get the buffer's number of rows, which is past its end.
    """
    tiles = max_tiles(group_ids.shape[0], groups, rows, max_group_rows)
    group_ids = jnp.where((group_ids >= 0) & (group_ids < groups), group_ids, groups).astype(jnp.int32)
    counts = jnp.zeros_like(group_ids, shape=groups + 1).at[group_ids].add(1)
    group_tiles = -(-counts[:groups] // rows)
    ends = jnp.cumsum(group_tiles, dtype=jnp.int32)
    first = ends - group_tiles
    of_tile = (jnp.arange(tiles)[:, None] >= ends).sum(1, dtype=jnp.int32)  # groups that end before the tile
    grouping = Groups(jnp.minimum(of_tile, groups - 1), ends[-1], first, group_tiles, counts[:groups], rows)

    order = jnp.argsort(group_ids, stable=True).astype(jnp.int32)
    sorted_groups = group_ids[order]
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts  # of each group among the sorted assignments
    index_in_group = jnp.arange(group_ids.shape[0], dtype=jnp.int32) - starts[sorted_groups]
    row = jnp.append(first, 0)[sorted_groups] * rows + index_in_group
    row = jnp.where(sorted_groups < groups, row, tiles * rows)
    return grouping, jnp.zeros_like(row).at[order].set(row, unique_indices=True)


def grouped_matmul(
    x: Float[Array, "r _"], kernels: Float[Array, "_ _ f"], groups: Groups, kernel: str
) -> Float[Array, "r f"]:
    """y = x W[g] for the rows of each group g, in the dtype of x, with sums in float32 or wider.

    Differentiable in x and kernels; a group without rows has a gradient of zeros.

    Args:
      x: a row for each row of a tile, zero in those that fill tiles.
      kernels: W [E, h, f], in the dtype of x. Inside `shard_map` all arguments are cast to vary over the axes that any
        of them varies over, which sums gradients over the added ones.
      groups: from `assign_rows`.
      kernel: `xla`, `pallas`, or a name for tests and traces.

    Returns:
      The result, zero in unused tiles.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    expected = len(groups.of_tile) * groups.rows, len(groups.first), x.dtype
    if (x.shape[0], kernels.shape[0], kernels.dtype) != expected or x.shape[1:] != kernels.shape[1:2]:
        given = f"{x.dtype} {x.shape} and {kernels.dtype} {kernels.shape}"
        raise ValueError(f"grouped_matmul() takes x [tiles · rows, h] and kernels [E, h, f] of one dtype; got {given}")
    if kernel != "xla" and (groups.rows < MULTIPLE or groups.rows & (groups.rows - 1)):
        raise ValueError(f"the kernel {kernel} has tiles of 16, 32, 64 … rows; these have {groups.rows}")
    x, kernels, groups = match_varying_axes(x, kernels, groups)
    if kernel == STAND_IN:
        with jax.named_scope(named_scopes.GROUPED):
            return x @ kernels[0]
    matmul, kernel_gradients = _implementation(kernel)

    def backward(saved, gradient):
        x, kernels, groups = saved
        return None, (matmul(gradient, kernels, groups, True), kernel_gradients(x, gradient, groups), None)

    return with_backward(lambda _, saved: matmul(*saved, False), backward, (), (x, kernels, groups))


def _implementation(kernel: str) -> tuple[Callable, Callable]:
    """The matmul and its gradient, with the arguments of `grouped_matmul_loop` and `kernel_gradients_loop`."""
    if kernel == "xla":
        return grouped_matmul_loop, kernel_gradients_loop
    interpret = {"pallas": False, INTERPRETED: True}[kernel]
    return partial(grouped_matmul_pallas, interpret=interpret), partial(kernel_gradients_pallas, interpret=interpret)


# --- The kernel `xla` -------------------------------------------------------------------------------------------------


def grouped_matmul_loop(
    x: Float[Array, "r _"], kernels: Float[Array, "E h f"], groups: Groups, transposed: bool
) -> Float[Array, "r _"]:
    """y = x W[g], or x W[g]ᵀ: for each group, for each of its tiles."""
    rows, contracted = groups.rows, 1 if transposed else 0

    def multiply_group(group, y):
        matrix = lax.dynamic_index_in_dim(kernels, group, keepdims=False)

        def multiply_tile(tile, y):
            part = lax.dynamic_slice_in_dim(x, tile * rows, rows)
            dims, wide = (((1,), (contracted,)), ((), ())), accumulation_dtype(x.dtype)
            part = lax.dot_general(part, matrix, dims, preferred_element_type=wide)
            return lax.dynamic_update_slice_in_dim(y, part.astype(x.dtype), tile * rows, 0)

        return lax.fori_loop(*_tile_range(groups, group), multiply_tile, y)

    y = jnp.zeros_like(x, shape=(x.shape[0], kernels.shape[2 - contracted]))
    return lax.fori_loop(0, kernels.shape[0], multiply_group, y)


def kernel_gradients_loop(
    x: Float[Array, "r h"], gradient: Float[Array, "r f"], groups: Groups
) -> Float[Array, "E h f"]:
    """dW[g] = Σ xᵀ dy over the tiles of g, summed in float32 or wider, in the dtype of x."""
    rows, wide = groups.rows, accumulation_dtype(x.dtype)
    shape = x.shape[1], gradient.shape[1]

    def add_group(group, dkernels):
        def add_tile(tile, total):
            part, upstream = (lax.dynamic_slice_in_dim(array, tile * rows, rows) for array in (x, gradient))
            return total + lax.dot_general(part, upstream, (((0,), (0,)), ((), ())), preferred_element_type=wide)

        total = lax.fori_loop(*_tile_range(groups, group), add_tile, jnp.zeros_like(x, wide, shape))
        return lax.dynamic_update_index_in_dim(dkernels, total.astype(x.dtype), group, 0)

    return lax.fori_loop(0, len(groups.first), add_group, jnp.zeros_like(x, shape=(len(groups.first), *shape)))


def _tile_range(groups: Groups, group: Array) -> tuple[Array, Array]:
    """The first tile of a group, and the one after its last."""
    return groups.first[group], groups.first[group] + groups.tiles[group]


# --- The kernel `pallas` ----------------------------------------------------------------------------------------------

BLOCK = 128  # the most columns of a block
MULTIPLE = 16  # of the rows of a tile, and of all sizes: Triton's smallest matmul


def grouped_matmul_pallas(x: Array, kernels: Array, groups: Groups, transposed: bool, interpret: bool = False) -> Array:
    """Compute `grouped_matmul_loop` in Pallas, for sizes that are multiples of 16 and tiles whose rows are a power of
    two from 16."""
    depth, width = reversed(kernels.shape[1:]) if transposed else kernels.shape[1:]
    block, rows = _block(width), groups.rows
    return pl.pallas_call(
        partial(_matmul_kernel, step=_step(depth, x.dtype), transposed=transposed),
        grid=(width // block, len(groups.of_tile)),
        in_specs=[
            pl.BlockSpec((None,), lambda _, tile: (tile,)),
            pl.BlockSpec((None,), lambda *_: (0,)),
            pl.BlockSpec((rows, depth), lambda _, tile: (tile, 0)),
            pl.BlockSpec(kernels.shape, lambda *_: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, block), lambda column, tile: (tile, column)),
        out_shape=_like(x, (x.shape[0], width)),
        compiler_params=_compiler_params(rows, block),
        interpret=interpret,
        name="grouped_matmul_transposed" if transposed else "grouped_matmul",
    )(groups.of_tile, groups.used[None], x, kernels)


def kernel_gradients_pallas(x: Array, gradient: Array, groups: Groups, interpret: bool = False) -> Array:
    """Compute `kernel_gradients_loop` in Pallas, for the same sizes."""
    (rows, h), (_, f), number = x.shape, gradient.shape, len(groups.first)
    height, width = _block(h), _block(f)
    group_spec = pl.BlockSpec((None,), lambda column, row, group: (group,))
    return pl.pallas_call(
        partial(_gradients_kernel, rows=groups.rows, step=_step(groups.rows, x.dtype)),
        grid=(f // width, h // height, number),
        in_specs=[
            group_spec,
            group_spec,
            pl.BlockSpec((rows, height), lambda column, row, group: (0, row)),
            pl.BlockSpec((rows, width), lambda column, row, group: (0, column)),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda column, row, group: (group, row, column)),
        out_shape=_like(x, (number, h, f)),
        compiler_params=_compiler_params(height, width),
        interpret=interpret,
        name="grouped_gradients",
    )(groups.first, groups.tiles, x, gradient)


def _matmul_kernel(of_tile_ref, used_ref, x_ref, kernels_ref, y_ref, *, step: int, transposed: bool) -> None:
    columns = pl.ds(pl.program_id(0) * y_ref.shape[1], y_ref.shape[1])
    group = of_tile_ref[...]

    def add(i, total):
        part = pl.ds(i * step, step)
        matrix = kernels_ref[group, columns, part].T if transposed else kernels_ref[group, part, columns]
        return total + triton.dot(x_ref[:, part], matrix)

    in_use = (pl.program_id(1) < used_ref[...]).astype(jnp.int32)
    steps = in_use * (x_ref.shape[1] // step)
    y_ref[...] = lax.fori_loop(0, steps, add, jnp.zeros(y_ref.shape, jnp.float32)).astype(y_ref.dtype)


def _gradients_kernel(first_ref, tiles_ref, x_ref, gradient_ref, out_ref, *, rows: int, step: int) -> None:
    first = first_ref[...] * rows

    def add(i, total):
        part = pl.ds(first + i * step, step)
        return total + triton.dot(x_ref[part, :].T, gradient_ref[part, :])

    steps = tiles_ref[...] * (rows // step)  # none for a group without rows
    out_ref[...] = lax.fori_loop(0, steps, add, jnp.zeros(out_ref.shape, jnp.float32)).astype(out_ref.dtype)


def _block(size: int) -> int:
    """The columns of a block: the largest power of two that divides `size`, up to BLOCK, so that no block is ragged."""
    return min(BLOCK, size & -size)


def _step(size: int, dtype) -> int:
    """The terms that a step of a loop adds: 128 bytes of a row, or fewer if `size` is not a multiple of that."""
    return min(128 // dtype.itemsize, size & -size)


def _compiler_params(rows: int, columns: int):
    return triton.CompilerParams(num_warps=8 if rows * columns >= 128 * 128 else 4, num_stages=3)


def _like(x: Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A result that varies over the same mesh axes as `x`."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).mat)
