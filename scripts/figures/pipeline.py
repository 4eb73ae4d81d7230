"""Pictures of docs/concepts/pipeline.md."""

from __future__ import annotations

import numpy as np

from mjax.parallel.pipeline_schedules import PipelineSchedule, build_schedule
from scripts.figures.svg import Drawing

LEFT = 68  # x where time begins
UNIT = 23.5  # of a forward pass through a whole stage


def pipeline_schedules() -> Drawing:
    """GPipe, 1F1B and interleaved 1F1B on one time axis, from their tables."""
    title = "GPipe and 1F1B take 24 units for six micro-batches on three stages, interleaved 1F1B takes 21"
    drawing = Drawing(640, 502, title)
    panels = (
        ("gpipe", 1, "GPipe: all forwards, then all backwards", 4),
        ("1f1b", 1, "1F1B: each backward as soon as it can", 14),
        ("1f1b", 2, "Interleaved 1F1B: two chunks of layers per stage", 4),
    )
    top = 0.0
    for name, chunks, label, gap in panels:
        schedule = build_schedule(name, stages=3, micro_batches=6, chunks=chunks)
        drawing.text(4, top + 14, label, size=15, bold=True)
        drawing.text(636, top + 14, f"bubble {schedule.bubble(1, 2):.0%} of F + B", size=15, anchor="end")
        boxes = _boxes(schedule, UNIT / chunks)
        rows = [top + 30 + stage * (30 + gap) for stage in range(3)]
        for stage, y in enumerate(rows):
            drawing.text(4, y + 15, f"stage {stage}", size=15)
            _draw_row(drawing, boxes[stage], y, mark=gap > 10)
        if gap > 10:
            _draw_way(drawing, boxes, rows)
        top = rows[-1] + 46
    drawing.arrow((LEFT, top + 2), (636, top + 2))
    drawing.text(4, top + 2, "time", size=15)
    legend = ((LEFT, "green", "F forward"), (LEFT + 126, "sky", "B backward"), (LEFT + 262, "", "bubble, idle"))
    for x, color, text in legend:
        drawing.box(x, top + 18, 20, 20, color=color or "grey", hatch=not color, radius=2)
        drawing.text(x + 26, top + 28, text, size=15)
    drawing.arrow((LEFT + 396, top + 28), (LEFT + 424, top + 28), width=2)
    drawing.text(LEFT + 430, top + 28, "micro-batch 0", size=15)
    return drawing


def pipeline_animation() -> Drawing:
    """1F1B on three stages, tick by tick; without motion, its fifth tick."""
    schedule = build_schedule("1f1b", stages=3, micro_batches=6)
    drawing = Drawing(640, 226, "1F1B tick by tick: each stage's F and B, its messages, and the activations it stores")
    for stage in range(3):
        drawing.box(8 + stage * 222, 36, 180, 82, fill="none", radius=8)
        drawing.text(98 + stage * 222, 20, f"stage {stage}", bold=True, size=15, anchor="middle")
        drawing.text(8 + stage * 222, 136, "stored:", size=15)
    drawing.text(8, 208, "tick", size=15)
    style = [f"@keyframes tick{{0%{{opacity:1}}{100 / schedule.ticks:g}%,100%{{opacity:0}}}}"]
    for tick in range(schedule.ticks):
        drawing.shapes.append(f'<g class="tick t{tick}" opacity="{int(tick == 4)}">')
        _draw_tick(drawing, schedule, tick)
        drawing.shapes.append("</g>")
        style.append(f".t{tick}{{animation-delay:{1.5 * (tick - schedule.ticks):g}s}}")
    moving = f".tick{{animation:tick {1.5 * schedule.ticks:g}s step-end infinite}}{''.join(style[1:])}"
    drawing.shapes.append(f"<style>{style[0]}@media(prefers-reduced-motion:no-preference){{{moving}}}</style>")
    return drawing


