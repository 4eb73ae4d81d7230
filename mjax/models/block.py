"""A layer composed of given parts, and the scan over stacked layers.

    Block, pre-LN (arXiv 1909.08053, figure 7b)

    x ─┬─ norm ─ attention ─ dropout ─ + ─┬─ norm ─ MLP ─ dropout ─ + ─▶
       └──────────────────────────────┘   └────────────────────────┘

    PostNormBlock, the original BERT (figure 7a)

    x ─┬─ attention ─ dropout ─ + ─ norm ─┬─ MLP ─ dropout ─ + ─ norm ─▶
       └──────────────────────┘           └────────────────┘

    OutputNormBlock (OLMo 2, arXiv 2501.00656)

    x ─┬─ attention ─ norm ─ dropout ─ + ─┬─ MLP ─ norm ─ dropout ─ + ─▶
       └──────────────────────────────┘   └────────────────────────┘

Attention and MLP each open and close a tensor-parallel region, so a layer has two all-reduces forward and two backward.
Between them the stream is [t, h], one row per token: all tokens of the micro-batch, or with sequence parallelism those
of this rank.

**A layer is any module** that takes the stream and a `Context` and returns the stream, or the stream and a dict of
sums: auxiliary losses, such as load balancing in a mixture of experts. They count as if the model's `loss` had returned
them (`protocol.py`).

**A stack repeats a group of layers**, and a group of one is a dense model. Weights have a leading dim. Layers of a
group that have equal weights and differ in something static, such as a window, are one layer with a `period`, and
`context.layer_in_group` says which of them is computed; those with other weights are a `Group`. Stacks follow each
other in an `nnx.List`. Scans, pipelines and storage divide a stack between its groups.

    stack(A)                       A_1 A_2 … A_i
    Group([stack(A), stack(B)])    A_1 B_1 A_2 B_2 … A_i B_i
    nnx.List([stack(A), stack(B)]) A_1 … A_i B_1 … B_j

The residuals of a layer have names, and `recompute` selects which of them are kept (arXiv 2205.05198, section 5):
`none` keeps what autodiff needs, `selective` the names below, `full` only the layer's input, and which experts a router
chose.

`offload` keeps the same as `full`, but the layer's input in host memory. It is the one residual from which all others
can be computed again, and the smallest: nothing that grows with the sequence stays on the device for each layer, and
the link to the host carries least. A copy out runs beside the whole forward pass of its layer. For a copy back the
layer waits: XLA starts it where the layer begins, and not during the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.models.context import Context
from mjax.models.parts.attention import Attention
from mjax.parallel import random
from mjax.parallel.weights import add_layer_dim
from mjax.parallel.zero import all_but_gathered_weights

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

Sums = dict[str, Array]


class Block(nnx.Module):
    """One transformer layer, with norms before attention and MLP, of this rank's rows of the stream."""

    def __init__(
        self,
        attention_norm: nnx.Module,
        attention: Attention,
        mlp_norm: nnx.Module,
        mlp: nnx.Module,
        dropout: float = 0.0,
        period: int = 1,
    ):
        """Compose the layer.

        Args:
          attention_norm, mlp_norm: called with x.
          attention, mlp: called with x and a `Context`.
          dropout: rate for the outputs of attention and MLP.
          period: how many of these layers a group has; `context.layer_in_group` says which of them this is.
        """
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout, self.period = dropout, period

    def __call__(self, x: Float[Array, "t h"], context: Context) -> Float[Array, "t h"]:
        y = self.attention(self.attention_norm(x), context)
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        y = self.mlp(self.mlp_norm(x), context)
        return x + context.dropout(y, self.dropout, random.MLP_OUTPUT)

    def empty_cache(self, sequences: int, slots: int, dtype) -> Any:
        """What this rank has read of so many sequences, before the first position: a pytree of arrays, which only
        the layer reads and writes.

        Args:
          sequences: b, the same as the first dim of every array.
          slots: positions of this rank that there must be room for.
          dtype: of the stream.
        """
        return self.attention.empty_cache(sequences, slots, dtype)

    def decode(
        self, x: Float[Array, "t h"], context: Context, cached: Any, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], Any]:
        """The layer without dropout, and the cache with the positions of `x`, for generation.

        Args:
          x: whole prompts, padded on the right to one width; with `context.slots` one position per sequence, the one
            after the cached ones.
          context: of these tokens.
          cached: by `empty_cache` and `decode` of this layer; empty for prompts.
          lengths: tokens of each prompt; with `context.slots` positions in the cache.
        """
        y, new = self.attention.decode(self.attention_norm(x), context, cached, lengths)
        x = x + y
        return x + self.mlp(self.mlp_norm(x), context), new


