"""Foreign tensors as the weights of a model, and back, by the table of a `Family`.

Shapes come from mjax's parameters; a family describes the layout in its files. For example, BLOOM's queries, keys and
values are a `torch.nn.Linear` [out, in], fused head by head. A layer of `blocks.attention.qkv.kernel` [l, h, c, n, d]
is transposed to [n, c, d, h] and flattened to [n · c · d, h]. Both directions are a transposition and a reshape.

Everything is checked before a number is read. Then one layer of a weight at a time is assembled from its tensors, or
split into them.
"""

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
from mjax.interop.tensor_files import FLOAT_DTYPES, LazyTensor, Tensors
from mjax.models.build import abstract_weights, weight_dims
from mjax.models.huggingface.family import Family
from mjax.models.protocol import Model
from mjax.parallel.weights import EXPERT, INPUTS, LAYER, OUTPUTS, PART, POSITION, TOKEN, leaf_name

EMBEDDING_ROWS = 4096  # of an embedding to read at once
SEPARATE_DIMS = (EXPERT, TOKEN, POSITION)  # dims that files never flatten together with others


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a file's tensor in a weight of mjax.

    Attributes:
      weight: name of the weight.
      index: the part of the weight: its layer, which of queries, keys and values, the rows that are tokens.
      order: the dims of that part in the tensor's order.
      sizes: of these dims, in that order.
      shape: of the tensor, whose dims are products of `sizes`.
    """

    weight: str
    index: tuple[int | slice, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_vocabulary(self) -> bool:
        """True if the tensor has a row per token; the weight has more, zero rows that pad the vocabulary."""
        return self.index[:1] not in ((), (slice(None),)) and isinstance(self.index[0], slice)

    def to_file(self, weight: np.ndarray, first: int = 0) -> np.ndarray:
        """The tensor, from a weight that begins with layer `first`: a view where the layout allows one, else a copy."""
        index = (self.index[0] - first, *self.index[1:]) if first else self.index
        return weight[index].transpose(self.order).reshape(self.shape)

    def from_file(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor with the layout of the part of the weight."""
        return tensor.reshape(self.sizes).transpose(np.argsort(self.order))


def tensor_layouts(family: Family, model: ModelConfig) -> dict[str, TensorLayout]:
    """The layout of every tensor of the model by name: in the order of the table, and layer by layer."""
    shapes, dims = {name: shape for name, (shape, _) in abstract_weights(model).items()}, weight_dims(model)
    stored, layouts, whole = _map_to_stacks(shapes, model), {}, slice(None)
    for layer, (module, names) in _iterate_modules(family, model):
        for parameter in (module, *(f"{module}.{part}" for part in ("table", "kernel", "scale", "bias"))):
            if (parameter, layer) not in stored or (parameter != module and parameter in family.names):
                continue
            weight, index = stored[parameter, layer]
            has_experts, suffix = EXPERT in dims[weight], ".bias" if parameter.endswith(".bias") else ".weight"
            for part, name in [(whole, names)] if isinstance(names, str) else enumerate(names):
                per_expert = has_experts and "{2}" in name
                complete = name.endswith("_bias") or (has_experts and not per_expert)
                for expert in range(model.experts) if per_expert else (whole,):
                    selection = {LAYER: index, EXPERT: expert, PART: part, TOKEN: slice(model.vocabulary)}
                    layout = _tensor_layout(family, weight, dims[weight], shapes[weight], selection)
                    full_name = name.format(layer, layer + 1, expert, model.layers)
                    layouts[full_name + suffix * (not complete)] = layout
    unnamed = shapes.keys() - {layout.weight for layout in layouts.values()}
    assert not unnamed, f"the table of {family.model} has no name for {', '.join(sorted(unnamed))}"
    return layouts


