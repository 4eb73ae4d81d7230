"""Pictures of docs/concepts/sequence-parallelism.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

RANKS = 4


def layer_regions() -> Drawing:
    """One layer on four ranks, without and with sequence parallelism: regions, and the collectives at their borders."""
    drawing = Drawing(640, 354, "One layer on four ranks: between its two regions work is repeated, or split by tokens")
    parts = (("norm", 60), ("f", 28), ("attention", 102), ("g", 28), ("dropout, +", 82))
    parts = (*parts, *(("MLP", width) if name == "attention" else (name, width) for name, width in parts))
    for strip, (title, costs) in enumerate(
        (
            ("Tensor parallelism alone", {"f": "copy", "g": "all-reduce"}),
            ("With sequence parallelism", {"f": "all-gather", "g": "reduce-scatter"}),
        )
    ):
        top, left = 4 + strip * 156, 8
        drawing.text(6, top + 10, title, size=15, bold=True)
        for name, width in parts:
            if name in "fg":
                sends = costs[name] != "copy"
                fill = "strong" if sends else "none"
                drawing.box(left + 3, top + 44, width - 6, 72, name, "blue", fill=fill, dashed=not sends, bold=True)
                color = "blue" if sends else ""
                drawing.text(left + width / 2, top + 130, costs[name], size=14, anchor="middle", color=color)
            else:
                drawing.text(left + width / 2, top + 34, name, size=14, anchor="middle")
                region = name in ("attention", "MLP")
                for rank in range(RANKS):
                    y, split = top + 44 + rank * 18.5, strip == 1 and not region
                    drawing.box(left, y, width, 16, fill="none", color="grey", radius=1)
                    share = width / RANKS if split else width
                    at = left + (rank * share if split else 0)
                    color = "blue" if region or split else "grey"
                    drawing.box(at, y, share, 16, color=color, fill="tint" if region else "strong", radius=1)
            left += width + 2
    drawing.text(
        6, 318, "a row: the tokens of one rank, first to last; grey: the same work on all ranks", size=14, italic=True
    )
    drawing.text(6, 340, "light blue: all tokens, but a quarter of the heads or columns", size=14, italic=True)
    return drawing


def all_reduce_halves() -> Drawing:
    """An all-reduce on four ranks as a reduce-scatter and an all-gather, with numbers."""
    drawing = Drawing(640, 254, "An all-reduce of four chunks on four ranks: a reduce-scatter, then an all-gather")
    cell, top = 28, 44
    states = (
        ("partial sums", lambda rank, chunk: str(rank + 1), "blue"),
        ("own chunk", lambda rank, chunk: "10" if rank == chunk else "", "blue"),
        ("all chunks", lambda rank, chunk: "10", "grey"),
    )
    lefts = (62, 290, 518)
    for (title, value, color), left in zip(states, lefts, strict=True):
        drawing.text(left + 2 * cell, 26, title, size=15, bold=True, anchor="middle")
        for rank in range(RANKS):
            if left == lefts[0]:
                drawing.text(6, top + rank * cell + 14, f"rank {rank}", size=14)
            for chunk in range(RANKS):
                text = value(rank, chunk)
                fill = "strong" if text and color == "blue" else "tint" if text else "none"
                drawing.box(left + chunk * cell, top + rank * cell, cell - 2, cell - 2, text, color, fill=fill, size=15)
    for left, name in ((180, "reduce-scatter"), (408, "all-gather")):
        drawing.arrow((left, 99), (left + 104, 99), "blue")
        drawing.text(left + 52, 82, name, size=14, anchor="middle", color="blue")
        drawing.text(left + 52, 118, "3 chunks", size=14, anchor="middle")
    drawing.arrow((345, 196), (345, 162))
    drawing.text(
        345, 208, "sequence parallelism computes norm, dropout and residual sum here", size=15, anchor="middle"
    )
    drawing.text(
        345, 236, "all-reduce: each rank sends 6 chunks, 2 · (t − 1) / t of the array", size=15, anchor="middle"
    )
    return drawing
