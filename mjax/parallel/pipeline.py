"""The interpreter of a schedule table: one scan over ticks, for every schedule.

A stage reads its column of the table (`pipeline_schedules.py`). In every tick it stores the messages that arrived, runs
at most one forward and one backward pass, each under a conditional, and sends the results:

    tick t    ┌ store ┐  ┌──────── F ────────┐  ┌────────────── B ──────────────┐  ┌ send ┐
              messages   first: embedding       last: head, loss, their gradient   y → next stage
                         layers; save residuals layers' gradient                   dx → previous
                                                first: gradient of the embedding

**A ring buffer stores residuals.** F differentiates its layers with `jax.vjp`. The result is a pytree: its arrays
are the residuals, which F writes into a slot of the buffer and B reads back, and its structure is the backward program.
Weights among them are recognized and not copied. So recomputation inside a stage is up to the model: the buffer stores
only the residuals that its `jax.checkpoint` saves.

**Stages may differ.** Virtual stages with equally many layers of each stack are of one kind. The kinds are branches of
the conditionals around F and B, each with its own layers and backward program. Every device has the same arrays, so it
has as many rows of each stack of layers as the stage with most, of which a virtual stage reads its own. The residuals
of all kinds share the buffer: one after the other in one flat array of each type, as long as the kind with most needs.

**Collectives over `model` inside a conditional are sound**, and collectives over `data` too: all ranks of such a group
are on the same stage, read the same column and take the same branch. Collectives over `pipe` would hang. So everything
that a branch differentiates is typed as varying over `pipe` before, and sums over stages come after the scan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.dtypes import float0

from mjax.config.axes import PIPE
from mjax.config.pattern import StackRows
from mjax.parallel import mappings, named_scopes
from mjax.parallel.pipeline_schedules import PipelineSchedule
from mjax.parallel.reductions import Means, add_means, loss_cotangents, tree_add, tree_index
from mjax.parallel.weights import combine, partition_trainable, trainable_only

Weights = Any  # a pytree of arrays
ResidualType = tuple[str, ...]
"""A dtype, and the mesh axes over which an array varies."""
LANES = 128
"""Elements of a row in the buffers of residuals, whose numbers of elements may exceed 32 bits."""


@dataclass(frozen=True)
class StageProgram:
    """The functions that the stages of a pipeline run.

    Attributes:
      embed: (shared weights, micro-batch) → the residual stream before the first layer [b·s, h].
      layers: (layers of a chunk, residual stream, micro-batch, index of the virtual stage) → the residual stream after
        these layers, and their parts of the means by name, [] each.
      head: (shared weights, residual stream, micro-batch) → parts of means by name, [] each.
      loss_weights: by name the weight of a mean in the loss, which is differentiated.
      kinds: of each virtual stage, from 0.
      rows: a tree like the weights of the layers: those of each virtual stage.
    """

    embed: Callable[[Weights, Any], Array]
    layers: Callable[[Weights, Array, Any, Array], tuple[Array, Means]]
    head: Callable[[Weights, Array, Any], Means]
    loss_weights: dict[str, float]
    kinds: tuple[int, ...]
    rows: Any


def pipeline_gradients(
    schedule: PipelineSchedule, program: StageProgram, shared: Weights, blocks: Weights, micro_batches, accumulator
):
    """Means and gradients of all micro-batches, inside `shard_map`.

    Args:
      schedule: with a backward pass, for as many stages as `pipe` has ranks.
      program: the functions of a stage.
      shared: trained weights of embedding and head, the same on every stage.
      blocks: this stage's layers: leaves [slots, …], chunk by chunk.
      micro_batches: pytree of arrays [m, …].
      accumulator: dtype of the sums.

    Returns:
      This device's parts of the means by name, and its gradients of `shared` and `blocks` where these are trained:
      complete except for the sums over `pipe` (shared weights) and `data`.
    """
    shared, blocks, micro_batches = vary_over_pipe((shared, blocks, micro_batches))
    stage = _Stage(schedule, program, shared, blocks, micro_batches, accumulator)
    state = _State(
        received=(stage.message, stage.message),
        activations=make_buffer(schedule.activation_slots + 1, stage.message),
        gradients=make_buffer(schedule.gradient_slots + 1, stage.message),
        outputs=make_buffer(schedule.output_slots + 1, stage.message),
        residuals=stage.residual_buffers(),
        aux=stage.zeros(stage.layer_means),
        sums=_Sums(
            means=stage.zeros(stage.mean_types),
            shared=jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), shared),
            blocks=jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), trainable_only(blocks)),
        ),
    )
    state, _ = lax.scan(stage.tick, state, _column(schedule, program.kinds))
    return add_means(state.sums.means, state.aux), state.sums.shared, state.sums.blocks


def pipeline_sums(schedule: PipelineSchedule, program: StageProgram, shared: Weights, blocks: Weights, micro_batches):
    """The sum over all micro-batches of the results of `head` and the layers on this device, for a `schedule` with
    forward passes only; arguments as for `pipeline_gradients`."""
    shared, blocks, micro_batches = vary_over_pipe((shared, blocks, micro_batches))
    stage = _Stage(schedule, program, shared, blocks, micro_batches)

    def tick(carry, row):
        received, activations, total, aux = carry
        slot = row["forward"]
        activations = write_slot(activations, row["receive_activation"], received)

        def forward(kind, x, total, aux):
            micro_batch, stage_number = stage.micro_batch(slot), slot["virtual_stage"]
            y, new = program.layers(
                stage.chunk(kind, stage_number), stage.input(kind, slot, x), micro_batch, stage_number
            )
            with_head = lambda total: tree_add(total, program.head(shared, y, micro_batch))  # noqa: E731
            if kind == program.kinds[-1]:
                total = run_branch(named_scopes.F_LAST, slot["last"], [with_head], total)
            return y, total, add_means(aux, new)

        branches = [partial(forward, kind) for kind in stage.kinds]
        y, *sums = run_branch(named_scopes.F, slot["on"], branches, activations[slot["message"]], total, aux)
        with jax.named_scope(named_scopes.PIPELINE):
            return (mappings.send_to_next_stage(y), activations, *sums), None

    activations = make_buffer(schedule.activation_slots + 1, stage.message)
    start = stage.message, activations, stage.zeros(stage.mean_types), stage.zeros(stage.layer_means)
    _, _, total, aux = lax.scan(tick, start, _column(schedule, program.kinds))[0]
    return add_means(total, aux) if aux else total


# --- One stage --------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Accumulators of the backward passes.

    Attributes:
      means: results of the head, by name.
      shared, blocks: gradients of the shared weights and of this stage's layers, where these are trained.
    """

    means: Means
    shared: Weights
    blocks: Weights


