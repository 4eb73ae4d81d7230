"""Foreign tensors as the weights of a model, and back, by the table of a `Family`.

Shapes are those of our own parameters; a family only gives the layout in its files. BLOOM's queries, keys and values
are a `torch.nn.Linear` [out, in], fused head by head: of `blocks.attention.qkv.kernel` [l, h, c, n, d] the part of a
layer is transposed to [n, c, d, h] and flattened to [n · c · d, h]. Both directions are a transposition and a reshape.

Everything is checked before a number is read. Then a layer of a weight at a time is assembled from its tensors, or cut
into them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, product
from typing import Any

import jax
import numpy as np

from mjax.config.model import ModelConfig
from mjax.config.pattern import find_stack
from mjax.errors import UsageError, join_shortened
from mjax.interop.tensor_files import FLOATS, TensorInfo, Tensors
from mjax.models.build import abstract_weights, weight_dims
from mjax.models.huggingface.family import Family
from mjax.models.protocol import Model
from mjax.parallel.weights import EXPERT, INPUTS, LAYER, OUTPUTS, PART, POSITION, TOKEN, leaf_name

ROWS = 4096  # of an embedding to read at once
ALONE = (EXPERT, TOKEN, POSITION)
"""Dims that files do not join with others."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a file's tensor in our weights.

    Attributes:
      ours: name of the weight.
      index: the part of the weight: its layer, which of queries, keys and values, the rows that are tokens.
      order: the dims of that part in the tensor's order.
      sizes: of these dims, in that order.
      shape: of the tensor, whose dims are products of `sizes`.
    """

    ours: str
    index: tuple[int | slice, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_vocabulary(self) -> bool:
        """Whether the tensor has a row per token, with zero rows after them in ours that pad the vocabulary."""
        return self.index[:1] not in ((), (slice(None),)) and isinstance(self.index[0], slice)

    def to_file(self, weight: np.ndarray, first: int = 0) -> np.ndarray:
        """The tensor: a view of the weight, given from layer `first` on, where the layout allows one, else a copy."""
        index = (self.index[0] - first, *self.index[1:]) if first else self.index
        return weight[index].transpose(self.order).reshape(self.shape)

    def from_file(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor with the layout of the part of the weight."""
        return tensor.reshape(self.sizes).transpose(np.argsort(self.order))


def places(family: Family, model: ModelConfig) -> dict[str, TensorPlace]:
    """The place of every tensor of the model by name: in the order of the table, and layer by layer."""
    shapes, dims = {name: shape for name, (shape, _) in abstract_weights(model).items()}, weight_dims(model)
    stored, table, whole = _positions_in_stacks(shapes, model), {}, slice(None)
    for layer, (module, names) in _modules(family, model):
        for ours in (module, *(f"{module}.{part}" for part in ("table", "kernel", "scale", "bias"))):
            if (ours, layer) not in stored or (ours != module and ours in family.names):
                continue
            weight, index = stored[ours, layer]
            of_experts = EXPERT in dims[weight]
            for which, name in [(whole, names)] if isinstance(names, str) else enumerate(names):
                one_by_one = of_experts and "{2}" in name
                suffix = "" if of_experts and not one_by_one else ".bias" if ours.endswith(".bias") else ".weight"
                for expert in range(shapes[weight][1]) if one_by_one else (whole,):
                    at = {LAYER: index, EXPERT: expert, PART: which, TOKEN: slice(model.vocabulary)}
                    place = _place(family, weight, dims[weight], shapes[weight], at)
                    table[name.format(layer, layer + 1, expert) + suffix] = place
    nameless = shapes.keys() - {place.ours for place in table.values()}
    assert not nameless, f"the table of {family.model} has no name for {', '.join(sorted(nameless))}"
    return table


def _modules(family: Family, model: ModelConfig) -> Iterator[tuple[int, tuple[str, str | tuple[str, ...]]]]:
    """The rows of the table, layer by layer, each with its layer from 0."""
    for in_layers, rows in groupby(family.names.items(), key=lambda row: bool(re.search(r"\{[01]\}", "".join(row[1])))):
        yield from product(range(model.layers if in_layers else 1), rows)


def _positions_in_stacks(weights: Iterable[str], model: ModelConfig) -> dict[tuple[str, int], tuple[str, int]]:
    """Map a weight's name in a model of equal layers, and a layer from 0, to the stacked weight that has it and the
    index in it. Weights outside layers have layer 0."""
    stored = {}
    for name in weights:
        if (stack := find_stack(model, name)) is None:
            stored[name, 0] = name, 0
        else:
            stored |= {(stack.name_in_layer(name), n - 1): (name, index) for index, n in enumerate(stack.numbers)}
    return stored


