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
the conditionals around F and B, each with separate layers and a backward program. Every device has the same arrays:
as many rows of each stack of layers as the stage with most, of which a virtual stage reads its layers. The residuals of
all kinds share the buffer: one after the other in one flat array of each type, as long as the kind with most needs.

**Collectives over `model` inside a conditional are sound**, and collectives over `data` too: all ranks of such a group
are on the same stage, read the same column and take the same branch. Collectives over `pipe` would hang. So everything
that a branch differentiates is typed as varying over `pipe` before, and sums over stages come after the scan.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.dtypes import float0
from jax.tree_util import register_static

from mjax.config.axes import PIPE
from mjax.config.pattern import StackRows
from mjax.parallel import mappings, named_scopes
from mjax.parallel.pipeline_schedules import PipelineSchedule
from mjax.parallel.reductions import Means, add_means, loss_cotangents, tree_add, tree_index
from mjax.parallel.weights import combine, partition_trainable, trainable_only

Weights = Any  # a pytree of arrays
ResidualType = tuple[str, ...]  # a dtype, and the mesh axes over which an array varies
LANES = 128  # elements of a row in the buffers of residuals, whose numbers of elements may exceed 32 bits


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
    stage = _Stage(program, shared, blocks, micro_batches)
    state = _State(
        received=(stage.message, stage.message),
        activations=stage.make_buffer(schedule.activation_slots + 1),
        gradients=stage.make_buffer(schedule.gradient_slots + 1),
        outputs=stage.make_buffer(schedule.output_slots + 1),
        residuals=stage.residual_buffers(schedule.residual_slots),
        means=zeros_like(jax.eval_shape(add_means, stage.head_means, stage.layer_means), accumulator),
        shared=zeros_like(stage.shared, accumulator),
        blocks=zeros_like(trainable_only(stage.blocks), accumulator),
    )

    def tick(state: _State, row: dict) -> tuple[_State, None]:
        f, b = row["forward"], row["backward"]
        # Stored first: a write after the reads would make XLA copy both buffers in every tick.
        activations = write_slot(state.activations, f["receive"], state.received[0])
        gradients = write_slot(state.gradients, b["receive"], state.received[1])
        branches = [partial(kind.forward, f) for kind in stage.kinds]
        carry = activations[f["message"]], state.outputs, state.residuals, state.means
        y, outputs, residuals, means = run_branch(named_scopes.F, f["on"], branches, *carry)
        branches = [partial(kind.backward, b, outputs, residuals) for kind in stage.kinds]
        carry = gradients[b["message"]], means, state.shared, state.blocks
        dx, *sums = run_branch(named_scopes.B, b["on"], branches, *carry)
        with jax.named_scope(named_scopes.PIPELINE):
            received = mappings.send_to_next_stage(y), mappings.send_to_previous_stage(dx)
        return _State(received, activations, gradients, outputs, residuals, *sums), None

    state, _ = lax.scan(tick, state, _column(schedule, program.kinds))
    return state.means, state.shared, state.blocks


def pipeline_sums(schedule: PipelineSchedule, program: StageProgram, shared: Weights, blocks: Weights, micro_batches):
    """The sum over all micro-batches of the results of `head` and the layers on this device, for a `schedule` with
    forward passes only; arguments as for `pipeline_gradients`."""
    stage = _Stage(program, shared, blocks, micro_batches)

    def tick(carry, row):
        received, activations, total, aux = carry
        slot = row["forward"]
        activations = write_slot(activations, slot["receive"], received)

        def forward(kind, x, total, aux):
            y, new = kind.run_layers(slot, kind.blocks(slot), kind.input(slot, x))
            with_head = lambda total: tree_add(total, program.head(stage.shared, y, stage.micro_batch(slot)))  # noqa: E731
            if kind.is_last:
                total = run_branch(named_scopes.F_LAST, slot["last"], [with_head], total)
            return y, total, add_means(aux, new)

        branches = [partial(forward, kind) for kind in stage.kinds]
        y, *sums = run_branch(named_scopes.F, slot["on"], branches, activations[slot["message"]], total, aux)
        with jax.named_scope(named_scopes.PIPELINE):
            return (mappings.send_to_next_stage(y), activations, *sums), None

    activations = stage.make_buffer(schedule.activation_slots + 1)
    start = stage.message, activations, zeros_like(stage.head_means), zeros_like(stage.layer_means)
    _, _, total, aux = lax.scan(tick, start, _column(schedule, program.kinds))[0]
    return add_means(total, aux) if aux else total


