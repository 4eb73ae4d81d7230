"""Pictures of docs/concepts/mesh.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

SHARDS = ("blue", "yellow", "green", "pink")


def mesh() -> Drawing:
    """Eight GPUs as data 2 × model 4: columns of each matrix inside a server, sequences across servers."""
    drawing = Drawing(640, 356, "Eight GPUs as data 2 × model 4: a server splits every matrix, servers split the batch")
    for server in range(2):
        top = 8 + server * 186
        drawing.box(96, top, 536, 116, fill="none", dashed=True, radius=10)
        drawing.text(4, top + 40, f"server {server}", bold=True)
        drawing.text(4, top + 62, f"data {server}", size=15)
        drawing.text(4, top + 84, "½ batch", size=15)
        for gpu in range(4):
            left = 112 + gpu * 132
            drawing.text(left, top + 18, f"GPU {4 * server + gpu}", size=15, bold=True)
            for column, color in enumerate(SHARDS):
                mine = column == gpu
                drawing.box(
                    left + column * 24, top + 32, 22, 52, color=color, fill="strong" if mine else "none", radius=2
                )
            drawing.text(left, top + 100, f"model {gpu}", size=15)
            if gpu < 3:
                drawing.arrow((left + 99, top + 58), (left + 129, top + 58), "blue", both=True)
    drawing.arrow((364, 128), (364, 190), "orange", both=True, dashed=True)
    drawing.text(376, 148, "data: one gradient all-reduce", color="orange", size=15)
    drawing.text(376, 170, "per step, over the network", color="orange", size=15)
    drawing.text(104, 148, "model: 4 all-reduces per", color="blue", size=15)
    drawing.text(104, 170, "layer, over NVLink", color="blue", size=15)
    drawing.text(104, 336, "filled: the columns of each matrix that this GPU stores", size=15, italic=True)
    return drawing
