"""A pipeline schedule as a picture: one row a stage, time to the right, every box a pass of one micro-batch.

The form is that of figures 3 and 4 of arXiv 2104.04473: two tones for forward and backward, darker for a stage's first
chunk and lighter for its later ones, the micro-batch's number in the box, grey where a stage is idle. Time is that of
the lock-step table: a tick lasts as long on every stage, its forwards begin together and so do its backwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mjax.parallel.schedules import Schedule, Slots
from mjax.pictures.figures import INK, PALETTE, SOFT_INK, add_heading, save

COLORS = {"forward": PALETTE[0], "backward": PALETTE[2]}
IDLE = "#DCDCDC"


def draw_schedule(schedule: Schedule, file: Path | BinaryIO, forward: float = 1.0, backward: float = 2.0) -> None:
    """Draw `schedule` into `file`, in the format of its suffix (png, pdf, svg, …).

    Args:
      schedule: what to draw.
      file: a path, or an open file, which gets a PNG.
      forward, backward: time of F and B of one micro-batch through one chunk, in any one unit.
    """
    kinds = zip(COLORS, (schedule.forward, schedule.backward), (forward, backward), strict=True)
    passes = [each for each in kinds if each[1] is not None]
    lengths = np.stack([slots.on.any(axis=1) * time for _, slots, time in passes])  # [kinds, ticks]
    ticks, offsets = lengths.sum(axis=0), lengths.cumsum(axis=0) - lengths
    begin, span = ticks.cumsum() - ticks, ticks.sum()

    stages = schedule.stages
    width, height = min(13 * forward / span, 0.35), np.clip(9 / stages, 0.14, 0.48)  # of a box, in inches
    size = max(8.5, 1.8 + width * span / forward), 2.2 + height * stages
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    rows = figure.add_subplot(xlim=(0, span), ylim=(stages, 0), facecolor=IDLE)
    inch = (size[0] - 1.8) / span
    for (kind, slots, time), offset in zip(passes, offsets, strict=True):
        _draw_boxes(rows, slots, _shades(kind, schedule.chunks), begin + offset, time, (inch * time, height))

    every = -(-stages // 32)
    rows.set_yticks(np.arange(0, stages, every) + 0.5, [f"stage {stage}" for stage in range(0, stages, every)])
    rows.tick_params(length=0, labelcolor=INK)
    rows.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    unit = "forward passes" if schedule.chunks == 1 else "forward passes of one chunk"
    rows.set_xlabel(f"time, in {unit}", color=SOFT_INK, loc="left")
    rows.spines[:].set_visible(False)
    chunks = f"{schedule.chunks} chunk{'s' * (schedule.chunks > 1)}"
    title = (
        f"{display_name(schedule)}:  P = {stages} stages,  M = {schedule.micro_batches} micro-batches,  V = {chunks}"
    )
    bubble = describe_bubble(schedule, forward, backward)
    add_heading(rows, title, f"bubble {bubble};  {schedule.ticks} ticks;  in flight: {describe_in_flight(schedule)}")
    handles = [Patch(color=COLORS[kind], label=kind) for kind, *_ in passes]
    figure.legend(handles=[*handles, Patch(color=IDLE, label="idle")], loc="outside lower left", ncols=4, frameon=False)
    save(figure, file)


def describe_bubble(schedule: Schedule, forward: float, backward: float) -> str:
    """The bubble as computed from the table, with the formula that it equals, if there is one."""
    bubble = schedule.bubble(forward, backward)
    stages, micro_batches, chunks = schedule.stages, schedule.micro_batches, schedule.chunks
    formula = " = (P − 1) / M" if chunks == 1 else " = (P − 1) / (V M)"
    exact = np.isclose(bubble, (stages - 1) / (chunks * micro_batches))
    return f"{bubble:.1%} of the ideal time{formula if exact else ''}"


def describe_in_flight(schedule: Schedule) -> str:
    """Micro-batches that the first and the last stage hold at most."""
    last = schedule.stages - 1
    return f"{schedule.in_flight(0)} on stage 0, {schedule.in_flight(last)} on stage {last}"


def display_name(schedule: Schedule) -> str:
    """The schedule's name in its paper."""
    name = {"gpipe": "GPipe", "1f1b": "1F1B", "forward": "Forward only"}[schedule.name]
    return name + ", interleaved" * (schedule.chunks > 1)


def _draw_boxes(
    rows: Axes, slots: Slots, shades: np.ndarray, begin: np.ndarray, time: float, box: tuple[float, float]
) -> None:
    """The boxes of one kind, `time` long, with their numbers where those fit.

    Args:
      shades: color of each chunk [V, 3].
      begin: where the boxes of each tick begin [ticks].
      box: width and height of a box, in inches.
    """
    ticks, stages = np.nonzero(slots.on)
    left, chunks, numbers = begin[ticks], slots.chunk[ticks, stages], slots.micro_batch[ticks, stages]
    corners = [[left, stages], [left + time, stages], [left + time, stages + 1], [left, stages + 1]]
    # A thin box has no border, and no smoothed edge through which the grey would shine.
    border = {"edgecolors": "white", "linewidths": 0.8} if min(box) > 0.08 else {"lw": 0, "antialiaseds": False}
    rows.add_collection(PolyCollection(np.transpose(corners, (2, 0, 1)), facecolors=shades[chunks], **border))
    size = min(10.0, 40 * box[1], 98 * box[0] / len(str(numbers.max())))  # points
    if size >= 6:
        inks = ["white" if luminance < 0.2 else INK for luminance in shades**2.2 @ (0.2126, 0.7152, 0.0722)]
        for x, y, m, chunk in zip(left, stages, numbers, chunks, strict=True):
            rows.text(x + time / 2, y + 0.52, m, size=size, color=inks[chunk], ha="center", va="center")


def _shades(kind: str, chunks: int) -> np.ndarray:
    """A color for each chunk [V, 3]: the full one for the first, lighter for the later ones."""
    white = 0.62 * np.arange(chunks)[:, None] / max(chunks - 1, 1)
    return np.asarray(to_rgb(COLORS[kind])) * (1 - white) + white