# --- A stage, and the passes of its kinds -----------------------------------------------------------------------------


class _State(NamedTuple):
    """The state of a stage from tick to tick.

    Attributes:
      received: an activation and a gradient [b·s, h] that have just arrived.
      activations, gradients: received and not yet used, [slots, b·s, h].
      outputs: on the last stage, outputs of its last layers that the head has not used yet, [slots, b·s, h].
      residuals: of each forward in flight, by type [slots · rows, LANES].
      means: parts of the means so far, by name.
      shared, blocks: gradients so far of the shared weights and of this stage's layers, where these are trained.
    """

    received: tuple[Array, Array]
    activations: Array
    gradients: Array
    outputs: Array
    residuals: dict[ResidualType, Array]
    means: Means
    shared: Weights
    blocks: Weights


class _Stage:
    """The arrays that the ticks of a stage read, and the kinds of virtual stages.

    Attributes:
      message: zeros like the stream that stages send [b·s, h].
      head_means, layer_means: types of the parts of means that the head and the layers add.
      residual_rows: by type the rows of a slot, as many as the kind with most needs.
    """

    def __init__(self, program: StageProgram, shared: Weights, blocks: Weights, micro_batches):
        self.program = program
        self.shared, self.blocks, self.micro_batches = vary_over_pipe((shared, blocks, micro_batches))
        first = tree_index(self.micro_batches, 0)
        self.message = zeros_like(jax.eval_shape(program.embed, self.shared, first))
        self.kinds = [_StageKind(self, number) for number in range(max(program.kinds) + 1)]
        self.head_means = jax.eval_shape(program.head, self.shared, self.message, first)
        self.layer_means = reduce(or_, (kind.means for kind in self.kinds))
        self.residual_rows = reduce(or_, (kind.rows for kind in self.kinds))

    def micro_batch(self, slot: dict):
        """The micro-batch of a slot."""
        return tree_index(self.micro_batches, slot["micro_batch"])

    def make_buffer(self, slots: int) -> Array:
        """Zeros [slots, b·s, h]."""
        return jnp.zeros_like(self.message, shape=(slots, *self.message.shape))

    def residual_buffers(self, slots: int) -> dict[ResidualType, Array]:
        """Zeros for residuals, by type [slots · rows, LANES]."""
        return {
            key: mappings.vary(jnp.zeros((slots * rows, LANES), key[0]), frozenset({PIPE, *key[1:]}))
            for key, rows in self.residual_rows.items()
        }


@register_static
@dataclass(frozen=True)
class _BackwardProgram:
    """The structure of the result of `jax.vjp`, without its arrays.

    Attributes:
      structure: of the pytree.
      sources: for each of its leaves the number of a weight, or None: the next residual; or a shape: the gradient of
        integers, which has no numbers.
    """

    structure: Any
    sources: tuple[int | tuple[int, ...] | None, ...]


