"""The communication ledger as a plot: one bar per mesh axis, split by source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mjax.cluster.hardware import human_bytes
from mjax.parallel import scopes
from mjax.pictures.figures import INK, SOFT_INK, add_heading, save

# Okabe and Ito's palette, distinguishable with colour blindness: one colour per part of the model. Phases of a part
# differ in lightness and hatching.
COLOURS = {
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
PARTS = list(COLOURS)
HATCHES = {"": "", "forward": "", "backward": "///", "recomputation": "..."}
PHASES = list(HATCHES)


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
        for (part, phase), size in sorted(sources[axes].items(), key=_order):
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


def _order(piece: tuple[tuple[str, str], float]) -> tuple[int, int]:
    (part, phase), _ = piece
    return PARTS.index(part), PHASES.index(phase)


def _in_words(part: str, phase: str) -> str:
    if part == scopes.WEIGHTS and not phase:
        return "weights, at the start of the step"
    return ", ".join(filter(None, (part or "elsewhere", phase)))


def _style(part: str, phase: str) -> dict:
    hatch = "xx" if part == scopes.WEIGHTS and not phase else HATCHES[phase]
    return {"facecolor": COLOURS[part], "hatch": hatch, "edgecolor": "white"}
