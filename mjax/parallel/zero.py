"""Storage of weights, moments and gradients: one layout for plain data parallelism, ZeRO-1, FSDP and pipelines.

A weight of the model names the axes it is split over *during the computation*: `model`, and `expert` for expert
weights. Between steps it may be split further, and its moments with it:

    weights of the layers     their layer dim over `pipe`: a stage has its layers only. If the stages have different
                              numbers of them, another dim, and the stages exchange them at the start of the step
    all other weights         also over `pipe`, if there is one: the embedding is used at both ends of the pipeline,
                              but its master weights and moments exist once rather than once per stage
    with `mesh.zero` 1 or 3   everything over the replicas that have it (arXiv 1910.02054): `data`, `expert` and
                              `context`, or of the experts of a mixture, which `expert` splits already, the others;
                              but never over `replicate`, whose groups have copies (HSDP, arXiv 2304.11277)

Shards become weights at one of two points. ZeRO-1 gathers everything at the start of the step, in the compute dtype.
ZeRO-3, or FSDP, gathers a layer's weights inside the loop over layers, and again in the backward pass, so that no
device ever has more than one layer. It treats embeddings, the final LayerNorm and weights that `data` does not divide
like ZeRO-1. Weights that are multiplied in float8 are sent in float8. Either way the gradient of a shard is
reduce-scattered in float32.

      float32 shards ── cast ── all-gather ──▶ weights ──▶ loss
      float32 shards ◀── reduce-scatter ◀──── gradients ◀──┘
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig, axes
from mjax.config.axes import EXPERT, MODEL, PIPE
from mjax.config.pattern import StackRows, find_rows
from mjax.parallel import float8, mappings, named_scopes
from mjax.parallel.autodiff import linear_call, start_after
from mjax.parallel.float8 import Float8
from mjax.parallel.mappings import Gathers
from mjax.parallel.weights import leaf_name, weight_metadata

REPLICAS = axes.axes_sharing_weights()


@dataclass(frozen=True)
class Storage:
    """The storage of one weight, and the all-gathers that make it whole for the computation.

    Attributes:
      spec: PartitionSpec of the master weight and its moments.
      gathers: (axes, dim) to gather, in this order; dims are counted from the end, so they apply with and without the
        layer dims.
      gather_per_layer: cast and gathered, and its gradient summed over the replicas, layer by layer rather than at the
        start of the step and at its end.
      grad_partial_over_model: whether every rank of `model` has the whole weight and computes a different part of its
        gradient.
      float8: whether its matmuls are in float8 if the run's are; then it may be gathered in float8.
      keep_fp32: whether the computation uses it in the dtype of the master weights.
      rows: the layers of each stage, if its first dim, or its first two with chunks, are layers.
    """

    spec: P
    gathers: Gathers = ()
    gather_per_layer: bool = False
    grad_partial_over_model: bool = False
    float8: bool = False
    keep_fp32: bool = False
    rows: StackRows | None = None

    def cast(self, weight: Array, dtype) -> Array:
        """The weight in the dtype of the computation."""
        return weight if self.keep_fp32 else weight.astype(dtype)

    def to_stage(self, shard: Array) -> Array:
        """This stage's layers [slots, …] from the stored shard, inside `shard_map`. Unused slots have any layer."""
        if (rows := self.rows) is None or rows.even:
            return shard if rows is None else shard.reshape(rows.slots, *shard.shape[num_layer_dims(rows) :])
        slots = np.array(rows.list_slots())
        if (dim := self._pipe_dim) is None:
            return shard[jnp.asarray(slots)[mappings.rank(PIPE)]]
        return mappings.all_to_all(shard[slots.reshape(-1)], PIPE, split=0, join=dim)

    def from_stage(self, gradient: Array, shard: Array) -> Array:
        """The gradient of the stored shard from that of the layers of this stage: the reverse of `to_stage`."""
        if self.rows is None or self.rows.even:
            return gradient.reshape(shard.shape)
        if (dim := self._pipe_dim) is None:
            gradient = mappings.all_gather_invariant(gradient, PIPE, 0)
        else:
            gradient = mappings.all_to_all(gradient, PIPE, split=dim, join=0)
        in_order = np.argsort(self.rows.list_slots(), axis=None)[-len(shard) :]  # unused slots first
        return gradient[in_order]

    @property
    def _pipe_dim(self) -> int | None:
        """The dim that `pipe` splits, of a weight whose layers are not split by it."""
        return next((dim for dim, split_by in enumerate(self.spec) if split_by and PIPE in split_by), None)


