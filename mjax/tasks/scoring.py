"""Batches through a trained model: one program on the mesh, under any parallelism, for every task.

It is the evaluation step with the task's own head (`RowScorer.head`), which gives some numbers for each row: for a
window of text its loss and the number of correct labels, for a labelled example its logits. Each micro-batch writes its
rows into an array of zeros at the indices of its samples, and one sum over all axes combines the rows of a batch: under
any parallelism, including a pipeline, every device ends up with all of them.

A batch of windows is padded on the right to one width, with a mask of the labels that count. Causal attention never
sees the padding after a token, and the mask excludes the padding's own labels, and the rows that fill the last batch.
Short windows are padded to the next power of two only, so there is one compiled program per width in use; each reads
the first positions of the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.config.kernels import position_unit
from mjax.models.causal import CausalModel
from mjax.models.context import Context
from mjax.models.heads import TaskBERT
from mjax.models.protocol import Model
from mjax.parallel import mappings
from mjax.parallel.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy
from mjax.parallel.mesh import batch_specs
from mjax.step.layout import lay_out
from mjax.step.step import sum_over_batch
from mjax.tasks.interface import Score, Window
from mjax.tasks.labelled_task import Batch, Examples, padded_batches

T = TypeVar("T")
NARROWEST = 64  # positions; narrower windows would save less than another compilation costs


class RowScorer(ABC):
    """The compiled program that computes a head's numbers for each row, with any weights of one config.

    Attributes:
      abstract_model: ShapeDtypeStructs with shardings: the target for restoring weights.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before the first batch.

        Args:
          config: with `model.attention` resolved to a kernel (`inference.inference_config`).
          mesh: of the shape `config.mesh`.
        """
        self.config = config
        layout = lay_out(config, mesh)
        self.abstract_model = layout.abstract_model
        self._mesh = mesh

        def program(width: int, model: Model, batch: dict[str, Array]) -> Array:
            narrow = replace(config, model=replace(config.model, sequence=width))
            on_device = partial(rows_of_batch, narrow, layout.plan, head=self.head)
            specs = layout.specs, specs_of(batch, width)
            return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)(model, batch)

        self._program = jax.jit(program, static_argnums=0)

    @staticmethod
    @abstractmethod
    def head(weights: Model, x: Array, batch: dict[str, Array], context: Context) -> Array:
        """The numbers of each row of a micro-batch, inside `shard_map`: [b, …], replicated over `model`.

        Args:
          weights: of the model, gathered.
          x: the stream after the last layer [t, h].
          batch: the arrays of the micro-batch.
          context: of its tokens.
        """

    @abstractmethod
    def __call__(self, model: Model, rows: Any, on_progress: Callable[[int], None]) -> Any:
        """Scores of all `rows` of a set, from which a task computes its metrics."""

    def rows(self, model: Model, batches: Iterable[tuple[T, int, Batch]]) -> Iterator[tuple[T, np.ndarray]]:
        """The numbers of every row of `batches`, [B, …] each, the same on every process.

        Args:
          model: master weights, as in `TrainState.model`.
          batches: a value to return with the numbers, the width of the rows, and the arrays of the global batch.
        """
        dispatched = (
            (about, self._program(width, model, to_devices(batch, self._mesh, width)))
            for about, width, batch in batches
        )
        for about, rows in one_behind(dispatched):
            yield about, jax.device_get(rows)


# --- Text -------------------------------------------------------------------------------------------------------------


class TextScorer(RowScorer):
    """Scores windows of text with a causal model."""

    @abstractmethod
    def result(self, window: Window, numbers: np.ndarray) -> Any:
        """The score of a window, from the head's numbers for its row."""

    @abstractmethod
    def together(self, scores: Sequence[Any]) -> Any:
        """The score of a list of windows, from those of each."""

    def __call__(
        self,
        model: CausalModel,
        passes: Sequence[Sequence[Window]],
        on_progress: Callable[[int], None] = lambda windows: None,
    ) -> list[Any]:
        """Score the windows of each of a task's `passes`; arguments as in `score_each`.

        Windows of all passes share batches, so many short passes fill them.
        """
        scores = iter(self.score_each(model, [window for windows in passes for window in windows], on_progress))
        return [self.together([next(scores) for _ in windows]) for windows in passes]

    def score_each(
        self, model: CausalModel, windows: Sequence[Window], on_progress: Callable[[int], None] = lambda windows: None
    ) -> list[Any]:
        """Score each of `windows`.

        Args:
          model: master weights, as in `TrainState.model`.
          windows: of at most `model.sequence` + 1 tokens each.
          on_progress: called with the number of windows that have been scored since the last call.
        """
        scores: list[Any] = [None] * len(windows)
        size = self.config.train.global_batch
        batches = (
            (chosen, width, _padded([windows[index] for index in chosen], width, size))
            for width, chosen in self._batches(windows)
        )
        for chosen, rows in self.rows(model, batches):
            for index, numbers in zip(chosen, rows, strict=False):  # the rest is padding
                scores[index] = self.result(windows[index], numbers)
            on_progress(len(chosen))
        return scores

    def _batches(self, windows: Sequence[Window]) -> Iterator[tuple[int, list[int]]]:
        """Indices of windows of one width at a time, the widest first: if memory is short, that shows at once."""
        by_width: dict[int, list[int]] = {}
        for index, window in enumerate(windows):
            by_width.setdefault(self._width(len(window.tokens) - 1), []).append(index)
        size = self.config.train.global_batch
        for width in sorted(by_width, reverse=True):
            group = by_width[width]
            for first in range(0, len(group), size):
                yield width, group[first : first + size]

    def _width(self, needed: int) -> int:
        """`needed` rounded up to a power of two from 64 on, limited by the number of positions; all of them where the
        mesh or the kernel of attention cannot divide it."""
        width = min(1 << (max(needed, NARROWEST) - 1).bit_length(), self.config.model.sequence)
        mesh, tokens = self.config.mesh, width * self.config.train.micro_batch
        splits = not mesh.sequence_parallel or tokens // mesh.context % mesh.model == 0
        return width if splits and width % position_unit(self.config) == 0 else self.config.model.sequence