def _iterate_modules(family: Family, model: ModelConfig) -> Iterator[tuple[int, tuple[str, str | tuple[str, ...]]]]:
    """Rows of the table, layer by layer, each with its layer from 0."""
    for in_layers, rows in groupby(family.names.items(), key=lambda row: bool(re.search(r"\{[01]\}", "".join(row[1])))):
        yield from product(range(model.layers if in_layers else 1), rows)


def _map_to_stacks(weights: Iterable[str], model: ModelConfig) -> dict[tuple[str, int], tuple[str, int]]:
    """Map a weight's name in a model of equal layers, and its layer from 0, to the name of the stacked weight and the
    index in it. Weights outside layers have layer 0."""
    stored = {}
    for name in weights:
        if (stack := find_stack(model, name)) is None:
            stored[name, 0] = name, 0
        else:
            stored |= {(stack.name_in_layer(name), n - 1): (name, index) for index, n in enumerate(stack.numbers)}
    return stored


def _tensor_layout(
    family: Family, name: str, dim_names: Sequence[str], shape: Sequence[int], selection: Mapping[str, Any]
) -> TensorLayout:
    """The layout of one tensor.

    Args:
      family: of the model.
      name: of the weight.
      dim_names: names of its dims.
      shape: sizes of its dims.
      selection: index or slice of a dim that the tensor has a part of: the layer in the weight; the expert; one of
        queries, keys and values, or of gate and up; the rows that are tokens.
    """
    index, dims, sizes = [], [], []
    for dim, size in zip(dim_names, shape, strict=True):
        index.append(part := selection.get(dim, slice(None)))
        if isinstance(part, slice):
            dims.append(dim)
            sizes.append(part.stop or size)
    kinds = SEPARATE_DIMS, INPUTS, (PART, *OUTPUTS)
    separate, inputs, outputs = ([i for i, dim in enumerate(dims) if dim in names] for names in kinds)
    if len(outputs) == 3:  # queries, keys and values in one
        outputs = [outputs["cnd".index(dim)] for dim in family.qkv]
    matrix = [outputs, inputs] if family.transposed else [inputs, outputs]
    groups = [group for group in (*([i] for i in separate), *matrix) if group]
    order = tuple(chain.from_iterable(groups))
    shape = tuple(math.prod(sizes[i] for i in group) for group in groups)
    while index and index[-1] == slice(None):
        index.pop()
    return TensorLayout(name, tuple(index), order, tuple(sizes[i] for i in order), shape)


def with_stored_experts(family: Family, tensors: Tensors) -> Family:
    """The family with the names of these files for its experts: a tensor of each, or one of all."""
    fused = "|".join(re.escape(name).replace(re.escape("{0}"), r"\d+") for name in family.fused.values())
    pattern = re.compile(f"({family.prefix})?({fused})")
    if fused and any(pattern.fullmatch(family.prefix + name) for name in tensors):
        return replace(family, names={**family.names, **family.fused})
    return family


def without_absent_layers(family: Family, tensors: Tensors, model: ModelConfig) -> ModelConfig:
    """The model without the `Family.optional` parts of which these files have no tensor."""

    def is_absent(prefix: str) -> bool:
        return not any(name.startswith(prefix.format(*[None] * 3, model.layers)) for name in tensors)

    return replace(model, **{name: 0 for name, prefix in family.optional.items() if is_absent(prefix)})