def plan_storage(shapes, specs, mesh: MeshConfig):
    """A `Storage` for each weight.

    Args:
      shapes: the model as given by `jax.eval_shape`.
      specs: the model's PartitionSpecs, over `model` and `expert`.
      mesh: sizes of the axes, chunks and ZeRO stage.

    Returns:
      A tree like `shapes` of `Storage`.
    """
    metadata = [weight_metadata(shapes, name) for name in ("grad_partial_over_model", "float8", "keep_fp32")]
    marks = zip(layer_rows(shapes, mesh), *metadata, strict=True)

    def plan_leaf(leaf, spec: P) -> Storage:
        rows, partial, float8, keep_fp32 = next(marks)
        unsharded = MODEL in spec and MODEL not in compute_spec(leaf.shape, spec, mesh)
        partial = mesh.model > 1 and (partial or unsharded)
        storage = plan_weight_storage(rows, leaf.shape, spec, mesh)
        return replace(storage, grad_partial_over_model=partial, float8=float8, keep_fp32=keep_fp32)

    return jax.tree.map(plan_leaf, shapes, specs)


def layer_rows(model, mesh: MeshConfig) -> list[StackRows | None]:
    """The layers of each stage for each leaf of a model, or of one value for each weight; None outside layers."""
    return [find_rows(model.config, mesh, leaf_name(path)) for path, _ in jax.tree_util.tree_leaves_with_path(model)]


def split_into_virtual_stages(model, mesh: MeshConfig):
    """The model with its layers as [V, l / V, …] if each stage has V chunks of equally many."""
    leaves, structure = jax.tree.flatten(model)
    return structure.unflatten(map(_split_layers, leaves, layer_rows(model, mesh)))


def _split_layers(weight: Array | np.ndarray, rows: StackRows | None) -> Array | np.ndarray:
    return weight.reshape(rows.chunks, -1, *weight.shape[1:]) if num_layer_dims(rows) == 2 else weight


def num_layer_dims(rows: StackRows | None) -> int:
    """Leading dims of a stored weight of layers: [l, …], or [V, l / V, …] with V equal chunks; 0 of another weight.

    Stage i of a pipeline with V chunks has the i-th part of each chunk's layers (arXiv 2104.04473, section 2.2). A
    reshape makes the chunks, so layers stay in order, and each stage's part is an ordinary shard of dim 1.
    """
    return 0 if rows is None else 2 if rows.even and rows.chunks > 1 else 1


def compute_spec(shape: tuple[int, ...], spec: P, mesh: MeshConfig) -> P:
    """Adapt the module's `spec` of a weight to a mesh.

    A dim with fewer parts than `model` has ranks, such as key-value heads, is unsharded on each of them. Experts are
    unsharded on a mesh that does not split them.
    """
    entries = (None,) * (len(shape) - len(spec)) + tuple(spec)  # a chunk dim is not in the model's spec

    def is_whole(dim: int, entry: str | None) -> bool:
        return (entry == MODEL and dim < mesh.model) or (entry == EXPERT and mesh.expert == 1)

    return P(*(None if is_whole(dim, entry) else entry for dim, entry in zip(shape, entries, strict=True)))


def plan_weight_storage(rows: StackRows | None, shape: tuple[int, ...], spec: P, mesh: MeshConfig) -> Storage:
    """The storage of a weight of this whole shape and its module's `spec`; `rows` as in `Storage`."""
    layers, sizes, computed = num_layer_dims(rows), axes.sizes(mesh), compute_spec(shape, spec, mesh)
    split_by: list[tuple[str, ...]] = [() if entry is None else (entry,) for entry in computed]
    gathers: list[tuple[tuple[str, ...], int]] = []
    stages = (PIPE,) if mesh.pipe > 1 else ()
    copies = tuple(axis for axis in axes.sharding() if sizes[axis] > 1 and axis not in computed) if mesh.zero else ()
    if rows and rows.even and stages:
        split_by[layers - 1], stages = stages, ()
    # Stages exchange their layers before they gather them from replicas: fewer bytes.
    for names in filter(None, (copies, stages) if rows else (stages, copies)):
        if (dim := _divisible_dim(shape, split_by, sizes, names, layers)) is not None:
            split_by[dim] = (*split_by[dim], *names)
            if not rows or names == copies:
                gathers.insert(0, (names, dim - len(shape)))
    return Storage(P(*split_by), tuple(gathers), mesh.zero == 3 and bool(rows and gathers), rows=rows)


