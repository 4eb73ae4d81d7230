"""The health of a run, judged from the metrics of its steps, without device, clock or files.

    healthy       the loss is finite and not far above its running mean
    settling      skipped while fp16's dynamic loss scale falls, or passed over on purpose: neutral
    skipped       nothing was updated, because a gradient, weight or moment was not finite
    spike         the loss is more than k standard deviations above the mean of the last healthy steps

The metrics of a step reach the host while the next one runs. So the limit for the loss of step s is always computed
from the losses up to step s - 2: it is known before s is started, and the same whether the host waited for s - 1
(before a save) or not. Everything is a function of the losses; a checkpoint contains `as_dict`, and a run that
continues from it judges as the run that wrote it did, in every process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from mjax.config import HealthConfig

HEALTHY, SETTLING, SKIPPED, SPIKE = "healthy", "settling", "skipped", "spike"

FAR = 10.0  # times the mean: a spike if too few losses are known for a deviation, or in an evaluation
GOOD_AFTER = 10  # healthy steps after a checkpoint (fewer if the next one comes earlier) that make it the last good one
LEAST_DEVIATION = 0.01  # of the mean: a nearly constant loss has no spikes of a few thousandths


class Health:
    """The health after step `step`.

    Attributes:
      step: the last that was observed.
      skipped_in_a_row: consecutive skipped steps up to this one.
    """

    def __init__(self, config: HealthConfig, step: int = 0, known: dict[str, Any] | None = None):
        """Begin after `step`, with the result of `as_dict` there; None: from scratch."""
        known = known or {"losses": [], "unhealthy": [], "skipped_in_a_row": 0, "limits": [None, None]}
        self.config, self.step = config, step
        self.skipped_in_a_row: int = known["skipped_in_a_row"]
        self._losses = deque(known["losses"], maxlen=config.window)  # of healthy steps
        self._unhealthy = deque(known["unhealthy"], maxlen=config.window)  # whether a step was; no settling ones
        self._limits = tuple(math.inf if limit is None else limit for limit in known["limits"])  # of the next two steps

    def as_dict(self) -> dict[str, Any]:
        """The whole state as plain values, exactly."""
        return {
            "losses": list(self._losses),
            "unhealthy": list(self._unhealthy),
            "skipped_in_a_row": self.skipped_in_a_row,
            "limits": [None if math.isinf(limit) else limit for limit in self._limits],
        }

    def limit(self, step: int) -> float:
        """The loss above which `step`, one of the next two, is a spike: a float32; infinity if there is no limit."""
        return self._limits[step - self.step - 1]

    def observe(self, step: int, loss: float | None, skipped: bool = False, settling: bool = False) -> str:
        """Record the next step and return its state.

        Args:
          step: the one after the last.
          loss: None if it was not finite.
          skipped: whether a value was not finite, as opposed to a loss above the limit.
          settling: whether this step is neutral.
        """
        assert step == self.step + 1
        limit = self.limit(step)
        if settling:
            found = SETTLING
        elif skipped or loss is None:
            found = SKIPPED
        else:
            found = SPIKE if loss > limit else HEALTHY
        if found == HEALTHY:
            self._losses.append(loss)
        if found != SETTLING:
            self._unhealthy.append(int(found != HEALTHY))
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if found == SKIPPED else 0
        self.step, self._limits = step, (self._limits[1], self._next_limit())
        return found

    def observe_validation(self, loss: float) -> bool:
        """Whether the loss of an evaluation after the last step indicates sound weights; if not, that step is
        unhealthy."""
        sound = math.isfinite(loss) and not (self._losses and loss > FAR * _mean(self._losses) > 0)
        if not sound and self._unhealthy:
            self._unhealthy[-1] = 1
        return sound

    @property
    def suspect(self) -> bool:
        """Whether the state may be bad: the last step was unhealthy, or most of the last few."""
        recent = list(self._unhealthy)[-GOOD_AFTER:]
        return bool(recent) and (bool(recent[-1]) or 2 * sum(recent) > len(recent))

    def deviations(self, loss: float) -> str:
        """How far a loss is above the running mean, in words."""
        mean = _mean(self._losses)
        return f"{(loss - mean) / self._deviation(mean):.1f} standard deviations above its running mean {mean:.4f}"

    def problem(self, ended: bool = False) -> str | None:
        """Why the run must not continue, if so.

        Args:
          ended: whether there are no more steps; for a short run the share is then that of the whole run.
        """
        if self.skipped_in_a_row >= self.config.skipped_in_a_row:
            return f"{self.skipped_in_a_row} steps in a row were skipped"
        bad, steps = sum(self._unhealthy), len(self._unhealthy)
        if (steps == self.config.window or ended) and 2 * bad > steps:
            return f"{bad} of the last {steps} steps were skipped or had a loss far above its running mean"
        return None

    def _next_limit(self) -> float:
        if self.config.spike_deviations == 0 or not self._losses:
            return math.inf
        mean = _mean(self._losses)
        if len(self._losses) < max(2, self.config.window // 4):
            limit = FAR * mean if mean > 0 else math.inf
        else:
            limit = mean + self.config.spike_deviations * self._deviation(mean)
        return float(np.float32(limit)) if limit < 1e38 else math.inf  # as the compiled step compares it

    def _deviation(self, mean: float) -> float:
        variance = _mean((loss - mean) ** 2 for loss in self._losses)
        return max(math.sqrt(variance), LEAST_DEVIATION * abs(mean)) or math.inf


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)
