"""Pictures of docs/concepts/context-parallelism.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

RANKS = 4
LEVELS = ("faint", "tint", "strong", "solid")  # of the color `context`, one per rank
CONTIGUOUS = tuple(chunk // 2 for chunk in range(2 * RANKS))  # the rank of each chunk
BALANCED = tuple(min(chunk, 2 * RANKS - 1 - chunk) for chunk in range(2 * RANKS))


def context_layer() -> Drawing:
    """A layer on four ranks of `context`: only attention crosses ranks."""
    drawing = Drawing(640, 236, "Each rank runs norms and MLP on its own positions; only attention needs other ranks")
    columns = ((84, 74, "norm"), (168, 92, "q, k, v"), (416, 64, "out"), (490, 142, "norm, MLP, …"))
    for x, width, name in columns:
        drawing.text(x + width / 2, 14, name, size=15, bold=True, anchor="middle")
    drawing.text(342, 14, "attention", size=15, bold=True, anchor="middle", color="pink")
    drawing.box(278, 30, 128, 170, "all ranks\nexchange\nq, k, v\nor only k, v", "pink", fill="strong", size=15)
    for rank in range(RANKS):
        y = 30 + rank * 44
        drawing.text(4, y + 12, f"rank {rank}", size=15, bold=True)
        drawing.text(4, y + 30, f"pos. {2 * rank}–{2 * rank + 1}", size=14)
        for x, width, _ in columns:
            drawing.box(x, y, width, 38, color="pink", fill="faint")
        drawing.arrow((260, y + 19), (278, y + 19), "pink")
        drawing.arrow((406, y + 19), (416, y + 19), "pink")
    drawing.text(84, 222, "a sequence of 8 positions, c = 4: light boxes need no other rank", size=15, italic=True)
    return drawing


def context_ulysses() -> Drawing:
    """Positions × heads of four ranks before, during and after attention with Ulysses."""
    drawing = Drawing(640, 288, "Ulysses: an all-to-all turns two positions, all heads into all positions, one head")
    panels = ((84, "2 positions, all heads", True), (284, "all positions, 1 head", False), (484, "back again", True))
    for x, label, by_position in panels:
        for position in range(8):
            for head in range(RANKS):
                rank = position // 2 if by_position else head
                fill = LEVELS[rank]
                drawing.box(x + head * 26, 34 + position * 24, 26, 24, color="pink", fill=fill, radius=0)
        drawing.text(x + 52, 14, "heads 0–3", size=15, anchor="middle")
        drawing.text(x + 52, 246, label, size=15, anchor="middle")
    for position in range(8):
        drawing.text(72, 46 + position * 24, str(position), size=14, anchor="end")
    drawing.text(4, 14, "position", size=15)
    for x in (196, 396):
        drawing.arrow((x, 130), (x + 80, 130), "pink", width=2.5)
        drawing.text(x + 40, 112, "all-to-all", size=15, anchor="middle", color="pink")
    drawing.text(336, 268, "attention runs here", size=15, anchor="middle", italic=True)
    for rank in range(RANKS):
        drawing.text(4, 58 + rank * 48, f"rank {rank}", size=14)
    return drawing


def context_allgather() -> Drawing:
    """All-gather of keys and values: rank 1 attends from chunks 1 and 6 to every chunk before them."""
    drawing = Drawing(640, 258, "All-gather: rank 1 attends from its own two chunks to the gathered keys of all ranks")
    for rank in range(RANKS):
        y, chunks = 34 + rank * 48, [chunk for chunk in range(8) if BALANCED[chunk] == rank]
        drawing.text(4, y + 17, f"rank {rank}", size=15, bold=rank == 1)
        for column, chunk in enumerate(chunks):
            drawing.box(64 + column * 38, y, 36, 34, str(chunk), "pink", fill="tint")
        drawing.line([(140, y + 17), (180, 115)], "pink", width=2)
    drawing.text(64, 14, "k, v chunks", size=15)
    drawing.arrow((180, 115), (206, 115), "pink")
    drawing.box(206, 96, 96, 38, "all-gather", "pink", fill="strong", size=15)
    drawing.arrow((302, 115), (336, 115), "pink")
    drawing.text(356, 14, "on rank 1: keys of chunks", size=15, bold=True)
    for row, chunk in enumerate((1, 6)):
        y = 80 + row * 60
        drawing.text(348, y + 17, f"q {chunk}", size=15, anchor="start")
        for key in range(8):
            seen, edge = key < chunk, key == chunk
            drawing.box(380 + key * 31, y, 29, 34, color="pink", fill="strong" if seen else "tint" if edge else "none")
    for key in range(8):
        drawing.text(394 + key * 31, 58, str(key), size=15, anchor="middle")
    drawing.text(348, 206, "dark: seen, light: half seen", size=15, italic=True)
    drawing.text(348, 230, "empty: the future", size=15, italic=True)
    return drawing


def context_balance() -> Drawing:
    """Causal work per rank with contiguous and with balanced chunks."""
    drawing = Drawing(640, 324, "Contiguous: the last rank has seven times the work of the first; balanced: equal")
    for panel, (label, owner) in enumerate((("contiguous", CONTIGUOUS), ("balanced (zigzag)", BALANCED))):
        x = 62 + panel * 324
        drawing.text(x, 14, label, bold=True)
        for query in range(8):
            fill = LEVELS[owner[query]]
            y = 32 + query * 26
            drawing.text(x - 8, y + 13, f"rank {owner[query]}", size=14, anchor="end")
            for key in range(query):
                drawing.box(x + key * 26, y, 26, 26, color="pink", fill=fill, radius=0)
            corners = [(x + query * 26, y), (x + query * 26, y + 26), (x + query * 26 + 26, y + 26)]
            drawing.polygon(corners, "pink", fill=fill)
        work = [sum(query + 0.5 for query in range(8) if owner[query] == rank) for rank in range(RANKS)]
        drawing.text(x, 264, "squares per rank", size=15)
        drawing.text(x, 288, ", ".join(f"{squares:g}" for squares in work), size=16, bold=True)
    drawing.text(4, 310, "rows: chunks of queries; columns: chunks of keys; diagonal: half", size=14, italic=True)
    return drawing