class PostNormBlock(Block):
    """One transformer layer of the original BERT, with a norm after each residual sum."""

    def __call__(self, x: Float[Array, "t h"], context: Context) -> Float[Array, "t h"]:
        y = self.attention(x, context)
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        x = self.attention_norm(x)
        y = self.mlp(x, context)
        x = x + context.dropout(y, self.dropout, random.MLP_OUTPUT)
        # The input of a norm is kept for its backward pass; in the pre-LN layer it is the next layer's input.
        return self.mlp_norm(checkpoint_name(x, "residual"))


class OutputNormBlock(Block):
    """One transformer layer whose attention and MLP are normed before they are added to the stream."""

    def __call__(self, x: Float[Array, "t h"], context: Context) -> Float[Array, "t h"]:
        y = self.attention(x, context)
        y = self.attention_norm(checkpoint_name(y, "residual"))
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        y = self.mlp(x, context)
        y = self.mlp_norm(checkpoint_name(y, "residual"))
        return x + context.dropout(y, self.dropout, random.MLP_OUTPUT)

    def decode(
        self, x: Float[Array, "t h"], context: Context, cached: Any, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], Any]:
        y, new = self.attention.decode(x, context, cached, lengths)
        x = x + self.attention_norm(y)
        return x + self.mlp_norm(self.mlp(x, context)), new


def stack(key: Array, layers: int, layer: Callable[[Array], nnx.Module], first: int = 0, every: int = 1) -> nnx.Module:
    """`layers` layers as one whose weights have a leading layer dim. Layer i of a model has the same initial weights at
    any depth; these are the layers `first`, `first` + `every`, … of it, from 0."""
    keys = jax.vmap(partial(jax.random.fold_in, key))(first + every * jnp.arange(layers))
    # Without transform_metadata the layer dim would silently be missing from the PartitionSpecs.
    return add_layer_dim(nnx.vmap(layer, transform_metadata={nnx.PARTITION_NAME: None})(keys))


class Group(nnx.Module):
    """Layers that a model repeats, each a stack of its repetitions: the first of each, then the second of each."""

    def __init__(self, stacks: Sequence[nnx.Module]):
        self.turns = nnx.List(stacks)  # the name in checkpoints


def stacks_of(blocks) -> Sequence:
    """The stacks of a model, in order; most have one."""
    return blocks if isinstance(blocks, nnx.List) else [blocks]


def group_of(stack) -> Sequence:
    """The layers of a stack that have weights of their own: those of a `Group`, or the one that is repeated."""
    return stack.turns if isinstance(stack, Group) else [stack]