class _StageKind:
    """The passes of virtual stages with equally many layers of each stack.

    Attributes:
      is_first, is_last: whether the first virtual stage is of this kind, and the last.
      example: one of its virtual stages.
      means: types of the layers' parts of means.
      residuals: types of the residuals of a forward pass.
      backward_program: of the layers.
      places, rows: of `_place_residuals`.
    """

    def __init__(self, stage: _Stage, number: int):
        kinds = stage.program.kinds
        self.stage, self.program = stage, stage.program
        self.is_first, self.is_last, self.example = kinds[0] == number, kinds[-1] == number, kinds.index(number)
        slot = dict.fromkeys(("micro_batch", "virtual_stage"), jnp.int32(0))
        traced = jax.eval_shape(partial(self._differentiate, slot), stage.message)
        _, self.means, self.residuals, self.backward_program = traced
        self.places, self.rows = _place_residuals(self.residuals)

    def blocks(self, slot: dict) -> Weights:
        """The layers of a slot's virtual stage."""
        read = partial(read_rows, self.example, slot["virtual_stage"])
        return jax.tree.map(read, self.program.rows, self.stage.blocks)

    def input(self, slot: dict, received: Array) -> Array:
        """The input of a slot's layers."""
        embed = lambda _: self.program.embed(self.stage.shared, self.stage.micro_batch(slot))  # noqa: E731
        return run_branch(named_scopes.F_FIRST, slot["first"], [embed], received) if self.is_first else received

    def run_layers(self, slot: dict, blocks: Weights, x: Array) -> tuple[Array, Means]:
        """The residual stream after these layers of a slot, and their parts of means."""
        return self.program.layers(blocks, x, self.stage.micro_batch(slot), slot["virtual_stage"])

    def forward(self, slot: dict, received: Array, outputs: Array, residuals: dict, means: Means):
        """F: write the residual stream after the layers, and the residuals, into their slots."""
        y, new_means, new, program = self._differentiate(slot, self.input(slot, received))
        assert program.sources == self.backward_program.sources, "layers save the same residuals in every tick"
        residuals = self._write_residuals(residuals, slot["residual"], new)
        return y, write_slot(outputs, slot["output"], y), residuals, add_means(means, new_means)

    def backward(self, slot: dict, outputs: Array, residuals: dict, dy: Array, means: Means, dshared, dblocks):
        """B: the gradient of the stage's input, and the sums with the means of the head and the weight gradients."""
        program, shared, micro_batch = self.program, self.stage.shared, self.stage.micro_batch(slot)

        def head(_, means, dshared):
            run = lambda shared, y: program.head(shared, y, micro_batch)  # noqa: E731
            new_means, pullback = jax.vjp(run, shared, outputs[slot["output"]])
            new, dy = pullback(loss_cotangents(program.loss_weights, new_means))
            return dy, add_means(means, new_means), tree_add(dshared, new)

        if self.is_last:
            dy, means, dshared = run_branch(named_scopes.B_LAST, slot["last"], [head], dy, means, dshared)
        dnew, dx = self._pull_back(slot, residuals, dy)

        def embedding(dshared):
            _, pullback = jax.vjp(lambda shared: program.embed(shared, micro_batch), shared)
            return tree_add(dshared, pullback(dx)[0])

        if self.is_first:
            dshared = run_branch(named_scopes.B_FIRST, slot["first"], [embedding], dshared)
        add = partial(add_rows, self.example, slot["virtual_stage"])
        return dx, means, dshared, jax.tree.map(add, trainable_only(program.rows), dblocks, dnew)

    # --- From F to B --------------------------------------------------------------------------------------------------

    def _differentiate(self, slot: dict, x: Array) -> tuple[Array, Means, list, _BackwardProgram]:
        """The residual stream after the layers, their parts of means, and the derivative of both in two parts."""
        blocks = self.blocks(slot)
        trainable, frozen = partition_trainable(blocks)
        run = lambda trainable, x: self.run_layers(slot, combine(trainable, frozen), x)  # noqa: E731
        (y, means), pullback = jax.vjp(run, trainable, x)
        leaves, structure = jax.tree.flatten(pullback)
        weights = jax.tree.leaves(blocks)

        def find_source(leaf) -> int | tuple[int, ...] | None:
            if leaf.dtype == float0:
                return leaf.shape
            return next((i for i, weight in enumerate(weights) if leaf is weight), None)

        sources = tuple(map(find_source, leaves))
        residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return y, means, residuals, _BackwardProgram(structure, sources)

    def _pull_back(self, slot: dict, buffers: dict, dy: Array) -> tuple[Weights, Array]:
        """The gradients of the trained layers and of their input, from `dy`, the gradient of their output."""
        weights, residuals = jax.tree.leaves(self.blocks(slot)), self._read_residuals(buffers, slot["residual"])

        def find_leaf(source: int | tuple[int, ...] | None) -> Array | np.ndarray:
            if isinstance(source, tuple):
                return np.zeros(source, float0)
            return next(residuals) if source is None else weights[source]

        pullback = jax.tree.unflatten(self.backward_program.structure, map(find_leaf, self.backward_program.sources))
        return pullback((dy, loss_cotangents(self.program.loss_weights, self.means)))

    def _write_residuals(self, buffers: dict, slot: Array, residuals: list) -> dict[ResidualType, Array]:
        """The buffers with the residuals of a forward pass in a slot."""
        buffers = dict(buffers)
        for (key, place), value in zip(self.places, residuals, strict=True):
            rows = jnp.pad(jnp.ravel(value), (0, -value.size % LANES)).reshape(-1, LANES)
            rows, first = mappings.vary(rows, mappings.varying_axes(buffers[key])), self._first_row(key, slot, place)
            buffers[key] = lax.dynamic_update_slice_in_dim(buffers[key], rows, first, 0)
        return buffers

    def _read_residuals(self, buffers: dict, slot: Array) -> Iterator[Array]:
        for like, (key, place) in zip(self.residuals, self.places, strict=True):
            rows = lax.dynamic_slice_in_dim(buffers[key], self._first_row(key, slot, place), _count_rows(like))
            yield rows.reshape(-1)[: like.size].reshape(like.shape)

    def _first_row(self, key: ResidualType, slot: Array, place: int) -> Array:
        return slot * self.stage.residual_rows[key] + place


