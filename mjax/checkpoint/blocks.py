"""Checkpoints in blocks: weights that are larger than memory, written and read a layer at a time.

Orbax holds every array of a state in memory, compressed or not. Its arrays are Zarr 3 in one OCDBT store, which
TensorStore writes and reads by slices. A checkpoint written here is one that Orbax began, with arrays of no size, and
TensorStore completed: `Checkpoints.restore` reads it as any other, on any mesh.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.arrays import CHUNK_BYTES, STACKED, named, open_array, type_and_shape
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import MANIFEST, write_manifest


def write_in_blocks(folder: Path, field: str, target: Any, read: Callable[[str, int, int], np.ndarray]) -> None:
    """Write checkpoint 0 into `folder`, which has none; it is not atomic, so write into a temporary folder.

    Args:
      folder: `checkpoints` of a run.
      field: of the state, such as `model`; it is the only one.
      target: its tree of ShapeDtypeStructs.
      read: takes the name of an array as in `named(target)`, and where a block of its first dim begins and ends.
    """
    with Checkpoints(folder, on_notice=lambda line: None) as checkpoints:
        checkpoints.save(0, {field: jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), target)})
    store = folder / "0" / field
    for begun in ("d", "ocdbt.process_0", "array_metadatas"):  # the last one has the chunks of arrays of no size
        shutil.rmtree(store / begun)
    for replaced in (store / "manifest.ocdbt", folder / "0" / MANIFEST):
        replaced.unlink()
    leaves = {f"{field}.{name}": (name, leaf) for name, leaf in named(target).items()}
    for stored, (name, leaf) in leaves.items():
        chunk = _chunk(stored, leaf)
        array = open_array(store, stored, create=_new_metadata(leaf, chunk))
        for start in range(0, leaf.shape[0], chunk[0]):
            end = min(start + chunk[0], leaf.shape[0])
            array[start:end].write(read(name, start, end)).result()
    write_manifest(folder / "0", 0, {stored: type_and_shape(leaf) for stored, (_, leaf) in leaves.items()})


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


def _new_metadata(leaf: Any, chunk: list[int]) -> dict[str, Any]:
    """Metadata of a Zarr 3 array like `leaf`, in chunks of a shape."""
    return {
        "shape": list(leaf.shape),
        "data_type": str(leaf.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 3}},  # as Orbax
        ],
    }


def _chunk(name: str, leaf: Any) -> list[int]:
    """The shape of the chunks: one layer at most, and no more than CHUNK_BYTES."""
    chunk = [1 if STACKED in name else leaf.shape[0], *leaf.shape[1:]]
    while math.prod(chunk) * leaf.dtype.itemsize > CHUNK_BYTES:
        largest = chunk.index(max(chunk))
        chunk[largest] = -(-chunk[largest] // 2)
    return chunk
