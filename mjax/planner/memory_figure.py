"""The memory of a config as a picture: bytes by kind, a bar for every kind of recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from mjax.config import Config
from mjax.hardware import GIB, Gpu
from mjax.planner.memory import Memory, predict_memory

# Okabe and Ito's palette: apart for every kind of colour vision.
COLOURS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#E69F00",
    "activations": "#009E73",
    "logits": "#CC79A7",
    "workspace": "#999999",
}


def draw_memory(config: Config, file: Path, gpu: Gpu | None = None) -> None:
    """Bars of the bytes by kind, for the config and for the same with every kind of recomputation.

    Args:
      config: validated.
      file: .png, .pdf or .svg.
      gpu: whose usable memory is drawn as a line.
    """
    bars = variants(config)
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(bars)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, memory in enumerate(bars.values()):
        start = 0.0
        for kind, size in memory.parts.items():
            axes.barh(row, size / GIB, left=start, color=COLOURS[kind], label=kind if row == 0 else None)
            start += size / GIB
    if gpu is not None:
        axes.axvline(gpu.usable_bytes / GIB, color="#222222", linestyle="--", label=f"usable on {gpu.name}")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each device")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file)


def variants(config: Config) -> dict[str, Memory]:
    """The memory under every kind of recomputation, with and without sequence parallelism where there is `model`."""
    found = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in ("none", "selective", "full"):
            changed = replace(
                config,
                mesh=replace(config.mesh, sequence_parallel=split),
                train=replace(config.train, recompute=recompute),
            )
            found[f"{recompute}, sequence parallel" if split else recompute] = predict_memory(changed)
    return found
