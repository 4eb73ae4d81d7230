"""What a loss is the mean of, and the figures it comes with: one number of a GPT, three of a BERT (`bert.FIGURES`), two
of a BERT with the head of a task (`heads.FIGURES`).

Models sum over the sequences they are given; `share` makes parts of a mean over the global batch of such sums, wherever
they are taken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config import Config
from mjax.models import bert, heads
from mjax.parallel import mappings, scopes
from mjax.parallel.mappings import DATA
from mjax.state.precision import parameter_type


@jax.named_scope(scopes.LOSS)
def count_labels(config: Config, batch: dict[str, Array]) -> Array | int:
    """Labels of the global batch that count: int32 [], the same on every device, or a number where all do."""
    if config.model.head != "pretraining":
        return config.train.global_batch
    if "loss_mask" not in batch:
        return config.train.global_batch * config.model.sequence
    counted = batch["loss_mask"].sum(dtype=jnp.int32)
    return mappings.sum_over(counted, mappings.varying_axes(counted))


def share(config: Config, scale: Array | float, labels: Array | int) -> Array | float:
    """What the loss of a label is multiplied by, to give the mean: [], or of a BERT [3], for each of its sums.

    Of no labels the loss is 0, and so is its gradient.
    """
    of_label = scale / (labels if isinstance(labels, int) else jnp.maximum(labels, 1))
    if config.model.kind == "gpt" or config.model.head != "pretraining":
        return of_label
    of_sequence = scale / config.train.global_batch
    return jnp.stack([of_label, of_sequence, of_sequence])


def named(config: Config, figures: Array) -> tuple[Array, dict[str, Array]]:
    """The loss and the other figures by name: of a BERT also what its loss is the sum of."""
    if config.model.kind == "gpt":
        return figures, {}
    by_name = dict(zip(_names(config), figures, strict=True))
    if config.model.head == "pretraining":
        return by_name["mlm_loss"] + by_name["order_loss"], by_name
    return by_name.pop("loss"), by_name


def no_loss(config: Config) -> Array:
    """What the losses of micro-batches are added to: zeros, [], of a BERT [3], with the head of a task [2]."""
    shape = () if config.model.kind == "gpt" else (len(_names(config)),)
    return mappings.vary(jnp.zeros(shape, parameter_type(config.precision.compute)), frozenset({DATA}))


def _names(config: Config) -> tuple[str, ...]:
    """The names of what a BERT sums up, with its own heads or that of a task."""
    return bert.FIGURES if config.model.head == "pretraining" else heads.FIGURES
