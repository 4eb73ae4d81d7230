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

**Collectives over `model` inside a conditional are sound**, and collectives over `data` too: all ranks of such a group
are on the same stage, read the same column and take the same branch. Collectives over `pipe` would hang. So everything
that a branch differentiates is typed as varying over `pipe` before, and sums over stages come after the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mjax.config.axes import PIPE
from mjax.parallel import mappings, named_scopes
from mjax.parallel.pipeline_schedules import PipelineSchedule
from mjax.parallel.reductions import Means, loss_cotangents, tree_add, tree_index
from mjax.parallel.weights import combine, partition_trainable, trainable_only

Weights = Any  # a pytree of arrays


@dataclass(frozen=True)
class StageProgram:
    """The functions that the stages of a pipeline run.

    Attributes:
      embed: (shared weights, micro-batch) → the residual stream before the first layer [b·s, h].
      layers: (layers of a chunk, residual stream, micro-batch, index of the virtual stage) → the residual stream after
        these layers, and their parts of the means by name, [] each.
      head: (shared weights, residual stream, micro-batch) → parts of means by name, [] each.
      loss_weights: by name the weight of a mean in the loss, which is differentiated.
    """

    embed: Callable[[Weights, Any], Array]
    layers: Callable[[Weights, Array, Any, Array], tuple[Array, Means]]
    head: Callable[[Weights, Array, Any], Means]
    loss_weights: dict[str, float]


