"""Pictures of docs/concepts/tensor-parallelism.md."""

from __future__ import annotations

import math

from scripts.figures.svg import Drawing


def _sum_of_two(drawing: Drawing, first: float, second: float, x: float, end: float, rows: int = 2) -> None:
    """Arrows from two partial results, at heights `first` and `second`, into their sum between them."""
    middle, center, edge = (first + second) / 2, end + 18, 4.5 * rows
    drawing.grid(end, middle - edge, rows, 4, 9, lambda row, column: "grey", fill="strong")
    drawing.arrow((x, first), (center, middle - edge - 5), "blue", via=[(center, first)])
    drawing.arrow((x, second), (center, middle + edge + 5), "blue", via=[(center, second)])
    drawing.text(end - 10, middle, "g adds", size=15, bold=True, anchor="end", color="blue")


def mlp_split() -> Drawing:
    """An MLP with h = 4 and f = 16 on two ranks, every matrix cell by cell."""
    drawing = Drawing(640, 386, "An MLP with h = 4 and f = 16 on two ranks: W₁ is split by columns, W₂ by rows")
    for x, text, anchor in (
        (26, "x", "middle"),
        (140, "W₁, by columns", "middle"),
        (322, "gelu(x W₁)", "middle"),
        (430, "W₂, by rows", "middle"),
        (528, "partial", "middle"),
        (606, "y", "middle"),
    ):
        drawing.text(x, 12, text, size=15, bold=True, anchor=anchor)
    for rank in range(2):
        middle, first = 104 + rank * 178, 8 * rank

        def mine(number: int, first: int = first) -> str | None:
            return "blue" if first <= number < first + 8 else None

        drawing.text(8, middle - 44, f"rank {rank}", size=15, bold=True)
        drawing.grid(8, middle - 9, 2, 4, 9, lambda row, column: "grey", fill="strong")
        drawing.text(56, middle, "×", anchor="middle")
        drawing.grid(68, middle - 18, 4, 16, 9, lambda row, column, mine=mine: mine(column), fill="strong")
        drawing.text(140, middle + 34, f"columns {first} to {first + 7}", size=14, anchor="middle")
        drawing.arrow((218, middle), (244, middle))
        drawing.grid(250, middle - 9, 2, 16, 9, lambda row, column, mine=mine: mine(column), fill="strong")
        drawing.text(406, middle, "×", anchor="middle")
        drawing.grid(418, middle - 72, 16, 4, 9, lambda row, column, mine=mine: mine(row), fill="strong")
        drawing.text(436, middle + 86, f"rows {first} to {first + 7}", size=14, anchor="middle")
        drawing.arrow((460, middle), (496, middle))
        drawing.grid(502, middle - 9, 2, 4, 9, lambda row, column: "blue", fill="strong")
    _sum_of_two(drawing, 104, 282, 542, 588)
    return drawing


def f_and_g() -> Drawing:
    """f and g on four ranks, forward and backward: the same operators with their roles exchanged."""
    drawing = Drawing(640, 448, "f and g on four ranks: forward f copies and g sums, backward g copies and f sums")
    halves = (
        ("forward →", ("x", "gelu(x W₁)", "(…) W₂", "y"), ("copy, free", "all-reduce")),
        ("← backward", ("dx", "(…) W₁ᵀ", "dy W₂ᵀ", "dy"), ("all-reduce", "copy, free")),
    )
    columns = (6, 194, 322, 510)  # of the boxes; f and g stand between the first two, and the last two
    for half, (title, names, costs) in enumerate(halves):
        top = 6 + half * 216
        drawing.text(6, top + 10, title, bold=True)
        for rank in range(4):
            y = top + 28 + rank * 36
            for left, name in zip(columns, names, strict=True):
                varies = "W" in name
                fill = "strong" if varies else "tint"
                drawing.box(left, y, 108, 30, name, "blue" if varies else "grey", fill=fill, size=15)
            for start, end in ((116, 132), (178, 192), (304, 320), (432, 448), (494, 508)):
                points = ((start, y + 15), (end, y + 15))
                drawing.arrow(*(points if half == 0 else points[::-1]))
        for left, name, cost in zip((134, 450), "fg", costs, strict=True):
            sums = cost == "all-reduce"
            fill = "strong" if sums else "none"
            drawing.box(left, top + 26, 42, 142, name, "blue", fill=fill, dashed=not sums, bold=True, size=20)
            drawing.text(left + 21, top + 182, cost, size=15, bold=sums, anchor="middle", color="blue" if sums else "")
    drawing.text(6, 436, "a row: one rank; grey: the same on all ranks, blue: a rank's part", size=14, italic=True)
    return drawing