class Scorer(TextScorer):
    """Gives every window a `Score`: the sum of its losses and the number of correct labels."""

    @staticmethod
    def head(weights: CausalModel, x: Array, batch: dict[str, Array], context: Context) -> Array:
        """Loss and number of correct labels of each row, [b, 2].

        The counts are exact: a window has far fewer labels than 2^24, up to which float32 represents every integer.
        """
        tokens, labels, counts = context.tokens, batch["labels"], batch["loss_mask"]  # [b, s]
        logits = weights.logits(x, tokens)  # [b s, v / p]
        losses = tokens.by_sequence(vocab_parallel_cross_entropy(logits, labels.reshape(-1)))
        correct = (tokens.by_sequence(vocab_parallel_argmax(logits)) == labels) & counts
        return jnp.stack([losses.sum(-1, where=counts), correct.sum(-1, dtype=losses.dtype)], -1)  # [b, 2]

    def result(self, window: Window, numbers: np.ndarray) -> Score:
        loss, correct = numbers.tolist()
        return Score(loss, window.counted, int(correct), 1, int(correct == window.counted))

    def together(self, scores: Sequence[Score]) -> Score:
        return sum(scores, Score())

    def score(
        self, model: CausalModel, windows: Sequence[Window], on_progress: Callable[[int], None] = lambda windows: None
    ) -> Score:
        """Score all `windows` together; arguments as in `score_each`."""
        return self.together(self.score_each(model, windows, on_progress))