def pipeline_stages() -> Drawing:
    """Layers in four stages, and what neighbors send to each other."""
    drawing = Drawing(640, 250, "80 layers in four stages: activations go to the next stage, gradients come back")
    drawing.text(320, 14, "F sends an activation [b · s, h] on", color="green", size=15, anchor="middle")
    for stage in range(4):
        x = 8 + stage * 162
        drawing.box(x, 32, 138, 180, fill="none", color="grey", radius=8)
        drawing.text(x + 69, 48, f"stage {stage}", bold=True, size=15, anchor="middle")
        for line in range(4):
            first = stage * 20 + 5 * line
            drawing.box(x + 14, 87 + line * 24, 110, 20, f"layers {first}–{first + 4}", "green", size=14, radius=2)
        if stage == 0:
            drawing.box(x + 14, 62, 110, 20, "embedding", "grey", size=14, radius=2)
        if stage == 3:
            drawing.box(x + 14, 184, 110, 22, "head and loss", "grey", size=14, radius=2)
        if stage < 3:
            drawing.arrow((x + 138, 96), (x + 162, 96), "green", width=2.5)
            drawing.arrow((x + 162, 150), (x + 138, 150), "sky", width=2.5)
    drawing.text(320, 232, "B sends the gradient of its input back", color="sky", size=15, anchor="middle")
    return drawing


def pipeline_chunks() -> Drawing:
    """Which of eight layers each stage stores with one and with two chunks."""
    drawing = Drawing(640, 184, "Stage 0 stores layers 0 and 1 with one chunk, layers 0 and 4 with two chunks")
    for stage in range(4):
        drawing.text(210 + stage * 122, 14, f"stage {stage}", size=15, bold=True, anchor="middle")
    for row, chunks in enumerate((1, 2)):
        y = 30 + row * 70
        drawing.text(4, y + 16, f"V = {chunks}", bold=True)
        drawing.text(4, y + 38, "one group" if chunks == 1 else "two chunks", size=14)
        layers = np.arange(8).reshape(chunks, 4, -1)  # [chunk, stage, layers in a row]
        for stage in range(4):
            for number, layer in enumerate(layers[:, stage].ravel()):
                fill = "tint" if chunks == 1 or number == 0 else "strong"
                drawing.box(158 + stage * 122 + number * 53, y, 50, 48, str(layer), "green", fill=fill)
    drawing.text(4, 172, "V = 2: after layer 3 the activation returns from stage 3 to stage 0", size=15, italic=True)
    return drawing


def pipeline_tick() -> Drawing:
    """One tick of the loop on one stage."""
    drawing = Drawing(640, 268, "One tick: store the arrived arrays, run F if it is on, run B if it is on, send")
    stages = (
        (4, 84, "store", "grey", ("y and dx", "that came", "→ slots")),
        (100, 204, "F, if on", "green", ("stage 0: embedding", "all: layers", "activations → buffer")),
        (316, 216, "B, if on", "sky", ("last stage: head, loss", "all: layers' gradient", "stage 0: embedding's")),
        (544, 92, "send", "grey", ("ppermute", "y → next", "dx → prev.")),
    )
    for number, (x, width, name, color, lines) in enumerate(stages):
        drawing.box(x, 40, width, 116, color=color, fill="faint", radius=8)
        drawing.text(x + width / 2, 24, name, bold=True, anchor="middle")
        for row, line in enumerate(lines):
            drawing.text(x + width / 2, 62 + row * 34, line, size=15, anchor="middle")
        if number < 3:
            drawing.arrow((x + width, 98), (stages[number + 1][0], 98))
    drawing.box(160, 192, 316, 34, "ring buffer: one slot per F in flight", fill="tint", size=15)
    drawing.arrow((202, 156), (202, 192), "green")
    drawing.arrow((424, 192), (424, 156), "sky")
    drawing.text(
        4, 252, "the stage's column of the table sets both conditions and all buffer slots", size=15, italic=True
    )
    return drawing