def map_layers(function: Callable, blocks) -> list[list]:
    """`function` of each layer that is stacked in `blocks`: for each of `stacks_of` a list of those of `group_of`."""
    return [list(map(function, group_of(stack))) for stack in stacks_of(blocks)]


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
      blocks: a stack of layers, or a `Group`, or an `nnx.List` of these.
      x: this rank's rows of the stream.
      context: of its tokens.
      recompute: `none`, `selective`, `full` or `offload`.
      first_layer: number of the first of these layers in the model, from 1; it selects the dropout masks.
      weights_of: by layer (`map_layers`) the function that turns the stored shards of a layer into its weights, if
        they are gathered layer by layer (FSDP), in the forward pass and again in the backward pass.
      unroll: compile the layers without a loop. A loop keeps what the backward pass needs in stacked arrays, which a
        GPU has to fill and to read layer by layer: a sixth of a step of `gpt_1b`.

    Returns:
      The stream after the layers, and the sums of the layers by name, in float32.
    """
    sums: Sums = {}
    for group, gathers, count in groups_with_weights(blocks, weights_of):
        layers = [_layer(context, recompute, gather, unroll) for gather in gathers]
        body, parts = _by_group(group, layers, first_layer + jnp.arange(count))
        x, layer_sums = jax.lax.scan(body, x, parts, unroll=unroll)
        sums = _added(sums, jax.tree.map(lambda each: each.sum(0), layer_sums))
        first_layer = first_layer + count
    return x, sums


def _layer(context: Context, recompute: str, gather: Callable | None, unroll: bool) -> Callable:
    """(layer in its group, x, (layer, its number)) → (x, its sums), with what the backward pass keeps of it."""

    def layer(layer_in_group, x, layer_and_number):
        block, number = layer_and_number
        if recompute == "offload":
            x = checkpoint_name(x, INPUT)
        if gather is not None:
            block = gather(block)
        return _with_sums(block(x, context.of_layer(number, layer_in_group)))

    if SAVED[recompute] is None and gather is None:
        return layer
    policy = all_but_gathered_weights if SAVED[recompute] is None else _policy(recompute)
    return jax.checkpoint(layer, prevent_cse=unroll, policy=policy, static_argnums=0)


def _added(sums: Sums, others: Sums) -> Sums:
    return {name: sums.get(name, 0) + others.get(name, 0) for name in {**sums, **others}}


def groups_with_weights(blocks, weights_of: Sequence[Sequence[Callable | None]] | None) -> Iterator[tuple]:
    """For each stack its group, their entries of `weights_of` and the number of its layers on this device."""
    weights_of = weights_of or map_layers(lambda _: None, blocks)
    for stack, gathers in zip(stacks_of(blocks), weights_of, strict=True):
        group = group_of(stack)
        yield group, gathers, jax.tree.leaves(group[0])[0].shape[0] * len(group)


def _with_sums(result: Array | tuple[Array, Sums]) -> tuple[Array, Sums]:
    """The result of a layer as the stream and its sums."""
    return result if isinstance(result, tuple) else (result, {})


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


def period_of(group: Sequence) -> int:
    """After how many layers all that is static repeats."""
    return math.lcm(len(group), *(getattr(layer, "period", 1) for layer in group))


def _by_group(group: Sequence, layers: Sequence[Callable], aux) -> tuple[Callable, Any]:
    """The body of a scan over the groups of a stack, and the arrays that it scans.

    Args:
      group: the stacks of its layers.
      layers: for each of them (layer in its group, x, (its weights, its part of `aux`)) → (x, its sums).
      aux: arrays with a leading dim of all layers.
    """
    size = period_of(group)
    if size == 1:
        return partial(layers[0], 0), (group[0], aux)
    each = size // len(group)  # repetitions of each layer in a group

    def cut(tree, size: int):
        return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), tree)

    def body(x, parts):
        sums, (stacks, others) = {}, parts
        for layer_in_group in range(size):
            number, which = divmod(layer_in_group, len(group))
            block = stacks[which] if each == 1 else jax.tree.map(itemgetter(number), stacks[which])
            x, more = layers[which](layer_in_group, x, (block, jax.tree.map(itemgetter(layer_in_group), others)))
            sums = _added(sums, more)
        return x, sums

    # A dim of one would cost memory: XLA copies the stack of gradients where it leaves the loop.
    stacks = list(group) if each == 1 else [cut(stack, each) for stack in group]
    return body, (stacks, cut(aux, size))
