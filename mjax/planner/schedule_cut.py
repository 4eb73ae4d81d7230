"""A schedule's time without its middle: warm-up, a little of the steady state, and drain, where all is too long to see.

In the steady state no stage is idle and every tick is like the others, so hundreds of them say no more than a few. What
is left out is a gap in the picture, and says how long it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mjax.parallel.schedules import Schedule

READABLE = 96
"""Forwards in a picture that still shows them one by one, with their numbers."""
LEAST = 3
"""Ticks of a steady state that stay at each of its ends."""
GAP = 2.5
"""Width of a gap, in forwards."""


@dataclass(frozen=True)
class Timeline:
    """The places at which the ticks of a schedule are drawn. Times are in the unit of the passes' durations.

    Attributes:
      start: [ticks], where each tick begins.
      begin: [ticks], where it is drawn.
      length: [ticks], how long it takes.
      shown: bool [ticks], True where it is drawn.
      span: of the picture.
      gaps: (begin, end, ticks left out) of each gap in the picture.
      phases: (name, begin, end) in the picture; none where nothing is left out.
    """

    start: np.ndarray
    begin: np.ndarray
    length: np.ndarray
    shown: np.ndarray
    span: float
    gaps: list[tuple[float, float, int]]
    phases: list[tuple[str, float, float]]


def timeline(schedule: Schedule, length: np.ndarray, forward: float) -> Timeline:
    """The ticks to draw.

    Args:
      schedule: what is drawn.
      length: [ticks], the time of each.
      forward: the time of F.
    """
    runs = _steady(schedule)
    shown = np.ones(len(length), bool)
    if length.sum() > READABLE * forward and runs:
        often = max(end - first for first, end in runs)
        for keep in range(often // 2, LEAST - 1, -1):  # as much as can be read
            shown[:] = True
            for first, end in runs:
                shown[first + keep : max(end - keep, first + keep)] = False
            if length[shown].sum() <= READABLE * forward:
                break
    left_out = [(first, end) for first, end in _stretches(~shown)]
    width = np.where(shown, length, 0.0)
    for first, _ in left_out:
        width[first] = GAP * forward
    begin = width.cumsum() - width
    gaps = [(begin[first], begin[first] + GAP * forward, end - first) for first, end in left_out]
    phases = []
    if gaps:
        edges = [0, *(edge for run in runs for edge in run), len(length)]
        names = ["warm-up", *["steady state", "turn"] * (len(runs) - 1), "steady state", "drain"]
        ends = [*begin, width.sum()]
        pairs = zip(names, edges, edges[1:], strict=False)
        phases = [(name, ends[first], ends[end]) for name, first, end in pairs if end > first]
    return Timeline(length.cumsum() - length, begin, length, shown, width.sum(), gaps, phases)


def _steady(schedule: Schedule) -> list[tuple[int, int]]:
    """The stretches [first, end) of ticks in which no stage is idle."""
    on = np.stack([slots.on for slots in (schedule.forward, schedule.backward, schedule.weight) if slots is not None])
    # One operation on every stage; or, where a tick has several, those that any stage runs on all.
    alike = (on.all(axis=-1) == on.any(axis=-1)).all(axis=0)
    busy = on.any(axis=0).all(axis=-1) if schedule.exclusive else alike
    return [run for run in _stretches(busy) if run[1] - run[0] > 2 * LEAST]


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """The stretches [first, end) in which `mask` holds."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [(int(first), int(end)) for first, end in changes.reshape(-1, 2)]