def _place_residuals(residuals: Sequence) -> tuple[list[tuple[ResidualType, int]], Counter[ResidualType]]:
    """For each residual its type and its first row in a slot of the buffer of this type; and all rows of each type."""
    places, rows = [], Counter()
    for like in residuals:
        key = str(like.dtype), *sorted(mappings.varying_axes(like))
        places.append((key, rows[key]))
        rows[key] += _count_rows(like)
    return places, rows


def _count_rows(like) -> int:
    return -(-like.size // LANES)


def _column(schedule: PipelineSchedule, kinds: tuple[int, ...]) -> dict[str, dict[str, Array]]:
    """This stage's column of the table: for each kind of operation its fields, int32 [ticks]; `on` counts the kinds of
    stages from 1."""
    stage, column = mappings.rank(PIPE), {}
    for name in ("forward", "backward"):
        if (slots := getattr(schedule, name)) is not None:
            fields = {field: jnp.asarray(table)[:, stage] for field, table in vars(slots).items()}
            virtual_stage = fields["chunk"] * schedule.stages + stage
            on = fields["on"] * (1 + jnp.asarray(kinds)[virtual_stage])
            column[name] = {**fields, "on": on, "virtual_stage": virtual_stage}
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
    new = mappings.vary(new, mappings.varying_axes(stored))
    return lax.dynamic_update_slice_in_dim(stored, new, _first_row(rows, virtual_stage), 0)


def add_rows(example: int, virtual_stage: Array, rows: StackRows, sums: Array, new: Array) -> Array:
    """The sums [slots, …] with `new` added to the rows of a virtual stage."""
    total = read_rows(example, virtual_stage, rows, sums) + new.astype(sums.dtype)
    return write_rows(example, virtual_stage, rows, sums, total)


def _first_row(rows: StackRows, virtual_stage: Array) -> Array:
    return jnp.array(rows.offsets, jnp.int32)[virtual_stage] if rows.chunks > 1 else jnp.int32(0)


def write_slot(buffer: Array, slot: Array, value) -> Array:
    """`buffer` [slots, …] with `value` in a slot."""
    value = mappings.vary(value, mappings.varying_axes(buffer))
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def zeros_like(tree, dtype=None):
    """Zeros with the shapes, dtypes and varying axes of arrays or ShapeDtypeStructs."""

    def zeros(like) -> Array:
        return mappings.vary(jnp.zeros(like.shape, dtype or like.dtype), mappings.varying_axes(like))

    return jax.tree.map(zeros, tree)


def vary_over_pipe(tree):
    """Cast the operands of a conditional whose predicate varies over `pipe`, or they would be typed as replicated."""
    return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset({PIPE})), tree)
