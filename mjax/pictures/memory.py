"""The memory of a config as a plot: bytes by kind, one bar per recomputation mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from matplotlib.figure import Figure

from mjax.cluster.hardware import GIB, Gpu
from mjax.pictures.figures import INK, SOFT_INK, add_heading, save

# Okabe and Ito's palette: distinguishable with colour blindness.
COLOURS = {
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
    shown = [kind for kind in COLOURS if any(parts[kind] for parts in modes.values())]
    for row, parts in enumerate(modes.values()):
        start = 0.0
        for kind in shown:
            size = parts[kind]
            axes.barh(row, size / GIB, left=start, color=COLOURS[kind], label=kind if row == 0 else None, zorder=2)
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
