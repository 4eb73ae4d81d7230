"""Pictures of a plan: memory by recomputation mode, communication by mesh axis, the schedule of a pipeline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mjax.cluster.hardware import Gpu
from mjax.parallel import named_scopes
from mjax.parallel.pipeline_schedules import PipelineSchedule, Slots
from mjax.pictures.figures import INK, PALETTE, SOFT_INK, add_heading, save
from mjax.utils.figures import GIB, human_bytes

PARTS = (
    *(named_scopes.LAYER, named_scopes.EMBEDDING, named_scopes.HEAD, named_scopes.WEIGHTS, named_scopes.GRADIENT),
    *(named_scopes.PIPELINE, named_scopes.OPTIMIZER, named_scopes.LOSS, "other"),
)
HATCHES = {"": "", "forward": "", "backward": "///", "recomputation": "..."}
TOO_MUCH = "#B00020"


def draw_memory(
    modes: Mapping[str, Mapping[str, float]],
    file: Path | BinaryIO,
    heading: str,
    about: str,
    gpu: Gpu | None = None,
    headroom: float = 0.0,
) -> None:
    """Draw a bar for each recomputation mode: bytes by kind, and their total.

    Args:
      modes: bytes of a device, by mode and kind.
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      heading, about: above the bars.
      gpu: its memory is drawn as a limit: the usable part, and of that the last `headroom`, in which a bar may not fit.
    """
    rows, totals = {}, []
    for mode, parts in modes.items():
        colors = zip(parts, PALETTE, strict=False)
        rows[mode] = [(kind, parts[kind] / GIB, {"color": color}) for kind, color in colors]
        size = sum(parts.values())
        free = 1.0 if gpu is None else 1 - size / gpu.usable_bytes
        verdict = ", out of memory" if free < 0 else f", {free:.1%} free" if free < headroom else ""
        totals.append((f"{size / GIB:.1f}{verdict}", TOO_MUCH if verdict else INK))
    figure, axes = _bars(rows, totals, 0.4)
    if gpu is not None:
        limit = gpu.usable_bytes / GIB
        label = f"{gpu.name.upper()}: {limit:.1f} of {gpu.memory_bytes / GIB:.1f} GiB usable"
        axes.axvline(limit, color=INK, linestyle="--", label=label, zorder=3)
        band = {"color": TOO_MUCH, "alpha": 0.12, "linewidth": 0, "label": f"less than {headroom:.0%} free"}
        axes.axvspan((1 - headroom) * limit, limit, zorder=1, **band)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * limit))
    add_heading(axes, heading, about)
    axes.set_xlabel("GiB per device", color=SOFT_INK, loc="left")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


def draw_communication(sources: Mapping[str, Mapping[str, float]], file: Path | BinaryIO, name: str = "") -> None:
    """Draw the ledger of a step.

    Each bar is the bytes that a device sends over an axis in one step, on the pipeline stage that sends most over it.
    Axes with less than a thousandth of the total are listed above the bars.

    Args:
      sources: bytes by axes and source (`Ledger.bytes_by_source`).
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      name: of the config, for the title.
    """
    sent = {axes: sum(by_source.values()) for axes, by_source in sources.items()}
    drawn = sorted((axes for axes in sent if sent[axes] >= 1e-3 * sum(sent.values())), key=sent.get, reverse=True)
    longest = max(sent.values(), default=1.0)
    unit, scale = next((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if longest >= s)
    styles = {f"{part} {phase}".strip(): _style(part, phase) for part in PARTS for phase in HATCHES}
    rows = {
        axes: [(source, sources[axes].get(source, 0.0) / scale, style) for source, style in styles.items()]
        for axes in drawn
    }
    figure, bars = _bars(rows, [(human_bytes(sent[axes]), INK) for axes in drawn], 0.75)
    small = [f"{axes} {human_bytes(sent[axes])}" for axes in sent if axes not in drawn]
    about = f"not drawn: {', '.join(small)}" if small else ""
    add_heading(bars, f"Communication per step{', ' * bool(name)}{name}", about)
    bars.set_xlabel(f"{unit} sent per device and step (ring algorithms)", color=SOFT_INK, loc="left")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


Segment = tuple[str, float, dict[str, Any]]  # a segment of a bar: its name in the legend, its length and its style


def _bars(
    rows: Mapping[str, Sequence[Segment]], totals: Sequence[tuple[str, str]], height: float
) -> tuple[Figure, Axes]:
    """Draw stacked horizontal bars; `totals` are the text after each bar and its color."""
    figure = Figure(figsize=(9, 2.3 + height * max(len(rows), 1)), dpi=150, layout="constrained")
    axes, labels = figure.add_subplot(), set()
    longest = max((sum(size for _, size, _ in segments) for segments in rows.values()), default=0.0)
    for row, segments in enumerate(rows.values()):
        left = 0.0
        for label, size, style in segments:
            if size > 0:
                style = style | {"label": None if label in labels else label}
                # A thin segment has no border, which would hide it.
                axes.barh(row, size, left=left, zorder=2, linewidth=0.8 * (size > 0.005 * longest), **style)
                labels.add(label)
                left += size
        total, color = totals[row]
        style = {"color": color, "weight": "bold", "size": 9}
        axes.annotate(total, (left, row), (4, 0), textcoords="offset points", va="center", zorder=4, **style)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(part: str, phase: str) -> dict[str, str]:
    hatch = "xx" if part == named_scopes.WEIGHTS and not phase else HATCHES[phase]
    return {"facecolor": PALETTE[PARTS.index(part)], "hatch": hatch, "edgecolor": "white"}


# --- The schedule of a pipeline -------------------------------------------------------------------------------------
# As in arXiv 2104.04473, figure 4: two colors for forward and backward, lighter for later virtual stages of a
# rank, the number of the micro-batch in the box, grey where a stage is idle. Time is lock-step: a
# tick lasts as long on every stage, and all forward passes of a tick begin together, as do all backward passes.

COLORS = {"forward": PALETTE[0], "backward": PALETTE[2]}
IDLE = "#DCDCDC"


def draw_schedule(schedule: PipelineSchedule, file: Path | BinaryIO, forward: float = 1, backward: float = 2) -> None:
    """Draw a pipeline schedule: one row a stage, time to the right, every box a pass of one micro-batch.

    Args:
      schedule: the schedule to draw.
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      forward, backward: time of F and B of one micro-batch through one chunk, in any one unit.
    """
    kinds = zip(COLORS, (schedule.forward, schedule.backward), (forward, backward), strict=True)
    passes = [kind for kind in kinds if kind[1] is not None]
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

    stride = -(-stages // 32)
    rows.set_yticks(np.arange(0, stages, stride) + 0.5, [f"stage {stage}" for stage in range(0, stages, stride)])
    rows.tick_params(length=0, labelcolor=INK)
    rows.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    unit = "forward passes" + " of a virtual stage" * (schedule.chunks > 1)
    rows.set_xlabel(f"time ({unit})", color=SOFT_INK, loc="left")
    rows.spines[:].set_visible(False)
    virtual = f",  V = {schedule.chunks} virtual stages per rank" if schedule.chunks > 1 else ""
    title = f"{display_name(schedule)}:  p = {stages} stages,  m = {schedule.micro_batches} micro-batches{virtual}"
    bubble, in_flight = describe_bubble(schedule, forward, backward), describe_in_flight(schedule)
    add_heading(rows, title, f"bubble {bubble};  {schedule.ticks} ticks;  micro-batches in flight: {in_flight}")
    handles = [Patch(color=COLORS[kind], label=kind) for kind, *_ in passes]
    figure.legend(handles=[*handles, Patch(color=IDLE, label="idle")], loc="outside lower left", ncols=4, frameon=False)
    save(figure, file)


def describe_bubble(schedule: PipelineSchedule, forward: float, backward: float) -> str:
    """The bubble as computed from the table, with its closed form if the two are equal."""
    bubble = schedule.bubble(forward, backward)
    stages, micro_batches, chunks = schedule.stages, schedule.micro_batches, schedule.chunks
    formula = " = (p − 1) / m" if chunks == 1 else " = (p − 1) / (V m)"
    exact = np.isclose(bubble, (stages - 1) / (chunks * micro_batches))
    return f"{bubble:.1%} of the ideal time{formula if exact else ''}"


def describe_in_flight(schedule: PipelineSchedule) -> str:
    """The largest numbers of micro-batches in flight on the first and the last stage."""
    last = schedule.stages - 1
    return f"{schedule.max_in_flight(0)} on stage 0, {schedule.max_in_flight(last)} on stage {last}"


def display_name(schedule: PipelineSchedule) -> str:
    """The schedule's name in its paper."""
    name = {"gpipe": "GPipe", "1f1b": "1F1B", "forward": "Forward only"}[schedule.name]
    return name + ", interleaved" * (schedule.chunks > 1)


def _draw_boxes(
    rows: Axes, slots: Slots, shades: np.ndarray, begin: np.ndarray, time: float, box: tuple[float, float]
) -> None:
    """Draw the boxes of one kind, `time` long, with the number of the micro-batch where it fits.

    Args:
      shades: color of each chunk [V, 3].
      begin: start of the boxes of each tick [ticks].
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
