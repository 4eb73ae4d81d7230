"""Pictures of a plan: memory by recomputation mode, communication by mesh axis, the longest sequences.

Colors are Okabe and Ito's palette, distinguishable with color blindness.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mjax.cluster.hardware import Gpu
from mjax.parallel import scopes
from mjax.pictures.figures import INK, SOFT_INK, add_heading, save
from mjax.utils.figures import GIB, human_bytes

KIND_COLOURS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#E69F00",
    "activations": "#009E73",
    "logits": "#CC79A7",
    "workspace": "#999999",
}
TOO_MUCH = "#B00020"


def draw_memory(
    modes: Mapping[str, Mapping[str, float]],
    file: Path | BinaryIO,
    heading: str,
    about: str,
    gpu: Gpu | None = None,
    headroom: float = 0.0,
) -> None:
    """Bars of the bytes by kind, one for each recomputation mode, and their totals.

    Args:
      modes: bytes of a device, by mode and kind.
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      heading, about: above the bars.
      gpu: its memory is drawn as a limit: the usable part, and of that the last `headroom`, in which a bar may not fit.
    """
    usable = 0.0 if gpu is None else gpu.usable_bytes
    figure = Figure(figsize=(8.5, 2.2 + 0.4 * len(modes)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    shown = [kind for kind in KIND_COLOURS if any(parts[kind] for parts in modes.values())]
    for row, parts in enumerate(modes.values()):
        start = 0.0
        for kind in shown:
            size = parts[kind]
            axes.barh(row, size / GIB, left=start, color=KIND_COLOURS[kind], label=kind if row == 0 else None, zorder=2)
            start += size / GIB
        free = 1 - sum(parts.values()) / usable if gpu is not None else 1.0
        verdict = ", too much" if free < 0 else f", {free:.1%} free" if free < headroom else ""
        style = {"color": TOO_MUCH if verdict else INK, "weight": "bold", "size": 9}
        axes.annotate(
            f"{start:.1f}{verdict}", (start, row), (4, 0), textcoords="offset points", va="center", zorder=4, **style
        )
    longest = max(sum(parts.values()) for parts in modes.values()) / GIB
    if gpu is None:
        axes.set_xlim(0, 1.1 * longest)
    else:
        limit = usable / GIB
        band = {"color": TOO_MUCH, "alpha": 0.12, "linewidth": 0, "label": f"less than {headroom:.0%} free"}
        axes.axvspan((1 - headroom) * limit, limit, zorder=1, **band)
        axes.axvline(limit, color=INK, linestyle="--", zorder=3)
        words = f"{gpu.name.upper()}: {limit:.1f} of {gpu.memory_bytes / GIB:.1f} GiB usable"
        axes.annotate(
            words, (limit, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right",
            va="bottom", size=9, color=INK,
        )  # fmt: skip
        axes.set_xlim(0, 1.16 * max(longest, 0.9 * limit))
    add_heading(axes, heading, about)
    axes.set_xlabel("GiB on each device", color=SOFT_INK, loc="left")
    axes.set_yticks(range(len(modes)), list(modes))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if gpu is not None:  # the band comes after the kinds
        handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


# --- Communication: one bar per mesh axis, split by source ------------------------------------------------------------


# Okabe and Ito's palette, distinguishable with colour blindness: one colour per part of the model. Phases of a part
# differ in lightness and hatching.
SOURCE_COLOURS = {
    scopes.LAYER: "#0072B2",
    scopes.EMBEDDING: "#56B4E9",
    scopes.HEAD: "#CC79A7",
    scopes.WEIGHTS: "#009E73",
    scopes.GRADIENT: "#E69F00",
    scopes.PIPELINE: "#F0E442",
    scopes.OPTIMIZER: "#D55E00",
    scopes.LOSS: "#999999",
    "": "#000000",
}
HATCHES = {"": "", "forward": "", "backward": "///", "recomputation": "..."}
ORDER = list(itertools.product(SOURCE_COLOURS, HATCHES))  # of parts and phases in a bar


def draw_communication(
    sources: Mapping[str, Mapping[tuple[str, str], float]], file: Path | BinaryIO, name: str = ""
) -> None:
    """Draw the ledger of a step.

    Each bar is the bytes that a device sends over an axis in one step, on the pipeline stage that sends most over it.
    Bars have one scale; axes with less than a thousandth of the total are not drawn but listed.

    Args:
      sources: bytes by axes, and by part and phase (`Ledger.pieces`).
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      name: of the config, for the title.
    """
    sent = {axes: sum(pieces.values()) for axes, pieces in sources.items()}
    drawn = sorted((axes for axes in sent if sent[axes] >= 1e-3 * sum(sent.values())), key=sent.get, reverse=True)
    figure = Figure(figsize=(10, 2.5 + 0.75 * max(len(drawn), 1)), dpi=150, layout="constrained")
    bars: Axes = figure.add_subplot()
    longest = max(sent.values(), default=1.0)
    unit, scale = next((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if longest >= s)
    shown: dict[tuple[str, str], str] = {}
    for row, axes in enumerate(drawn):
        left = 0.0
        for part, phase in sorted(sources[axes], key=ORDER.index):
            size = sources[axes][part, phase]
            # A thin piece has no border, which would hide it.
            border = 0.8 if size > 0.005 * longest else 0.0
            bars.barh(row, size / scale, left=left, height=0.62, linewidth=border, **_style(part, phase))
            left += size / scale
            if size > 5e-4 * longest:  # a third of a pixel
                shown[part, phase] = _in_words(part, phase)
        bars.text(left + 0.01 * longest / scale, row, human_bytes(sent[axes]), va="center", color=INK, size=10)
    bars.set_yticks(range(len(drawn)), drawn, size=11)
    bars.set(ylim=(len(drawn) - 0.4, -0.6), xlim=(0, 1.16 * longest / scale))
    bars.set_xlabel(f"{unit} that a device sends in a step (ring algorithms)", color=SOFT_INK, loc="left")
    bars.tick_params(axis="y", length=0)
    bars.spines[["top", "right", "left"]].set_visible(False)
    few = [f"{axes} {human_bytes(sent[axes])}" for axes in sent if axes not in drawn]
    about = f"too small to draw: {', '.join(few)}" if few else ""
    add_heading(bars, f"Communication of a step{' of ' * bool(name)}{name}", about)
    handles = [Patch(**_style(*key)) for key in shown]
    figure.legend(handles, list(shown.values()), loc="outside lower left", ncols=4, frameon=False, labelcolor=INK)
    save(figure, file)


def _in_words(part: str, phase: str) -> str:
    if part == scopes.WEIGHTS and not phase:
        return "weights, at the start of the step"
    return ", ".join(filter(None, (part or "elsewhere", phase)))


def _style(part: str, phase: str) -> dict:
    hatch = "xx" if part == scopes.WEIGHTS and not phase else HATCHES[phase]
    return {"facecolor": SOURCE_COLOURS[part], "hatch": hatch, "edgecolor": "white"}


# --- The longest sequences: positions over the number of GPUs, a line for each way ------------------------------------


# Okabe and Ito's palette, distinguishable with colour blindness; each way has a separate marker, too. Labels stand to
# the left of the first two lines, and below the last.
STYLES = (
    ("#0072B2", "o", (-3, 5), "right"),
    ("#009E73", "s", (-6, 3), "right"),
    ("#666666", "^", (0, -15), "center"),
)


def draw_longest(points: Mapping[str, Sequence[tuple[int, int]]], file: Path, name: str, gpu: str) -> None:
    """Draw the longest sequences.

    Args:
      points: by way, highest first, the numbers of GPUs and of positions.
      file: .png, .pdf or .svg.
      name, gpu: of the config and of the GPU, for the title and the axis.
    """
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    plot = figure.add_subplot()
    for (way, pairs), (colour, marker, offset, side) in zip(points.items(), STYLES, strict=False):
        counts, lengths = zip(*pairs, strict=True)
        plot.plot(counts, lengths, color=colour, marker=marker, linewidth=2, label=way)
        for count, length in zip(counts, lengths, strict=True):
            style = {"textcoords": "offset points", "ha": side, "size": 9, "color": colour}
            plot.annotate(in_short(length), (count, length), offset, **style)
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.yaxis.set_minor_formatter(NullFormatter())
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(int(value))))
    plot.margins(x=0.1, y=0.12)
    add_heading(plot, f"Longest sequence of {name} that fits into memory")
    plot.set_xlabel(f"number of {gpu.upper()} GPUs", color=SOFT_INK)
    plot.set_ylabel("positions in a sequence (k: thousand, M: million)", color=SOFT_INK)
    plot.grid(axis="y", alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(frameon=False, loc="upper left")
    save(figure, file)


def in_short(positions: int) -> str:
    """Return a number of positions with three digits: 131,072 → 131k, 1,572,864 → 1.57M."""
    for unit, word in ((1e6, "M"), (1e3, "k")):
        if positions >= unit:
            return f"{positions / unit:.3g}{word}"
    return str(positions)
