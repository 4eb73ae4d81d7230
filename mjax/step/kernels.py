"""The kernels of a run, of attention and of the products of experts, chosen by rule (`config/kernels.py`).

`mjax doctor --config NAME` runs them and compares them with their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from mjax.config import Config
from mjax.config.kernels import capability_of, choose_grouped, choose_kernel, with_grouped
from mjax.step.unrolling import with_unrolling


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
