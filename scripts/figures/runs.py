"""Pictures of docs/guides/resume-and-branch.md and profile-and-compare.md."""

from __future__ import annotations

from scripts.figures.svg import Drawing

LEFT, STEP = 80, 2.5  # x of step 0, and units per step


def _x(step: float) -> float:
    return LEFT + step * STEP


def _checkpoint(drawing: Drawing, step: int, y: float, color: str = "green") -> None:
    drawing.circle(_x(step), y, 7, color=color, fill="solid")


def run_life() -> Drawing:
    """A run of 200 steps in three starts: killed at step 137, stopped by SIGTERM at 164, done at 200."""
    drawing = Drawing(640, 300, "A run in three starts: after kill -9 it repeats 37 steps, after SIGTERM none")
    rows = (
        (64, "start 1", 0, 137, (50, 100)),
        (144, "start 2", 100, 164, (150, 164)),
        (224, "start 3", 164, 200, (200,)),
    )
    for y, label, first, last, saved in rows:
        drawing.text(4, y, label, size=15, bold=True)
        drawing.line([(_x(first), y), (_x(last), y)], "blue", width=4)
        for step in saved:
            _checkpoint(drawing, step, y)
            drawing.text(_x(step), y - 20, str(step), size=15, anchor="middle", color="green")
    drawing.box(_x(100), 133, _x(137) - _x(100), 22, color="grey", fill="strong")
    drawing.text(_x(118.5), 168, "repeated", size=15, anchor="middle")
    drawing.text(_x(137) + 6, 64, "✗ kill -9 at step 137", size=15, color="orange", bold=True)
    drawing.text(_x(164) + 12, 144, "SIGTERM:", size=15, color="orange", bold=True)
    drawing.text(_x(164) + 12, 164, "saves, exit 75", size=15, color="orange", bold=True)
    drawing.text(_x(200), 245, "exit 0", size=15, color="green", bold=True, anchor="middle")
    drawing.arrow((_x(100), 74), (_x(100), 130), "green", dashed=True)
    drawing.arrow((_x(164), 154), (_x(164), 212), "green", dashed=True)
    drawing.line([(_x(0), 262), (_x(200), 262)])
    for step in (0, 50, 100, 150, 200):
        drawing.line([(_x(step), 262), (_x(step), 268)])
        drawing.text(_x(step), 282, str(step) if step else "step 0", size=15, anchor="middle")
    _checkpoint(drawing, 12, 224)
    drawing.text(_x(12) + 14, 224, "checkpoint", size=15)
    return drawing


def run_branches() -> Drawing:
    """A WSD run that trains on at its peak, with a decayed copy from step 40,000 and a run from its weights."""
    drawing = Drawing(640, 286, "Branches of a run: a copy decays from a checkpoint, a new run takes the weights alone")
    top, y = 24, 96
    drawing.text(4, y - 22, "stable", size=15, bold=True)
    drawing.line([(24, y), (600, y)], "blue", width=4)
    drawing.arrow((590, y), (622, y), "blue", width=4)
    for number, x in enumerate((150, 290, 430, 570)):
        drawing.circle(x, y, 8, color="green", fill="solid")
        drawing.text(x, y - 22, f"{20 * (number + 1)},000", size=15, anchor="middle", color="green")
    drawing.text(320, top, "learning rate at its peak", size=15, anchor="middle", italic=True)
    drawing.line([(290, y + 8), (300, 160), (420, 176)], "orange", width=4)
    drawing.circle(420, 176, 8, color="green", fill="solid")
    drawing.text(436, 166, "stable_40000", size=15, bold=True)
    drawing.text(436, 186, "copied, then decays", size=15)
    drawing.line([(150, y + 8), (150, 244)], "grey", width=2, dashed=True)
    drawing.line([(150, 244), (330, 244)], "pink", width=4)
    drawing.circle(330, 244, 8, color="green", fill="solid")
    drawing.text(346, 234, "continued", size=15, bold=True)
    drawing.text(346, 254, "--init: weights only", size=15)
    drawing.text(160, 222, "step 0", size=15, color="pink")
    return drawing


PROFILE = (  # of gpt_demo, the table on profile-and-compare.md
    ("matmuls", 45.0, "blue"),
    ("attention", 12.8, "sky"),
    ("other kernels", 13.9, "green"),
    ("copies", 4.9, "yellow"),
    ("optimizer", 0.5, "pink"),
    ("collectives", 0.5, "orange"),
    ("idle", 22.3, "grey"),
)


def profile_bar() -> Drawing:
    """One step of gpt_demo: the rows of the first profile table as shares of a bar."""
    drawing = Drawing(640, 176, "A step of gpt_demo on a CPU: 45% matmuls, 13% attention, 22% idle")
    left = 10.0
    for _, share, color in PROFILE:
        width = 620 * share / 100
        drawing.box(left, 16, width, 50, f"{share:.0f}%" if share > 4 else "", color, fill="strong", size=15, radius=1)
        left += width
    for number, (name, share, color) in enumerate(PROFILE):
        x, y = 10 + number % 4 * 158, 96 + number // 4 * 34
        drawing.box(x, y - 8, 16, 16, color=color, fill="strong", radius=1)
        drawing.text(x + 24, y, f"{name} {share}%" if share < 1 else name, size=15)
    drawing.text(320, 162, "one step, 2.6 s", size=15, anchor="middle", italic=True)
    return drawing


LOSSES = {  # of the two runs on profile-and-compare.md, from metrics.jsonl
    "slow": "8.37 8.38 8.37 8.37 8.37 8.36 8.35 8.35 8.34 8.33 8.34 8.33 8.34 8.3 8.3 8.32 8.3 8.3 8.29 8.28",
    "fast": "8.37 8.38 8.36 8.36 8.34 8.3 8.25 8.24 8.18 8.13 8.15 8.05 8.07 7.98 7.95 7.98 7.91 7.92 7.89 7.87",
}


def compare_runs() -> Drawing:
    """Losses of two runs that differ in the learning rate, over 20 steps."""
    drawing = Drawing(640, 270, "Losses of two runs over 20 steps: learning rate 1e-3 falls faster than 1e-4")
    left, right, top, bottom = 70, 500, 24, 216
    drawing.line([(left, top - 8), (left, bottom), (right + 8, bottom)])
    for loss in (7.8, 8.0, 8.2, 8.4):
        y = bottom - (loss - 7.8) / 0.6 * (bottom - top)
        drawing.line([(left - 5, y), (left, y)])
        drawing.text(left - 10, y, str(loss), size=15, anchor="end")
    for (name, text), color, rate in zip(LOSSES.items(), ("blue", "orange"), ("1e-4", "1e-3"), strict=True):
        losses = [float(loss) for loss in text.split()]
        points = [
            (left + step * (right - left) / 20, bottom - (loss - 7.8) / 0.6 * (bottom - top))
            for step, loss in enumerate(losses, 1)
        ]
        drawing.line(points, color, width=2.5)
        drawing.text(points[-1][0] + 10, points[-1][1], f"{name}, {rate}", size=15, bold=True, color=color)
    for step in (1, 10, 20):
        x = left + step * (right - left) / 20
        drawing.line([(x, bottom), (x, bottom + 5)])
        drawing.text(x, bottom + 20, str(step), size=15, anchor="middle")
    drawing.text((left + right) / 2, bottom + 42, "step", size=15, anchor="middle")
    drawing.text(left + 8, top - 14, "loss (nats per token)", size=15)
    return drawing
