"""A config at another global batch, with the samples that it had."""

from __future__ import annotations

from dataclasses import replace

from mjax.batch_size import BatchSizes
from mjax.config import Config, DataConfig, MeshConfig
from mjax.errors import UsageError
from mjax.validation import validate


def with_batch(config: Config, batch: int) -> Config:
    """`config` with a global batch of `batch` and, to a step, the samples it had: in all, in warm-up and in decay.

    The learning rate stays; what it should be at another batch is for the user to say.

    Raises:
      UsageError: batch is below 1 or above the samples of the run, or the config's ramp-up or schedule does not end in
        it.
    """
    if batch < 1:
        raise UsageError(f"--target-batch is {batch}; it must be at least 1")
    train, optimizer = replace(config.train, global_batch=batch), config.optimizer
    changed = replace(config, train=train)
    validate(replace(changed, mesh=MeshConfig(), train=replace(train, micro_batch=1), data=DataConfig(mock=True)))
    before, after = BatchSizes.of(config), BatchSizes.of(changed)
    samples = before.samples_before(config.train.steps)
    if _steps_of(after, samples) < 1:
        raise UsageError(
            f"--target-batch {batch} is more than the {samples:,} samples of the run; use {samples} or less"
        )

    def rescaled(steps: int, least: int = 1) -> int:
        """The most steps that take no more samples than `steps` did."""
        return max(least, _steps_of(after, before.samples_before(steps)))

    decay, end = optimizer.decay_steps, optimizer.wsd_decay_steps
    return replace(
        changed,
        train=replace(train, steps=rescaled(train.steps)),
        optimizer=replace(
            optimizer,
            warmup_steps=rescaled(optimizer.warmup_steps, least=0),
            decay_steps=None if decay is None else rescaled(decay),
            # A length, counted from the end, where the batch has its last size.
            wsd_decay_steps=None if end is None else max(1, end * config.train.global_batch // batch),
        ),
    )


def _steps_of(sizes: BatchSizes, samples: int) -> int:
    """The most steps that take no more than `samples` samples."""
    first, done, size = next(piece for piece in reversed(sizes.pieces) if piece[1] <= samples)
    return first + (samples - done) // size
