"""Pictures of docs/concepts/experts.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

PROBABILITIES = (0.60, 0.05, 0.20, 0.15)  # of one token, for four experts
ASSIGNMENTS = ((0, 2), (0, 3), (0, 2), (1, 0), (2, 0), (2, 3))  # the two experts of each of six tokens
TILE = 4  # rows


def experts_router() -> Drawing:
    """The router's choice of two of four experts for one token, with numbers."""
    title = "Experts 0 and 2 have the largest probabilities, 0.60 and 0.20: weights 0.75 and 0.25"
    drawing = Drawing(640, 264, title)
    chosen = sorted(range(4), key=lambda expert: -PROBABILITIES[expert])[:2]
    total = sum(PROBABILITIES[expert] for expert in chosen)
    for x, text in ((36, "token"), (128, "router"), (266, "probability"), (400, "expert"), (506, "weight")):
        drawing.text(x, 14, text, size=15, bold=True, anchor="middle")
    drawing.box(4, 110, 64, 40, "cat", "grey")
    drawing.arrow((68, 130), (92, 130))
    drawing.box(92, 104, 74, 52, "matmul,\nsoftmax", "grey", size=15)
    for expert, probability in enumerate(PROBABILITIES):
        y, mine = 32 + expert * 54, expert in chosen
        drawing.box(190, y + 6, 100 * probability, 28, color="yellow", fill="strong" if mine else "faint", radius=2)
        drawing.text(196 + 100 * probability, y + 20, f"{probability:.2f}", size=15, bold=mine)
        drawing.box(352, y, 96, 40, f"expert {expert}", "yellow", fill="tint" if mine else "none", dashed=not mine)
        if mine:
            drawing.arrow((240 + 100 * probability, y + 20), (352, y + 20), "yellow")
            drawing.arrow((448, y + 20), (474, y + 20), "yellow")
            drawing.text(510, y + 20, f"× {probability / total:.2f}", anchor="middle", bold=True)
            drawing.arrow((542, y + 20), (580, 124 if expert < 2 else 136), "yellow")
    drawing.box(580, 110, 56, 40, "y", "grey")
    drawing.text(92, 252, "0.60 / (0.60 + 0.20) = 0.75: only two of four MLPs run", size=15, italic=True)
    return drawing


def experts_devices() -> Drawing:
    """Eight tokens and four experts on four devices: all-gather, compute, reduce-scatter."""
    title = "All-gather gives every device all tokens, it computes its expert's, reduce-scatter adds"
    drawing = Drawing(640, 306, title)
    takes = ((0, 1, 4), (2, 5, 6, 7), (0, 3, 5), (1, 2, 3, 4, 6, 7))  # the tokens of each expert, two experts each
    for x, text in ((96, "tokens"), (226, "all-gather"), (400, "own expert"), (570, "result")):
        drawing.text(x, 14, text, size=15, bold=True, anchor="middle")
    for device in range(4):
        y = 32 + device * 62
        drawing.text(4, y + 24, f"dev. {device}", size=15)
        for token in range(2):
            drawing.box(62 + token * 34, y + 9, 32, 30, str(2 * device + token), "grey")
        for token in range(8):
            mine = token in takes[device]
            x, row = 170 + token % 4 * 28, y + token // 4 * 25
            drawing.box(x, row, 26, 23, str(token), "yellow", fill="strong" if mine else "none", size=14, radius=2)
        drawing.arrow((130, y + 24), (166, y + 24), "yellow")
        drawing.arrow((284, y + 24), (324, y + 24), "yellow")
        drawing.box(324, y + 4, 150, 40, f"expert {device}: {len(takes[device])} rows", "yellow", size=15)
        drawing.arrow((474, y + 24), (536, y + 24), "yellow")
        for token in range(2):
            drawing.box(538 + token * 34, y + 9, 32, 30, str(2 * device + token), "grey")
    for x in (148, 506):
        drawing.line([(x, 32), (x, 274)], "yellow", width=3)
    drawing.text(4, 294, "dark: tokens that chose this expert; right line: reduce-scatter", size=14, italic=True)
    return drawing


def experts_tiles() -> Drawing:
    """Rows of a grouped matmul, sorted by expert and filled up to whole tiles."""
    drawing = Drawing(640, 252, "Twelve assignments by expert in five tiles of four rows; each tile has one matrix")
    groups = [[token for token, experts in enumerate(ASSIGNMENTS) if expert in experts] for expert in range(4)]
    tiles = [(e, rows[i : i + TILE]) for e, rows in enumerate(groups) for i in range(0, len(rows), TILE)]
    for number in range(6):  # `max_tiles` of twelve assignments
        x, used = 8 + number * 106, number < len(tiles)
        expert, rows = tiles[number] if used else (None, [])
        drawing.text(x + 44, 14, f"tile {number}", size=15, anchor="middle")
        for row in range(TILE):
            filled = row < len(rows)
            label = f"token {rows[row]}" if filled else "0" if used else ""
            color, fill = ("yellow", "strong") if filled else ("grey", "faint" if used else "none")
            drawing.box(x, 30 + row * 30, 88, 28, label, color, fill=fill, size=14, radius=2, dashed=not used)
        if used:
            drawing.arrow((x + 44, 150), (x + 44, 174), "yellow")
            drawing.box(x, 174, 88, 34, f"× W of {expert}", "yellow", size=14)
        else:
            drawing.text(x + 44, 190, "not run", size=14, anchor="middle", italic=True)
    drawing.text(8, 234, f"experts of tokens 0–5: {', '.join(f'{a}+{b}' for a, b in ASSIGNMENTS)}", size=15)
    return drawing


def experts_capacity() -> Drawing:
    """Rows that a capacity drops, and the same rows without one."""
    drawing = Drawing(640, 232, "A capacity of three rows per expert drops three of twelve assignments")
    counts = [sum(expert in experts for experts in ASSIGNMENTS) for expert in range(4)]
    for panel, (label, capacity) in enumerate((("capacity 3 (not in mjax)", 3), ("dropless (mjax)", 99))):
        x = 8 + panel * 326
        drawing.text(x, 14, label, bold=True)
        for expert, count in enumerate(counts):
            for row in range(count):
                kept = row < capacity
                at = x + expert * 76, 172 - row * 28
                label, color = ("", "yellow") if kept else ("dropped", "grey")
                fill = "strong" if kept else "none"
                drawing.box(*at, 70, 26, label, color, fill=fill, size=14, radius=2, dashed=not kept)
            drawing.text(x + expert * 76 + 35, 216, f"expert {expert}", size=15, anchor="middle")
        if capacity < 10:
            drawing.line([(x - 4, 115), (x + 304, 115)], dashed=True)
    return drawing
