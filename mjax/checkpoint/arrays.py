"""The arrays of a checkpoint: by dotted path, in their shapes on disk, and whether they fit a config."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from mjax.errors import RunError, UsageError
from mjax.parallel.weights import are_stacked, leaf_name

CHUNK_BYTES = 1 << 26  # bytes of a chunk on disk, which is decompressed to read one number


def open_array(folder: Path, name: str, create: dict[str, Any] | None = None) -> ts.TensorStore:
    """An array in the folder of a field, as Orbax wrote it; or a new one with this metadata."""
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}, "path": f"{name}/"},
        "context": {"file_io_sync": False},  # the folder is synced in one piece
    }
    if create is None:
        return ts.open(spec, open=True, read=True).result()
    return ts.open(spec | {"metadata": create, "store_data_equal_to_fill_value": True}, create=True).result()


def write_array(folder: Path, name: str, leaf: Any, stacked: bool, read_rows: Callable[[int, int], np.ndarray]) -> None:
    """Add an array to the folder of a field, a chunk at a time: of one layer at most, and of `CHUNK_BYTES`.

    Args:
      folder: of the field.
      name: of the array.
      leaf: its shape and dtype.
      stacked: whether its first dim is layers.
      read_rows: returns the rows of the first dim from a first one to before a last one; of a scalar its value.
    """
    chunk = [1 if stacked and dim == 0 else size for dim, size in enumerate(leaf.shape)]
    while math.prod(chunk) * leaf.dtype.itemsize > CHUNK_BYTES:
        largest = chunk.index(max(chunk))
        chunk[largest] = -(-chunk[largest] // 2)
    metadata = {
        "shape": list(leaf.shape),
        "data_type": str(leaf.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 3}},  # as Orbax
        ],
    }
    array = open_array(folder, name, create=metadata)
    if not leaf.shape:
        array.write(read_rows(0, 1)).result()
        return
    for start in range(0, leaf.shape[0], chunk[0]):
        end = min(start + chunk[0], leaf.shape[0])
        array[start:end].write(read_rows(start, end)).result()


def read_in_blocks(folder: Path, name: str, rank: int) -> Iterator[tuple[int, np.ndarray]]:
    """The blocks of an array along its first dim, one chunk of it each, and the index of their first row.

    Args:
      folder: of the checkpoint, such as `checkpoints/200`, which `Checkpoints.find` has checked.
      name: of the array, such as `model.blocks.mlp.up.kernel`.
      rank: dims of the array; a pipeline with several chunks per stage has stored one more.
    """
    array = open_array(folder / name.split(".")[0], name)
    split = array.rank - rank
    rows = array.chunk_layout.read_chunk.shape[split]
    parts = [array[number] for number in range(array.shape[0])] if split else [array]
    for number, part in enumerate(parts):
        for start in range(0, part.shape[0], rows):
            block = part[start : min(start + rows, part.shape[0])]
            yield number * part.shape[0] + start, block.read().result()


def check_opens(folder: Path, metadata: dict[str, list]) -> None:
    """Read the smallest array of each field of the checkpoint in `folder`, and compare its shape with `metadata`.

    Raises:
      RunError: it is missing, or has another shape.
    """
    by_size = sorted(metadata, key=lambda name: math.prod(metadata[name][1]), reverse=True)
    for field, name in {name.split(".")[0]: name for name in by_size}.items():
        try:
            shape = list(open_array(folder / field, name).read().result().shape)
        except ValueError as error:
            raise RunError(f"{name} cannot be read back: {str(error).splitlines()[0]}") from error
        if shape != metadata[name][1]:
            raise RunError(f"{name} has shape {shape} instead of {metadata[name][1]}")


def leaves_by_path(tree: Any, field: str | None = None) -> dict[str, Any]:
    """The leaves of a tree by dotted path, in the order of `jax.tree.leaves`; `field` is the name of the tree."""
    parent = (jax.tree_util.GetAttrKey(field),) if field else ()
    leaves = [(leaf_name((*parent, *path)), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    named = dict(leaves)
    if len(named) < len(leaves):
        raise ValueError(f"two leaves of the state have the same name; the names are {[name for name, _ in leaves]}")
    return named


def names_with_layer_dim(tree: Any, field: str | None = None) -> set[str]:
    """Names, as in `leaves_by_path`, of the arrays whose first dim, or first two with chunks, are layers."""
    weights = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Param))
    flags = (are_stacked(node) if isinstance(node, nnx.Param) else [False] for node in weights)
    return {name for name, stacked in zip(leaves_by_path(tree, field), itertools.chain(*flags), strict=True) if stacked}


def group_by_field(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One folder per field: {'model.up': x, 'step': y} → {'model': {'model.up': x}, 'step': {'step': y}}."""
    fields: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        fields.setdefault(name.split(".")[0], {})[name] = leaf
    return fields


