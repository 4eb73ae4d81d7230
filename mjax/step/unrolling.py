"""Whether the layers of a step are compiled in a loop or one after the other."""

from __future__ import annotations

from dataclasses import replace

from mjax.config import Config
from mjax.config.model import ModelConfig
from mjax.config.pattern import stacks_of

MOST_UNROLLED = 80
"""Layers that are compiled without a loop unless a config says so: each takes one to two seconds."""
SERVER = 8
"""GPUs whose FSDP hides its gathers beside the layers without a loop too."""


def is_unrolled(config: Config, on_gpu: bool) -> bool:
    """True if the layers are compiled without a loop. With `auto` that is so on a GPU, where nothing is done layer by
    layer that XLA would begin for many layers at once: weights gathered from several servers (FSDP), all-to-alls over
    `context`, whole layers computed again, copies to the host, rows of experts; and not for a pipeline, whose stages
    keep activations in slots, nor for layers of several kinds, or more than can be compiled in two minutes."""
    train, mesh, model = config.train, config.mesh, config.model
    if train.unroll != "auto":
        return train.unroll == "on"
    from_servers = mesh.zero == 3 and mesh.devices > SERVER
    by_layer = from_servers or mesh.context > 1 or train.recompute in ("full", "offload") or model.experts
    return on_gpu and not (by_layer or mesh.pipe > 1 or len(stacks_of(model)) > 1 or model.layers > MOST_UNROLLED)


def with_unrolling(config: Config, on_gpu: bool) -> Config:
    """`config` with `train.unroll` decided (`is_unrolled`)."""
    return replace(config, train=replace(config.train, unroll="on" if is_unrolled(config, on_gpu) else "off"))


def repeats_in_stack(config: ModelConfig) -> bool:
    """True if layers of one stack differ in more than weights, such as windows; a loop then runs several at once."""
    return any(len(stack.kinds) > 1 for stack in stacks_of(config))