def _place(family: Family, name: str, named: Sequence[str], shape: Sequence[int], at: Mapping[str, Any]) -> TensorPlace:
    """The place of one tensor.

    Args:
      family: of the model.
      ours: name of the weight.
      named: its dims.
      shape: its sizes.
      at: what the tensor has of a dim, if not all: a layer's index in the weight; the number of an expert; which of
        queries, keys and values, or of gate and up; the rows that are tokens.
    """
    index, dims, sizes = [], [], []
    for dim, size in zip(named, shape, strict=True):
        index.append(part := at.get(dim, slice(None)))
        if isinstance(part, slice):
            dims.append(dim)
            sizes.append(part.stop or size)
    alone, ins, outs = (
        [i for i, dim in enumerate(dims) if dim in names] for names in (ALONE, INPUTS, (PART, *OUTPUTS))
    )
    if len(outs) == 3:  # queries, keys and values in one
        outs = [outs["cnd".index(dim)] for dim in family.qkv]
    groups = [*filter(None, [*([i] for i in alone), *([outs, ins] if family.transposed else [ins, outs])])]
    order = tuple(chain.from_iterable(groups))
    shape = tuple(math.prod(sizes[i] for i in group) for group in groups)
    while index and index[-1] == slice(None):
        index.pop()
    return TensorPlace(name, tuple(index), order, tuple(sizes[i] for i in order), shape)


def to_stored(family: Family, tensors: Tensors) -> Family:
    """The family with the names that these files have for its experts: of each, or of all in one tensor."""
    fused = "|".join(re.escape(name).replace(re.escape("{0}"), r"\d+") for name in family.fused.values())
    if not fused or not any(
        re.fullmatch(f"({family.prefix})?({fused})", family.prefix + name) for name in tensors.kinds
    ):
        return family
    return replace(family, names={**family.names, **family.fused})


