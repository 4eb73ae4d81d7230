"""What a loss is the mean of, and the figures it comes with: one number of a GPT, three of a BERT (`bert.FIGURES`).

Models sum over the sequences they are given; `share` makes parts of a mean over the global batch of such sums, wherever
they are taken.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mjax.config import Config
from mjax.models.bert import FIGURES
from mjax.parallel import mappings
from mjax.parallel.mappings import DATA
from mjax.training.precision import parameter_type


def count_labels(config: Config, batch: dict[str, Array]) -> Array | int:
    """Labels of the global batch that count: int32 [], the same on every device, or a number where all do."""
    if "loss_mask" not in batch:
        return config.train.global_batch * config.model.sequence
    counted = batch["loss_mask"].sum(dtype=jnp.int32)
    return mappings.sum_over(counted, mappings.varying_axes(counted))


def share(config: Config, scale: Array | float, labels: Array | int) -> Array | float:
    """What the loss of a label is multiplied by, to give the mean: [], or of a BERT [3], for each of its sums.

    Of no labels the loss is 0, and so is its gradient.
    """
    of_label = scale / (labels if isinstance(labels, int) else jnp.maximum(labels, 1))
    if config.model.kind == "gpt":
        return of_label
    of_sequence = scale / config.train.global_batch
    return jnp.stack([of_label, of_sequence, of_sequence])


def named(figures: Array) -> tuple[Array, dict[str, Array]]:
    """The loss, and of a BERT what it is the sum of and how often the order is found, by name."""
    if figures.ndim == 0:
        return figures, {}
    return figures[0] + figures[1], dict(zip(FIGURES, figures, strict=True))


def no_loss(config: Config) -> Array:
    """What the losses of micro-batches are added to: zeros, [] or of a BERT [3]."""
    shape = () if config.model.kind == "gpt" else (len(FIGURES),)
    return mappings.vary(jnp.zeros(shape, parameter_type(config.precision.compute)), frozenset({DATA}))
