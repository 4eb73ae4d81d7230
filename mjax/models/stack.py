"""The stacks of a model's layers, and the scan over them.

**A layer is any module** that maps the residual stream and a `ForwardContext` to the residual stream. It may also
return a dict of sums: auxiliary losses, such as load balancing in a mixture of experts. They count as if the model's
`loss` had returned them (`protocol.py`).

**The config has the pattern of the layers** (`config/pattern.py`), and `stack` makes them. A run of equal groups
becomes a stack with a leading layer dim, or a `LayerGroup` of stacks if the layers in a group have different weights.
Several runs are an `nnx.List`. Scans, pipelines and storage divide a run between its groups. `context.kind` is a
layer's entry in the pattern.

The residuals of a layer have names, and `recompute` selects the saved ones (arXiv 2205.05198, section 5). `none` saves
all residuals of autodiff, `selective` the names below, `full` only the layer's input and the router's choice of
experts.

`offload` saves the same as `full`, but the layer's input in host memory. It is the smallest residual from which all
others can be recomputed: no layer leaves anything on the device that grows with the sequence, and the link to the host
carries least. A copy out overlaps the whole forward pass of its layer. A copy back delays the layer: XLA starts it
where the layer begins, and not during the one before.
"""

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
from mjax.models.block import Sums, split_sums
from mjax.models.protocol import ForwardContext
from mjax.parallel.autodiff import run_after
from mjax.parallel.reductions import add_means
from mjax.parallel.weights import add_layer_dim
from mjax.parallel.zero import save_all_but_gathered_weights

# Residuals to save, by `train.recompute`; None: autodiff chooses. The names:
#   qkv       queries, keys and values before norms and rotary positions    mlp_up   of the MLP, before its activation
#   attended  output of attention, before the output projection             experts  that a router chose
#   residual  the stream after attention
SAVED: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "selective": ("qkv", "attended", "residual", "mlp_up", "experts"),
    "full": ("experts",),
    "offload": ("experts",),
}

INPUT = "layer"  # the name of a layer's input. Only `offload` needs it: the other choices save the input anyway

Layer = Callable[[Array], nnx.Module]  # key of `jax.random` → a layer


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
    groups = [LayerGroup(stacks) if len(stacks) > 1 else stacks[0] for stacks in runs]
    return nnx.List(groups) if len(groups) > 1 else groups[0]


class LayerGroup(nnx.Module):
    """A group of different layers that a model repeats; each is a stack of its repetitions."""

    def __init__(self, stacks: Sequence[nnx.Module]):
        self.turns = nnx.List(stacks)  # the name in checkpoints


def layer_runs(blocks) -> Sequence[Sequence[nnx.Module]]:
    """The stacks of each run of a model's layers."""
    runs = blocks if isinstance(blocks, nnx.List) else [blocks]
    return [run.turns if isinstance(run, LayerGroup) else [run] for run in runs]


def map_stacks(function: Callable, blocks) -> list[list]:
    """Apply `function` to each stack of `layer_runs`."""
    return [list(map(function, stacks)) for stacks in layer_runs(blocks)]


def group_kinds(stacks: Sequence) -> list[tuple[int, int, LayerKind]]:
    """List, for each layer of the group that a run repeats: its stack, its number among the group's layers in that
    stack, and its kind."""
    layers_of_stack = range(len(stacks[0].kinds))
    return [(i, number, stacks[i].kinds[number]) for number in layers_of_stack for i in range(len(stacks))]


def run_blocks(
    blocks,
    x: Float[Array, "t h"],
    context: ForwardContext,
    recompute: str = "none",
    first_layer: Int[Array, ""] | int = 1,
    gathers: Sequence[Sequence[Callable | None]] | None = None,
    unroll: bool = False,
) -> tuple[Float[Array, "t h"], Sums]:
    """Apply stacked layers one after the other: a scan, so that compile time does not grow with depth.

    Args:
      blocks: layers from `stack`.
      x: this rank's rows of the residual stream.
      context: of its tokens.
      recompute: `none`, `selective`, `full` or `offload`.
      first_layer: number of the first of these layers in the model, from 1; it selects the dropout masks.
      gathers: by stack (`map_stacks`) the function that turns the stored shards of a layer into its weights, if
        they are gathered layer by layer (FSDP), in the forward pass and again in the backward pass.
      unroll: compile the layers without a loop. A loop stores residuals in stacked arrays, which a GPU has to fill and
        to read layer by layer: a sixth of a step of `gpt_1b`.

    Returns:
      The stream after the layers, and the sums of the layers by name, in float32.
    """
    sums: Sums = {}
    for run, (stacks, run_gathers, count) in enumerate(iterate_runs(blocks, gathers)):
        layers = [_make_layer(context, recompute, gather, unroll) for gather in run_gathers]
        x, stacks = run_after(x, stacks) if run else (x, stacks)
        body, parts = _scan_groups(stacks, layers, first_layer + jnp.arange(count))
        x, layer_sums = jax.lax.scan(body, x, parts, unroll=unroll)
        sums = add_means(sums, jax.tree.map(lambda values: values.sum(0), layer_sums))
        first_layer = first_layer + count
    return x, sums


def _make_layer(context: ForwardContext, recompute: str, gather: Callable | None, unroll: bool) -> Callable:
    """(kind, x, (layer, its number)) → (x, its sums), with the residuals of `recompute`."""

    def layer(kind, x, layer_and_number):
        block, number = layer_and_number
        if recompute == "offload":
            x = checkpoint_name(x, INPUT)
        if gather is not None:
            block = gather(block)
        return split_sums(block(x, context.with_layer(number, kind)))

    if SAVED[recompute] is None and gather is None:
        return layer
    policy = save_all_but_gathered_weights if SAVED[recompute] is None else _policy(recompute)
    return jax.checkpoint(layer, prevent_cse=unroll, policy=policy, static_argnums=0)


def iterate_runs(blocks, gathers: Sequence[Sequence[Callable | None]] | None) -> Iterator[tuple]:
    """Yield, for each run, its stacks, their entries of `gathers` and the number of its layers on this device."""
    gathers = gathers or map_stacks(lambda _: None, blocks)
    for stacks, run_gathers in zip(layer_runs(blocks), gathers, strict=True):
        if count := jax.tree.leaves(stacks[0])[0].shape[0]:  # a pipeline stage may have none of a run
            yield stacks, run_gathers, count * len(stacks)


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
      layers: for each stack (kind, x, (weights of a layer, its part of `aux`)) → (x, its sums).
      aux: arrays with a leading dim of all layers.
    """
    kinds = group_kinds(stacks)
    if len(kinds) == 1:
        return partial(layers[0], kinds[0][-1]), (stacks[0], aux)
    layers_of_stack = len(kinds) // len(stacks)  # in a group

    def split(tree, size: int):
        return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), tree)

    def body(x, parts):
        sums, (weights, group_aux) = {}, parts
        for layer_in_group, (i, number, kind) in enumerate(kinds):
            block = weights[i] if layers_of_stack == 1 else jax.tree.map(itemgetter(number), weights[i])
            x, layer_sums = layers[i](kind, x, (block, jax.tree.map(itemgetter(layer_in_group), group_aux)))
            sums = add_means(sums, layer_sums)
        return x, sums

    # A dim of one would cost memory: XLA copies the stack of gradients where it leaves the loop.
    weights = list(stacks) if layers_of_stack == 1 else [split(stack, layers_of_stack) for stack in stacks]
    return body, (weights, split(aux, len(kinds)))
