"""The pictures of runs, drawn from the records of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjax.config.model import Metric
from mjax.pictures.figures import add_perplexity, save

if TYPE_CHECKING:  # matplotlib takes a second to import
    import numpy as np
    from matplotlib.axes import Axes

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:cyan")
LEGIBLE = 16  # experts of a heat map, at most, that have room for their numbers


def draw_loss(records: Iterable[dict[str, Any]], file: Path, title: str, metrics: Sequence[Metric] = ()) -> None:
    """Training loss (thin: raw, thick: centred average) and validation loss over steps, as a PNG.

    Args:
      records: of metrics.jsonl.
      file: the picture.
      title: name of the run.
      metrics: those of the model (`ModelConfig.metrics`): those with an axis that the records have are drawn next to
        each other, instead of the loss.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    records = list(records)
    drawn = [metric for metric in metrics if metric.axis and any(metric.name in record for record in records)]
    drawn = drawn or [Metric("loss", "", axis="loss (nats per token)")]
    figure = Figure(figsize=(4 + 4 * len(drawn), 4.5), dpi=120, layout="constrained")
    for metric, panel in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        _draw_curves(panel, records, metric.name, "{:.1%}" if metric.share else "{:.3f}")
        panel.set(xlabel="step", ylabel=metric.axis)
        panel.set_title(": ".join(filter(None, (title, metric.title))), parse_math=False)  # a name may contain dollars
        guess = metric.guess
        if isinstance(guess, str):
            guess = next((record[f"val_{guess}"] for record in records if f"val_{guess}" in record), None)
        if guess is not None:
            panel.axhline(guess, color="0.4", linestyle="--", linewidth=1, label=metric.guess_label.format(guess=guess))
        if metric.share:
            panel.yaxis.set_major_formatter(PercentFormatter(1, 0))
        else:
            add_perplexity(panel)
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False)
    save(figure, file)