def _divisible_dim(shape, split_by, sizes: dict[str, int], names: tuple[str, ...], first: int) -> int | None:
    """The first dim that `names` can split further, inside the axes that split it: its rows stay contiguous."""
    ranks = math.prod(sizes[axis] for axis in names)
    local = [rows // math.prod(sizes[axis] for axis in outer) for rows, outer in zip(shape, split_by, strict=True)]
    return next((dim for dim in range(first, len(shape)) if local[dim] % ranks == 0), None)


def add_to_shards(model, whole: dict[str, Array], plan):
    """Add to this device's shards in `model` its shards of `whole`: arrays by name of the weight, the same on every
    device, with layers as [l, …]. Other weights are unchanged."""

    def add_shard(path: tuple, shard: Array, storage: Storage) -> Array:
        added = remaining.pop(leaf_name(path), None)
        if added is None:
            return shard
        return shard + local_shard(_split_layers(added, storage.rows).astype(shard.dtype), storage.spec)

    remaining = dict(whole)
    model = jax.tree_util.tree_map_with_path(add_shard, model, plan)
    assert not remaining, f"the model has no weight {', '.join(remaining)}"
    return model


def local_shard(whole: Array, spec: P) -> Array:
    """This device's shard with this `spec` of an array that every device has: the reverse of gathering it. Of several
    axes that split a dim the first is outermost, as in every PartitionSpec."""
    for dim, split_by in enumerate(spec):
        for axis in (split_by,) if isinstance(split_by, str) else split_by or ():
            rows = whole.shape[dim] // mappings.size(axis)
            whole = jax.lax.dynamic_slice_in_dim(whole, mappings.rank(axis) * rows, rows, dim)
    return whole


@jax.named_scope(named_scopes.WEIGHTS)
def gather_weights(model, plan, dtype, mesh: MeshConfig, in_float8: bool = False):
    """Gather the weights of the computation in `dtype`, inside `shard_map`; those gathered per layer stay shards.

    With `in_float8` linear layers' weights are gathered in float8, with the values to which these layers would round
    them.

    They vary over every axis over which their gradients are summed after the backward pass (`axes.gradient_sum_axes`),
    and over `model` where its ranks have parts of the gradient. Otherwise the backward pass would sum these layer by
    layer.
    """

    def gather(shard: Array, storage: Storage) -> Array:
        summed = axes.gradient_sum_axes(mesh) | ({MODEL} if storage.grad_partial_over_model else frozenset())
        if storage.gather_per_layer:
            return mappings.vary(storage.to_stage(shard), summed)
        weight = storage.to_stage(storage.cast(shard, dtype))
        return mappings.vary(materialize_weight(weight, storage, dtype, in_float8, 1), summed)

    return _start_after_others(jax.tree.map(gather, model, plan), plan, stacked=True)


def materialize_weight(
    shard: Array, storage: Storage, dtype, in_float8: bool = False, stacked: int = 0, gather=mappings.all_gather
) -> Array:
    """Cast the stored shard of a weight, and all-gather it for the computation.

    Args:
      shard: of the master weight, of the layers of this stage; in float32 or wider, or already cast.
      storage: of the weight.
      dtype: compute dtype.
      in_float8: round a weight of linear layers to float8 before it is sent: half the bytes. The layers round it
        again, to the same values.
      stacked: leading dims, along which every layer's weight has a separate scale in float8.
      gather: (shard, axes, dim) → gathered.
    """
    weight = storage.cast(shard, dtype)
    kind, in_float8 = weight.dtype, in_float8 and storage.float8 and bool(storage.gathers)
    if in_float8:
        over = (MODEL, *(axis for names, _ in storage.gathers for axis in names))
        scale = float8.weight_scales(weight, float8.FORWARD, over, stacked)
        scale = scale.reshape(*scale.shape, *[1] * (weight.ndim - stacked))
        weight = float8.quantize(weight, float8.FORWARD, scale).values
    for names, dim in storage.gathers:
        weight = gather(weight, names, dim)
    return float8.dequantize(Float8.from_scaled(weight, scale), kind) if in_float8 else weight


def gather_for_inference(model, plan, dtype):
    """Like `gather_weights`, for a program without gradients: the weights are typed as replicated."""

    def gather(shard: Array, storage: Storage) -> Array:
        weight = storage.to_stage(storage.cast(shard, dtype))
        if storage.gather_per_layer:
            return weight
        return materialize_weight(weight, storage, dtype, gather=mappings.all_gather_invariant)

    return jax.tree.map(gather, model, plan)


def layer_gather(plan, dtype, inference: bool = False, in_float8: bool = False) -> Callable | None:
    """The function that gathers one layer's weights from its stored shards; None if `gather_weights` gathered all.

    Args:
      plan: `Storage` of the stacked layers.
      dtype: compute dtype.
      inference: for weights of `gather_for_inference`.
      in_float8: as in `gather_weights`.
    """
    if not any(storage.gather_per_layer for storage in jax.tree.leaves(plan)):
        return None

    def gather(storage: Storage, shard: Array) -> Array:
        if not storage.gather_per_layer:
            return shard
        if inference:
            return materialize_weight(shard, storage, dtype, gather=mappings.all_gather_invariant)
        return _gather_layer(shard, storage, dtype, in_float8)

    return lambda layer: jax.tree.map(gather, plan, layer)


# A custom backward pass, for its dtype: the transpose of a bf16 gather would sum the gradients in bf16.
def _gather_layer(shard: Array, storage: Storage, dtype, in_float8: bool) -> Array:
    """A layer's weight, varying over all replicas."""
    stored = mappings.varying_axes(shard)

    @jax.named_scope(named_scopes.WEIGHTS)
    def gather(shard, _):
        return mappings.vary(materialize_weight(shard, storage, dtype, in_float8), frozenset(REPLICAS))

    @jax.named_scope(named_scopes.GRADIENT)
    def reduce(gradient, _):
        gradient = _reduce_scatter(gradient.astype(jnp.promote_types(dtype, jnp.float32)), storage)
        return mappings.psum(gradient, mappings.varying_axes(gradient) - stored)

    return linear_call(gather, reduce, shard)


def _reduce_scatter(gradient: Array, storage: Storage) -> Array:
    """This device's shard of a gradient, summed over the axes along which its weight was gathered."""
    for names, dim in reversed(storage.gathers):
        gradient = mappings.reduce_scatter(gradient, names, dim)
    return gradient


def save_all_but_gathered_weights(primitive, *_, **parameters) -> bool:
    """Policy of `jax.checkpoint`: save all residuals of autodiff, except weights gathered by `_gather_layer`."""
    if primitive.name != "custom_vjp_call":
        return True
    body = parameters["call_jaxpr"]
    equations = getattr(body, "jaxpr", body).eqns
    return not any(e.primitive.name == "all_gather" and {*REPLICAS} & {*e.params["axis_name"]} for e in equations)


@jax.named_scope(named_scopes.GRADIENT)
def reduce_gradients(gradients, model, plan):
    """Sum every gradient over the ranks that have a part of it, and return the shard that this device stores.

    After all micro-batches and in the dtype of the gradients (float32). Layers that are gathered one by one have summed
    theirs. The rule: scatter along the dims that were gathered, then sum over the axes on which the
    gradient still varies and its weight does not. That covers data parallelism, the weights between regions under
    sequence parallelism, and the embedding at both ends of a pipeline.
    """

    def reduce(gradient: Array, shard: Array, storage: Storage) -> Array:
        gradient = gradient if storage.gather_per_layer else _reduce_scatter(gradient, storage)
        gradient = storage.from_stage(gradient, shard)
        return mappings.psum(gradient, mappings.varying_axes(gradient) - mappings.varying_axes(shard))

    return jax.tree.map(reduce, _start_after_others(gradients, plan, stacked=False), model, plan)


def _start_after_others(tree, plan, stacked: bool):
    """`tree`, whose stacked arrays, or with False the others, start after the rest on simulated devices
    (`start_after`): weights are gathered before the loop over layers, and gradients are summed after it."""
    is_later = [(storage.rows is not None) == stacked for storage in jax.tree.leaves(plan)]
    leaves, structure = jax.tree.flatten(tree)
    rest = [leaf for leaf, later in zip(leaves, is_later, strict=True) if not later]
    return structure.unflatten(
        start_after(rest, leaf) if later else leaf for leaf, later in zip(leaves, is_later, strict=True)
    )
