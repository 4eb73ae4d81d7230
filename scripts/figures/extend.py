"""Pictures of docs/extend and docs/guides/inspect-a-model.md."""

from __future__ import annotations

from pathlib import Path

from scripts.figures.svg import Drawing

MJAX = Path(__file__).resolve().parents[2] / "mjax"
PURPOSES = {
    "commands": "one file per command",
    "finetuning": "BERT on tasks",
    "tasks": "evaluation",
    "profiling": "where time goes",
    "run": "the loop",
    "generation": "text",
    "interop": "HF, Megatron",
    "doctor": "checks",
    "planner": "mjax plan",
    "checkpoint": "Orbax",
    "step": "compiled train step, optimizers, precision",
    "models": "protocol, attention, MLP, families",
    "lora": "adapters",
    "pictures": "plots",
    "parallel": "f and g, ZeRO",
    "cluster": "launch, GPUs",
    "data": "text → batches",
    "config": "every option, typed",
    "utils": "files, names, progress",
}
COLORS = {"models": "blue", "parallel": "blue", "step": "blue", "run": "orange", "commands": "yellow"}


def _imports() -> dict[str, set[str]]:
    """The folders that the files in each folder of mjax import."""
    found: dict[str, set[str]] = {name: set() for name in PURPOSES}
    for file in MJAX.glob("*/**/*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == ["from"] and words[1].startswith("mjax."):
                found[file.relative_to(MJAX).parts[0]].add(words[1].split(".")[1])
    return {name: (folders & found.keys()) - {name} for name, folders in found.items()}


def rooms() -> Drawing:
    """The folders of mjax: each imports only from rows below it."""
    imports, levels = _imports(), {}
    while len(levels) < len(imports):
        ready = [name for name, below in imports.items() if name not in levels and below <= levels.keys()]
        if not ready:
            raise ValueError("the folders of mjax import each other in a circle")
        levels |= {name: max((levels[other] for other in imports[name]), default=-1) + 1 for name in ready}
    top = max(levels.values())
    drawing = Drawing(640, 58 * (top + 1) + 8, "The folders of mjax in rows: each imports only from rows below it")
    for level in range(top + 1):
        row = [name for name in PURPOSES if levels[name] == level]
        width = (588 - 8 * (len(row) - 1)) / len(row)
        for number, name in enumerate(row):
            left, y = 44 + number * (width + 8), 4 + 58 * (top - level)
            drawing.box(left, y, width, 52, f"{name}/\n{PURPOSES[name]}", COLORS.get(name, "grey"), size=14.5)
    drawing.arrow((20, 12), (20, 58 * (top + 1) - 8), label="")
    return drawing


def code_path() -> Drawing:
    """One batch: from train.py to the loss, and from the layers to the first matmul of attention."""
    steps = [
        ("train.py", "the command", "grey"),
        ("commands/train.py", "flags → Config", "grey"),
        ("run/loop.py", "batch, step, callbacks", "orange"),
        ("step/step.py", "shard_map, gradients, update", "orange"),
        ("step/forward.py", "embed, layers, loss", "blue"),
    ]
    drawing = Drawing(640, 470, "From train.py through the loop and the train step to the layers and to the loss")
    for number, (file, what, color) in enumerate(steps):
        drawing.box(170, 4 + number * 66, 300, 48, f"{file}\n{what}", color, size=15)
        if number:
            drawing.arrow((320, 4 + number * 66 - 18), (320, 4 + number * 66))
    for left, texts, color in (
        (8, ("models/causal.py", "loss: logits, labels"), "green"),
        (332, ("models/stack.py, block.py", "x + attention, x + MLP"), "blue"),
    ):
        drawing.box(left, 340, 300, 48, "\n".join(texts), color, size=15)
        drawing.box(left, 414, 300, 48, BELOW[left], color, fill="faint", size=15)
        drawing.arrow((left + 150, 388), (left + 150, 414))
    drawing.arrow((240, 316), (158, 340))
    drawing.arrow((400, 316), (482, 340))
    return drawing


BELOW = {
    8: "parallel/cross_entropy.py\nsums over the vocabulary shards",
    332: "parallel/layers.py, linear.py\nf, then the first matmul",
}


def model_parts() -> Drawing:
    """The parts of a model that you write, and everything that mjax derives from it."""
    drawing = Drawing(640, 330, "A batch goes through embed, the stacked layers and output; mjax derives the rest")
    drawing.text(8, 16, "you write", bold=True)
    drawing.box(8, 34, 100, 84, "batch()\ntokens,\nlabels", "orange")
    drawing.box(146, 34, 100, 84, "embed()\nids →\nstream", "blue")
    drawing.box(284, 34, 180, 84, "", "blue", fill="faint")
    drawing.text(374, 48, "stack(): L layers", size=15, anchor="middle")
    drawing.box(294, 62, 76, 46, "attention", "blue", size=14.5)
    drawing.box(378, 62, 76, 46, "MLP", "blue", size=14.5)
    drawing.box(502, 34, 130, 84, "output()\nstream →\ntable, x", "blue")
    for left, right in ((108, 146), (246, 284), (464, 502)):
        drawing.arrow((left, 76), (right, 76))
    drawing.arrow((320, 124), (320, 160), width=3)
    drawing.text(334, 142, "traced once per mesh", size=15, italic=True)
    drawing.text(8, 178, "mjax derives", bold=True)
    parts = [
        "loss, logits,\ngeneration", "every mesh,\nZeRO, pipeline", "checkpoints,\nresharding",
        "mjax plan:\nmemory, time", "FLOPs,\ncollectives", "hidden states,\ngradients",
    ]  # fmt: skip
    for number, label in enumerate(parts):
        drawing.box(8 + number % 3 * 212, 196 + number // 3 * 66, 200, 56, label, "grey", size=15)
    return drawing


# The array `rows` of docs/guides/inspect-a-model.md: attention weights in tenths, at most 9.
MEASURED = """
9000000000000000
9000000000000000
0900000000000000
9000000000000000
0900000000000000
0090000000000000
0090000000000000
9000000000000000
0900000000000000
0090000000000000
0009000000000000
0000900000000000
0000090000000000
0000009000000000
0000009000010000
0000000900000000
"""


def attention_map() -> Drawing:
    """Attention weights of a head that copies."""
    rows = MEASURED.split()
    drawing = Drawing(640, 470, "Attention map of a copying head: rows 8 to 15 read the token seven positions earlier")
    tokens = (7, 3, 19, 28, 11, 30, 14, 22) * 2
    cell, left, top = 25, 110, 40
    for number, token in enumerate(tokens):
        drawing.text(left + number * cell + cell / 2, top - 14, str(token), size=14, anchor="middle")
        drawing.text(left - 8, top + number * cell + cell / 2, str(token), size=14, anchor="end")
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            level = ["none", "faint", "tint", "strong", "solid"][min((int(value) + 1) // 2, 4)]
            if column <= row:
                drawing.box(
                    left + column * cell, top + row * cell, cell - 2, cell - 2, "", "blue", fill=level, radius=1
                )
    drawing.text(4, 26, "reads from", size=15, italic=True)
    drawing.text(4, 250, "at token", size=15, italic=True)
    for number, (level, words) in enumerate(
        (("solid", "0.7 – 1"), ("strong", "0.5"), ("tint", "0.3"), ("faint", "0.1"))
    ):
        drawing.box(530, 200 + number * 32, 22, 22, "", "blue", fill=level, radius=1)
        drawing.text(560, 211 + number * 32, words, size=15)
    return drawing