class _State(NamedTuple):
    """The state of a stage from tick to tick.

    Attributes:
      received: an activation and a gradient [b·s, h] that have just arrived.
      activations, gradients: received and not yet used, [slots, b·s, h].
      outputs: on the last stage, outputs of its last layers that the head has not used yet, [slots, b·s, h].
      residuals: of each forward in flight, [slots, rows, LANES] of each type.
      aux: parts of means from the layers.
      sums: means and gradients so far.
    """

    received: tuple[Array, Array]
    activations: Array
    gradients: Array
    outputs: Array
    residuals: dict[ResidualType, Array]
    aux: Means
    sums: _Sums


class _LayerTrace(NamedTuple):
    """The forward pass of a kind of stage.

    Attributes:
      residuals: types of its residuals.
      places, sizes: of `_place_residuals`.
      means: types of the layers' parts of means.
      backward: the backward program (`_differentiate`).
    """

    residuals: list[jax.ShapeDtypeStruct]
    places: list[tuple[ResidualType, int]]
    sizes: Counter[ResidualType]
    means: Means
    backward: tuple


class _Stage:
    """The passes of a stage, and the tick that runs them."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        program: StageProgram,
        shared: Weights,
        blocks: Weights,
        micro_batches,
        accumulator=None,
    ):
        self.schedule, self.program, self.accumulator = schedule, program, accumulator
        self.shared, self.blocks, self.micro_batches = shared, blocks, micro_batches
        first = tree_index(micro_batches, 0)
        message = jax.eval_shape(program.embed, shared, first)
        self.message = zeros_like(message)
        self.mean_types = jax.eval_shape(program.head, shared, message, first)
        self.kinds = range(max(program.kinds) + 1)
        self.traces = list(map(self._trace_layers, self.kinds))
        self.layer_means = reduce(or_, (trace.means for trace in self.traces))

    def micro_batch(self, slot: dict):
        """The micro-batch of a slot."""
        return tree_index(self.micro_batches, slot["micro_batch"])

    def chunk(self, kind: int, virtual_stage: Array) -> Weights:
        """The layers of a virtual stage of this kind, with one layer dim."""
        example = self.program.kinds.index(kind)
        return jax.tree.map(partial(read_rows, example, virtual_stage), self.program.rows, self.blocks)

    def input(self, kind: int, slot: dict, received: Array) -> Array:
        """The input of a slot's layers."""
        if kind != self.program.kinds[0]:
            return received
        embed = lambda _: self.program.embed(self.shared, self.micro_batch(slot))  # noqa: E731
        return run_branch(named_scopes.F_FIRST, slot["first"], [embed], received)

    # --- The passes ---------------------------------------------------------------------------------------------------

    def tick(self, state: _State, row: dict) -> tuple[_State, None]:
        """One row of the table."""
        # Stored first: a write after the reads would make XLA copy both buffers in every tick.
        activations = write_slot(state.activations, row["receive_activation"], state.received[0])
        gradients = write_slot(state.gradients, row["receive_gradient"], state.received[1])
        f, b = row["forward"], row["backward"]
        carry = activations[f["message"]], state.outputs, state.residuals, state.aux
        forward = [partial(self._forward, kind, f) for kind in self.kinds]
        y, outputs, residuals, aux = run_branch(named_scopes.F, f["on"], forward, *carry)
        backward = [partial(self._backward, kind, b, outputs, residuals) for kind in self.kinds]
        dx, sums = run_branch(named_scopes.B, b["on"], backward, gradients[b["message"]], state.sums)
        with jax.named_scope(named_scopes.PIPELINE):
            received = mappings.send_to_next_stage(y), mappings.send_to_previous_stage(dx)
        return _State(received, activations, gradients, outputs, residuals, aux, sums), None

    def _forward(self, kind: int, slot: dict, received: Array, outputs: Array, residuals: dict, aux: Means):
        """F: write the residual stream after the layers, and the residuals, into their slots."""
        x, micro_batch, virtual_stage = self.input(kind, slot, received), self.micro_batch(slot), slot["virtual_stage"]
        y, means, new, backward = self._differentiate(self.chunk(kind, virtual_stage), x, micro_batch, virtual_stage)
        assert backward[1] == self.traces[kind].backward[1], "layers save the same residuals in every tick"
        residuals = self._write_residuals(kind, residuals, slot["residual"], new)
        return y, write_slot(outputs, slot["output"], y), residuals, add_means(aux, means)

    def _backward(self, kind: int, slot: dict, outputs: Array, residuals: dict, received: Array, sums: _Sums):
        """B: return the gradient of the stage's input, and add the weight gradients to the sums."""
        micro_batch, virtual_stage = self.micro_batch(slot), slot["virtual_stage"]
        dy, (means, dshared, dblocks) = received, sums

        def head(_, means, dshared):
            y = outputs[slot["output"]]
            run = lambda shared, y: self.program.head(shared, y, micro_batch)  # noqa: E731
            metrics, pullback = jax.vjp(run, self.shared, y)
            new, dy = pullback(loss_cotangents(self.program.loss_weights, metrics))
            return dy, tree_add(means, metrics), tree_add(dshared, new)

        if kind == self.program.kinds[-1]:
            dy, means, dshared = run_branch(named_scopes.B_LAST, slot["last"], [head], dy, means, dshared)
        saved = self._read_residuals(kind, residuals, slot["residual"])
        dchunk, dx = self._pull_back(kind, self.chunk(kind, virtual_stage), saved, dy)

        def embedding(dshared):
            _, pullback = jax.vjp(lambda shared: self.program.embed(shared, micro_batch), self.shared)
            return tree_add(dshared, pullback(dx)[0])

        if kind == self.program.kinds[0]:
            dshared = run_branch(named_scopes.B_FIRST, slot["first"], [embedding], dshared)
        add = partial(add_rows, self.program.kinds.index(kind), virtual_stage)
        return dx, _Sums(means, dshared, jax.tree.map(add, trainable_only(self.program.rows), dblocks, dchunk))

    # --- From F to B --------------------------------------------------------------------------------------------------

    def zeros(self, types):
        """Zeros for accumulating values of these types, in the accumulator's dtype."""
        return jax.tree.map(lambda like: zeros_like(like, self.accumulator), types)

    def _trace_layers(self, kind: int) -> _LayerTrace:
        programs = []

        def forward(x):
            micro_batch, virtual_stage = tree_index(self.micro_batches, 0), jnp.int32(0)
            chunk = self.chunk(kind, virtual_stage)
            _, means, residuals, backward = self._differentiate(chunk, x, micro_batch, virtual_stage)
            programs.append(backward)
            return residuals, means

        residuals, means = jax.eval_shape(forward, self.message)
        return _LayerTrace(residuals, *_place_residuals(residuals), means, *programs)

    def residual_buffers(self) -> dict[ResidualType, Array]:
        """Zeros for the residuals of every slot, by type: [slots, rows of the kind with most, LANES]."""
        sizes = reduce(or_, (trace.sizes for trace in self.traces))
        slots = self.schedule.residual_slots
        return {
            key: mappings.vary(jnp.zeros((slots, rows, LANES), key[0]), frozenset({PIPE, *key[1:]}))
            for key, rows in sizes.items()
        }

    def _write_residuals(self, kind: int, buffers: dict, slot: Array, residuals: list) -> dict:
        """`buffers` with the residuals of a pass of this kind in a slot."""
        buffers = dict(buffers)
        for (key, place), value in zip(self.traces[kind].places, residuals, strict=True):
            flat = jnp.asarray(value).reshape(-1)  # of a NumPy constant, too
            rows = (jnp.pad(flat, (0, -flat.size % LANES)) if flat.size % LANES else flat).reshape(1, -1, LANES)
            rows = mappings.vary(rows, mappings.varying_axes(buffers[key]))
            buffers[key] = lax.dynamic_update_slice(buffers[key], rows, (slot, jnp.int32(place), jnp.int32(0)))
        return buffers

    def _read_residuals(self, kind: int, buffers: dict, slot: Array) -> list[Array]:
        likes, places, *_ = self.traces[kind]

        def read(like: jax.ShapeDtypeStruct, key: ResidualType, place: int) -> Array:
            size = 1, _count_rows(like), LANES
            rows = lax.dynamic_slice(buffers[key], (slot, jnp.int32(place), jnp.int32(0)), size)
            return rows.reshape(-1)[: like.size].reshape(like.shape)

        return [read(like, *place) for like, place in zip(likes, places, strict=True)]

    def _differentiate(self, chunk: Weights, x: Array, micro_batch, virtual_stage: Array):
        """Return the residual stream after the layers, their parts of means, and the derivative of both.

        The derivative has two parts: the residuals, and the backward program, which is the structure of the result of
        `jax.vjp` and for each of its leaves the index of a weight (None: a residual; a shape: the gradient of
        integers, which has no numbers).
        """
        trainable, frozen = partition_trainable(chunk)

        def layers(trainable, x):
            return self.program.layers(combine(trainable, frozen), x, micro_batch, virtual_stage)

        (y, means), pullback = jax.vjp(layers, trainable, x)
        leaves, structure = jax.tree.flatten(pullback)
        weights = jax.tree.leaves(chunk)

        def find_source(leaf) -> int | tuple[int, ...] | None:
            if leaf.dtype == float0:
                return leaf.shape
            return next((i for i, weight in enumerate(weights) if leaf is weight), None)

        indices = list(map(find_source, leaves))
        residuals = [leaf for leaf, index in zip(leaves, indices, strict=True) if index is None]
        return y, means, residuals, (structure, indices)

    def _pull_back(self, kind: int, chunk: Weights, residuals: list[Array], dy: Array):
        """Reassemble the derivative of the layers and apply it to `dy`, the gradient of their output."""
        structure, indices = self.traces[kind].backward
        weights, residuals = jax.tree.leaves(chunk), iter(residuals)

        def find_leaf(source: int | tuple[int, ...] | None) -> Array | np.ndarray:
            if isinstance(source, tuple):
                return np.zeros(source, float0)
            return next(residuals) if source is None else weights[source]

        leaves = list(map(find_leaf, indices))
        dmeans = loss_cotangents(self.program.loss_weights, self.traces[kind].means)
        return jax.tree.unflatten(structure, leaves)((dy, dmeans))