def leaves(model: Model) -> dict[str, Any]:
    """The weights of a model by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def find_tensors(
    family: Family, tensors: Tensors, model: ModelConfig, source: str, draw_heads: bool = False
) -> dict[str, str]:
    """The name in the files of each tensor of `model`, after checking the files.

    Args:
      family: of the model.
      tensors: the files.
      model: the model.
      source: where the files are, for messages.
      draw_heads: whether heads may be missing entirely.

    Raises:
      UsageError: a tensor is missing, unknown, of another shape or not floating-point; or a copy differs.
    """
    if model.layers > len(tensors.kinds):  # before there is a name for each
        counts = f"{model.layers:,} layers, and its files have {len(tensors.kinds):,} tensors"
        raise UsageError(f"{family.described_by} of {source} asks for {counts}; download the model again")
    expected = places(family, model)
    copied = {copy: original for copy, original in family.copies.items() if copy not in expected}
    names: dict[str, str] = {}
    for name, kind in tensors.kinds.items():
        if re.fullmatch(family.ignored, name):
            continue
        known = _full_name(family, name, expected)
        place = expected.get(copied.get(known, known))
        if place is None:
            model_of = f"which is not part of {family.model} with {model.layers} layers"
            remedy = f"convert the model it was made for, or restore {family.described_by}"
            raise UsageError(f"{source} has a tensor {family.spelled(name)}, {model_of}; {remedy}")
        if kind.dtype not in FLOATS:
            raise UsageError(f"{source}: {name} is of type {kind.dtype}; mjax reads {', '.join(FLOATS)}")
        if names.setdefault(known, name) != name:
            raise UsageError(f"{source} has both {name} and {names[known]}; remove the one that is not the model's")
        if known not in copied and not _fits(family, kind, place):
            shapes = f"shape {kind.shape}, and {family.described_by} asks for {place.shape}"
            raise UsageError(f"{source}: {family.spelled(name)} has {shapes}; restore one of the two")
    absent = absent_heads(family, model, {copied.get(known, known) for known in names})
    copies = {copy: names.pop(copy) for copy in copied if copy in names}
    missing = {name: place for name, place in expected.items() if name not in names}
    _check_missing(family, missing, absent, source, draw_heads)
    for known, copy in copies.items():
        _check_copy(family, tensors, copy, names[copied[known]], expected[copied[known]], source)
    return names


def _check_missing(
    family: Family, missing: dict[str, TensorPlace], absent: list[str], source: str, draw_heads: bool
) -> None:
    """Refuse missing tensors, except those of heads without any if these may be drawn."""
    if lost := [name for name, place in missing.items() if not place.ours.startswith(tuple(absent))]:
        named = join_shortened(list(dict.fromkeys(map(family.spelled, lost))))
        raise UsageError(f"{source} lacks the tensor {named}; download the model again")
    if missing and not draw_heads:
        heads = ", ".join(family.heads[head] for head in absent)
        lost = f"{join_shortened(list(missing))}, all of {heads}; its encoder is complete"
        raise UsageError(f"{source} lacks the tensor {lost}, so add --init-missing-heads to give these random weights")


def _check_copy(family: Family, tensors: Tensors, copy: str, original: str, place: TensorPlace, source: str) -> None:
    """Refuse a second copy of a tensor with other numbers, read a few rows at a time."""
    if not _fits(family, tensors.kinds[copy], place) or not all(
        np.array_equal(tensors.read(copy, rows), tensors.read(original, rows)) for rows in _rows(0, place.shape[0])
    ):
        problem = f"{copy} differs from {original}, but mjax has one weight for both"
        raise UsageError(f"{source}: {problem}; convert a model in which they are tied")


def absent_heads(family: Family, model: ModelConfig, names: Container[str]) -> list[str]:
    """The heads without any tensor among `names`."""
    there = [place.ours for name, place in places(family, model).items() if name in names]
    return [head for head in family.heads if not any(ours.startswith(head) for ours in there)]


def _full_name(family: Family, name: str, expected: Mapping[str, TensorPlace]) -> str:
    """A name as in the table: the current one, with the prefix."""
    for old, new in family.renamed:
        name = re.sub(old, new, name)
    return name if name in expected or name in family.copies else family.prefix + name


def _fits(family: Family, kind: TensorInfo, place: TensorPlace) -> bool:
    """Whether a tensor has the shape of its place, or more rows if these pad the vocabulary."""
    padded = family.padded and place.is_vocabulary and kind.shape[:1] > place.shape[:1]
    return kind.shape[padded:] == place.shape[padded:]


def _rows(first: int, end: int) -> list[slice]:
    return [slice(start, min(start + ROWS, end)) for start in range(first, end, ROWS)]


def block_reader(
    family: Family,
    tensors: Tensors,
    names: Mapping[str, str],
    model: ModelConfig,
    read: Callable[[int], None],
    drawn: Mapping[str, jax.Array] | None = None,
) -> Callable[[str, int, int], np.ndarray]:
    """A function that reads a part of a weight, with one tensor in memory beside it.

    It takes the name of the weight and where the part begins and ends along dim 0 (layers [l, …], not split into a
    pipeline's chunks), and returns float32.

    Args:
      family: of the model.
      tensors: the files.
      names: the result of `find_tensors`.
      model: the model.
      read: called with the bytes of tensors read since the last call.
      drawn: weights that are not in the files, by our names.

    Raises:
      UsageError: when a part is read: it is not finite.
    """
    shapes, dims, parts = abstract_weights(model), weight_dims(model), _group_by_weight(family, model)

    def tensor(name: str, rows: slice = slice(None)) -> np.ndarray:
        array = tensors.read(names[name], rows)
        read(array.nbytes)
        if not np.isfinite(array).all():
            raise UsageError(f"{names[name]} holds numbers that are not finite; download the model again")
        return array

    def block(weight: str, first: int, end: int) -> np.ndarray:
        if weight in (drawn or {}):
            return np.asarray(drawn[weight])[first:end]
        shape, _ = shapes[weight]
        out = np.zeros((end - first, *shape[1:]), np.float32)  # vocabulary padding stays 0
        for name, place in parts[weight]:
            if place.is_vocabulary:  # an embedding is large: avoid a second copy
                for rows in _rows(first, min(end, place.shape[0])):
                    out[rows.start - first : rows.stop - first] = tensor(name, rows)
            elif LAYER not in dims[weight]:
                out[...] = place.from_file(tensor(name))[first:end]
            elif first <= place.index[0] < end:
                out[(place.index[0] - first, *place.index[1:])] = place.from_file(tensor(name))
        return out

    return block


def tensor_parts(
    family: Family, model: ModelConfig, blocks: Callable[[str, int], Iterable[tuple[int, np.ndarray]]]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """The tensors of a model folder in the order in which the weights are stored: name, first row, and rows.

    All rows of a tensor come at once, except of an embedding. Vocabulary padding is left out. A part is a view of its
    block where the layout allows one.

    Args:
      family: of the model.
      model: the model.
      blocks: takes the name of an array of a checkpoint and its number of dims; returns parts along dim 0 in order,
        each with its first index.
    """
    dims = weight_dims(model)
    for ours, named in _group_by_weight(family, model).items():
        parts = blocks(f"model.{ours}", len(dims[ours]))
        if {LAYER, TOKEN}.isdisjoint(dims[ours]):
            parts = [(0, np.concatenate([part for _, part in parts]))]
        for first, block in parts:
            for name, place in named:
                if TOKEN in dims[ours]:
                    if len(rows := block[: max(0, model.vocabulary - first)]):
                        yield name, first, rows
                elif LAYER not in dims[ours] or first <= place.index[0] < first + len(block):
                    yield name, 0, place.to_file(block, first)


def _group_by_weight(family: Family, model: ModelConfig) -> dict[str, list[tuple[str, TensorPlace]]]:
    """The names and places of the tensors of each weight."""
    parts = defaultdict(list)
    for name, place in places(family, model).items():
        parts[place.ours].append((name, place))
    return parts
