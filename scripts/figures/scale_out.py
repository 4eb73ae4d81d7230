"""The picture of docs/get-started/scale-out.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing


def scale_out() -> Drawing:
    """The same model on one GPU, on a server that splits its matrices, and on two servers that split the batch too."""
    drawing = Drawing(640, 300, "One model on one GPU, on a server of eight, and on two servers")
    drawing.text(8, 20, "one GPU", bold=True)
    drawing.box(8, 36, 56, 56, "GPU", "grey")
    drawing.text(8, 112, "--mesh.data 1", size=15)

    drawing.text(200, 20, "one server: every matrix in 8 shards", bold=True)
    _server(drawing, 200, 36)
    drawing.text(200, 112, "--mesh.model 8", size=15, color="blue")
    drawing.arrow((74, 64), (190, 64))

    drawing.text(200, 150, "two servers: each reads half of the batch", bold=True)
    _server(drawing, 200, 166)
    _server(drawing, 200, 226)
    drawing.arrow((588, 184), (588, 256), "orange", both=True, via=[(610, 184), (610, 256)])
    drawing.text(8, 196, "gradients over", color="orange", size=15)
    drawing.text(8, 216, "the network,", color="orange", size=15)
    drawing.text(8, 236, "once a step", color="orange", size=15)
    drawing.text(200, 290, "--mesh.data 2 --mesh.model 8", size=15, color="orange")
    return drawing


def _server(drawing: Drawing, left: float, top: float) -> None:
    drawing.box(left, top, 384, 52, fill="none", dashed=True, radius=8)
    for gpu in range(8):
        drawing.box(left + 8 + gpu * 46.5, top + 8, 42, 36, "1/8", "blue", size=14)
