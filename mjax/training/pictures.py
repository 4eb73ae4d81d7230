"""The pictures in a run folder, drawn from the records of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjax.data.atomic import put

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes


def draw_loss(records: Iterable[dict[str, Any]], file: Path, title: str) -> None:
    """Training loss (thin: raw, thick: centred average) and validation loss over steps, as a PNG.

    For a BERT the loss of the masked tokens, with the loss of guessing by frequency; and beside it the accuracy of the
    order.
    """
    from matplotlib.figure import Figure

    records = list(records)
    bert = any("order_accuracy" in record for record in records)
    figure = Figure(figsize=(12 if bert else 8, 4.5), dpi=120, layout="constrained")
    axes, *beside = figure.subplots(1, 2 if bert else 1, squeeze=False)[0]
    _draw_curves(axes, records, "mlm_loss" if bert else "loss", "{:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per masked token)" if bert else "loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a name may contain dollars
    entropy = next((record["val_unigram_entropy"] for record in records if "val_unigram_entropy" in record), None)
    if entropy is not None:
        axes.axhline(entropy, color="0.4", linestyle="--", linewidth=1, label=f"by frequency alone, {entropy:.3f}")
    low, high = axes.get_ylim()
    round_numbers = [digit * 10**power for power in range(-1, 9) for digit in (1, 1.5, 2, 3, 5, 7)]
    shown = [number for number in round_numbers if low <= math.log(number) <= high]
    perplexity = axes.secondary_yaxis("right")
    perplexity.set_ylabel("perplexity")
    perplexity.set_yticks([math.log(number) for number in shown], [f"{number:,g}" for number in shown])
    for order in beside:
        _draw_curves(order, records, "order_accuracy", "{:.1%}")
        order.axhline(0.5, color="0.4", linestyle="--", linewidth=1, label="by chance, 50%")
        order.set(xlabel="step", ylabel="share of pairs whose order is found", title="sentence order")
    for panel in (axes, *beside):
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False)
    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary)
    put(temporary, file)


def _draw_curves(axes: Axes, records: list[dict[str, Any]], name: str, form: str) -> None:
    """The values of a metric in training and in evaluations, each with its last value in the legend."""

    def curve(name: str) -> list[tuple[int, float]]:
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    if training := curve(name):
        steps, values = zip(*training, strict=True)
        averaged = smoothed(values)
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8)
        axes.plot(steps, averaged, color="tab:blue", linewidth=1.8, label=f"training, {form.format(averaged[-1])}")
    if validation := curve(f"val_{name}"):
        steps, values = zip(*validation, strict=True)
        axes.plot(steps, values, "o-", color="tab:orange", markersize=4, label=f"validation, {form.format(values[-1])}")


def smoothed(values: Sequence[float]) -> Sequence[float]:
    """Average over a window of about a thirtieth of the run, 51 steps at most, with each step in its middle.

    An average over earlier steps only would lag behind a falling loss and lie above it. Where the window exceeds an end
    of the run, the line that fits the steps there best is used (Savitzky and Golay, order 1).
    """
    half = min(50, len(values) // 30) // 2
    if not half:
        return values
    from scipy.signal import savgol_filter  # takes a second to import

    return savgol_filter(values, 2 * half + 1, polyorder=1).tolist()
