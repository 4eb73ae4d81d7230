"""The stacks of a model's layers, and the scan over them.

**A layer is any module** that takes the stream and a `Context` and returns the stream, or the stream and a dict of
sums: auxiliary losses, such as load balancing in a mixture of experts. They count as if the model's `loss` had returned
them (`protocol.py`).

**The config says the pattern of the layers** (`config/pattern.py`), and `stack` makes them: of each run of equal groups
one stack with a leading layer dim, or a `Group` of stacks, if the layers of a group have different weights. Several
runs are an `nnx.List`. Scans, pipelines and storage divide a run between its groups. A layer finds the entry of the
pattern that it is in `context.kind`.

The residuals of a layer have names, and `recompute` selects which of them are kept (arXiv 2205.05198, section 5):
`none` keeps what autodiff needs, `selective` the names below, `full` only the layer's input, and which experts a router
chose.

`offload` keeps the same as `full`, but the layer's input in host memory. It is the one residual from which all others
can be computed again, and the smallest: nothing that grows with the sequence stays on the device for each layer, and
the link to the host carries least. A copy out runs beside the whole forward pass of its layer. For a copy back the
layer waits: XLA starts it where the layer begins, and not during the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.config.model import ModelConfig
from mjax.config.pattern import LayerKind, Stack, layer_stacks
from mjax.models.block import Sums, with_sums
from mjax.models.protocol import Context
from mjax.parallel.weights import add_layer_dim
from mjax.parallel.zero import save_all_but_gathered_weights

# Residuals to keep, by `train.recompute`; None leaves the choice to autodiff. The names:
#   qkv       queries, keys and values before norms and rotary positions    mlp_up   of the MLP, before its activation
#   context   of attention, before the output projection                    experts  that a router chose
#   residual  the stream after attention
SAVED: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "selective": ("qkv", "context", "residual", "mlp_up", "experts"),
    "full": ("experts",),
    "offload": ("experts",),
}

INPUT = "layer"
"""The name of a layer's input. Only `offload` needs it: the other choices keep the input anyway."""

Layer = Callable[[Array], nnx.Module]
"""key of `jax.random` → a layer."""


def stack(key: Array, config: ModelConfig, layer: Layer | Mapping[str, Layer]) -> nnx.Module:
    """The layers of a model, stacked by `config.pattern`. Layer i has the same initial weights at any depth.

    Args:
      key: of `jax.random`.
      config: of the model.
      layer: makes one layer; by `LayerKind.weights`, if the pattern has several.
    """

    def make_stack(stack: Stack) -> nnx.Module:
        first, every = stack.numbers[0] - 1, stack.numbers.step
        keys = jax.vmap(partial(jax.random.fold_in, key))(first + every * jnp.arange(len(stack.numbers)))
        make = layer[stack.kinds[0].weights] if isinstance(layer, Mapping) else layer
        # Without transform_metadata the layer dim would silently be missing from the PartitionSpecs.
        layers = add_layer_dim(nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None})(keys))
        layers.kinds = stack.kinds
        return layers

    runs = [list(map(make_stack, stacks)) for _, stacks in groupby(layer_stacks(config), key=lambda stack: stack.run)]
    groups = [Group(stacks) if len(stacks) > 1 else stacks[0] for stacks in runs]
    return nnx.List(groups) if len(groups) > 1 else groups[0]


class Group(nnx.Module):
    """Layers that a model repeats, each a stack of its repetitions: the first of each, then the second of each."""

    def __init__(self, stacks: Sequence[nnx.Module]):
        self.turns = nnx.List(stacks)  # the name in checkpoints


def runs_in(blocks) -> Sequence[Sequence[nnx.Module]]:
    """For each run of a model's layers its stacks."""
    runs = blocks if isinstance(blocks, nnx.List) else [blocks]
    return [run.turns if isinstance(run, Group) else [run] for run in runs]


def map_stacks(function: Callable, blocks) -> list[list]:
    """`function` of each stack, as `runs_in` gives them."""
    return [list(map(function, stacks)) for stacks in runs_in(blocks)]


def kinds_in(stacks: Sequence) -> list[tuple[int, int, LayerKind]]:
    """For each layer of the group that a run repeats: its stack, its number among the layers of the group in that
    stack, and its kind."""
    each = len(stacks[0].kinds)
    return [(i, number, stacks[i].kinds[number]) for number in range(each) for i in range(len(stacks))]