def attention_heads() -> Drawing:
    """Four attention heads on two ranks: columns of Q, K and V, and rows of the output projection."""
    drawing = Drawing(640, 252, "Four attention heads on two ranks: columns of Q, K and V, rows of the output matrix")
    for x, text in ((26, "x"), (144, "Q, K, V, by heads"), (304, "attention"), (424, "O, by heads"), (606, "y")):
        drawing.text(x, 12, text, size=15, bold=True, anchor="middle")
    drawing.text(526, 12, "partial", size=15, bold=True, anchor="middle")
    for rank in range(2):
        middle = 76 + rank * 128

        def mine(head: int, rank: int = rank) -> str | None:
            return "blue" if head // 2 == rank else None

        drawing.text(8, middle - 38, f"rank {rank}", size=15, bold=True)
        drawing.grid(8, middle - 22.5, 5, 4, 9, lambda row, column: "grey", fill="strong")
        drawing.text(57, middle, "×", anchor="middle")
        for matrix in range(3):
            for head in range(4):
                color, fill = mine(head) or "grey", "strong" if mine(head) else "none"
                drawing.box(70 + matrix * 52 + head * 11, middle - 20, 11, 40, color=color, fill=fill, radius=1)
            drawing.text(92 + matrix * 52, middle + 34, "QKV"[matrix], size=14, anchor="middle")
        drawing.arrow((224, middle), (248, middle))
        for head in range(2):
            left = 254 + head * 56
            drawing.grid(
                left, middle - 22, 5, 5, 9, lambda row, column: "blue" if column <= row else None, fill="strong"
            )
            drawing.text(left + 22, middle + 36, f"head {2 * rank + head}", size=14, anchor="middle")
        drawing.text(382, middle, "×", anchor="middle")
        for head in range(4):
            color, fill = mine(head) or "grey", "strong" if mine(head) else "none"
            drawing.box(402, middle - 26 + head * 13, 44, 13, color=color, fill=fill, radius=1)
        drawing.arrow((456, middle), (496, middle))
        drawing.grid(506, middle - 22.5, 5, 4, 9, lambda row, column: "blue", fill="strong")
    _sum_of_two(drawing, 76, 204, 546, 588, rows=5)
    return drawing


def vocabulary_split() -> Drawing:
    """The cross entropy of one token whose eight logits are split over four ranks, with its numbers."""
    logits, label = (1.0, 2.0, 0.0, 3.0, 2.0, 1.0, 0.0, 0.0), 1
    mine = [logits[2 * rank : 2 * rank + 2] for rank in range(4)]
    largest = max(logits)
    sums = [sum(math.exp(logit - largest) for logit in part) for part in mine]
    labels = [logits[label] - largest if label // 2 == rank else 0.0 for rank in range(4)]
    total, label_sum = sum(sums), sum(labels)
    drawing = Drawing(640, 300, "Cross entropy of one token on four ranks: three numbers per rank, not eight logits")
    rows = (
        ("largest", [max(part) for part in mine], f"max {largest:.0f}", "{:.0f}"),
        ("sum of exp", sums, f"sum {total:.2f}", "{:.2f}"),
        ("label − max", labels, f"sum −{-label_sum:.0f}", "{:.0f}"),
    )
    drawing.text(6, 52, "logits", size=15, bold=True)
    for rank, part in enumerate(mine):
        left = 116 + rank * 98
        drawing.text(left + 43, 12, f"rank {rank}", size=15, bold=True, anchor="middle")
        for column, logit in enumerate(part):
            drawing.box(left + column * 44, 30, 42, 42, f"{logit:.0f}", "blue", fill="strong")
            if 2 * rank + column == label:
                drawing.text(left + column * 44 + 21, 82, "↑ label", size=14, anchor="middle")
    for number, (name, values, reduced, form) in enumerate(rows):
        y = 96 + number * 48 + 24 * (number > 0)
        drawing.text(6, y + 18, name, size=15, bold=True)
        for rank, value in enumerate(values):
            drawing.box(116 + rank * 98, y, 86, 36, form.format(value).replace("-", "−"), "blue", fill="faint")
        drawing.arrow((500, y + 18), (532, y + 18), "blue")
        drawing.box(536, y, 98, 36, reduced, "grey", bold=True)
    drawing.text(636, 82, "first all-reduce", size=15, anchor="end", color="blue")
    drawing.text(636, 152, "second, for both sums", size=15, anchor="end", color="blue")
    loss = math.log(total) - label_sum
    drawing.text(6, 282, f"loss = log {total:.2f} + {-label_sum:.0f} = {loss:.2f}", bold=True)
    return drawing
