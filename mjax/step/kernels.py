"""The kernels of a run, of attention and of the products of experts, chosen by rule (`config/kernels.py`); and whether
its layers are compiled in a loop or one after the other.

`mjax doctor --config NAME` runs them and compares them with their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from mjax.config import Config
from mjax.config.kernels import capability_of, choose_grouped, choose_kernel, with_grouped
from mjax.config.pattern import stacks_of

MOST_UNROLLED = 80
"""Layers that are compiled without a loop unless a config says so: each takes one to two seconds."""
SERVER = 8
"""GPUs whose FSDP hides its gathers beside the layers without a loop too."""


def with_kernel(config: Config, announce: Callable[[str], None] = print) -> Config:
    """`config` with `model.attention` set to the kernel for this process's devices, in a mixture of experts
    `model.grouped`, and `train.unroll` (`with_unrolling`).

    Args:
      announce: receives one sentence for each slower kernel that `auto` has to use on a GPU.

    Raises:
      UsageError: a requested kernel does not support the run.
    """
    model, compute, chunks = config.model, config.precision.compute, config.sequence_chunks
    documents, on_gpu = "documents" in config.batch_arrays(), jax.default_backend() == "gpu"
    capability = capability_of(jax.local_devices()[0])
    kernel, obstacle = choose_kernel(model, compute, jax.default_backend(), documents, capability, chunks)
    if model.attention == "auto" and on_gpu and obstacle:
        announce(f"attention: the slower kernel xla is used instead of cuDNN flash, because {obstacle}")
    if kernel == "cudnn" and documents:
        announce("attention: cuDNN gets the documents as a bias, as JAX has no public interface for their offsets")
    if model.grouped:
        grouped, obstacle = choose_grouped(config, jax.default_backend(), capability)
        if model.grouped == "auto" and on_gpu and obstacle:
            announce(f"experts: their products run one tile after the other, because pallas cannot be used: {obstacle}")
        model = with_grouped(model, grouped)
    return with_unrolling(replace(config, model=replace(model, attention=kernel)), on_gpu)


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