def run_blocks(
    blocks,
    x: Float[Array, "t h"],
    context: Context,
    recompute: str = "none",
    first_layer: Int[Array, ""] | int = 1,
    weights_of: Sequence[Sequence[Callable | None]] | None = None,
    unroll: bool = False,
) -> tuple[Float[Array, "t h"], Sums]:
    """Apply stacked layers one after the other: a scan, so that compile time does not grow with depth.

    Args:
      blocks: layers as `stack` gives them.
      x: this rank's rows of the stream.
      context: of its tokens.
      recompute: `none`, `selective`, `full` or `offload`.
      first_layer: number of the first of these layers in the model, from 1; it selects the dropout masks.
      weights_of: by stack (`map_stacks`) the function that turns the stored shards of a layer into its weights, if
        they are gathered layer by layer (FSDP), in the forward pass and again in the backward pass.
      unroll: compile the layers without a loop. A loop keeps what the backward pass needs in stacked arrays, which a
        GPU has to fill and to read layer by layer: a sixth of a step of `gpt_1b`.

    Returns:
      The stream after the layers, and the sums of the layers by name, in float32.
    """
    sums: Sums = {}
    for stacks, gathers, count in runs_with_weights(blocks, weights_of):
        layers = [_layer(context, recompute, gather, unroll) for gather in gathers]
        body, parts = _scan_groups(stacks, layers, first_layer + jnp.arange(count))
        x, layer_sums = jax.lax.scan(body, x, parts, unroll=unroll)
        sums = _add_sums(sums, jax.tree.map(lambda each: each.sum(0), layer_sums))
        first_layer = first_layer + count
    return x, sums


def _layer(context: Context, recompute: str, gather: Callable | None, unroll: bool) -> Callable:
    """(kind, x, (layer, its number)) → (x, its sums), with what the backward pass keeps of it."""

    def layer(kind, x, layer_and_number):
        block, number = layer_and_number
        if recompute == "offload":
            x = checkpoint_name(x, INPUT)
        if gather is not None:
            block = gather(block)
        return with_sums(block(x, context.with_layer(number, kind)))

    if SAVED[recompute] is None and gather is None:
        return layer
    policy = save_all_but_gathered_weights if SAVED[recompute] is None else _policy(recompute)
    return jax.checkpoint(layer, prevent_cse=unroll, policy=policy, static_argnums=0)


def _add_sums(sums: Sums, others: Sums) -> Sums:
    return {name: sums.get(name, 0) + others.get(name, 0) for name in {**sums, **others}}


def runs_with_weights(blocks, weights_of: Sequence[Sequence[Callable | None]] | None) -> Iterator[tuple]:
    """For each run its stacks, their entries of `weights_of` and the number of its layers on this device."""
    weights_of = weights_of or map_stacks(lambda _: None, blocks)
    for stacks, gathers in zip(runs_in(blocks), weights_of, strict=True):
        yield stacks, gathers, jax.tree.leaves(stacks[0])[0].shape[0] * len(stacks)


def _policy(recompute: str) -> Callable:
    """The policy of `jax.checkpoint`, which saves the names of `SAVED`; with `offload` a layer's input in host
    memory."""
    policies, saved = jax.checkpoint_policies, SAVED[recompute]
    if recompute == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*saved)


def _scan_groups(stacks: Sequence, layers: Sequence[Callable], aux) -> tuple[Callable, Any]:
    """The body of a scan over the groups of a run, and the arrays that it scans.

    Args:
      stacks: of the run.
      layers: for each of them (kind, x, (weights of a layer, its part of `aux`)) → (x, its sums).
      aux: arrays with a leading dim of all layers.
    """
    kinds = kinds_in(stacks)
    if len(kinds) == 1:
        return partial(layers[0], kinds[0][-1]), (stacks[0], aux)
    each = len(kinds) // len(stacks)  # layers of each stack in a group

    def cut(tree, size: int):
        return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), tree)

    def body(x, parts):
        sums, (weights, others) = {}, parts
        for layer_in_group, (which, number, kind) in enumerate(kinds):
            block = weights[which] if each == 1 else jax.tree.map(itemgetter(number), weights[which])
            x, more = layers[which](kind, x, (block, jax.tree.map(itemgetter(layer_in_group), others)))
            sums = _add_sums(sums, more)
        return x, sums

    # A dim of one would cost memory: XLA copies the stack of gradients where it leaves the loop.
    weights = list(stacks) if each == 1 else [cut(stack, each) for stack in stacks]
    return body, (weights, cut(aux, len(kinds)))
