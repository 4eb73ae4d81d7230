"""The predicted time of a step, by its parts (`time.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mjax.batch_size import BatchSizes
from mjax.config import Config

# Parts of a step, in display order.
PARTS = (
    "matmul", "attention", "elementwise", "head", "model", "context", "expert", "pipe", "bubble", "data", "host",
    "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part.

    Attributes:
      parts: seconds by name; they add up to `total`.
        matmul: matrix products of the layers, including recomputed ones.
        attention: scores, softmax and weighted sums.
        elementwise: memory-bound kernels of the layers.
        head: embedding, logits and loss, without their collectives.
        model: exposed collectives over `model`; with Muon also those of its matrices.
        context: attention's collectives over `context`.
        expert: collectives over `expert`, to the experts of a mixture and back.
        pipe: messages between stages.
        bubble: idle time while the pipeline fills and drains.
        data: sums and gathers over `data` and `context`, and of the embedding over `pipe`; with Muon those of its
          matrices.
        host: exposed copies of the layers' inputs to host memory and back.
        optimizer: accumulation of gradients, norm, update of the weights.
      model_tflops: TFLOP/s of one GPU, counted as in `model_flops` (nothing for recomputation, full attention).
      mfu: those over the peak.
      error: error bar of `total`, relative to the time that is measured; None if there is none for this config.
      mean: seconds per step, mean over the run: less than `total` with a batch ramp-up.
      caveats: what is outside the range of the calibration.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float
    error: float | None
    mean: float
    caveats: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def between(self, predicted: float) -> tuple[float, float] | None:
        """The range of a measured time by the error bar, for a prediction such as `total`; None if it has no end."""
        if self.error is None or self.error >= 1:
            return None
        return predicted / (1 + self.error), predicted / (1 - self.error)


def mean_over_run(config: Config, seconds_of: Callable[[int], dict[str, float]], total: float) -> float:
    """Seconds per step, mean over the run.

    Args:
      config: of the run.
      seconds_of: the parts of a step of so many micro-batches.
      total: of a step with the global batch.
    """
    train, steps = config.train, config.train.steps
    if (train.batch_rampup is None and train.batch_schedule is None) or steps < 1:
        return total
    seconds, sequences = 0.0, config.mesh.data * train.micro_batch
    for count, size in BatchSizes.of(config).stretches(steps):
        each = total if size == train.global_batch else sum(seconds_of(size // sequences).values())
        seconds += count * each
    return seconds / steps
