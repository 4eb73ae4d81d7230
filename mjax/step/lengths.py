"""The length of the sequences in a batch, which may be below `model.sequence`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jax import Array

from mjax.config import Config
from mjax.config.kernels import position_unit
from mjax.errors import UsageError


def at_length(config: Config, batch: Mapping[str, Array | np.ndarray]) -> Config:
    """`config` for the length of the sequences in a batch, which may be below `model.sequence`: the weights stay those
    of the config, and of learned positions the first ones are used.

    Raises:
      UsageError: the arrays have several lengths, or one that is too long or that the mesh or kernel cannot split.
    """
    arrays = config.batch_arrays() | config.batch_arrays(evaluation=True)
    model, whole = config.model, config.model.sequence
    split = [name for name, (shape, _) in arrays.items() if shape[-1:] == (whole,) and name in batch]
    lengths = {name: batch[name].shape[-1] for name in split}
    first = next(iter(lengths.values()), whole)
    if {first, *lengths.values()} == {whole}:
        return config
    if other := next((name for name in split if lengths[name] != first), None):
        raise UsageError(
            f"{split[0]} of the batch has {first} positions and {other} {lengths[other]}; give arrays of one length"
        )
    if not 0 < first <= whole:
        raise UsageError(f"the batch has sequences of {first} and model.sequence is {whole}; give 1 to {whole}")
    mesh, sequences = config.mesh, config.train.micro_batch * model.sequences
    parts = mesh.model if mesh.splits_tokens else 1  # of the tokens of a micro-batch
    even = 2 if model.attention == "cudnn" and (model.biased_scores or "documents" in batch) else 1
    unit = math.lcm(position_unit(config), mesh.context * (parts // math.gcd(parts, sequences)), even)
    if first % unit:
        raise UsageError(
            f"the batch has sequences of {first}, which the mesh or model.attention {model.attention!r} cannot split; "
            f"give a multiple of {unit}"
        )
    return replace(config, model=replace(model, sequence=first))