def _column(schedule: PipelineSchedule, kinds: tuple[int, ...]) -> dict:
    """This stage's column of the table: for each kind of operation its fields, int32 [ticks]; `on` counts the kinds of
    stages from 1."""
    stage = mappings.rank(PIPE)

    def local(table) -> Array:
        return jnp.asarray(table)[:, stage]

    column = {name: local(getattr(schedule, name)) for name in ("receive_activation", "receive_gradient")}
    for kind in ("forward", "backward"):
        if (slots := getattr(schedule, kind)) is not None:
            fields = {name: local(table) for name, table in vars(slots).items()}
            virtual_stage = fields["chunk"] * schedule.stages + stage
            on = fields["on"] * (1 + jnp.asarray(kinds)[virtual_stage])
            column[kind] = {**fields, "on": on, "virtual_stage": virtual_stage}
    return column


# --- Building blocks: buffers with slots, conditionals, values that vary over stages ----------------------------------


def run_branch(name: str, index: Array, branches: Sequence[Callable], *operands):
    """The branch of this number, from 1, of the operands; with 0 the operands. XLA copies all others, so that values
    that only pass through are operands.

    `name` labels the conditional in the traced program.
    """

    def pass_through(*operands):
        return operands if len(operands) > 1 else operands[0]

    with jax.named_scope(name):
        return lax.switch(index, [pass_through, *branches], *operands)


