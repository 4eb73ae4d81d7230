"""Pictures of docs/guides/fit-in-memory.md and choose-a-mesh.md."""

from __future__ import annotations

from mjax.config import load_config, with_values
from mjax.planner.memory import predict_memory
from scripts.figures.memory import USABLE_GIB
from scripts.figures.svg import Drawing

START = {"mesh.zero": 1, "train.micro_batch": 4, "train.recompute": "none"}
REMEDIES = [  # of llama3_8b on 8 H100s, each added to those before it
    ("as started", {}),
    ("--train.recompute selective", {"train.recompute": "selective"}),
    ("--train.micro-batch 1", {"train.micro_batch": 1}),
    ("--train.recompute full", {"train.recompute": "full"}),
    ("--mesh.zero 3", {"mesh.zero": 3}),
]


def oom_remedies() -> Drawing:
    """Predicted memory of llama3_8b on 8 H100s, with one remedy more in each row."""
    drawing = Drawing(640, 270, "llama3_8b on 8 H100s: four remedies lower 211 GiB to 30, below the 71.7 GiB usable")
    left, scale, values = 244, 1.5, dict(START)
    limit = left + USABLE_GIB * scale
    for row, (name, change) in enumerate(REMEDIES):
        values |= change
        size, y = predict_memory(with_values(load_config("llama3_8b"), values)).total / 2**30, 34 + row * 46
        drawing.text(4, y + 16, name, size=15)
        drawing.box(
            left, y, size * scale, 32, color="green" if size <= USABLE_GIB else "orange", fill="strong", radius=1
        )
        drawing.text(max(left + size * scale, limit) + 8, y + 16, f"{size:.0f} GiB", size=15, bold=True)
    drawing.line([(limit, 24), (limit, 262)], width=2.5, dashed=True)
    drawing.text(limit, 12, f"H100: {USABLE_GIB} GiB usable", size=14, anchor="middle", bold=True)
    return drawing


def mesh_layout() -> Drawing:
    """Three axes on 16 GPUs in two servers: model inside a server, data and pipe across."""
    drawing = Drawing(640, 252, "pipe 2 × data 2 × model 4: model stays in a server, pipe and data may leave it")
    for server in range(2):
        x = 8 + server * 320
        drawing.box(x, 34, 304, 150, fill="none", dashed=True, radius=10)
        drawing.text(x + 10, 16, f"server {server} = pipe {server}", bold=True, size=15)
        for row in range(2):
            y = 48 + row * 72
            for gpu in range(4):
                drawing.box(x + 12 + gpu * 72, y, 58, 44, f"GPU {server * 8 + row * 4 + gpu}", "blue", size=14)
                if gpu < 3:
                    drawing.line([(x + 70 + gpu * 72, y + 22), (x + 84 + gpu * 72, y + 22)], "blue", width=3)
        drawing.arrow((x + 152, 94), (x + 152, 118), "orange", both=True)
        drawing.text(x + 166, 106, f"data, {'layers 0–15' if not server else 'layers 16–31'}", size=14, color="orange")
    drawing.arrow((308, 140), (332, 140), "green", both=True)
    drawing.text(4, 204, "model: 4 messages per layer, NVLink", size=14, color="blue")
    drawing.text(4, 224, "data: once per step", size=14, color="orange")
    drawing.text(290, 204, "pipe: once per micro-batch, over network", size=14, color="green")
    return drawing