class LossScorer(TextScorer):
    """Gives every window the losses of its labels that count, nats, float32 [counted], in order."""

    @staticmethod
    def head(weights: CausalModel, x: Array, batch: dict[str, Array], context: Context) -> Array:
        """The loss at every position of each row, [b, s]; a rank of `context` fills in those that it has."""
        tokens = context.tokens
        losses = vocab_parallel_cross_entropy(weights.logits(x, tokens), batch["labels"].reshape(-1))
        row = mappings.vary(jnp.zeros((tokens.sequences, tokens.whole), losses.dtype), mappings.varying_axes(losses))
        return row.at[:, tokens.places()].set(tokens.by_sequence(losses))

    def result(self, window: Window, numbers: np.ndarray) -> np.ndarray:
        last = len(window.tokens) - 1
        return numbers[last - window.counted : last].astype(np.float32)

    def together(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """[windows, counted], of windows with equally many labels that count."""
        return np.stack(scores)


def _padded(windows: Sequence[Window], width: int, size: int) -> Batch:
    """A batch [size, width] of windows; padding rows have no label that counts."""
    tokens, labels = np.zeros((2, size, width), np.int32)
    mask = np.zeros((size, width), bool)
    for row, (ids, counted) in enumerate(windows):
        count = len(ids) - 1
        tokens[row, :count], labels[row, :count] = ids[:-1], ids[1:]
        mask[row, count - counted : count] = True
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


# --- Labelled examples ------------------------------------------------------------------------------------------------


class TaskScorer(RowScorer):
    """Scores examples with a BERT that has a task's head."""

    @staticmethod
    def head(weights: TaskBERT, x: Array, batch: dict[str, Array], context: Context) -> Array:
        """The scores of the task's head."""
        return mappings.once(weights.scores(x, batch, context))

    def __call__(
        self, model: TaskBERT, examples: Examples, on_progress: Callable[[int], None] = lambda examples: None
    ) -> np.ndarray:
        """Scores of all N examples, float32: [N, classes], [N, c] or [N, 2, s].

        Args:
          model: master weights.
          examples: in rows of the model's length.
          on_progress: called with the number of examples that have been scored since the last call.
        """
        width, found = self.config.model.sequence, []
        batches = padded_batches(examples, self.config.train.global_batch)
        for count, scores in self.rows(model, ((count, width, batch) for count, batch in batches)):
            found.append(scores[:count].astype(np.float32))
            on_progress(count)
        return np.concatenate(found)


# --- On the devices ---------------------------------------------------------------------------------------------------


def rows_of_batch(config: Config, plan, model: Model, batch: dict[str, Array], head: Callable) -> Array:
    """The head's output for each sample of the global batch, without dropout, inside `shard_map`.

    Args:
      config, plan, model, batch: as for `step.loss_and_gradients`.
      head: (weights, stream after the last layer [t, h], micro-batch, context) → [b, …], replicated over `model`.

    Returns:
      [B, …], the same on every device.
    """
    sequences = config.model.sequences

    def placed(weights: Model, x: Array, micro_batch: dict[str, Array], context: Context) -> Array:
        found = head(weights, x, micro_batch, context)
        own = micro_batch["samples"][::sequences] // sequences  # [b], rows of the global batch
        zeros = jnp.zeros((config.train.global_batch, *found.shape[1:]), found.dtype)
        return mappings.vary(zeros, mappings.varying_axes(found)).at[own].set(found)

    return sum_over_batch(config, plan, model, batch, head=placed)


def specs_of(batch: dict[str, Array | np.ndarray], width: int) -> dict[str, P]:
    """PartitionSpecs of the arrays of a batch with rows of this width."""
    return batch_specs({name: (rows.shape[1:], "") for name, rows in batch.items()}, width)


def to_devices(batch: dict[str, np.ndarray], mesh: Mesh, width: int) -> dict[str, Array]:
    """The arrays of a batch that every process has as a whole; each gives its own devices their parts."""
    with jax.transfer_guard("allow"):  # the intended transfer
        return {
            name: jax.make_array_from_callback(batch[name].shape, NamedSharding(mesh, spec), batch[name].__getitem__)
            for name, spec in specs_of(batch, width).items()
        }


def one_behind(dispatched: Iterable[T]) -> Iterator[T]:
    """The same items, each after the next has been dispatched: it is fetched while the devices work on that one."""
    waiting: list[T] = []
    for item in dispatched:
        yield from waiting
        waiting = [item]
    yield from waiting
