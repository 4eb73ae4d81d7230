"""Pictures of docs/guides/fine-tune.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

CONVERSATIONS = (
    (("user", "2 + 2?"), ("assistant", "4 <end>"), ("user", "Times 3?"), ("assistant", "12 <end>")),
    (("user", "Hi"), ("assistant", "Hello <end>")),
)


def sft_mask() -> Drawing:
    """Two conversations in one sequence: only answers are trained, and attention stops at the border."""
    drawing = Drawing(640, 190, "Two packed conversations: the loss counts the tokens of the answers alone")
    drawing.text(4, 24, "role", size=15)
    drawing.text(4, 62, "tokens", size=15)
    drawing.text(4, 105, "loss mask", size=15)
    left = 84.0
    for number, turns in enumerate(CONVERSATIONS):
        start = left
        for role, text in turns:
            answer = role == "assistant"
            color, width = "green" if answer else "grey", len(text) * 9.2 + 14
            drawing.box(left, 42, width, 40, text, color, fill="strong" if answer else "faint", size=15, radius=1)
            drawing.text(left + width / 2, 24, "model" if answer else "user", size=14, anchor="middle")
            drawing.box(left, 90, width, 30, "1" if answer else "0", color, fill="tint" if answer else "none", radius=1)
            left += width
        drawing.line([(start, 130), (start, 138), (left, 138), (left, 130)])
        drawing.text((start + left) / 2, 154, f"conversation {number + 1}", size=15, anchor="middle")
        drawing.text((start + left) / 2, 174, "positions from 0", size=14, anchor="middle")
        left += 6
    return drawing


def lora() -> Drawing:
    """A frozen matrix W of h × f next to two thin trained ones, A of h × r and B of r × f."""
    drawing = Drawing(640, 250, "LoRA: a frozen matrix W, and two thin matrices A and B that are trained")
    drawing.box(12, 92, 60, 40, "x", "grey", fill="faint")
    drawing.text(42, 148, "h", size=15, anchor="middle")
    drawing.arrow((72, 104), (148, 60), via=[(110, 104), (110, 60)])
    drawing.arrow((72, 120), (148, 186), via=[(110, 120), (110, 186)])
    drawing.box(152, 20, 280, 80, "W, frozen", "grey", fill="strong", bold=True)
    drawing.text(292, 116, "h × f, no gradient, no Adam state", size=14, anchor="middle")
    drawing.box(152, 146, 34, 80, "A", "green", fill="strong", bold=True)
    drawing.text(169, 240, "h × r", size=14, anchor="middle")
    drawing.arrow((190, 186), (220, 186))
    drawing.box(224, 170, 208, 32, "B, starts at 0", "green", fill="strong", bold=True)
    drawing.text(328, 218, "r × f, float32 with Adam", size=14, anchor="middle")
    drawing.circle(500, 112, 18, "+", "grey", fill="faint")
    drawing.arrow((436, 60), (500, 92), via=[(500, 60)])
    drawing.arrow((436, 186), (500, 132), via=[(500, 186)])
    drawing.text(510, 176, "× alpha / r", size=14)
    drawing.arrow((518, 112), (564, 112))
    drawing.box(568, 92, 60, 40, "y", "grey", fill="faint")
    drawing.text(598, 148, "f", size=15, anchor="middle")
    return drawing