# --- Chunks of a pipeline ---------------------------------------------------------------------------------------------
# The layers of a pipeline with V chunks per stage are arrays [V, l / V, …] instead of [l, …]: another shape with the
# same order in memory and on disk.


def _same_layers(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """True if two shapes of stacked layers differ only in how the layers are split into chunks."""
    flat, split = sorted((list(stored), list(wanted)), key=len)
    if len(flat) == len(split):  # split differently in both
        return flat[2:] == split[2:] and math.prod(flat[:2]) == math.prod(split[:2])
    return len(split) == len(flat) + 1 and split[2:] == flat[1:] and math.prod(split[:2]) == flat[0]


def shape_on_disk(leaf: jax.ShapeDtypeStruct, stored: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """`leaf` in its shape on disk, sharded over the same devices as far as the layer dims allow."""
    if leaf.shape == stored:
        return leaf
    mesh, spec = leaf.sharding.mesh, list(leaf.sharding.spec)
    spec += [None] * (len(leaf.shape) - len(spec))
    rest = min(len(stored), len(leaf.shape)) - (2 if len(stored) == len(leaf.shape) else 1)
    axes = tuple(axis for axis in spec[: len(spec) - rest] if axis is not None)
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    layers = [None] * (len(stored) - rest)
    if axes and stored[len(layers) - 1] % ranks == 0:
        layers[-1] = axes
    sharding = NamedSharding(mesh, PartitionSpec(*layers, *spec[len(spec) - rest :]))
    return jax.ShapeDtypeStruct(stored, leaf.dtype, sharding=sharding)


def reshape(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """`array` in the shape and sharding of `leaf`; the array is donated."""
    return jax.jit(lambda x: x.reshape(leaf.shape), out_shardings=leaf.sharding, donate_argnums=0)(array)


def chunks_on_disk(
    stacked: set[str], path: tuple, array: jax.Array
) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """Large arrays are stored in chunks, of one layer at most, so that `read_in_blocks` can read one."""
    if array.nbytes <= CHUNK_BYTES:
        return None
    layers = (0,) if path[-1].key in stacked else None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=CHUNK_BYTES, shard_axes=layers)


def type_and_shape(array: Any) -> list:
    """The manifest's entry for an array: ['float32', [4, 8]]."""
    return [str(array.dtype), list(array.shape)]


def check_fits(
    step: int, stored: dict[str, list], wanted: dict[str, Any], stacked: set[str], field: str | None
) -> None:
    """Compare the arrays of checkpoint `step`, as in its manifest, with those `wanted` by name.

    Of those that are `stacked`, the layers may be split into other chunks.

    Raises:
      UsageError: one is missing, of another shape or dtype, or not wanted; in `field` only, if given.
    """
    advice = "use the config.json of its run or another --name"
    for name, leaf in wanted.items():
        dtype, shape = type_and_shape(leaf)
        if name not in stored:
            needed = f"this config needs one of shape {tuple(shape)}"
            raise UsageError(f"checkpoint {step} has no {name}, {needed}; {advice}")
        stored_dtype, stored_shape = stored[name]
        if stored_shape != shape and not (name in stacked and _same_layers(stored_shape, shape)):
            shapes = f"{tuple(stored_shape)}, this config needs {tuple(shape)}"
            raise UsageError(f"checkpoint {step} has {name} of shape {shapes}; {advice}")
        if stored_dtype != dtype:  # Orbax would convert silently
            raise UsageError(f"checkpoint {step} has {name} in {stored_dtype}, this config needs {dtype}; {advice}")
    for name, (_, shape) in stored.items():
        if name not in wanted and field in (None, name.split(".")[0]):
            unknown = f"{name} of shape {tuple(shape)}, and this config has no such array"
            raise UsageError(f"checkpoint {step} has {unknown}; {advice}")


def check_types(step: int, arrays: dict[str, jax.Array], wanted: dict[str, Any]) -> None:
    """Reject arrays with a dtype that differs from `wanted`."""
    # Orbax reads in separate threads, where a float64 mode that this thread entered as a context is off.
    for name, leaf in wanted.items():
        if arrays[name].dtype != leaf.dtype:
            types = f"{arrays[name].dtype}, not {leaf.dtype}; set jax_enable_x64 for the whole process"
            raise RunError(f"{name} of checkpoint {step} came back in {types}, not in a context")