def read_rows(example: int, virtual_stage: Array, rows: StackRows, stored: Array) -> Array:
    """The rows of a virtual stage, of the kind of virtual stage `example`, from those of its stage [slots, …]."""
    if (count := rows.counts[example]) == rows.slots:
        return stored
    return lax.dynamic_slice_in_dim(stored, _first_row(rows, virtual_stage), count)


def write_rows(example: int, virtual_stage: Array, rows: StackRows, stored: Array, new: Array) -> Array:
    """The reverse of `read_rows`."""
    if (count := rows.counts[example]) in (0, rows.slots):
        return new if count else stored
    new = mappings.vary(new, mappings.varying_axes(stored))
    return lax.dynamic_update_slice_in_dim(stored, new, _first_row(rows, virtual_stage), 0)


def add_rows(example: int, virtual_stage: Array, rows: StackRows, sums: Array, new: Array) -> Array:
    """The sums [slots, …] with `new` added to the rows of a virtual stage."""
    total = read_rows(example, virtual_stage, rows, sums) + new.astype(sums.dtype)
    return write_rows(example, virtual_stage, rows, sums, total)


def _first_row(rows: StackRows, virtual_stage: Array) -> Array:
    return jnp.array(rows.offsets, jnp.int32)[virtual_stage] if rows.chunks > 1 else jnp.int32(0)


