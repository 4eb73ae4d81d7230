"""Pictures of docs/guides/schedules.md, drawn from the functions that the train step uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.step.learning_rate import learning_rate
from scripts.figures.svg import Drawing

STEPS, WARMUP = 1000, 100


def _axes(drawing: Drawing, left: float, right: float, top: float, bottom: float) -> None:
    drawing.line([(left, top - 6), (left, bottom), (right + 6, bottom)])


def schedules() -> Drawing:
    """Learning rate over 1,000 steps for cosine, linear, WSD and inverse square root, with 100 steps of warm-up."""
    title = "Learning rate of four schedules over 1,000 steps: WSD stays at the peak until its final decay"
    drawing = Drawing(640, 330, title)
    left, right, top, bottom = 84, 620, 46, 270
    _axes(drawing, left, right, top, bottom)
    base = Config()
    train = replace(base.train, steps=STEPS, global_batch=1)
    places = {
        "wsd": ("orange", 0.66, top - 16),
        "inverse_square_root": ("pink", 0.2, 196),
        "cosine": ("blue", 0.42, 66),
        "linear": ("green", 0.73, 166),
    }
    for schedule, (color, share, y) in places.items():
        optimizer = replace(
            base.optimizer,
            schedule=schedule,
            learning_rate=1.0,
            min_learning_rate=0.1,
            warmup_steps=WARMUP,
            wsd_decay="minus_sqrt",
            wsd_decay_steps=200,
        )
        steps = np.arange(0, STEPS + 1, 4)
        rates = learning_rate(replace(base, train=train, optimizer=optimizer), steps, np)
        width = (right - left) / STEPS
        points = [
            (left + step * width, bottom - rate * (bottom - top))
            for step, rate in zip(steps.tolist(), rates.tolist(), strict=True)
        ]
        drawing.line(points, color, width=2.5)
        drawing.text(left + share * (right - left), y, schedule, color=color, size=15, bold=True)
    for value, label in ((1.0, "peak"), (0.1, "minimum")):
        drawing.text(left - 8, bottom - value * (bottom - top), label, size=15, anchor="end")
    for step in (0, WARMUP, 800, STEPS):
        x = left + step / STEPS * (right - left)
        drawing.line([(x, bottom), (x, bottom + 5)])
        drawing.text(min(x, 608), bottom + 20, f"{step:,}", size=15, anchor="middle")
    drawing.text(left + 4, bottom + 44, "warm-up", size=15, italic=True)
    drawing.text((left + right) / 2, bottom + 44, "steps", size=15, anchor="middle")
    drawing.text(right, bottom + 44, "WSD decay", size=15, anchor="end", italic=True)
    return drawing


def batch_rampup() -> Drawing:
    """Global batch of each step with batch_rampup 16 16 864 and a global batch of 64."""
    drawing = Drawing(640, 246, "A batch ramp-up from 16 to 64 sequences: a larger batch after every 288 samples")
    left, right, top, bottom = 84, 620, 34, 190
    _axes(drawing, left, right, top, bottom)
    base = Config()
    train = replace(base.train, global_batch=64, batch_rampup=(16, 16, 864))
    sizes = BatchSizes.from_config(replace(base, train=train))
    steps = 48
    width = (right - left) / steps
    for step in range(steps):
        size = sizes.size(step)
        height = size / 64 * (bottom - top)
        fill = "solid" if size == 64 else "tint"
        drawing.box(left + step * width + 1, bottom - height, width - 2, height, color="orange", fill=fill, radius=1)
    for size in (16, 32, 48, 64):
        drawing.text(left - 8, bottom - size / 64 * (bottom - top), str(size), size=15, anchor="end")
    for first, before, _ in sizes.pieces:
        x = left + first * width
        drawing.line([(x, bottom), (x, bottom + 6)])
        drawing.text(max(x, left), bottom + 20, f"{before}", size=15, anchor="middle")
    drawing.text((left + right) / 2, bottom + 44, "samples read before the step", size=15, anchor="middle")
    drawing.text(4, 14, "sequences per step", size=15)
    return drawing