def pipeline_gradients(
    schedule: PipelineSchedule, program: StageProgram, shared: Weights, blocks: Weights, micro_batches, accumulator
):
    """Means and gradients of all micro-batches, inside `shard_map`.

    Args:
      schedule: with a backward pass, for as many stages as `pipe` has ranks.
      program: the functions of a stage.
      shared: trained weights of embedding and head, the same on every stage.
      blocks: this stage's layers: leaves [l / p, …], or [V, l / (p V), …] with V chunks.
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
        residuals=[make_buffer(schedule.residual_slots, like) for like in stage.residual_types],
        aux=stage.zeros(stage.layer_means),
        sums=_Sums(
            means=stage.zeros(stage.mean_types),
            shared=jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), shared),
            blocks=jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), trainable_only(blocks)),
        ),
    )
    state, _ = lax.scan(stage.tick, state, _column(schedule))
    return state.sums.means | state.aux, state.sums.shared, state.sums.blocks


def pipeline_sums(schedule: PipelineSchedule, program: StageProgram, shared: Weights, blocks: Weights, micro_batches):
    """The sum over all micro-batches of the results of `head` and the layers on this device, for a `schedule` with
    forward passes only; arguments as for `pipeline_gradients`."""
    shared, blocks, micro_batches = vary_over_pipe((shared, blocks, micro_batches))
    stage = _Stage(schedule, program, shared, blocks, micro_batches)

    def tick(carry, row):
        received, activations, total, aux = carry
        slot = row["forward"]
        activations = write_slot(activations, row["receive_activation"], received)

        def forward(x, total, aux):
            micro_batch = stage.micro_batch(slot)
            y, new = program.layers(stage.chunk(slot), stage.input(slot, x), micro_batch, slot["virtual_stage"])
            with_head = lambda total: tree_add(total, program.head(shared, y, micro_batch))  # noqa: E731
            total = run_if(named_scopes.F_LAST, slot["last"], with_head, total)
            return y, total, tree_add(aux, new)

        y, *sums = run_if(named_scopes.F, slot["on"], forward, activations[slot["message"]], total, aux)
        with jax.named_scope(named_scopes.PIPELINE):
            return (mappings.send_to_next_stage(y), activations, *sums), None

    activations = make_buffer(schedule.activation_slots + 1, stage.message)
    start = stage.message, activations, stage.zeros(stage.mean_types), stage.zeros(stage.layer_means)
    _, _, total, aux = lax.scan(tick, start, _column(schedule))[0]
    return total | aux if aux else total


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
      residuals: of each forward in flight, [slots, …] each.
      aux: parts of means from the layers.
      sums: means and gradients so far.
    """

    received: tuple[Array, Array]
    activations: Array
    gradients: Array
    outputs: Array
    residuals: list[Array]
    aux: Means
    sums: _Sums


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
        self.residual_types, self.layer_means, self.backward = self._trace_layers()

    def micro_batch(self, slot: dict):
        """The micro-batch of a slot."""
        return tree_index(self.micro_batches, slot["micro_batch"])

    def chunk(self, slot: dict) -> Weights:
        """The layers of a slot's chunk, with one layer dim."""
        return tree_index(self.blocks, slot["chunk"]) if self.schedule.chunks > 1 else self.blocks

    def input(self, slot: dict, received: Array) -> Array:
        """The input of a slot's layers."""
        embed = lambda _: self.program.embed(self.shared, self.micro_batch(slot))  # noqa: E731
        return run_if(named_scopes.F_FIRST, slot["first"], embed, received)

    # --- The passes ---------------------------------------------------------------------------------------------------

    def tick(self, state: _State, row: dict) -> tuple[_State, None]:
        """One row of the table."""
        # Stored first: a write after the reads would make XLA copy both buffers in every tick.
        activations = write_slot(state.activations, row["receive_activation"], state.received[0])
        gradients = write_slot(state.gradients, row["receive_gradient"], state.received[1])
        f, b = row["forward"], row["backward"]
        carry = activations[f["message"]], state.outputs, state.residuals, state.aux
        y, outputs, residuals, aux = run_if(named_scopes.F, f["on"], partial(self._forward, f), *carry)
        backward = partial(self._backward, b, outputs, residuals)
        dx, sums = run_if(named_scopes.B, b["on"], backward, gradients[b["message"]], state.sums)
        with jax.named_scope(named_scopes.PIPELINE):
            received = mappings.send_to_next_stage(y), mappings.send_to_previous_stage(dx)
        return _State(received, activations, gradients, outputs, residuals, aux, sums), None

    def _forward(self, slot: dict, received: Array, outputs: Array, residuals: list[Array], aux: Means):
        """F: write the residual stream after the layers, and the residuals, into their slots."""
        x, micro_batch = self.input(slot, received), self.micro_batch(slot)
        y, means, new, backward = self._differentiate(self.chunk(slot), x, micro_batch, slot["virtual_stage"])
        assert backward[1] == self.backward[1], "layers save the same residuals in every tick"
        residuals = [write_slot(buffer, slot["residual"], value) for buffer, value in zip(residuals, new, strict=True)]
        return y, write_slot(outputs, slot["output"], y), residuals, tree_add(aux, means)

    def _backward(self, slot: dict, outputs: Array, residuals: list[Array], received: Array, sums: _Sums):
        """B: return the gradient of the stage's input, and add the weight gradients to the sums."""
        micro_batch = self.micro_batch(slot)
        residuals = [buffer[slot["residual"]] for buffer in residuals]

        def head(_, means, dshared):
            y = outputs[slot["output"]]
            run = lambda shared, y: self.program.head(shared, y, micro_batch)  # noqa: E731
            metrics, pullback = jax.vjp(run, self.shared, y)
            new, dy = pullback(loss_cotangents(self.program.loss_weights, metrics))
            return dy, tree_add(means, metrics), tree_add(dshared, new)

        dy, means, dshared = run_if(named_scopes.B_LAST, slot["last"], head, received, sums.means, sums.shared)
        dchunk, dx = self._pull_back(self.chunk(slot), residuals, dy)

        def embedding(dshared):
            _, pullback = jax.vjp(lambda shared: self.program.embed(shared, micro_batch), self.shared)
            return tree_add(dshared, pullback(dx)[0])

        dshared = run_if(named_scopes.B_FIRST, slot["first"], embedding, dshared)
        return dx, _Sums(means, dshared, self._add_to_chunk(sums.blocks, dchunk, slot))

    # --- From F to B --------------------------------------------------------------------------------------------------

    def zeros(self, types):
        """Zeros for accumulating values of these types, in the accumulator's dtype."""
        return jax.tree.map(lambda like: zeros_like(like, self.accumulator), types)

    def _trace_layers(self):
        """The types of the residuals of a forward pass and of the layers' parts of means; and the backward program."""
        programs = []

        def forward(chunk, x):
            micro_batch = tree_index(self.micro_batches, 0)
            _, means, residuals, backward = self._differentiate(chunk, x, micro_batch, jnp.int32(0))
            programs.append(backward)
            return residuals, means

        return *jax.eval_shape(forward, self.chunk({"chunk": 0}), self.message), *programs

    def _differentiate(self, chunk: Weights, x: Array, micro_batch, virtual_stage: Array):
        """Return the residual stream after the layers, their parts of means, and the derivative of both.

        The derivative has two parts: the residuals, and the backward program, which is the structure of the result of
        `jax.vjp` and for each of its leaves the index of a weight (None: a residual).
        """
        trainable, frozen = partition_trainable(chunk)

        def layers(trainable, x):
            return self.program.layers(combine(trainable, frozen), x, micro_batch, virtual_stage)

        (y, means), pullback = jax.vjp(layers, trainable, x)
        leaves, structure = jax.tree.flatten(pullback)
        weights = jax.tree.leaves(chunk)
        indices = [next((i for i, weight in enumerate(weights) if leaf is weight), None) for leaf in leaves]
        residuals = [leaf for leaf, index in zip(leaves, indices, strict=True) if index is None]
        return y, means, residuals, (structure, indices)

    def _pull_back(self, chunk: Weights, residuals: list[Array], dy: Array):
        """Reassemble the derivative of the layers and apply it to `dy`, the gradient of their output."""
        structure, indices = self.backward
        weights, residuals = jax.tree.leaves(chunk), iter(residuals)
        leaves = [next(residuals) if index is None else weights[index] for index in indices]
        dmeans = loss_cotangents(self.program.loss_weights, self.layer_means)
        return jax.tree.unflatten(structure, leaves)((dy, dmeans))

    def _add_to_chunk(self, sums: Weights, new: Weights, slot: dict) -> Weights:
        """Add one chunk's gradients to the stage's gradients."""
        if self.schedule.chunks == 1:
            return tree_add(sums, new)
        index = slot["chunk"]
        add = lambda total, gradient: write_slot(total, index, total[index] + gradient.astype(total.dtype))  # noqa: E731
        return jax.tree.map(add, sums, new)