def _place_residuals(residuals: Sequence) -> tuple[list[tuple[ResidualType, int]], Counter[ResidualType]]:
    """For each residual its type and its first row in the buffer of this type; and all rows of each type."""
    places, sizes = [], Counter()
    for like in residuals:
        key = str(like.dtype), *sorted(mappings.varying_axes(like))
        places.append((key, sizes[key]))
        sizes[key] += _count_rows(like)
    return places, sizes


def _count_rows(like) -> int:
    return -(-like.size // LANES)


def write_slot(buffer: Array, slot: Array, value) -> Array:
    """`buffer` [slots, …] with `value` in a slot."""
    value = mappings.vary(value, mappings.varying_axes(buffer))
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def zeros_like(like, dtype=None) -> Array:
    """Zeros with the shape, dtype and varying axes of an array or a ShapeDtypeStruct."""
    return mappings.vary(jnp.zeros(like.shape, dtype or like.dtype), mappings.varying_axes(like))


def make_buffer(slots: int, like) -> Array:
    """Zeros for `slots` arrays like `like`, varying over stages."""
    return mappings.vary(jnp.zeros((slots, *like.shape), like.dtype), mappings.varying_axes(like) | {PIPE})


def vary_over_pipe(tree):
    """Cast the operands of a conditional whose predicate varies over `pipe`, or they would be typed as replicated."""
    return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset({PIPE})), tree)
