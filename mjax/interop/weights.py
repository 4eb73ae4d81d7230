"""The tensors of others as the weights of a model, and back, as a table of `places` describes them.

Reading looks at everything that can be wrong before a number is read. Then each shard of each weight is put together
from the tensors it is made of, one tensor in memory at a time beside the weights, whatever the mesh.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from mjax.config import ModelConfig
from mjax.errors import UsageError
from mjax.interop.places import LAYERS, Place, shapes, sizes, stacked_dim, to_ours, to_theirs
from mjax.interop.tensor_files import FLOATS, Tensors
from mjax.models.build import Model
from mjax.names import leaf_name

ROWS = 4096  # of an embedding that are read at once


@dataclass(frozen=True)
class Naming:
    """How a family calls its tensors.

    Attributes:
      model: what messages call it, such as GPT2LMHeadModel.
      places: for each of our weights its form and name, or names, in full.
      prefix: what some files leave out at the beginning of a name.
      copies: tensors that are another one under a second name; where they are stored they must be equal to it.
      ignored: names of tensors that are no weights, such as stored masks.
      heads: what may be drawn anew where the files hold nothing of it: how the names of our weights begin, and a word
        for it.
      renamed: (expression, replacement) that turn names of old versions into those of `places`.
      described_by: what says how large the tensors must be.
    """

    model: str
    places: Mapping[str, Place]
    prefix: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: str = "(?!)"  # matches nothing
    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    described_by: str = "config.json"


def find_tensors(
    naming: Naming, tensors: Tensors, model: ModelConfig, source: str, draw_heads: bool = False
) -> dict[str, str]:
    """The name in the files of each tensor of `model`, after a look at what there is.

    Args:
      naming: the family's names.
      tensors: the files.
      model: the model.
      source: where the files are, for messages.
      draw_heads: whether heads of which the files hold nothing may be missing.

    Raises:
      UsageError: a tensor is missing, unknown, of another shape or of a type that holds no weights; or a copy is none.
    """
    if model.layers > len(tensors.kinds):  # before there is a name for each
        raise UsageError(
            f"{naming.described_by} of {source} asks for {model.layers:,} layers, and its files hold "
            f"{len(tensors.kinds):,} tensors; restore the one or download the others again"
        )
    expected = shapes(naming.places, model)
    found, copies = {}, {}
    for name, kind in tensors.kinds.items():
        if re.fullmatch(naming.ignored, name):
            continue
        known = _in_full(naming, name, expected)
        if (known in expected or known in naming.copies) and kind.dtype not in FLOATS:
            raise UsageError(f"{source}: {name} is of type {kind.dtype}; mjax reads {', '.join(FLOATS)}")
        if known in naming.copies:
            copies[known] = name
            continue
        if known not in expected:
            raise UsageError(
                f"{source} holds a tensor {name}, which {naming.model} with {model.layers} layers has not; "
                f"convert the model it was made for, or restore {naming.described_by}"
            )
        if known in found:
            raise UsageError(f"{source} holds both {name} and {found[known]}; take out the one that is not the model's")
        if kind.shape != expected[known]:
            raise UsageError(
                f"{source}: {name} has shape {kind.shape}, and {naming.described_by} asks for {expected[known]}; "
                "restore the one or the other"
            )
        found[known] = name
    absent = absent_heads(naming, [*found, *(naming.copies[copy] for copy in copies)])
    of_absent = {name for head in absent for name in tensors_of_head(naming, head)}
    missing = [name for name in expected if name not in found]
    if lost := [name for name in missing if name not in of_absent]:
        raise UsageError(f"{source} lacks the tensor {_and_more(lost)}; download the model again")
    if missing and not draw_heads:
        heads = ", ".join(naming.heads[head] for head in absent)
        raise UsageError(
            f"{source} lacks the tensor {_and_more(missing)}, all of {heads}; "
            "its encoder is whole, so add --draw-heads to give these random weights, or get a model that has them"
        )
    for known, copy in copies.items():
        original = found[naming.copies[known]]
        if not _equal(tensors, copy, original):
            raise UsageError(
                f"{source}: {copy} differs from {original}, and mjax has one weight for both; "
                "convert a model in which they are tied"
            )
    return found


def absent_heads(naming: Naming, names: Iterable[str]) -> list[str]:
    """The heads of which there is no tensor among `names`."""
    names = set(names)
    return [head for head in naming.heads if names.isdisjoint(tensors_of_head(naming, head))]


def tensors_of_head(naming: Naming, head: str) -> list[str]:
    """The names of the tensors of a head."""
    return [name for ours, (_, *names) in naming.places.items() if ours.startswith(head) for name in names]


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _in_full(naming: Naming, name: str, expected: Mapping[str, tuple[int, ...]]) -> str:
    """A name as `places` has it: those of today, with the prefix."""
    for old, new in naming.renamed:
        name = re.sub(old, new, name)
    return name if name in expected or name in naming.copies else naming.prefix + name


def _equal(tensors: Tensors, one: str, other: str) -> bool:
    """Whether two tensors hold the same numbers, read a few rows at a time."""
    shape = tensors.kinds[one].shape
    return shape == tensors.kinds[other].shape and all(
        np.array_equal(tensors.read(one, part), tensors.read(other, part))
        for part in (slice(start, start + ROWS) for start in range(0, shape[0], ROWS))
    )


def read_weights(
    naming: Naming,
    tensors: Tensors,
    names: Mapping[str, str],
    model: ModelConfig,
    target: Model,
    read: Callable[[int], None],
    drawn: Mapping[str, jax.Array] | None = None,
) -> Model:
    """The weights, each straight into its shards, one tensor in memory beside them.

    Args:
      naming: the family's names.
      tensors: the files.
      names: what `find_tensors` found in them.
      model: the model.
      target: the model of ShapeDtypeStructs with shardings; layers as [l, …], not cut into a pipeline's chunks.
      read: called with the bytes of tensors read since the last call.
      drawn: weights that are not in the files, by our names.

    Raises:
      UsageError: a weight is not finite.
    """
    size, drawn = sizes(model), drawn or {}

    def tensor(name: str, rows: slice = slice(None)) -> np.ndarray:
        array = tensors.read(names[name], rows)
        read(array.nbytes)
        if not np.isfinite(array).all():
            raise UsageError(f"{names[name]} holds numbers that are not finite; download the model again")
        return array

    def fill(out: np.ndarray, index: tuple[slice, ...], ours: str, layer: int) -> None:
        """Put the part `index` of a weight, of one layer where there are layers, into `out`."""
        form, *theirs = naming.places[ours]
        if len(theirs) == 1:
            out[...] = to_ours(tensor(theirs[0].format(layer)), ours, form, size)[index]
            return
        dim = stacked_dim(ours)
        others = (*index[:dim], *index[dim + 1 :])
        for place, which in enumerate(range(len(theirs))[index[dim]]):
            part = to_ours(tensor(theirs[which].format(layer)), ours, form, size)
            out[(slice(None),) * dim + (place,)] = part[others]

    def leaf(path: tuple, target: jax.ShapeDtypeStruct) -> jax.Array:
        ours = leaf_name(path)
        if ours in drawn:
            return drawn[ours]
        form, name = naming.places[ours][:2]

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            lengths = [len(range(*part.indices(extent))) for part, extent in zip(index, target.shape, strict=True)]
            out = np.zeros(lengths, target.dtype)  # what pads the vocabulary stays 0
            if ours.startswith(LAYERS):
                for place, layer in enumerate(range(target.shape[0])[index[0]]):
                    fill(out[place], index[1:], ours, layer)
            elif form.startswith("v"):  # an embedding is large: not twice in memory
                first, end, _ = index[0].indices(target.shape[0])
                for start in range(first, min(end, size["v"]), ROWS):
                    rows = slice(start, min(start + ROWS, end, size["v"]))
                    out[rows.start - first : rows.stop - first] = tensor(name, rows)[(slice(None), *index[1:])]
            else:
                fill(out, index, ours, 0)
            return out

        return jax.make_array_from_callback(target.shape, target.sharding, shard)

    return jax.tree_util.tree_map_with_path(leaf, target)


def weight_arrays(naming: Naming, weights: Model, model: ModelConfig) -> Callable[[str], np.ndarray]:
    """What gives the tensor of a name in `shapes`: a view of `weights`, whose arrays are on the CPU, or a copy of what
    lies in another order there.

    The rows that pad the vocabulary are left out.
    """
    leaves = {leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    origins = {}
    for ours, (form, *names) in naming.places.items():
        for which, name in enumerate(names):
            part = which if len(names) > 1 else None
            for layer in range(model.layers) if ours.startswith(LAYERS) else [None]:
                origins[name.format(layer)] = (ours, form, layer, part)

    def array(name: str) -> np.ndarray:
        ours, form, layer, part = origins[name]
        leaf = leaves[ours] if layer is None else leaves[ours][layer]
        leaf = leaf[: model.vocabulary] if form.startswith("v") else leaf
        leaf = leaf if part is None else leaf[(slice(None),) * stacked_dim(ours) + (part,)]
        return to_theirs(leaf, ours, form)

    return array
