"""Batches through a trained model: one program on the mesh, under any parallelism, for every task.

It is the evaluation step with a head of the task (`RowScorer.head`), which computes some numbers for each row. For a
window of text these are the loss and the correctness of each label, for a labelled example its logits. Each micro-batch
writes its rows into an array of zeros at the indices of its samples. One sum over all axes combines the rows of a
batch, so under any parallelism, including a pipeline, every device has all rows at the end.

A batch of windows is padded on the right to one width, and only the unmasked labels are read from the result. Causal
attention never reads the padding after a token. There is one compiled program per width in use, which reads the first
positions of the same weights; batches share widths if another program would cost more than the padding. If only the
last positions of all windows of a width have unmasked labels, as in a question's answers, logits are computed for
these positions only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.config.axes import MODEL
from mjax.config.kernels import pad_width
from mjax.models.causal import CausalModel
from mjax.models.protocol import ForwardContext, Model
from mjax.parallel import mappings
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.mesh import batch_specs
from mjax.step.layout import build_layout
from mjax.step.step import sum_over_batch
from mjax.tasks.interface import ContextWindow, Score
from mjax.tasks.labelled_task import Batch, Examples, iterate_batches

Progress = Callable[[int], None]  # called with the number of rows that have been scored since the last call


def no_progress(rows: int) -> None:
    """Show no progress."""


Windows = Sequence[ContextWindow]
Passes = Sequence[Windows]
WIDTHS = range(16, 2**30, 16)
POSITIONS_MULTIPLE = 32  # of the scored positions, unless all are scored
PROGRAM_COST = 1  # of one more program, in batches: about three if it is compiled, 0.3 s if it is cached


def vocab_parallel_argmax(logits: Array) -> Array:
    """The id with the highest logit when each rank holds v/t of them; the lowest id in a tie, as in `argmax`.

    Two numbers per token are communicated over `model`: the highest logit, and the lowest id that has it. Shapes:
    [b·s, v / t] → int32 [b·s].
    """
    highest = logits.max(-1)
    ids = jnp.argmax(logits, -1).astype(jnp.int32) + mappings.rank(MODEL) * logits.shape[-1]
    local_ids = jnp.where(highest == mappings.pmax(highest), ids, jnp.iinfo(jnp.int32).max)
    return -mappings.pmax(-local_ids)


class RowScorer:
    """The compiled program that computes a head's numbers for each row, with any weights of one config.

    A subclass defines the `head`, and `__call__` with the scores of a whole set.

    Attributes:
      abstract_model: ShapeDtypeStructs with shardings: the target for restoring weights.
      head: inside `shard_map`: weights, residual stream after the last layer [b·s, h], micro-batch and the context of
        its tokens → numbers per row [b, …], replicated over `model`.
    """

    head: Callable[[Model, Array, dict[str, Array], ForwardContext], Array]

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before the first batch.

        Args:
          config: with `model.attention` resolved to a kernel (`inference.inference_config`).
          mesh: of the shape `config.mesh`.
        """
        self.config, self._mesh = config, mesh
        layout = build_layout(config, mesh)
        self.abstract_model = layout.abstract_model

        def program(width: int, model: Model, batch: dict[str, Array]) -> Array:
            narrow = replace(config, model=replace(config.model, sequence=width))
            on_device = partial(score_rows, narrow, layout.plan, head=self.head)
            specs = layout.specs, row_specs(batch, width)
            return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)(model, batch)

        self._program = jax.jit(program, static_argnums=0)

    def rows(self, model: Model, batches: Iterable[tuple[Any, int, Batch]]) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the numbers of every row of `batches`, [B, …] each, the same on every process.

        Args:
          model: master weights, as in `TrainState.model`.
          batches: a value to return with the numbers, the width of the rows, and the arrays of the global batch.
        """
        dispatched = (
            (value, self._program(width, model, to_devices(batch, self._mesh, width)))
            for value, width, batch in batches
        )
        # A batch is fetched after the next one has been dispatched: the devices work meanwhile.
        for (value, rows), _ in pairwise(chain(dispatched, [None])):
            yield value, jax.device_get(rows)


# --- Text -------------------------------------------------------------------------------------------------------------


class Scorer(RowScorer):
    """Computes the `Score` of windows of text, with a causal model."""

    @staticmethod
    def head(weights: CausalModel, x: Array, batch: dict[str, Array], context: ForwardContext) -> Array:
        """Loss and correctness of each label, [b, s, 2]; a rank of `context` has its part. For a batch with `scored`,
        positions [b, n], only at these, [b, n, 2]."""
        tokens, labels = context.tokens, batch["labels"]
        if "scored" in batch:
            scored = batch["scored"]
            x = jnp.take_along_axis(tokens.split_sequences(x), scored[..., None], axis=1).reshape(-1, x.shape[-1])
            tokens, labels = replace(tokens, positions=scored.shape[1]), jnp.take_along_axis(labels, scored, axis=1)
        logits = weights.logits(x, tokens)  # [b·s, v / t]
        losses = vocab_parallel_cross_entropy(logits, labels.reshape(-1))
        correct = vocab_parallel_argmax(logits) == labels.reshape(-1)
        numbers = tokens.split_sequences(jnp.stack([losses, correct.astype(losses.dtype)], -1))
        rows = jnp.zeros((tokens.sequences, tokens.global_positions, 2), losses.dtype)
        return mappings.vary(rows, mappings.varying_axes(numbers)).at[:, tokens.position_ids()].set(numbers)

    def __call__(self, model: CausalModel, passes: Passes, on_progress: Progress = no_progress) -> list[Score]:
        """Score the windows of each of a task's `passes`; arguments as in `score_labels`.

        Windows of all passes share batches, so many short passes fill them.
        """
        scores = iter(self.score_each(model, [window for windows in passes for window in windows], on_progress))
        return [sum((next(scores) for _ in windows), Score()) for windows in passes]

    def score_each(self, model: CausalModel, windows: Windows, on_progress: Progress = no_progress) -> list[Score]:
        """Score each of `windows`; arguments as in `score_labels`."""
        totals = [labels.sum(0, dtype=np.float64) for labels in self.score_labels(model, windows, on_progress)]
        return [
            Score(loss, window.counted, int(correct), 1, int(correct == window.counted))
            for window, (loss, correct) in zip(windows, totals, strict=True)
        ]

    def score_labels(self, model: CausalModel, windows: Windows, on_progress: Progress) -> list[np.ndarray]:
        """Return loss in nats and correctness (0 or 1) of the unmasked labels, [counted, 2] per window.

        Args:
          model: master weights, as in `TrainState.model`.
          windows: of at most `model.sequence` + 1 tokens each.
          on_progress: called after each batch.
        """
        scores: list[Any] = [None] * len(windows)
        size = self.config.train.global_batch
        batches = (
            (indices, width, self._pad([windows[index] for index in indices], width, scored, size))
            for width, scored, indices in self._batches(windows)
        )
        for indices, rows in self.rows(model, batches):
            for index, numbers in zip(indices, rows, strict=False):  # the rest is padding
                end = min(len(windows[index].tokens) - 1, len(numbers))
                scores[index] = numbers[end - windows[index].counted : end]
            on_progress(len(indices))
        return scores

    def _batches(self, windows: Sequence[ContextWindow]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield the width, the number of scored positions and the window indices of each batch, the longest first: if
        memory is short, that shows immediately."""
        size, mesh = self.config.train.global_batch, self.config.mesh
        longest_first = sorted(range(len(windows)), key=lambda index: -len(windows[index].tokens))
        batches = [longest_first[first : first + size] for first in range(0, len(windows), size)]
        lengths = (len(windows[first].tokens) - 1 for first, *_ in batches)
        needed = [pad_width(self.config, length, 1, self.config.train.micro_batch, WIDTHS) for length in lengths]
        for width, group in groupby(zip(choose_widths(needed), batches, strict=True), itemgetter(0)):
            batches_of_width = [indices for _, indices in group]
            counted = max(windows[index].counted for index in chain(*batches_of_width))
            scored = -(-counted // POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE
            if 2 * scored > width or mesh.splits_tokens or self.config.context_attention:
                scored = width
            yield from ((width, scored, indices) for indices in batches_of_width)

    @staticmethod
    def _pad(windows: Sequence[ContextWindow], width: int, scored: int, size: int) -> Batch:
        """A batch [size, width] of windows, padded with zeros on the right."""
        tokens, labels = np.zeros((2, size, width), np.int32)
        last = np.zeros((size, scored), np.int32)
        for row, (ids, _) in enumerate(windows):
            tokens[row, : len(ids) - 1], labels[row, : len(ids) - 1] = ids[:-1], ids[1:]
            last[row] = max(len(ids) - 1 - scored, 0) + np.arange(scored)
        batch = {"tokens": tokens, "labels": labels}
        return batch if scored == width else batch | {"scored": last}


def choose_widths(needed: Sequence[int]) -> list[int]:
    """Choose widths for batches with these minimum widths, the widest first, to minimize positions and programs."""
    price = PROGRAM_COST * sum(needed) / max(len(needed), 1)
    cheapest = {0: (0.0, 0)}  # up to a batch: cost, first batch of the last program
    for end in range(1, len(needed) + 1):
        if end == len(needed) or needed[end] < needed[end - 1]:
            costs = ((cost + price + needed[begin] * (end - begin), begin) for begin, (cost, _) in cheapest.items())
            cheapest[end] = min(costs)
    widths, end = [], len(needed)
    while end:
        begin = cheapest[end][1]
        widths[:0], end = [needed[begin]] * (end - begin), begin
    return widths


class LossScorer(Scorer):
    """Computes the losses of lists of windows with the same number of unmasked labels, [windows, counted]."""

    def __call__(self, model: CausalModel, passes: Passes, on_progress: Progress = no_progress) -> list[np.ndarray]:
        """Score the windows of each of `passes`; arguments as in `Scorer`."""
        return [np.stack(self.score_labels(model, windows, on_progress))[..., 0] for windows in passes]


# --- Labelled examples ------------------------------------------------------------------------------------------------


class TaskScorer(RowScorer):
    """Scores examples with a BERT that has a task's head."""

    @staticmethod
    def head(weights: Any, x: Array, batch: dict[str, Array], context: ForwardContext) -> Array:
        """The scores of the task's head."""
        return mappings.mask_to_first_context_rank(weights.scores(x, batch, context))

    def __call__(self, model: Model, examples: Examples, on_progress: Progress = no_progress) -> np.ndarray:
        """Scores of all N examples, float32: [N, classes], [N, c] or [N, 2, s].

        Args:
          model: master weights.
          examples: in rows of the model's length.
          on_progress: called after each batch.
        """
        width, scores = self.config.model.sequence, []
        batches = iterate_batches(examples, self.config.train.global_batch)
        for count, rows in self.rows(model, ((count, width, batch) for count, batch in batches)):
            scores.append(rows[:count].astype(np.float32))
            on_progress(count)
        return np.concatenate(scores)


# --- On the devices ---------------------------------------------------------------------------------------------------


def score_rows(config: Config, plan, model: Model, batch: dict[str, Array], head: Callable) -> Array:
    """The head's output for each sample of the global batch, without dropout, inside `shard_map`.

    Args:
      config, plan, model, batch: as for `step.loss_and_gradients`.
      head: `RowScorer.head`.

    Returns:
      [B, …], the same on every device.
    """

    def place_rows(weights: Model, x: Array, micro_batch: dict[str, Array], context: ForwardContext) -> Array:
        numbers = head(weights, x, micro_batch, context)
        rows = micro_batch["samples"][:: config.model.sequences] // config.model.sequences  # [b], of the global batch
        zeros = jnp.zeros((config.train.global_batch, *numbers.shape[1:]), numbers.dtype)
        return mappings.vary(zeros, mappings.varying_axes(numbers)).at[rows].set(numbers)

    return sum_over_batch(config, plan, model, batch, head=place_rows)


def row_specs(batch: dict[str, Array | np.ndarray], width: int) -> dict[str, P]:
    """PartitionSpecs of the arrays of a batch with rows of this width."""
    return batch_specs({name: (rows.shape[1:], "") for name, rows in batch.items()}, width)


def to_devices(batch: dict[str, np.ndarray], mesh: Mesh, width: int) -> dict[str, Array]:
    """Shard the arrays of a batch; every process has all rows."""
    return {
        name: jax.make_array_from_callback(batch[name].shape, NamedSharding(mesh, spec), batch[name].__getitem__)
        for name, spec in row_specs(batch, width).items()
    }
