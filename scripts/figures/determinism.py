"""Pictures of docs/concepts/determinism.md."""

from __future__ import annotations

import numpy as np

from scripts.figures.svg import Drawing

COLORS = ("blue", "orange", "green", "pink")


def same_seed_two_meshes() -> Drawing:
    """One position's dropout mask in eight sequences, on one device and cut for four: the same columns are dropped."""
    drawing = Drawing(640, 294, "One seed, two meshes: each device computes its rows of the same mask, so none differs")
    rows, columns = np.meshgrid(np.arange(8, dtype=np.uint32), np.arange(12, dtype=np.uint32), indexing="ij")
    dropped = _hash(_hash(rows + np.uint32(1234)) ^ columns) < np.uint32(0.2 * 2**32)

    def draw(x: float, y: float, which: range, color: str) -> None:
        drawing.grid(
            x, y, len(which), 12, 17, lambda row, column: None if dropped[which[row], column] else color, gap=2
        )

    drawing.text(100, 14, "one device", bold=True, anchor="start")
    drawing.text(404, 14, "data 4", bold=True)
    for row in range(8):
        drawing.text(88, 44 + row * 19, f"sequence {row}", size=14, anchor="end")
    draw(100, 35, range(8), "grey")
    for rank, color in enumerate(COLORS):
        y = 35 + rank * 62
        draw(404, y, range(2 * rank, 2 * rank + 2), color)
        drawing.text(392, y + 18, f"rank {rank}", size=14, anchor="end")
    drawing.text(100, 202, "12 columns of one position", size=14)
    drawing.text(100, 222, "empty: dropped", size=14, italic=True)
    drawing.text(4, 250, "keep(seed, step, layer, site,", size=15)
    drawing.text(4, 272, "sequence, position, column)", size=15)
    return drawing


def sample_order() -> Drawing:
    """The samples of two steps of eight sequences, on data 2 and on data 4 with micro-batches."""
    drawing = Drawing(640, 268, "A step's samples follow from its number alone: data 2 and data 4 read the same eight")
    cell, left = 52, 196
    for row, (ranks, title) in enumerate(((1, "shuffled order"), (2, "data 2"), (4, "data 4"))):
        y = 30 + row * 84
        drawing.text(4, y + 20, title, bold=True)
        for sample in range(8):
            rank = sample * ranks // 8
            color = "grey" if ranks == 1 else COLORS[rank]
            drawing.box(left + sample * cell, y, cell - 4, 40, str(8 + sample), color, size=15)
        if ranks > 1:
            for rank in range(ranks):
                middle = left + (rank + 0.5) * 8 / ranks * cell - 2
                drawing.text(middle, y + 54, f"rank {rank}", size=14, anchor="middle")
    drawing.text(4, 72, "global batch 8, step 1", size=14)
    drawing.text(4, 156, "4 sequences each", size=14)
    drawing.text(4, 240, "2 sequences each", size=14)
    return drawing


def _hash(x: np.ndarray) -> np.ndarray:
    """The mixer of `mjax.parallel.random.mix_bits`, without JAX."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
