"""Pictures of docs/concepts/mesh.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing, draw_server


def mesh() -> Drawing:
    """Eight GPUs as data 2 × model 4: columns of each matrix inside a server, sequences across servers."""
    drawing = Drawing(640, 372, "Eight GPUs as data 2 × model 4: a server splits every matrix, servers split the batch")
    for server in range(2):
        top = 8 + server * 164
        drawing.text(4, top + 18, f"server {server}", size=15, bold=True)
        for row in range(4):
            fill = "strong" if row // 2 == server else "none"
            drawing.box(6, top + 34 + row * 14, 66, 12, color="orange", fill=fill, radius=2)
        drawing.text(4, top + 106, f"data {server}", size=15, color="orange", bold=True)
        draw_server(drawing, top, 4 * server, "blue", "model")
    for gpu in range(4):
        drawing.arrow((157 + gpu * 134, 132), (157 + gpu * 134, 170), "orange", both=True, dashed=True)
    drawing.text(
        4, 316, "filled: this GPU's sequences of the batch, and its columns of each matrix", size=14, italic=True
    )
    drawing.arrow((6, 338), (46, 338), "blue", both=True)
    drawing.text(58, 338, "model: all four exchange activations, 4 times per layer, NVLink", size=15)
    drawing.arrow((6, 360), (46, 360), "orange", both=True, dashed=True)
    drawing.text(58, 360, "data: gradients, once per step, over the network", size=15)
    return drawing


def mesh_axes() -> Drawing:
    """The tokens and the weights that rank 0 holds, for each axis alone."""
    drawing = Drawing(640, 378, "What each mesh axis splits: the tokens and the weights that rank 0 of two holds")
    panels = (  # axis, color, its part, share of the sequences, of the positions, of the layers, of a layer's columns
        ("data", "orange", "half of the sequences", 2, 4, 4, 4),
        ("model", "blue", "half of every matrix", 4, 4, 4, 2),
        ("pipe", "green", "half of the layers", 4, 4, 2, 4),
        ("context", "pink", "half of the positions", 4, 2, 4, 4),
        ("expert", "yellow", "half of the experts", 2, 4, 4, 3),  # one column is attention, four are experts
        ("replicate", "grey", "a copy of ZeRO's shards", 1, 4, 4, 2),
    )
    for number, (axis, color, part, sequences, positions, layers, columns) in enumerate(panels):
        left, top = 6 + number % 3 * 214, 6 + number // 3 * 162
        drawing.box(left, top, 200, 150, fill="none", radius=8)
        drawing.text(left + 12, top + 18, axis, bold=True, color=color)
        drawing.text(left + 12, top + 40, part, size=14)
        for row in range(4):
            for column in range(4):
                fill = "strong" if row < sequences and column < positions else "none"
                drawing.box(left + 12 + column * 17, top + 56 + row * 17, 14, 14, color=color, fill=fill, radius=2)
            width = 17 if axis == "expert" else 22
            for column in range(88 // width):
                fill = "strong" if row < layers and column < columns else "none"
                at, shared = left + 100 + column * width, axis == "expert" and column == 0
                paint = "grey" if shared else color
                drawing.box(at, top + 56 + row * 17, width - 3, 14, color=paint, fill=fill, radius=2)
        drawing.text(left + 12, top + 136, "tokens", size=14)
        drawing.text(left + 100, top + 136, "attn, experts" if axis == "expert" else "weights", size=14)
    drawing.text(6, 342, "filled: what rank 0 of two holds; a row is a sequence, or a layer", size=14, italic=True)
    drawing.text(
        6, 364, "expert: grey is attention, on all ranks; replicate: 2 ZeRO groups of 2 ranks", size=14, italic=True
    )
    return drawing


def mesh_device_order() -> Drawing:
    """Sixteen GPUs as pipe 2 × data 2 × model 4 on two servers, and the partners of GPU 1 on each axis."""
    drawing = Drawing(640, 266, "pipe 2 × data 2 × model 4 on two servers of eight GPUs, with the partners of GPU 1")
    colors = {0: "blue", 2: "blue", 3: "blue", 5: "orange", 9: "green"}
    for server in range(2):
        top = 46 + server * 104
        drawing.box(86, top - 10, 548, 62, fill="none", dashed=True, radius=10)
        drawing.text(4, top + 10, f"server {server}", size=15, bold=True)
        drawing.text(4, top + 32, f"pipe {server}", size=15, color="green", bold=True)
        for place in range(8):
            gpu = server * 8 + place
            left = 98 + place * 66 + (8 if place > 3 else 0)
            fill = "solid" if gpu == 1 else "strong" if gpu in colors else "none"
            drawing.box(left, top, 54, 42, str(gpu), colors.get(gpu, "grey"), fill=fill, bold=gpu == 1)
    x1, x5 = 98 + 66 + 27, 98 + 5 * 66 + 8 + 27
    drawing.arrow((x1, 42), (x5, 42), "orange", both=True, via=[(x1, 18), (x5, 18)])
    drawing.text(x1 + 14, 8, "data: same columns, other sequences", size=14, color="orange")
    drawing.arrow((x1, 92), (x1, 144), "green", both=True)
    drawing.text(x1 + 14, 119, "pipe: the next layers, same columns", size=14, color="green")
    drawing.box(93, 41, 262, 52, color="blue", fill="none", radius=7)
    drawing.text(
        6, 224, "model: GPUs 0 to 3, neighbors in one server, hold a quarter of each matrix", size=15, color="blue"
    )
    drawing.text(6, 250, "GPU = (pipe × 2 + data) × 4 + model:  GPU 9 is pipe 1, data 0, model 1", size=15)
    return drawing