def pipeline_memory() -> Drawing:
    """Micro-batches in flight per stage: GPipe and 1F1B, sixteen micro-batches."""
    drawing = Drawing(640, 196, "With 16 micro-batches each GPipe stage stores 16, and the 1F1B stages 7, 5, 3 and 1")
    for column, (name, label) in enumerate((("gpipe", "GPipe"), ("1f1b", "1F1B"))):
        schedule, x = build_schedule(name, stages=4, micro_batches=16), 70 + column * 330
        drawing.text(x, 16, f"{label}, m = 16", bold=True)
        for stage in range(4):
            y, held = 36 + stage * 34, schedule.max_in_flight(stage)
            for slot in range(held):
                drawing.box(x + slot * 14, y, 12, 24, color="green", fill="strong", radius=1)
            drawing.text(x + held * 14 + 6, y + 12, str(held), size=15)
            if not column:
                drawing.text(4, y + 12, f"stage {stage}", size=15)
    drawing.text(70, 184, "one bar: the saved activations of one micro-batch on one stage", size=15, italic=True)
    return drawing


def _draw_tick(drawing: Drawing, schedule: PipelineSchedule, tick: int) -> None:
    """Draw the passes of one tick on every stage, the messages at its end, and the stored micro-batches."""
    begun, ended = (slots.on.cumsum(axis=0) for slots in (schedule.forward, schedule.backward))
    for stage in range(schedule.stages):
        x = 8 + stage * 222
        for row, (kind, slots, color) in enumerate((("F", schedule.forward, "green"), ("B", schedule.backward, "sky"))):
            y, on = 46 + row * 34, slots.on[tick, stage]
            label = f"{kind} {slots.micro_batch[tick, stage]}" if on else ""
            drawing.box(x + 12, y, 156, 28, label, color if on else "grey", fill="strong", hatch=not on, radius=2)
            if on and kind == "F" and stage < schedule.stages - 1:
                drawing.arrow((x + 180, y + 14), (x + 222, y + 14), color, width=2.5)
            if on and kind == "B" and stage:
                drawing.arrow((x, y + 14), (x - 42, y + 14), color, width=2.5)
        first = ended[tick - 1, stage] if tick else 0
        for number, micro_batch in enumerate(range(first, begun[tick, stage])):
            drawing.box(x + number * 34, 150, 30, 28, str(micro_batch), "green", size=15, radius=2)
    drawing.text(44, 208, f"{tick}", size=15, bold=True)
    drawing.box(72, 202, 560 * (tick + 1) / schedule.ticks, 12, color="grey", fill="strong", radius=2)


def _boxes(schedule: PipelineSchedule, unit: float) -> list[list[tuple]]:
    """Passes of each stage (begin, width, kind, micro-batch, chunk) in order of time, in lock-step."""
    kinds = (("F", schedule.forward, unit), ("B", schedule.backward, 2 * unit))
    rows: list[list[tuple]] = [[] for _ in range(schedule.stages)]
    time = float(LEFT)
    for tick in range(schedule.ticks):
        for kind, slots, width in kinds:
            on = slots.on[tick]
            for stage in np.flatnonzero(on):
                values = int(slots.micro_batch[tick, stage]), int(slots.chunk[tick, stage])
                rows[stage].append((time, width, kind, *values))
            time += width * on.any()
    for row in rows:
        row.append((time, 0.0, "end", 0, 0))
    return rows


def _draw_row(drawing: Drawing, passes: list[tuple], y: float, mark: bool) -> None:
    """Draw a stage's passes, micro-batch 0 darker if `mark`, and its idle time hatched."""
    end = float(LEFT)
    for begin, width, kind, micro_batch, chunk in passes:
        if begin > end + 0.1:
            drawing.box(end, y, begin - end, 30, hatch=True, radius=0)
        if width:
            strong = chunk or (mark and micro_batch == 0)
            color, fill = "green" if kind == "F" else "sky", "strong" if strong else "tint"
            drawing.box(begin, y, width, 30, str(micro_batch), color, fill=fill, size=14, radius=1)
        end = begin + width


def _draw_way(drawing: Drawing, boxes: list[list[tuple]], rows: list[float]) -> None:
    """Draw the arrows of micro-batch 0 between the stages: forward down, backward up."""
    for kind in "FB":
        middle = [next(b + w / 2 for b, w, k, m, _ in row if (k, m) == (kind, 0)) for row in boxes]
        for stage in range(len(rows) - 1):
            above, below = (middle[stage], rows[stage] + 30), (middle[stage + 1], rows[stage + 1])
            drawing.arrow(*((above, below) if kind == "F" else (below, above)), width=2)
