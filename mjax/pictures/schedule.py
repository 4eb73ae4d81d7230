"""A pipeline schedule as a picture: one row a stage, time to the right, every box a pass of one micro-batch.

The form is that of figures 3 and 4 of arXiv 2104.04473: two tones for forward and backward, darker for a stage's first
chunk and lighter for its later ones, the micro-batch's number in the box, grey where a stage is idle. Time is that of
the lock-step table: a tick lasts as long on every stage, its forwards begin together and so do its backwards. Where all
of it would be a barcode, the middle of the steady state is left out: there no stage is idle and every tick is like the
others, so hundreds of them say no more than a few. Ticks that are left out are a gap in the picture, labelled with its
length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mjax.parallel.schedules import Schedule, Slots
from mjax.pictures.figures import INK, SOFT_INK, save

# Okabe and Ito's palette: apart for every kind of colour vision, and of different lightness too.
COLOURS = {"forward": "#0072B2", "backward": "#E69F00"}
IDLE = "#DCDCDC"

DPI, POINT = 150, 150 / 72  # pixels in an inch, and in a point
MARGINS = 132, 150, 195, 98  # pixels to the left, to the right, above and below the rows
PHASES = 36  # pixels more above the rows, where phases are named
SMALLEST_NUMBER = 6.0  # points; numbers that would have to be smaller are left out
READABLE = 96
"""Forwards in a picture that still shows them one by one, with their numbers."""
LEAST = 3
"""Ticks of a steady state that stay at each of its ends."""
GAP = 2.5
"""Width of a gap, in forwards."""


def draw_schedule(schedule: Schedule, file: Path | BinaryIO, forward: float = 1.0, backward: float = 2.0) -> None:
    """Draw `schedule` into `file`, in the format of its suffix (png, pdf, svg, …).

    Args:
      schedule: what to draw.
      file: a path, or an open file, which gets a PNG.
      forward, backward: time of F and B of one micro-batch through one chunk, in any one unit.
    """
    times = [forward, backward]
    passes, lengths = _passes(schedule, times)
    line_of_time = timeline(schedule, lengths, forward)
    span = line_of_time.span
    # Pixels of a forward: the title has to fit. A whole number, so that thin boxes are equally wide.
    unit = max(ceil(1275 * forward / span), min(50, ceil(2000 * forward / span)))
    row = int(np.clip(1350 / schedule.stages, 21, 72))
    width, height = unit * span / forward, row * schedule.stages  # pixels of all rows
    scale = max(1.0, width / 2100)  # letters grow with what is too wide for a screen
    left, right, top, bottom = (scale * margin for margin in MARGINS)
    top += scale * PHASES * bool(line_of_time.phases)
    size = np.array([left + width + right, bottom + height + top])

    figure = Figure(figsize=size / DPI, dpi=DPI)
    rows = figure.add_axes((left / size[0], bottom / size[1], width / size[0], height / size[1]))
    rows.set(xlim=(0, span), ylim=(schedule.stages, 0), facecolor=IDLE)
    for kind, slots, offset, time in passes:
        boxes = line_of_time.shown, line_of_time.begin + offset, time
        _draw_boxes(rows, schedule, kind, slots, boxes, (unit * time / forward, row))
    _draw_gaps(rows, line_of_time, scale)
    _label_rows(rows, schedule, row, scale)
    _label_time(rows, line_of_time)

    def line(pixels_from_top: float, text: str, **style) -> None:
        figure.text(left / size[0], 1 - scale * pixels_from_top / size[1], text, va="center", **style)

    chunks = f"{schedule.chunks} chunk{'s' * (schedule.chunks > 1)}"
    counts = f"P = {schedule.stages} stages,  M = {schedule.micro_batches} micro-batches,  V = {chunks}"
    line(51, f"{display_name(schedule)}:  {counts}", size=14 * scale, weight="bold", color=INK)
    bubble, in_flight = describe_bubble(schedule, *times), describe_in_flight(schedule)
    summary = f"bubble {bubble};  {schedule.ticks} ticks;  in flight: {in_flight}"
    line(98, summary, size=10.5 * scale, color=SOFT_INK)
    _draw_legend(figure, schedule, passes, (left / size[0], 1 - scale * 148 / size[1]), scale)
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


Pass = tuple[str, Slots, np.ndarray, float]
"""A kind of pass, its slots, the offset of its boxes in a tick [ticks], its duration."""


def _passes(schedule: Schedule, times: list[float]) -> tuple[list[Pass], np.ndarray]:
    """Return the passes of a schedule, and the length of all ticks [ticks]."""
    slots = schedule.forward, schedule.backward
    kinds = [row for row in zip(COLOURS, slots, times, strict=True) if row[1] is not None]
    lengths = np.stack([slots.on.any(axis=1) * time for _, slots, time in kinds])  # [kinds, ticks]
    ticks, offsets = lengths.sum(axis=0), lengths.cumsum(axis=0) - lengths
    return [(name, slots, offset, time) for (name, slots, time), offset in zip(kinds, offsets, strict=True)], ticks


def _draw_boxes(rows: Axes, schedule: Schedule, kind: str, slots: Slots, boxes, box) -> None:
    """The boxes of one kind, each `box` = (width, height) pixels large, with their numbers where those fit.

    Args:
      boxes: which ticks are shown [ticks], where the boxes of each begin [ticks], and how long they are.
    """
    shown, begin, time = boxes
    ticks, stages = np.nonzero(slots.on * shown[:, None])
    shades = _shades(kind, schedule.chunks)
    left, chunks = begin[ticks], slots.chunk[ticks, stages]
    corners = [[left, stages], [left + time, stages], [left + time, stages + 1], [left, stages + 1]]
    # A thin box has no border, and no smoothed edge through which the grey would shine.
    border = {"edgecolors": "white", "linewidths": 0.8} if min(box) > 12 else {"lw": 0, "antialiaseds": False}
    rows.add_collection(PolyCollection(np.transpose(corners, (2, 0, 1)), facecolors=shades[chunks], **border))

    digits = len(str(schedule.micro_batches - 1))
    size = min(10.0, 0.55 * box[1] / POINT, 0.85 * box[0] / POINT / (0.62 * digits))
    if size >= SMALLEST_NUMBER:
        luminances = shades**2.2 @ (0.2126, 0.7152, 0.0722)  # of sRGB colors, about
        inks = ["white" if luminance < 0.2 else INK for luminance in luminances]
        for x, y, m, chunk in zip(left, stages, slots.micro_batch[ticks, stages], chunks, strict=True):
            rows.text(x + time / 2, y + 0.52, m, size=size, color=inks[chunk], ha="center", va="center")


def _shades(kind: str, chunks: int) -> np.ndarray:
    """A colour for each chunk [V, 3]: the full one for the first, lighter for the later ones."""
    white = 0.62 * np.arange(chunks)[:, None] / max(chunks - 1, 1)
    return np.asarray(to_rgb(COLOURS[kind])) * (1 - white) + white


def _label_rows(rows: Axes, schedule: Schedule, row: int, scale: float) -> None:
    """Stages to the left, what each holds to the right, time below."""
    every = 2 ** max(0, ceil(np.log2(30 * scale / row)))
    last = schedule.stages - 1
    shown = [*(stage for stage in range(0, last, every) if last - stage > every / 2), last]
    rows.set_yticks([stage + 0.5 for stage in shown], [f"stage {stage}" for stage in shown])
    rows.tick_params(axis="y", length=0, pad=7 * scale, labelsize=10 * scale, labelcolor=INK)
    rows.tick_params(axis="x", length=3, color=SOFT_INK, labelsize=9 * scale, labelcolor=SOFT_INK)
    unit = "forward passes" if schedule.chunks == 1 else "forward passes of one chunk"
    rows.set_xlabel(
        f"time, in {unit}; stages begin a tick's forwards, and its backwards, together",
        size=9 * scale,
        color=SOFT_INK,
        loc="left",
    )
    rows.spines[:].set_visible(False)
    if schedule.backward is not None:
        at_right = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
        rows.annotate("in flight", (1, 0), (8, 7 * scale), size=9 * scale, color=SOFT_INK, **at_right)
        for stage in shown:
            in_flight = str(schedule.in_flight(stage))
            rows.annotate(in_flight, (1, stage + 0.52), (8, 0), size=10 * scale, color=INK, va="center", **at_right)


def _draw_gaps(rows: Axes, time: Timeline, scale: float) -> None:
    """White where ticks are left out, with their number, and the names of the phases above."""
    stages, above = rows.get_ylim()[0], {"xycoords": ("data", "axes fraction"), "annotation_clip": False}
    for begin, end, ticks in time.gaps:
        rows.axvspan(begin, end, color="white", zorder=3)
        text = f"{ticks:,} more ticks like these"
        middle, size = ((begin + end) / 2, stages / 2), 9.5 * scale
        rows.text(*middle, text, size=size, color=INK, rotation=90, ha="center", va="center", zorder=4, clip_on=False)
    for name, begin, end in time.phases:
        rows.annotate(
            "", (begin, 1), (end, 1), xycoords=above["xycoords"], textcoords=above["xycoords"], annotation_clip=False,
            arrowprops={"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "color": SOFT_INK, "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip
        words = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
        rows.annotate(name, ((begin + end) / 2, 1), (0, 5 * scale), size=9.5 * scale, color=INK, **words, **above)


def _label_time(rows: Axes, time: Timeline) -> None:
    """Numbers of the time that it is, on both sides of a gap."""
    marks = {}
    edges = [0.0, *(edge for begin, end, _ in time.gaps for edge in (begin, end)), time.span]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        tick = int(np.searchsorted(time.begin, begin + 1e-9, side="right")) - 1
        later = time.start[tick] - time.begin[tick]
        count = max(2, round(12 * (end - begin) / time.span))
        values = MaxNLocator(count, integer=True).tick_values(begin + later, end + later)
        marks |= {value - later: f"{value:g}" for value in values if begin <= value - later <= end}
    rows.set_xticks(list(marks), list(marks.values()))


def _draw_legend(
    figure: Figure, schedule: Schedule, passes: list[Pass], left_center: tuple[float, float], scale: float
) -> None:
    names = [kind for kind, _, _, _ in passes]
    handles = [tuple(Patch(color=shade) for shade in _shades(name, schedule.chunks)) for name in names]
    if schedule.chunks > 1:
        names = [f"{name}, chunk 0 … {schedule.chunks - 1}" for name in names]
    figure.legend(
        [*handles, Patch(color=IDLE)],
        [*names, "idle"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=1.2 + 0.6 * (schedule.chunks - 1),
        loc="center left",
        bbox_to_anchor=left_center,
        ncols=4,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        fontsize=10 * scale,
        labelcolor=INK,
    )


# --- Time without its middle ------------------------------------------------------------------------------------------


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
    on = np.stack([slots.on for slots in (schedule.forward, schedule.backward) if slots is not None])
    busy = (on.all(axis=-1) == on.any(axis=-1)).all(axis=0)  # what any stage runs runs on all
    return [run for run in _stretches(busy) if run[1] - run[0] > 2 * LEAST]


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """The stretches [first, end) in which `mask` holds."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [(int(first), int(end)) for first, end in changes.reshape(-1, 2)]
