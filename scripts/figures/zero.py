"""Pictures of docs/concepts/zero.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing, draw_server, text_width


def zero_example() -> Drawing:
    """ZeRO-1 in numbers: two replicas, four weights, each replica stores and updates two of them."""
    drawing = Drawing(640, 402, "ZeRO-1 on two replicas: gather four weights, compute, reduce-scatter, update two each")
    rows = [
        ("stored between steps", [[5, 1, None, None], [None, None, 8, 2]], "grey"),
        ("all-gather: all weights", [[5, 1, 8, 2], [5, 1, 8, 2]], "grey"),
        ("gradients of its batch", [[3, 0, 1, 2], [1, 2, 1, 0]], "sky"),
        ("reduce-scatter: sums", [[4, 2, None, None], [None, None, 2, 2]], "sky"),
        ("stored − 0.5 · sum", [[3, 0, None, None], [None, None, 7, 1]], "grey"),
    ]
    for replica in range(2):
        drawing.text(290 + replica * 210, 16, f"replica {replica}", bold=True, anchor="middle")
    for number, (name, values, color) in enumerate(rows):
        y = 36 + number * 76
        drawing.text(4, y + 20, name, size=15)
        for replica, cells in enumerate(values):
            for column, value in enumerate(cells):
                x = 206 + replica * 210 + column * 43
                label = "" if value is None else str(value)
                drawing.box(x, y, 40, 40, label, color, fill="none" if value is None else "tint", radius=2)
        if number < 4:
            for at in (247, 545) if number in (0, 2) else (290, 500):
                drawing.arrow((at, y + 42), (at, y + 74), "orange" if number in (0, 2) else "")
        for start, end in {0: ((545, 335), (247, 457)), 2: ((457, 247), (335, 545))}.get(number, ()):
            drawing.arrow((start, y + 42), (end, y + 74), "orange")
    return drawing


def zero_timeline() -> Drawing:
    """Compute and network over time of a step with four layers, for ZeRO 0, 1 and 3."""
    drawing = Drawing(640, 384, "ZeRO-1 gathers once before the step, ZeRO-3 gathers each layer just before it runs")
    left, unit, layers = 92, 25.4, 4

    def lanes(top: int, name: str, note: str) -> None:
        drawing.text(4, top + 2, name, bold=True)
        drawing.text(left, top + 2, note, size=14)
        drawing.text(4, top + 34, "compute", size=15)
        drawing.text(4, top + 72, "network", size=15)

    def put(top: int, lane: int, start: float, length: float, label: str, color: str) -> float:
        x, width = left + start * unit, length * unit
        label = label if text_width(label, 14) <= width else ""
        drawing.box(x, top + 18 + lane * 38, width, 32, label, color, size=14, radius=1)
        return start + length

    def layers_from(top: int, start: float) -> tuple[float, list[float]]:
        begins = []
        for number in range(2 * layers):
            forward = number < layers
            begins.append(start)
            name = f"{number + 1}" if forward else f"{2 * layers - number}"
            start = put(top, 0, start, 1 if forward else 2, name, "green" if forward else "sky")
        return start, begins

    lanes(12, "no ZeRO", "one all-reduce of float32 gradients, all update all weights")
    end, _ = layers_from(12, 0)
    put(12, 0, put(12, 1, end, 8, "all-reduce", "orange"), 1.2, "A", "grey")

    lanes(134, "ZeRO-1", "gather all weights in bf16, reduce-scatter float32 gradients")
    end, _ = layers_from(134, put(134, 1, 0, 2, "gather", "orange"))
    put(134, 0, put(134, 1, end, 4, "scatter", "orange"), 0.5, "A", "grey")

    lanes(256, "ZeRO-3", "gather and reduce-scatter (R) one layer during another")
    start = put(256, 1, 0, 0.5, "", "orange")
    end, begins = layers_from(256, start)
    for number, begin in enumerate(begins, 1):  # while a pass runs: gather for the next, scatter of the one before
        x = put(256, 1, begin, 0.5, "", "orange") if number < 2 * layers else begin
        if number > layers + 1:
            put(256, 1, x, 1, "R", "orange")
    put(256, 0, put(256, 1, end, 1, "R", "orange"), 0.5, "A", "grey")
    drawing.text(
        4, 366, "green: layers 1 to 4 forward, blue: backward, A: Adam; narrow: gather a layer", size=14, italic=True
    )
    return drawing


def hsdp() -> Drawing:
    """HSDP on eight GPUs: two groups of four, each with all weights in four shards."""
    drawing = Drawing(
        640, 344, "HSDP, --mesh.data 8 --mesh.replicate 2: gathers within a group, all-reduce between groups"
    )
    for group in range(2):
        top = 8 + group * 180
        drawing.text(4, top + 44, f"group {group}", bold=True)
        drawing.text(4, top + 66, f"replicate {group}", size=14)
        draw_server(drawing, top, 4 * group, "orange", "shard")
    for gpu in range(4):
        drawing.arrow((157 + gpu * 134, 132), (157 + gpu * 134, 186), both=True, dashed=True)
    for x, lines, color in (
        (176, ("inside groups:", "gather, scatter", "each layer"), "orange"),
        (440, ("between them:", "all-reduce", "once per step"), ""),
    ):
        for row, line in enumerate(lines):
            drawing.text(x, 142 + row * 18, line, size=14, color=color)
    drawing.text(100, 330, "filled: the shard of every weight that this GPU stores", size=15, italic=True)
    return drawing
