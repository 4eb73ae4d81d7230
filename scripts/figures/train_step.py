"""Pictures of docs/concepts/train-step.md."""

from __future__ import annotations

import itertools

from scripts.figures.svg import Drawing


def train_step() -> Drawing:
    """One device's train step from the batch to the update, with the axis of each communication in its color."""
    drawing = Drawing(640, 690, "The train step on one device: cast, loop over micro-batches, reduce, clip, update")
    drawing.box(20, 8, 280, 52, "float32 weights and Adam\nthis device's shards", size=15)
    drawing.box(340, 8, 280, 52, "B sequences, B / d per replica\nbatch split over data", "orange", size=15)
    drawing.arrow((160, 60), (160, 106), "orange")
    drawing.text(172, 82, "cast to bf16, ZeRO gathers", size=14, color="orange")
    drawing.arrow((480, 60), (480, 106))
    drawing.text(468, 82, "m × b", size=14, anchor="end")

    drawing.box(8, 106, 624, 238, fill="none", dashed=True, radius=10)
    drawing.text(22, 126, "repeat for each of m micro-batches of b sequences", size=15, bold=True)
    columns = [
        (22, 108, "embedding"),
        (152, 150, "L layers"),
        (324, 108, "final norm"),
        (454, 164, "logits and loss"),
    ]
    for x, width, name in columns:
        drawing.box(x, 146, width, 38, name, "green", size=15)
        drawing.box(x, 204, width, 38, "gradients", "sky", size=15)
    for (x, width, _), (after, _, _) in itertools.pairwise(columns):
        drawing.arrow((x + width, 165), (after, 165), "green")
        drawing.arrow((after, 223), (x + width, 223), "sky")
    drawing.arrow((536, 184), (536, 204), "sky")
    rows = [
        ("blue", "model: f and g, four times per layer", "green", "pipe: send/recv between stages"),
        ("pink", "context: keys and values, in attention", "yellow", "expert: all tokens of the group"),
    ]
    for number, (left, left_text, right, right_text) in enumerate(rows):
        drawing.text(22, 264 + number * 22, left_text, size=14, color=left)
        drawing.text(372, 264 + number * 22, right_text, size=14, color=right)
    drawing.box(22, 302, 596, 34, "add to the gradient accumulators, float32", size=15)

    drawing.arrow((320, 344), (320, 372), "orange")
    drawing.box(8, 372, 624, 44, "data: sum float32 gradients once per step (ZeRO-3: per layer)", "orange", bold=True)
    drawing.arrow((133, 416), (133, 438))
    drawing.arrow((258, 460), (282, 460))
    drawing.box(8, 438, 250, 44, "divide by the loss scale", size=15)
    drawing.box(282, 438, 350, 44, "global norm: squares summed over ranks", "blue", size=15)
    drawing.arrow((457, 482), (457, 504))
    drawing.box(8, 504, 624, 44, "clip: multiply by min(1, limit / norm)", size=15)
    drawing.arrow((160, 548), (160, 590))
    drawing.text(172, 569, "norm and loss finite", size=14)
    drawing.arrow((480, 548), (480, 590))
    drawing.text(492, 569, "not finite", size=14)
    drawing.box(8, 590, 304, 52, "Adam on this device's shards\nno communication", size=15)
    drawing.box(
        328, 590, 304, 52, "skip: keep the old state\nfp16: may halve the loss scale", size=15, fill="none", dashed=True
    )
    drawing.text(
        320,
        668,
        "Every device computes the same norm, so all take the same branch.",
        size=15,
        anchor="middle",
        italic=True,
    )
    return drawing


def data_parallel() -> Drawing:
    """Four replicas with equal weights and different sequences, whose gradients an all-reduce adds."""
    drawing = Drawing(
        640, 344, "Four replicas compute four gradients, an all-reduce adds them, all apply the same update"
    )
    for replica in range(4):
        left = 8 + replica * 158
        drawing.text(left + 75, 16, f"replica {replica}", bold=True, anchor="middle")
        drawing.box(left, 32, 150, 40, f"sequences {2 * replica}, {2 * replica + 1}", "orange", size=15)
        drawing.arrow((left + 75, 72), (left + 75, 96))
        drawing.box(left, 96, 150, 40, "the same weights", size=15)
        drawing.arrow((left + 75, 136), (left + 75, 160), "sky")
        drawing.box(left, 160, 150, 40, f"gradient {replica}", "sky")
        drawing.arrow((left + 75, 200), (left + 75, 224), "orange")
        drawing.arrow((left + 75, 268), (left + 75, 292), "orange")
        drawing.box(left, 292, 150, 44, "the same update", size=15)
    drawing.box(8, 224, 624, 44, "data: all-reduce, every replica receives the sum of all four", "orange", bold=True)
    return drawing


def gradient_accumulation() -> Drawing:
    """Two ways to run eight sequences on a replica: all at a time, or as four micro-batches with a fourth of the
    activations."""
    drawing = Drawing(
        640, 342, "One micro-batch of 8 sequences, or 4 of 2: the same gradient, a fourth of the activations"
    )
    unit = 16
    for number, (top, name) in enumerate([(10, "m = 1, b = 8"), (182, "m = 4, b = 2")]):
        drawing.text(8, top + 8, name, bold=True)
        drawing.text(130, top + 8, "one micro-batch" if number == 0 else "four micro-batches, one all-reduce", size=15)
        height = 96 if number == 0 else 30
        base = top + 124
        x = 40.0
        runs = 1 if number == 0 else 4
        for run in range(runs):
            forward, backward = 8 * unit / runs, 16 * unit / runs
            names = ("forward 8", "backward 8") if runs == 1 else (f"{run}", f"{run}")
            drawing.box(x, base - height, forward, height, names[0], "green", size=15, radius=1)
            drawing.box(x + forward, base - height, backward, height, names[1], "sky", size=15, radius=1)
            x += forward + backward
        drawing.box(x, base - 96, 96, 96, "all-\nreduce", "orange", size=15, radius=1)
        drawing.box(x + 96, base - 96, 74, 96, "update", size=15, radius=1)
        drawing.arrow((40, base), (40, top + 22), width=1.5)
        drawing.arrow((40, base), (626, base), width=1.5)
        drawing.text(626, base + 16, "time", size=14, anchor="end")
    drawing.text(
        8, 328, "height: saved activations; green: forward, blue: backward of micro-batch 0 to 3", size=14, italic=True
    )
    return drawing
