"""Pictures of docs/concepts/memory-and-recomputation.md, and the memory of docs/concepts/zero.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing, text_width

KINDS = {  # of memory, in the planner's order: color and fill of each
    "weights": ("grey", "strong"),
    "optimizer state": ("yellow", "strong"),
    "gradients": ("sky", "strong"),
    "activations": ("green", "strong"),
    "other": ("grey", "faint"),
}
USABLE_GIB = 71.7  # of an H100 with 80 GB
# GiB by kind: mjax plan --config llama3_8b --gpu h100 --train.unroll off --mesh.zero ZERO
LLAMA3_8B = {
    0: (44.87, 59.83, 43.89, 23.00, 1.55),
    1: (18.70, 7.48, 43.89, 23.00, 1.55),
    3: (5.70, 7.48, 11.39, 23.00, 2.77),
}
# Saved activations of a GPT layer in bytes per s·b·h, undivided, and the modes that keep them.
BLOCKS = [
    ("layer input", 2, ("none", "selective", "full")),
    ("norm output", 2, ("none",)),
    ("q, k, v", 6, ("none", "selective")),
    ("attention output", 2, ("none", "selective")),
    ("residual stream", 2, ("none", "selective")),
    ("norm output", 2, ("none",)),
    ("MLP, before GELU", 8, ("none", "selective")),
    ("MLP, after GELU", 8, ("none",)),
]
# GiB by kind: mjax plan --config llama3_70b --gpu h100 --mesh.pipe 1 --mesh.data 64 --mesh.model 1 --mesh.zero 3
# --train.recompute MODE, and the last row with --mesh.data 8 --mesh.model 8
LLAMA3_70B = {
    "none": (8.02, 8.21, 17.75, 177.66, 10.19),
    "selective": (8.02, 8.21, 17.75, 112.50, 10.19),
    "full": (8.02, 8.21, 17.75, 10.00, 10.19),
    "offload": (8.02, 8.21, 17.75, 0.00, 10.19),
    "selective + TP": (4.60, 8.21, 9.19, 14.06, 1.59),
}


def zero_memory() -> Drawing:
    """Memory of llama3_8b on each of 8 GPUs, with ZeRO 0, 1 and 3."""
    drawing = Drawing(640, 260, "llama3_8b on 8 GPUs: 173 GiB each without ZeRO, 95 with ZeRO-1, 50 with ZeRO-3")
    names = {0: "no ZeRO", 1: "ZeRO-1", 3: "ZeRO-3, FSDP"}
    rows = [(names[zero], f"--mesh.zero {zero}", amounts) for zero, amounts in LLAMA3_8B.items()]
    _memory_rows(drawing, rows, 2.1)
    return drawing


def memory_blocks() -> Drawing:
    """Eight saved arrays of a GPT layer with their bytes, and the recomputation modes that keep each."""
    drawing = Drawing(640, 434, "A layer's 32 s·b·h bytes: none keeps all, selective 20, full 2, offload 0 on the GPU")
    modes = ("none", "selective", "full", "offload")
    left, width = 298, 84
    drawing.text(4, 16, "bytes / s·b·h", size=14, italic=True)
    for column, mode in enumerate(modes):
        drawing.text(left + column * width + 40, 16, mode, size=15, bold=True, anchor="middle")
    for row, (name, units, keep) in enumerate(BLOCKS):
        y = 34 + row * 40
        drawing.text(4, y + 16, name, size=15)
        drawing.box(144, y, units * 18, 32, str(units), "green", radius=2)
        for column, mode in enumerate(modes):
            x = left + column * width
            if mode in keep:
                drawing.box(x, y, 80, 32, "keep", "green", size=14, radius=2)
            elif row == 0:
                drawing.box(x, y, 80, 32, "host", "grey", size=14, radius=2)
            else:
                drawing.box(x, y, 80, 32, "again", "sky", size=14, radius=2, fill="faint", dashed=True)
    y = 34 + len(BLOCKS) * 40 + 20
    drawing.text(4, y, "kept on the GPU", size=15, bold=True)
    for column, mode in enumerate(modes):
        total = sum(units for _, units, keep in BLOCKS if mode in keep)
        drawing.text(left + column * width + 40, y, str(total), bold=True, anchor="middle")
    drawing.text(4, y + 28, "again: recomputed in the backward pass. The paper's 34 adds 2 for dropout masks.", size=14)
    return drawing


def memory_over_step() -> Drawing:
    """Memory over a step with eight layers: activations pile up in the forward pass and vanish in the backward pass."""
    drawing = Drawing(640, 502, "Memory over a step: without recomputation the peak is after the forward pass")
    panels = [
        (222, "none", "every layer adds its activations", 15, 0, 36),
        (474, "full", "a layer adds its input, and is recomputed before its backward pass", 2, 13, 46),
    ]
    for base, mode, note, per_layer, temporary, backward in panels:
        x, floor, saved = 30.0, base - 40, 0
        drawing.text(38, base - 208, mode, bold=True)
        drawing.text(100, base - 208, note, size=14)
        for layer in range(16):
            width, gradients = (20, 0) if layer < 8 else (backward, 4 * (layer - 7))
            saved += per_layer if layer < 8 else 0
            top = floor - gradients
            drawing.box(x, top, width, gradients, color="sky", fill="strong", radius=0)
            drawing.box(x, top - saved, width, saved, color="green", fill="strong", radius=0)
            if layer >= 8 and temporary:
                drawing.box(x, top - saved - temporary, width, temporary, color="green", fill="faint", radius=0)
            saved -= per_layer if layer >= 8 else 0
            x += width
        drawing.text(110, base + 14, "forward", size=14, anchor="middle")
        drawing.text(190 + 4 * backward, base + 14, "backward", size=14, anchor="middle")
        drawing.text(x + 30, base + 14, "update", size=14, anchor="middle")
        drawing.box(x, floor - 32, 46, 32, color="sky", fill="strong", radius=0)
        drawing.box(30, floor, x + 16, 40, "weights and Adam", radius=0, size=15)
        drawing.arrow((30, base), (30, base - 216), width=1.5)
        drawing.arrow((30, base), (634, base), width=1.5)
    drawing.text(38, 92, "activations", size=15, color="green")
    drawing.arrow((96, 102), (138, 128), "green", width=1.5)
    drawing.text(470, 114, "gradients", size=15, color="sky")
    drawing.arrow((508, 124), (484, 156), "sky", width=1.5)
    drawing.text(232, 366, "one layer, recomputed", size=15, color="green")
    return drawing


def memory_modes() -> Drawing:
    """Predicted memory of llama3_70b on 64 H100s for each recomputation mode."""
    drawing = Drawing(640, 396, "llama3_70b on 64 H100s with FSDP: none and selective do not fit, full and offload fit")
    rows = [(name, "data 8, model 8" if "+" in name else "data 64", amounts) for name, amounts in LLAMA3_70B.items()]
    _memory_rows(drawing, rows, 1.75)
    return drawing


def _memory_rows(drawing: Drawing, rows: list[tuple[str, str, tuple[float, ...]]], scale: float) -> None:
    """Draw a bar for each row of (name, second line, GiB by kind), a line at the usable memory and a legend."""
    left, top, step = 132, 40, 64
    limit = left + USABLE_GIB * scale
    for number, (name, flag, amounts) in enumerate(rows):
        x, y = float(left), top + number * step
        drawing.text(4, y + 11, name, bold=True, size=15)
        drawing.text(4, y + 32, flag, size=14)
        for amount, (color, fill) in zip(amounts, KINDS.values(), strict=True):
            width = amount * scale
            if width:
                drawing.box(x, y, width, 42, color=color, fill=fill, radius=1)
            if width > 38:
                middle = x + width / 2
                at = middle if abs(middle - limit) > 22 else limit + (24 if middle > limit else -24)
                drawing.text(at, y + 21, f"{amount:.1f}", size=14, anchor="middle")
            x += width
        verdict = max(x, limit) + 10
        drawing.text(verdict, y + 12, f"{sum(amounts):.0f} GiB", bold=True)
        drawing.text(verdict, y + 32, "fits" if sum(amounts) <= USABLE_GIB else "does not fit", size=14)
    drawing.line([(limit, 24), (limit, top + len(rows) * step - 14)], width=2.5, dashed=True)
    drawing.text(limit, 12, f"H100: {USABLE_GIB} GiB usable", size=14, anchor="middle", bold=True)
    x, y = 4.0, top + len(rows) * step + 8
    for name, (color, fill) in KINDS.items():
        drawing.box(x, y - 8, 16, 16, color=color, fill=fill, radius=2)
        drawing.text(x + 22, y, name, size=14)
        x += 22 + text_width(name, 14) + 20