def weights_by_name(model: Model) -> dict[str, Any]:
    """The weights of a model by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def match_tensors(
    family: Family, tensors: Tensors, model: ModelConfig, source: str, init_missing_heads: bool = False
) -> dict[str, str]:
    """Check the files of a model, and return the name in the files of each of its tensors.

    Args:
      family: of the model.
      tensors: the files.
      model: the model.
      source: folder of the files, for messages.
      init_missing_heads: True if heads may be missing entirely.

    Raises:
      UsageError: a tensor is missing, unknown, of another shape or not floating-point; or a copy differs.
    """
    if model.layers > len(tensors):  # before names of all layers are built
        counts = f"{model.layers:,} layers, and its files have {len(tensors):,} tensors"
        raise UsageError(f"{family.described_by} of {source} asks for {counts}; download the model again")
    expected = tensor_layouts(family, model)
    copied = {copy: original for copy, original in family.copies.items() if copy not in expected}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        if re.fullmatch(family.ignored.replace("{3}", str(model.layers)), name):
            continue
        known = _full_name(family, name, expected)
        layout = expected.get(copied.get(known, known))
        if layout is None:
            model_of = f"which is not part of {family.model} with {model.layers} layers"
            remedy = f"convert the model it was made for, or restore {family.described_by}"
            raise UsageError(f"{source} has a tensor {family.spelled(name)}, {model_of}; {remedy}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise UsageError(f"{source}: {name} is of type {tensor.dtype}; mjax reads {', '.join(FLOAT_DTYPES)}")
        if names.setdefault(known, name) != name:
            raise UsageError(f"{source} has both {name} and {names[known]}; remove the one that is not the model's")
        if known not in copied and not _has_shape(family, tensor, layout):
            shapes = f"shape {tensor.shape}, and {family.described_by} asks for {layout.shape}"
            raise UsageError(f"{source}: {family.spelled(name)} has {shapes}; restore one of the two")
    missing_heads = find_missing_heads(family, model, {copied.get(known, known) for known in names})
    copies = {copy: names.pop(copy) for copy in copied if copy in names}
    missing = {name: layout for name, layout in expected.items() if name not in names}
    _check_missing(family, missing, missing_heads, source, init_missing_heads)
    for known, copy in copies.items():
        _check_copy(family, tensors, copy, names[copied[known]], expected[copied[known]], source)
    return names


def _check_missing(family: Family, missing: dict[str, TensorLayout], heads: list[str], source: str, init: bool) -> None:
    """Reject missing tensors, except all tensors of the missing `heads` if these are initialized."""
    if absent := [name for name, layout in missing.items() if not layout.weight.startswith(tuple(heads))]:
        listed = join_shortened(list(dict.fromkeys(map(family.spelled, absent))))
        raise UsageError(f"{source} lacks the tensor {listed}; download the model again")
    if missing and not init:
        titles = ", ".join(family.heads[head] for head in heads)
        listed = f"{join_shortened(list(missing))}, all of {titles}; its encoder is complete"
        raise UsageError(f"{source} lacks the tensor {listed}, so add --init-missing-heads to initialize these")


def _check_copy(family: Family, tensors: Tensors, copy: str, original: str, layout: TensorLayout, source: str) -> None:
    """Reject a second copy of a tensor with other values; a few rows are read at a time."""
    slices = _row_slices(0, layout.shape[0])
    equal = (np.array_equal(tensors[copy][rows], tensors[original][rows]) for rows in slices)
    if not _has_shape(family, tensors[copy], layout) or not all(equal):
        problem = f"{copy} differs from {original}, but mjax has one weight for both"
        raise UsageError(f"{source}: {problem}; convert a model in which they are tied")


def find_missing_heads(family: Family, model: ModelConfig, names: Container[str]) -> list[str]:
    """The heads without any tensor among `names`."""
    present = [layout.weight for name, layout in tensor_layouts(family, model).items() if name in names]
    return [head for head in family.heads if not any(weight.startswith(head) for weight in present)]


def _full_name(family: Family, name: str, expected: Mapping[str, TensorLayout]) -> str:
    """The name in the table for a name in a file: the current one, with the prefix."""
    for old, new in family.renamed:
        name = re.sub(old, new, name)
    return name if name in expected or name in family.copies else family.prefix + name


def _has_shape(family: Family, tensor: LazyTensor, layout: TensorLayout) -> bool:
    """True if a tensor has the shape of its layout, or more rows that pad the vocabulary."""
    padded = family.padded and layout.is_vocabulary and tensor.shape[:1] > layout.shape[:1]
    return tensor.shape[padded:] == layout.shape[padded:]


def _row_slices(first: int, end: int) -> list[slice]:
    return [slice(start, min(start + EMBEDDING_ROWS, end)) for start in range(first, end, EMBEDDING_ROWS)]


def make_block_reader(
    family: Family,
    tensors: Tensors,
    names: Mapping[str, str],
    model: ModelConfig,
    on_read: Callable[[int], None],
    initialized: Mapping[str, jax.Array] | None = None,
) -> Callable[[str, int, int], np.ndarray]:
    """Return a function that reads a block of a weight, with one more tensor in memory.

    Its arguments are the name of the weight, and the begin and end of the block along dim 0 (layers [l, …], not split
    into virtual stages). It returns float32.

    Args:
      family: of the model.
      tensors: the files.
      names: the result of `match_tensors`.
      model: the model.
      on_read: called with the bytes of tensors read since the last call.
      initialized: weights that are not in the files, by name.

    Raises:
      UsageError: when a block is read: it is not finite.
    """
    shapes, tensors_by_weight = abstract_weights(model), _group_by_weight(family, model)

    def read_tensor(name: str, rows: slice = slice(None)) -> np.ndarray:
        array = tensors[names[name]][rows]
        on_read(array.nbytes)
        if not np.isfinite(array).all():
            raise UsageError(f"{names[name]} holds numbers that are not finite; download the model again")
        return array

    def read_block(weight: str, first: int, end: int) -> np.ndarray:
        if weight in (initialized or {}):
            return np.asarray(initialized[weight])[first:end]
        shape, _ = shapes[weight]
        result = np.zeros((end - first, *shape[1:]), np.float32)  # vocabulary padding stays 0
        for name, layout in tensors_by_weight[weight]:
            if layout.is_vocabulary:  # an embedding is large: avoid a second copy
                for rows in _row_slices(first, min(end, layout.shape[0])):
                    result[rows.start - first : rows.stop - first] = read_tensor(name, rows)
            elif layout.index[:1] in ((), (slice(None),)):
                result[layout.index] = layout.from_file(read_tensor(name))[first:end]
            elif first <= layout.index[0] < end:
                result[(layout.index[0] - first, *layout.index[1:])] = layout.from_file(read_tensor(name))
        return result

    return read_block


def iterate_tensors(
    family: Family, model: ModelConfig, blocks: Callable[[str, int], Iterable[tuple[int, np.ndarray]]]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the tensors of a model folder in the order of the stored weights: name, first row, and rows.

    All rows of a tensor are yielded together, except of an embedding. Vocabulary padding is dropped. Rows are a view of
    their block where the layout allows one.

    Args:
      family: of the model.
      model: the model.
      blocks: called with the name of an array of a checkpoint and its number of dims; returns blocks along dim 0 in
        order, each with its first index.
    """
    dims_by_weight = weight_dims(model)
    for weight, layouts in _group_by_weight(family, model).items():
        dims, weight_blocks = dims_by_weight[weight], blocks(f"model.{weight}", len(dims_by_weight[weight]))
        if {LAYER, TOKEN}.isdisjoint(dims):
            weight_blocks = [(0, np.concatenate([block for _, block in weight_blocks]))]
        for first, block in weight_blocks:
            for name, layout in layouts:
                if TOKEN in dims:
                    if len(rows := block[: max(0, model.vocabulary - first)]):
                        yield name, first, rows
                elif LAYER not in dims or first <= layout.index[0] < first + len(block):
                    yield name, 0, layout.to_file(block, first)


def _group_by_weight(family: Family, model: ModelConfig) -> dict[str, list[tuple[str, TensorLayout]]]:
    """Names and layouts of the tensors of each weight."""
    by_weight = defaultdict(list)
    for name, layout in tensor_layouts(family, model).items():
        by_weight[layout.weight].append((name, layout))
    return by_weight
