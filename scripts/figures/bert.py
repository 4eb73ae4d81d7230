"""Pictures of docs/guides/bert.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

STEPS = range(200, 2001, 200)
MASKED_LOSS = (5.92, 5.77, 5.70, 5.66, 5.60, 5.50, 5.40, 5.30, 5.23, 5.19)
"""Validation loss of the masked tokens in `make bert`, in nats, from its metrics.jsonl; two CPU cores, 2026-11-30."""
ORDER_ACCURACY = (51.8, 49.9, 59.6, 63.1, 62.5, 61.9, 66.4, 66.9, 66.8, 68.3)
"""Sentence-order accuracy of the same validations, in percent."""


def bert_sample() -> Drawing:
    """One training sample of BERT: two segments, some tokens masked, and the two questions about them."""
    drawing = Drawing(640, 236, "A BERT sample: two segments with masked tokens, and the two predictions")
    words = ("[CLS]", "the", "[MASK]", "is", "old", "[SEP]", "it", "has", "[MASK]", "walls", "[SEP]")
    left, centers = 8.0, []
    for index, word in enumerate(words):
        width = len(word) * 9.0 + 12
        color = "orange" if word == "[MASK]" else "blue" if index < 6 else "green"
        drawing.box(left, 96, width, 36, word, color, fill="strong" if word == "[MASK]" else "tint", size=15, radius=1)
        centers.append(left + width / 2)
        left += width
    drawing.line([(8, 140), (8, 148), (centers[5] + 26, 148), (centers[5] + 26, 140)], "blue")
    drawing.text((8 + centers[5] + 26) / 2, 164, "segment 0", size=15, anchor="middle", color="blue")
    drawing.line([(centers[5] + 30, 140), (centers[5] + 30, 148), (left, 148), (left, 140)], "green")
    drawing.text((centers[5] + 30 + left) / 2, 164, "segment 1", size=15, anchor="middle", color="green")
    for center, word in ((centers[2], "city"), (centers[8], "three")):
        drawing.arrow((center, 94), (center, 60), "orange")
        drawing.text(center, 44, f"“{word}”?", size=16, anchor="middle", color="orange", bold=True)
    drawing.text(
        (centers[2] + centers[8]) / 2, 18, "masked tokens: predicted from both sides", size=15, anchor="middle"
    )
    drawing.arrow((centers[0], 134), (centers[0], 206), via=[])
    drawing.text(centers[0] + 12, 206, "sentence order: are the two segments swapped?", size=15)
    return drawing


def bert_curve() -> Drawing:
    """Validation of `make bert` over 2,000 steps: the masked-token loss and the sentence-order accuracy."""
    drawing = Drawing(640, 290, "A small BERT over 2,000 steps: masked-token loss falls, sentence-order accuracy rises")
    _panel(drawing, 44, "masked-token loss (nats)", MASKED_LOSS, (5.0, 6.0), (5.0, 5.5, 6.0), 5.90, "by frequency")
    _panel(drawing, 374, "sentence-order accuracy", ORDER_ACCURACY, (45, 70), (50, 60, 70), 50, "by chance", "%")
    return drawing


def _panel(drawing, left, title, values, limits, ticks, baseline, name, unit="") -> None:
    top, width, height = 44, 250, 190

    def y(value: float) -> float:
        return top + height * (limits[1] - value) / (limits[1] - limits[0])

    points = [(left + width * step / 2000, y(value)) for step, value in zip(STEPS, values, strict=True)]
    drawing.text(left, 20, title, bold=True)
    drawing.line([(left, top), (left, top + height), (left + width, top + height)])
    for tick in ticks:
        drawing.line([(left - 4, y(tick)), (left, y(tick))])
        drawing.text(left - 7, y(tick), f"{tick}{unit}", size=14, anchor="end")
    for step in (0, 1000, 2000):
        at = left + width * step / 2000
        drawing.line([(at, top + height), (at, top + height + 4)])
        drawing.text(at, top + height + 16, f"{step:,}", size=14, anchor="end" if step == 2000 else "middle")
    drawing.text(left + width / 2, top + height + 40, "step", size=14, anchor="middle")
    drawing.line([(left, y(baseline)), (left + width, y(baseline))], "grey", dashed=True)
    drawing.text(left + width, y(baseline) - 11, name, size=14, anchor="end", color="grey")
    drawing.line(points, "orange", width=2.5)
    for point in points:
        drawing.circle(*point, 3.5, color="orange", fill="solid")
    below = 14 if values[-1] < values[0] else -14
    drawing.text(points[-1][0], points[-1][1] + below, f"{values[-1]}{unit}", size=14, anchor="end", color="orange")
