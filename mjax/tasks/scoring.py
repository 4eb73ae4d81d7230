"""Windows through the model: one program on the mesh, under any parallelism, whatever the task.

A batch holds windows padded on the right to one width, and a mask that says which labels count. Causal attention never
looks at the padding behind a token, and the mask leaves the padding's own labels out; so do the rows that fill the last
batch. The program gives two figures for each window, the same on every device: its loss, and how many of its labels
are the likeliest. Of these is made a `Score`.

Short windows are padded to the next power of two only, so there is a compiled program for each width in use; each
reads the first positions of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.models.gpt import GPT
from mjax.parallel.layers import vocab_parallel_argmax, vocab_parallel_cross_entropy
from mjax.parallel.mappings import DATA
from mjax.tasks.interface import Score, Window
from mjax.training.forward import one_behind, rows_of_batch, to_devices
from mjax.training.layout import lay_out
from mjax.training.step import tokens_of

NARROWEST = 64  # positions; narrower windows would save less than another compilation costs

Batch = dict[str, np.ndarray]


class Scorer:
    """The compiled program that scores windows with any weights of one config.

    Attributes:
      abstract_model: `GPT` of ShapeDtypeStructs with shardings: what weights are restored to.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before `score`.

        Args:
          config: with `model.attention` resolved to a kernel (`inference.inference_config`).
          mesh: of the shape `config.mesh`.
        """
        self.config = config
        layout = lay_out(config, mesh)
        self.abstract_model = layout.abstract_model
        self._sharding = NamedSharding(mesh, P(DATA))

        def program(width: int, model: GPT, batch: dict[str, Array]) -> Array:
            narrow = replace(config, model=replace(config.model, sequence=width))
            on_device = partial(_figures, narrow, layout.plan)
            specs = layout.specs, dict.fromkeys(batch, P(DATA))
            return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)(model, batch)

        self._program = jax.jit(program, static_argnums=0)

    def score(
        self, model: GPT, windows: Sequence[Window], on_progress: Callable[[int], None] = lambda windows: None
    ) -> Score:
        """Score all `windows` together.

        Args:
          model: master weights, as in `TrainState.model`.
          windows: of at most `model.sequence` + 1 tokens each.
          on_progress: called with the number of windows that have been scored since the last call.
        """
        return sum(self.score_each(model, windows, on_progress), Score())

    def score_each(
        self, model: GPT, windows: Sequence[Window], on_progress: Callable[[int], None] = lambda windows: None
    ) -> list[Score]:
        """Score each of `windows`; see `score`."""
        scores: list[Score] = [Score()] * len(windows)

        def dispatched() -> Iterator[tuple[list[int], Array]]:
            for width, chosen in self._batches(windows):
                rows = _padded([windows[index] for index in chosen], width, self.config.train.global_batch)
                yield chosen, self._program(width, model, to_devices(rows, self._sharding))

        for chosen, figures in one_behind(dispatched()):
            rows = np.asarray(figures).tolist()
            for index, (loss, correct) in zip(chosen, rows, strict=False):  # the rest is filling
                counted = windows[index].counted
                scores[index] = Score(loss, counted, int(correct), 1, int(correct == counted))
            on_progress(len(chosen))
        return scores

    def _batches(self, windows: Sequence[Window]) -> Iterator[tuple[int, list[int]]]:
        """Indices of windows of one width at a time, the widest first: if the memory is short, that shows at once."""
        by_width: dict[int, list[int]] = {}
        for index, window in enumerate(windows):
            by_width.setdefault(self._width(len(window.tokens) - 1), []).append(index)
        size = self.config.train.global_batch
        for width in sorted(by_width, reverse=True):
            group = by_width[width]
            for first in range(0, len(group), size):
                yield width, group[first : first + size]

    def _width(self, needed: int) -> int:
        """`needed` rounded up to a power of two from 64 on, as far as there are positions."""
        width = min(1 << (max(needed, NARROWEST) - 1).bit_length(), self.config.model.sequence)
        mesh, tokens = self.config.mesh, width * self.config.train.micro_batch
        splits = not mesh.sequence_parallel or tokens % mesh.model == 0
        return width if splits else self.config.model.sequence


def _padded(windows: Sequence[Window], width: int, size: int) -> Batch:
    """A batch [size, width] of windows; what fills it up has no label that counts."""
    tokens, labels = np.zeros((2, size, width), np.int32)
    mask = np.zeros((size, width), bool)
    for row, (ids, counted) in enumerate(windows):
        count = len(ids) - 1
        tokens[row, :count], labels[row, :count] = ids[:-1], ids[1:]
        mask[row, count - counted : count] = True
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def _figures(config: Config, plan, model: GPT, batch: dict[str, Array]) -> Array:
    """From inside `shard_map`: loss and number of correct labels of each row of the global batch, [B, 2].

    The counts are exact: a window has far fewer labels than the 2^24 up to which float32 holds every whole number.
    """
    tokens = tokens_of(config)

    def head(weights: GPT, x: Array, micro_batch: dict[str, Array]) -> Array:
        labels, counts = micro_batch["labels"], micro_batch["loss_mask"]  # [b, s]
        logits = weights.logits(x, tokens)  # [b s, v / p]
        losses = tokens.by_sequence(vocab_parallel_cross_entropy(logits, labels.reshape(-1)))
        correct = (tokens.by_sequence(vocab_parallel_argmax(logits)) == labels) & counts
        return jnp.stack([losses.sum(-1, where=counts), correct.sum(-1, dtype=losses.dtype)], -1)  # [b, 2]

    return rows_of_batch(config, plan, model, batch, head)
