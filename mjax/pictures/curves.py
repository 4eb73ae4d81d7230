"""Curves of a run of any length: values over steps in a bounded number of bins, from which pictures are drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_POINTS = 4096  # of a curve; a picture has about a thousand pixels
WINDOW = 51  # steps that are averaged, at most


class Bin(NamedTuple):
    """Values of neighboring steps: their number, sums of the steps and of the values, and the extreme values."""

    count: int
    steps: float
    values: float
    low: float
    high: float

    @property
    def step(self) -> float:
        """Mean of the steps."""
        return self.steps / self.count

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.values / self.count


class Curve:
    """Values over steps, added in ascending order, in at most `MAX_POINTS` bins of equal length.

    Each value has its bin until there are more. Then the length of the bins, a power of two, is doubled.

    Attributes:
      width: steps of a bin.
      bins: by step // width, without empty ones.
      recent: the last `WINDOW` values.
    """

    def __init__(self, values: Iterable[tuple[int, float]] = ()):
        self.width, self.recent = 1, deque(maxlen=WINDOW)
        self.bins: dict[int, Bin] = {}
        for step, value in values:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, or of a number of tokens, from 0 on."""
        self.recent.append(value)
        self._include(step // self.width, Bin(1, step, value, value, value))
        while len(self.bins) > MAX_POINTS:
            self._merge(2)

    def merged(self, width: int = 1) -> Curve:
        """A copy with bins of `width` steps, a power of two, unless they are that long already."""
        copied = Curve()
        copied.width, copied.bins, copied.recent = self.width, {**self.bins}, self.recent.copy()
        if width > self.width:
            copied._merge(width // self.width)
        return copied

    def _merge(self, number: int) -> None:
        bins, self.bins, self.width = self.bins, {}, self.width * number
        for key, part in bins.items():
            self._include(key // number, part)

    def _include(self, key: int, part: Bin) -> None:
        if key in self.bins:
            count, steps, values, low, high = self.bins[key]
            part = Bin(
                count + part.count, steps + part.steps, values + part.values, min(low, part.low), max(high, part.high)
            )
        self.bins[key] = part

    @property
    def steps(self) -> list[float]:
        """Mean step of each bin."""
        return [part.step for part in self.bins.values()]

    @property
    def means(self) -> list[float]:
        """Mean value of each bin."""
        return [part.mean for part in self.bins.values()]

    @property
    def smoothed(self) -> Sequence[float]:
        """The means, averaged over neighbors as far as bins are shorter than `WINDOW`."""
        return smoothed(self.means, min(WINDOW // self.width, len(self.bins) // 30 + 1))

    @property
    def last(self) -> float:
        """The end of the smoothed curve; of a long one, of its last steps instead of its last bin."""
        return self.smoothed[-1] if self.width == 1 else smoothed([*self.recent], WINDOW)[-1]


def smoothed(values: Sequence[float], window: int | None = None) -> Sequence[float]:
    """Average over a window of about a thirtieth of the run, 51 steps at most, with each step in its middle.

    An average over earlier steps only would lag behind a falling loss and lie above it. Where the window exceeds an end
    of the run, the line that fits the steps there best is used (Savitzky and Golay, order 1).

    Args:
      values: of consecutive steps.
      window: another length of the window.
    """
    half = ((min(WINDOW, len(values) // 30 + 1) if window is None else window) - 1) // 2
    if half < 1:
        return values
    import numpy as np

    width = 2 * half + 1  # SciPy's savgol_filter does the same, and takes a second to import
    inner = np.convolve(values, np.full(width, 1 / width), "valid")
    ends = values[:width], values[-width:]
    first, last = (np.polyval(np.polyfit(range(width), end, 1), range(width)) for end in ends)
    return [*first[:half].tolist(), *inner.tolist(), *last[-half:].tolist()]