def _column(schedule: PipelineSchedule) -> dict:
    """This stage's column of the table: for each kind of operation its fields, int32 [ticks]."""
    stage = mappings.rank(PIPE)

    def local(table) -> Array:
        return jnp.asarray(table)[:, stage]

    column = {name: local(getattr(schedule, name)) for name in ("receive_activation", "receive_gradient")}
    for kind in ("forward", "backward"):
        if (slots := getattr(schedule, kind)) is not None:
            fields = {name: local(table) for name, table in vars(slots).items()}
            column[kind] = {**fields, "virtual_stage": fields["chunk"] * schedule.stages + stage}
    return column


# --- Building blocks: buffers with slots, conditionals, values that vary over stages ----------------------------------


def run_if(name: str, condition: Array, then: Callable, *operands):
    """`then(*operands)` if the condition is 1, else the operands. XLA copies all others, so that values that only pass
    through are operands.

    `name` labels the conditional in the traced program.
    """

    def pass_through(*operands):
        return operands if len(operands) > 1 else operands[0]

    with jax.named_scope(name):
        return lax.switch(condition, [pass_through, then], *operands)


def write_slot(buffer: Array, slot: Array, value) -> Array:
    """`buffer` [slots, …] with `value` in a slot."""
    value = mappings.vary(jnp.asarray(value), mappings.varying_axes(buffer))  # a residual may be a NumPy constant
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


# --- Generation: one stage after the other ----------------------------------------------------------------------------


def pipeline_decode(
    stages: int,
    chunks: int,
    layers: Callable[[Weights, Array, Any], tuple[Array, Any]],
    blocks: Weights,
    x: Array,
    caches,
) -> tuple[Array, Any]:
    """Run the stages one after the other, for text generation.

    Args:
      stages, chunks: p and V.
      layers: (layers of a chunk, residual stream, cache of the chunk) → (residual stream after these layers, new
        cache).
      blocks: this stage's layers, as for `pipeline_gradients`.
      x: the residual stream before the first layer, the same on every stage.
      caches: caches of the chunks, a pytree with a leading dim of this stage's chunks.

    Returns:
      The stream after the last layer, replicated over stages, and the new caches.
    """
    blocks, x, caches = vary_over_pipe((blocks, x, caches))

    def run_virtual_stage(carry, number):
        chunk = number // stages

        def run_chunk(x, caches):
            x, cache = layers(blocks if chunks == 1 else tree_index(blocks, chunk), x, tree_index(caches, chunk))
            return x, jax.tree.map(lambda buffer, value: write_slot(buffer, chunk, value), caches, cache)

        is_local = (mappings.rank(PIPE) == number % stages).astype(jnp.int32)
        x, caches = run_if("turn", is_local, run_chunk, *carry)
        return (mappings.send_to_next_stage(x), caches), None

    (x, caches), _ = lax.scan(run_virtual_stage, (x, caches), jnp.arange(stages * chunks))
    return mappings.broadcast_from_first_stage(x), caches
