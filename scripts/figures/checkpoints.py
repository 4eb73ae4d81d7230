"""Pictures of docs/reference/checkpoints.md and docs/reference/run-directory.md."""

from __future__ import annotations

from configs.llama3_8b import config
from scripts.figures.svg import Drawing

RANK = 16


def checkpoint_size() -> Drawing:
    """Bytes of a Llama 3 8B on disk: checkpoints with Adam and Muon, exports, adapters."""
    embeddings, norms, matrices, adapters = _parameters()
    total = embeddings + norms + matrices
    bars = (
        ("AdamW", (4 * total, 4 * total, 4 * total)),
        ("Muon", (4 * total, 4 * total, 4 * (embeddings + norms))),
        ("to-hf, fp32", (4 * total,)),
        ("to-hf, bf16", (2 * total,)),
        (f"LoRA r = {RANK}", (4 * adapters, 4 * adapters, 4 * adapters)),
    )
    drawing = Drawing(640, 306, f"Llama 3 8B on disk: {_gb(12 * total)} with AdamW, {_gb(2 * total)} exported in bf16")
    drawing.text(8, 18, f"Llama 3 8B on disk, {total / 1e9:.2f} billion parameters", bold=True)
    unit = 400 / (12 * total)
    parts = (("weights", "blue"), ("first moment", "green"), ("second moment", "yellow"))
    for row, (name, sizes) in enumerate(bars):
        top, left = 40 + row * 46, 130
        drawing.text(122, top + 17, name, size=15, anchor="end")
        for size, (_, color) in zip(sizes, parts, strict=False):
            drawing.box(left, top, max(size * unit, 1), 34, color=color, fill="strong", radius=2)
            left += size * unit
        drawing.text(left + 8, top + 17, _gb(sum(sizes)), size=15)
    left = 130
    for name, color in parts:
        drawing.box(left, 278, 18, 18, color=color, fill="strong", radius=2)
        drawing.text(left + 26, 287, name, size=15)
        left += 44 + 9 * len(name)
    return drawing


def _parameters() -> tuple[int, int, int, int]:
    """Parameters in embedding and head, norms and matrices of the layers, and in adapters on all of these."""
    model = config.model
    h, f, heads, key_heads = model.hidden, model.feed_forward, model.heads, model.kv_heads
    d_h = h // heads
    shapes = ((h, heads * d_h), (h, key_heads * d_h), (h, key_heads * d_h), (heads * d_h, h), (h, f), (h, f), (f, h))
    matrices = model.layers * sum(rows * columns for rows, columns in shapes)
    adapters = model.layers * sum(RANK * (rows + columns) for rows, columns in shapes)
    return 2 * model.vocabulary * h, (2 * model.layers + 1) * h, matrices, adapters


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def run_directory() -> Drawing:
    """The files of a run: settings, record, state, and files for people."""
    drawing = Drawing(640, 372, "A run directory holds its settings, its record, its checkpoints and its pictures")
    drawing.text(8, 18, "runs/NAME/", bold=True)
    groups = (
        ("blue", "settings", ("config.json", "data.json", "environment.json")),
        ("orange", "record", ("metrics.jsonl", "goodput.json", "tensorboard/")),
        ("green", "state", ("checkpoints/200/", "checkpoints/300/", "tokenizer/")),
        ("yellow", "to look at", ("loss.png", "samples.jsonl", "profile/")),
    )
    about = (
        ("every field of the config", "digests of the tokens", "versions, devices, commit: per start"),
        ("a line per step", "seconds by activity: per start", "the same metrics"),
        ("weights, moments, step", "the newest", "copied from the data"),
        ("the loss curve", "answers, with --log.sample-prompts", "where time went, with --profile"),
    )
    drawing.line([(20, 30), (20, 350)], width=1.5)
    for number, ((color, title, files), notes) in enumerate(zip(groups, about, strict=True)):
        for row, (file, note) in enumerate(zip(files, notes, strict=True)):
            y = 46 + number * 84 + row * 26
            drawing.line([(20, y), (36, y)], width=1.5)
            drawing.box(42, y - 11, 170, 22, color=color, radius=3)
            drawing.text(50, y, file, size=15)
            drawing.text(224, y, note, size=15)
        drawing.text(632, 46 + number * 84 + 26, title, size=15, bold=True, anchor="end", color=color)
    return drawing
