"""Pictures of docs/concepts/planner.md."""

from __future__ import annotations

from mjax.cluster.hardware import gpu_named
from mjax.config import load_config
from mjax.planner.ledger import ledger
from mjax.planner.time import predict_time
from scripts.figures.svg import Drawing, text_width

H100 = gpu_named("h100")
GROUPS = {  # of the parts of a step: name, color, fill
    ("matmul",): ("layer matmuls", "green", "strong"),
    ("attention",): ("attention", "green", "tint"),
    ("elementwise",): ("elementwise", "green", "faint"),
    ("recompute",): ("recomputed", "sky", "strong"),
    ("head",): ("embedding, head", "yellow", "tint"),
    ("model",): ("tensor-parallel collectives", "blue", "strong"),
    ("data",): ("gradient collectives", "orange", "strong"),
    ("optimizer",): ("optimizer", "grey", "strong"),
}


def step_time() -> Drawing:
    """Two predicted steps as stacked bars: compute on the left, collectives on the right."""
    drawing = Drawing(
        640, 262, "Predicted step: llama3_8b on 8 H100s is 58% matmuls, gpt_8b on 512 is 49% gradient sums"
    )
    left, width = 4, 630
    for row, (name, about) in enumerate((("llama3_8b", "8 H100s, ZeRO-3"), ("gpt_8b", "512 H100s, no ZeRO"))):
        step, y, x = predict_time(load_config(name), H100), 34 + row * 88, float(left)
        total = f"{step.total:.1f} s" if step.total > 1 else f"{1e3 * step.total:.0f} ms"
        drawing.text(left, y - 18, f"{name} on {about}: {total}", bold=True, size=15)
        for parts, (_, color, fill) in GROUPS.items():
            share = sum(step.parts[part] for part in parts) / step.total
            drawing.box(x, y, share * width, 44, color=color, fill=fill, radius=0)
            if share > 0.05:
                drawing.text(x + share * width / 2, y + 22, f"{share:.0%}", size=14, anchor="middle")
            x += share * width
    x, y = 4.0, 200.0
    for name, color, fill in GROUPS.values():
        wide = 24 + text_width(name, 14) + 16
        if x + wide > 640:
            x, y = 4.0, y + 24
        drawing.box(x, y - 8, 16, 16, color=color, fill=fill, radius=2)
        drawing.text(x + 22, y, name, size=14)
        x += wide
    return drawing


def communication() -> Drawing:
    """Bytes and exposed time of gpt_8b's collectives on 512 H100s, by axis."""
    drawing = Drawing(640, 214, "gpt_8b on 512 H100s: model sends four times the bytes of data in a third of the time")
    config = load_config("gpt_8b")
    step, sent = predict_time(config, H100), ledger(config).bytes_by_axis()
    rows = (("model", "over NVLink", "blue"), ("data", "over the network", "orange"))
    for column, title in ((150, "bytes sent per step"), (410, "time not hidden")):
        drawing.text(column, 14, title, size=15, bold=True)
    largest = max(sent.values()), max(step.parts["model"], step.parts["data"])
    for row, (axis, link, color) in enumerate(rows):
        y = 36 + row * 80
        drawing.text(4, y + 14, axis, bold=True)
        drawing.text(4, y + 38, link, size=14)
        size, seconds = sent[(axis,)], step.parts[axis]
        drawing.box(150, y, 150 * size / largest[0], 48, color=color, fill="strong", radius=1)
        drawing.text(158 + 150 * size / largest[0], y + 24, f"{size / 2**30:.1f} GiB", size=15)
        drawing.box(410, y, 150 * seconds / largest[1], 48, color=color, fill="strong", radius=1)
        drawing.text(418 + 150 * seconds / largest[1], y + 24, f"{1e3 * seconds:.0f} ms", size=15)
    drawing.text(4, 200, "Which axis costs more? Bytes say model, time says data.", size=15)
    return drawing
