"""The memory of a config as a plot: bytes by kind, one bar per recomputation mode."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from matplotlib.figure import Figure

from mjax.config import Config
from mjax.hardware import GIB, Gpu
from mjax.models.kernels import HOPPER, resolved_on_gpu
from mjax.parallel.axes import PIPE, in_words
from mjax.pictures.figures import INK, SOFT_INK, add_heading, save
from mjax.planner.memory import HEADROOM, Memory, free_share, predict_memory
from mjax.validation import can_run_layers

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


def draw_memory(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Bars of the bytes by kind, for the config and for the same with each recomputation mode, and their totals.

    Args:
      config: validated.
      file: .png, .pdf or .svg; or an open file, which gets a PNG.
      gpu: its memory is drawn as a limit: the usable part, and of that the last HEADROOM, in which a bar may not fit.
      name: of the config, for the title.
    """
    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    bars = variants(config)
    usable = math.inf if gpu is None else gpu.usable_bytes
    figure = Figure(figsize=(8.5, 2.2 + 0.4 * len(bars)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    shown = [kind for kind in COLOURS if any(memory.parts[kind] for memory in bars.values())]
    for row, memory in enumerate(bars.values()):
        start = 0.0
        for kind in shown:
            size = memory.parts[kind]
            axes.barh(row, size / GIB, left=start, color=COLOURS[kind], label=kind if row == 0 else None, zorder=2)
            start += size / GIB
        free = free_share(memory.total, usable) if gpu is not None else 1.0
        verdict = ", too much" if free < 0 else f", {free:.1%} free" if free < HEADROOM else ""
        style = {"color": TOO_MUCH if verdict else INK, "weight": "bold", "size": 9}
        axes.annotate(
            f"{start:.1f}{verdict}", (start, row), (4, 0), textcoords="offset points", va="center", zorder=4, **style
        )
    longest = max(memory.total for memory in bars.values()) / GIB
    if gpu is None:
        axes.set_xlim(0, 1.1 * longest)
    else:
        limit = usable / GIB
        band = {"color": TOO_MUCH, "alpha": 0.12, "linewidth": 0, "label": f"less than {HEADROOM:.0%} free"}
        axes.axvspan((1 - HEADROOM) * limit, limit, zorder=1, **band)
        axes.axvline(limit, color=INK, linestyle="--", zorder=3)
        words = f"{gpu.name.upper()}: {limit:.1f} of {gpu.memory_bytes / GIB:.1f} GiB usable"
        axes.annotate(
            words, (limit, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right",
            va="bottom", size=9, color=INK,
        )  # fmt: skip
        axes.set_xlim(0, 1.16 * max(longest, 0.9 * limit))
    mesh = config.mesh
    about = (
        f"{in_words(mesh, PIPE)}, micro-batches of {config.train.micro_batch}, attention by {config.model.attention}"
    )
    add_heading(axes, f"Memory of a device by recomputation mode{', for ' * bool(name)}{name}", about)
    axes.set_xlabel("GiB on each device", color=SOFT_INK, loc="left")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if gpu is not None:  # the band comes after the kinds
        handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


def variants(config: Config) -> dict[str, Memory]:
    """The memory in each recomputation mode that is possible, with and without sequence parallelism if `model` is above
    1; the picture has that of the device."""
    found = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in ("none", "selective", "full", "offload"):
            train = replace(config.train, recompute=recompute)
            if recompute == "offload":
                train = replace(train, unroll="off", streams=1)
            changed = replace(config, mesh=replace(config.mesh, sequence_parallel=split), train=train)
            if not can_run_layers(changed):
                continue
            found[f"{recompute}, sequence parallel" if split else recompute] = predict_memory(changed)
    return found
