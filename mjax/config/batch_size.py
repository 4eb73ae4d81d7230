"""Global batch sizes as a function of the step.

Early in training a small batch is enough (its gradient noise is small, arXiv 1812.06162), so large runs begin with one
and let it grow, as GPT-3 did (arXiv 2005.14165, appendix B):

    train.batch_rampup     (start, increment, samples), Megatron's --rampup-batch-size: from `start` to
                           train.global_batch by `increment` at a time, in equal portions of `samples` samples

The size of a step follows from the samples before it, and so from the step alone: it is the same after a restart.
Sample order does not depend on the sizes; only the split into steps does:

    samples   0 1 2 3 4 5 6 7 8 9 …          batch_rampup 2 2 8, global batch 6: 4 samples for each of two increments
    steps     └0┘ └1┘ └──2──┘ └────3────┘ …

A run whose batch size was changed stores its earlier sizes (`train.batch_history`) and continues from their samples.

The train step is compiled once per size, so few large increments cost less than many small ones.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from mjax.config.run import Config
from mjax.errors import UsageError

TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizes:
    """The batch size of every step, and the samples before it.

    Attributes:
      pieces: (first step, samples before it, size) for each range of steps of one size. The last has no end.
      begin: first step with the current settings; `train.batch_history` has the steps before it.
    """

    pieces: tuple[tuple[int, int, int], ...]
    begin: int = 0

    @classmethod
    def from_config(cls, config: Config) -> BatchSizes:
        """The sizes of the run that `config` describes.

        Raises:
          UsageError: its ramp-up is malformed.
        """
        train = config.train
        changes = [(0, train.global_batch)]
        if train.batch_rampup is not None:
            changes = _rampup(*train.batch_rampup, train.global_batch)
        return cls._from_changes(changes, train.batch_history)

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """The same size at every step."""
        return cls(((0, 0, size),))

    @classmethod
    def _from_changes(cls, changes: list[tuple[int, int]], history: Iterable[tuple[int, int]]) -> BatchSizes:
        """The sizes of `history`, then of `changes`: pairs (samples, size) with ascending samples from 0; a step that
        begins at or after these samples has this size."""
        starts = [start for start, _ in changes]
        pieces: list[tuple[int, int, int]] = []
        step = sample = 0
        for steps, size in history:
            if not pieces or pieces[-1][2] != size:
                pieces.append((step, sample, size))
            step, sample = step + steps, sample + steps * size
        begin = step
        while True:
            current = bisect_right(starts, sample)  # a step may be larger than the range between two changes
            size = changes[current - 1][1]
            if not pieces or pieces[-1][2] != size:
                pieces.append((step, sample, size))
            if current == len(changes):
                return cls(tuple(pieces), begin)
            steps = -(-(starts[current] - sample) // size)
            step, sample = step + steps, sample + steps * size

    def size(self, step: int) -> int:
        """Samples in the batch of `step` (from 0)."""
        return self._piece(step)[2]

    def samples_before(self, step: int) -> int:
        """Samples in all steps before `step` (from 0): the number of the first sample of its batch."""
        first_step, first_sample, size = self._piece(step)
        return first_sample + (step - first_step) * size

    def steps_for(self, samples: int) -> int:
        """The fewest steps with `samples` samples or more."""
        first_step, first_sample, size = next(piece for piece in reversed(self.pieces) if piece[1] < max(samples, 1))
        return first_step + -(-(samples - first_sample) // size)

    def stretches(self, steps: int) -> list[tuple[int, int]]:
        """(steps, size) of each range of the first `steps` steps."""
        ends = [first for first, _, _ in self.pieces[1:]] + [steps]
        counts = ((min(end, steps) - first, size) for (first, _, size), end in zip(self.pieces, ends, strict=True))
        return [(count, size) for count, size in counts if count > 0]

    def sizes(self) -> list[int]:
        """The distinct sizes from `begin` on, in order of appearance."""
        return list(dict.fromkeys(size for _, _, size in self.ahead()))

    def ahead(self) -> list[tuple[int, int, int]]:
        """The pieces with a step from `begin` on."""
        first = max(bisect_right(self.pieces, self.begin, key=lambda piece: piece[0]) - 1, 0)
        return list(self.pieces[first:])

    def _piece(self, step: int) -> tuple[int, int, int]:
        return self.pieces[max(bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1, 0)]


def training_samples(config: Config) -> int:
    """Number of samples for which the training order is drawn."""
    return config.data.train_samples or BatchSizes.from_config(config).samples_before(config.train.steps)


def with_batch_size(config: Config, size: int) -> Config:
    """`config` for the steps of one size: a constant global batch of `size`."""
    return replace(config, train=replace(config.train, global_batch=size, batch_rampup=None, batch_history=()))


def _rampup(start: int, increment: int, samples: int, end: int) -> list[tuple[int, int]]:
    """The changes of Megatron's ramp-up (core/num_microbatches_calculator.py), to the sample.

    There the size after n samples is start + int(n / (samples / increments)) × increment up to `samples` of them, and
    `end` after. The quotient is rounded as a float, so that a change can come one sample after the exact quotient.

    Raises:
      UsageError: the increments do not end at `end`.
    """
    if min(start, increment, samples) < 1 or start >= end or (end - start) % increment:
        flag, fix = f"--train.batch-rampup {start} {increment} {samples}", "an INCREMENT that divides the difference"
        short = f"{flag} does not reach --train.global-batch {end} in whole increments"
        raise UsageError(f"{short}; use a START below it and {fix}")
    increments = (end - start) // increment
    portion = samples / increments
    changes = [(0, start)]
    for k in range(1, increments + 1):
        about = math.ceil(k * portion)
        first = next(n for n in (about - 1, about, about + 1) if int(n / portion) >= k)
        changes.append((min(first, samples + 1), start + k * increment))
    return changes


def parse_tokens(tokens: str) -> int | None:
    """'1.5B' → 1,500,000,000; None if it is not a number of tokens."""
    match = TOKENS.fullmatch(tokens)
    return match and int(Fraction(match[1]) * UNITS[match[2]])


def format_tokens(tokens: int) -> str:
    """1,310,720 → '1.31M'."""
    unit = max((name for name, size in UNITS.items() if 0.9995 * size <= max(tokens, 1)), key=UNITS.__getitem__)
    count = tokens / UNITS[unit]
    return f"{count:.3g}{unit}" if count < 999.5 else f"{count:,.0f}{unit}"


def check_pipeline(stages: int, micro_batches: int, virtual_stages: int) -> None:
    """Check that a pipeline schedule exists for these counts, without building it.

    Raises:
      UsageError: virtual_stages > 1 and P does not divide M.
    """
    if virtual_stages > 1 and micro_batches % stages:
        below, above = micro_batches // stages * stages, -(-micro_batches // stages) * stages
        counts = f"{below} or {above}" if below else str(above)
        virtual = f"--mesh.virtual-stages {virtual_stages} needs micro-batches in groups of --mesh.pipe {stages}"
        counts = f"--train.global-batch / (--mesh.data × --train.micro-batch) {counts}"
        raise UsageError(f"{virtual}, and a step has {micro_batches}; make {counts}, or use --mesh.virtual-stages 1")