def draw_experts(records: Iterable[dict[str, Any]], step: int, shares: np.ndarray, file: Path, title: str) -> None:
    """Balance of a mixture's experts, as a PNG: load and entropy over steps, and the share of each expert.

    Args:
      records: of metrics.jsonl.
      step: the shares are those of this step.
      shares: of each expert in the assignments of its layer, [l, E], of the layers with experts.
      file: the picture.
      title: name of the run.
    """
    import numpy as np
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    records, (layers, experts) = list(records), shares.shape
    balanced, height = 1 / experts, min(max(0.4 * layers, 2), 6)
    figure = Figure(figsize=(12, 4 + height), dpi=120, layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name may contain dollars
    panels = figure.subplot_mosaic([["load", "entropy"], ["shares", "shares"]], height_ratios=(4, height))
    load, entropy, heat = panels["load"], panels["entropy"], panels["shares"]
    _draw_curves(load, records, "expert_load", "{:.2f}")
    load.axhline(1, color="0.4", linestyle="--", linewidth=1, label="balanced, 1")
    load.set(xlabel="step", ylabel="load", title="busiest expert over the mean, in the worst layer")
    _draw_curves(entropy, records, "router_entropy", "{:.3f}")
    uniform = math.log(experts)
    entropy.axhline(uniform, color="0.4", linestyle="--", linewidth=1, label=f"uniform, log {experts} = {uniform:.3f}")
    entropy.set(xlabel="step", ylabel="nats per token", title="entropy of the router")
    for panel, top in ((load, 1), (entropy, 0.94)):  # the line of log E is above
        panel.grid(alpha=0.25)
        panel.legend(loc="upper right", bbox_to_anchor=(1, top), edgecolor="none")  # "best" is slow with many steps

    norm = TwoSlopeNorm(balanced, 0, max(2 * balanced, shares.max()))
    edges = (-0.5, experts - 0.5, layers + 0.5, 0.5)
    image = heat.imshow(shares, cmap="RdBu_r", norm=norm, aspect="auto", extent=edges, interpolation="nearest")
    heat.set(xlabel="expert", ylabel="layer with experts", title=f"share of a layer's assignments at step {step:,}")
    heat.set_xticks(range(0, experts, -(-experts // 32)))
    heat.set_yticks(range(1, layers + 1, -(-layers // 16)))
    bar = figure.colorbar(image, ax=heat, format=PercentFormatter(1, 1 if experts <= LEGIBLE else 2), pad=0.01)
    bar.set_ticks(norm.inverse(np.linspace(0, 1, 5)))
    bar.set_label(f"balanced: {balanced:.2%}")
    if experts <= LEGIBLE and layers <= LEGIBLE:
        for (layer, expert), share in np.ndenumerate(shares):
            dark = abs(norm(share) - 0.5) > 0.3
            heat.text(expert, layer + 1, f"{share:.1%}", ha="center", va="center", color="white" if dark else "0.2")
    save(figure, file)


def draw_runs(runs: Mapping[str, Sequence[dict[str, Any]]], file: Path, by_tokens: bool = False) -> None:
    """Losses of runs: training, smoothed and raw, and validation; below, their difference from the first.

    Args:
      runs: records of metrics.jsonl by name.
      file: .png, .pdf or .svg.
      by_tokens: use tokens as the x axis, because steps of the runs have different numbers of tokens.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    x = "tokens" if by_tokens else "step"
    measured = {
        name: {record[x]: record["loss"] for record in records if record.get("loss") is not None}
        for name, records in runs.items()
    }
    (first, reference), *others = measured.items()
    common = {name: [at for at in values if at in reference] for name, values in others}
    apart = any(common.values())
    figure = Figure(figsize=(8, 6.5 if apart else 4.5), dpi=120, layout="constrained")
    axes, *below = figure.subplots(
        2 if apart else 1, 1, squeeze=False, sharex=True, height_ratios=(2, 1) if apart else None
    )[:, 0]
    for number, (name, values) in enumerate(measured.items()):
        # Where curves coincide, each shows at the sides of the next.
        colour, wider = COLOURS[number % len(COLOURS)], (len(measured) - 1 - number) / len(measured)
        averaged = smoothed(list(values.values()))
        label = f"{name}, last {averaged[-1]:.4f}"
        axes.plot(values.keys(), averaged, color=colour, linewidth=1.2 + 6 * wider, label=label)
        axes.plot(values.keys(), values.values(), color=colour, alpha=0.25, linewidth=0.7, zorder=1)
        validation = [(record[x], record["val_loss"]) for record in runs[name] if record.get("val_loss") is not None]
        if validation:
            axes.plot(*zip(*validation, strict=True), "o", color=colour, markersize=4 + 6 * wider)
        if below and name != first:
            distance = [values[at] - reference[at] for at in common[name]]
            below[0].plot(common[name], distance, color=colour, linewidth=1)
    axes.set(
        ylabel="loss (nats per token)", title="Loss in training (lines: averaged; thin: raw) and validation (dots)"
    )
    if below:
        below[0].axhline(0, color=COLOURS[0], linewidth=1)
        below[0].set_title(f"Training loss minus the loss of {first}", parse_math=False)  # a name may contain dollars
        below[0].set_ylabel("nats per token")
        below[0].ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    (*_, last) = (axes, *below)
    last.set(xlabel=x)
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for panel in (axes, *below):
        panel.grid(alpha=0.25)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    save(figure, file)


def _draw_curves(axes: Axes, records: list[dict[str, Any]], name: str, form: str) -> None:
    """The values of a metric in training and in evaluations, each with its last value in the legend."""

    def curve(name: str) -> list[tuple[int, float]]:
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    if training := curve(name):
        steps, values = zip(*training, strict=True)
        averaged = smoothed(values)
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8)
        last = form.format(averaged[-1])
        axes.plot(steps, averaged, color="tab:blue", linewidth=1.8, label=f"training, last {last}")
    if validation := curve(f"val_{name}"):
        steps, values = zip(*validation, strict=True)
        last = form.format(values[-1])
        axes.plot(steps, values, "o-", color="tab:orange", markersize=4, label=f"validation, last {last}")


def smoothed(values: Sequence[float]) -> Sequence[float]:
    """Average over a window of about a thirtieth of the run, 51 steps at most, with each step in its middle.

    An average over earlier steps only would lag behind a falling loss and lie above it. Where the window exceeds an end
    of the run, the line that fits the steps there best is used (Savitzky and Golay, order 1).
    """
    half = min(50, len(values) // 30) // 2
    if not half:
        return values
    import numpy as np

    width = 2 * half + 1  # SciPy's savgol_filter does the same, and takes a second to import
    inner = np.convolve(values, np.full(width, 1 / width), "valid")
    ends = values[:width], values[-width:]
    first, last = (np.polyval(np.polyfit(range(width), end, 1), range(width)) for end in ends)
    return [*first[:half].tolist(), *inner.tolist(), *last[-half:].tolist()]
