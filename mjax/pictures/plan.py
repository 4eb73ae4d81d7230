"""Pictures of a plan: memory by recomputation mode, communication by mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mjax.cluster.hardware import Gpu
from mjax.parallel import scopes
from mjax.pictures.figures import INK, PALETTE, SOFT_INK, add_heading, save
from mjax.utils.figures import GIB, human_bytes

KINDS = ("parameters", "optimizer", "gradients", "activations", "logits", "workspace")
PARTS = (
    *(scopes.LAYER, scopes.EMBEDDING, scopes.HEAD, scopes.WEIGHTS, scopes.GRADIENT),
    *(scopes.PIPELINE, scopes.OPTIMIZER, scopes.LOSS, ""),
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
    """Bars of the bytes by kind, one for each recomputation mode, and their totals.

    Args:
      modes: bytes of a device, by mode and kind.
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      heading, about: above the bars.
      gpu: its memory is drawn as a limit: the usable part, and of that the last `headroom`, in which a bar may not fit.
    """
    rows, totals, colors = {}, [], dict(zip(KINDS, PALETTE, strict=False))
    for mode, parts in modes.items():
        rows[mode] = [(kind, parts[kind] / GIB, {"color": color}) for kind, color in colors.items()]
        size = sum(parts.values())
        free = 1.0 if gpu is None else 1 - size / gpu.usable_bytes
        verdict = ", too much" if free < 0 else f", {free:.1%} free" if free < headroom else ""
        totals.append((f"{size / GIB:.1f}{verdict}", TOO_MUCH if verdict else INK))
    figure, axes = _bars(rows, totals, 0.4)
    if gpu is not None:
        limit = gpu.usable_bytes / GIB
        words = f"{gpu.name.upper()}: {limit:.1f} of {gpu.memory_bytes / GIB:.1f} GiB usable"
        axes.axvline(limit, color=INK, linestyle="--", label=words, zorder=3)
        band = {"color": TOO_MUCH, "alpha": 0.12, "linewidth": 0, "label": f"less than {headroom:.0%} free"}
        axes.axvspan((1 - headroom) * limit, limit, zorder=1, **band)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * limit))
    add_heading(axes, heading, about)
    axes.set_xlabel("GiB on each device", color=SOFT_INK, loc="left")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


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
    longest = max(sent.values(), default=1.0)
    unit, scale = next((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if longest >= s)
    rows = {
        axes: [
            (_describe_piece(part, phase), sources[axes].get((part, phase), 0.0) / scale, _style(part, phase))
            for part in PARTS
            for phase in HATCHES
        ]
        for axes in drawn
    }
    figure, bars = _bars(rows, [(human_bytes(sent[axes]), INK) for axes in drawn], 0.75)
    few = [f"{axes} {human_bytes(sent[axes])}" for axes in sent if axes not in drawn]
    about = f"too small to draw: {', '.join(few)}" if few else ""
    add_heading(bars, f"Communication of a step{' of ' * bool(name)}{name}", about)
    bars.set_xlabel(f"{unit} that a device sends in a step (ring algorithms)", color=SOFT_INK, loc="left")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


Piece = tuple[str, float, dict[str, Any]]
"""A part of a bar: its name in the legend, its length and its style."""


def _bars(rows: Mapping[str, Sequence[Piece]], totals: Sequence[tuple[str, str]], height: float) -> tuple[Figure, Axes]:
    """Bars of pieces, one below the other; `totals` are the words behind each and their color."""
    figure = Figure(figsize=(9, 2.3 + height * max(len(rows), 1)), dpi=150, layout="constrained")
    axes, labels = figure.add_subplot(), set()
    longest = max((sum(size for _, size, _ in pieces) for pieces in rows.values()), default=0.0)
    for row, pieces in enumerate(rows.values()):
        left = 0.0
        for label, size, style in pieces:
            if size > 0:
                style = style | {"label": None if label in labels else label}
                # A thin piece has no border, which would hide it.
                axes.barh(row, size, left=left, zorder=2, linewidth=0.8 * (size > 0.005 * longest), **style)
                labels.add(label)
                left += size
        words, color = totals[row]
        style = {"color": color, "weight": "bold", "size": 9}
        axes.annotate(words, (left, row), (4, 0), textcoords="offset points", va="center", zorder=4, **style)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _describe_piece(part: str, phase: str) -> str:
    if part == scopes.WEIGHTS and not phase:
        return "weights, at the start of the step"
    return ", ".join(filter(None, (part or "elsewhere", phase)))


def _style(part: str, phase: str) -> dict[str, str]:
    hatch = "xx" if part == scopes.WEIGHTS and not phase else HATCHES[phase]
    return {"facecolor": PALETTE[PARTS.index(part)], "hatch": hatch, "edgecolor": "white"}
