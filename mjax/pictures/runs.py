"""Pictures of runs and tasks, and the curves in the pictures of runs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mjax.config.marks import Metric
from mjax.pictures.figures import PALETTE, add_heading, add_perplexity, save

if TYPE_CHECKING:  # matplotlib takes a second to import
    import numpy as np
    from matplotlib.axes import Axes

MAX_POINTS = 4096  # of a curve; a picture has about a thousand pixels
MAX_WINDOW = 51  # steps in an average


class Bins(NamedTuple):
    """Neighboring values, reduced to arrays [bins]: number of the bin, mean step, mean value, and extreme values."""

    numbers: np.ndarray
    steps: np.ndarray
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


class Curve:
    """Values over steps, added in ascending order; a picture shows at most `MAX_POINTS` of their means.

    Attributes:
      steps: or numbers of tokens, from 0 on.
      values: one for each step.
    """

    def __init__(self, points: Iterable[tuple[int, float]] = ()):
        self.steps, self.values = array("q"), array("d")
        for step, value in points:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def width(self) -> int:
        """Steps of a bin: the least power of two that gives at most `MAX_POINTS`."""
        import numpy as np

        steps, width = np.array(self.steps), 1
        while len(np.unique(steps // width)) > MAX_POINTS:
            width *= 2
        return width

    def bins(self, width: int | None = None) -> Bins:
        """The values in bins of `width` steps, by default the curve's width, without empty bins."""
        import numpy as np

        steps, values = np.array(self.steps), np.array(self.values)
        numbers, first = np.unique(steps // (width or self.width), return_index=True)
        counts = np.diff(first, append=len(steps))
        means = (np.add.reduceat(x, first) / counts for x in (steps, values))
        return Bins(numbers, *means, np.minimum.reduceat(values, first), np.maximum.reduceat(values, first))

    @property
    def last(self) -> float:
        """The end of the smoothed values."""
        window = smoothing_window(len(self.values))
        return smooth(self.values[-window:], window)[-1]


def smoothing_window(count: int) -> int:
    """Values that are averaged: about a thirtieth of the run, `MAX_WINDOW` at most."""
    return min(MAX_WINDOW, count // 30 + 1)


def smooth(values: Sequence[float], window: int) -> Sequence[float]:
    """Average over a window with each step in its middle.

    An average over earlier steps only would lag behind a falling loss and lie above it. Where the window exceeds an end
    of the run, the line that fits the steps there best is used (Savitzky and Golay, order 1).

    Args:
      values: of consecutive steps.
      window: as `smoothing_window` gives for a run.
    """
    if window < 3:
        return values
    import numpy as np

    width = (window - 1) // 2 * 2 + 1  # SciPy's savgol_filter does the same, and takes a second to import
    inner, half = np.convolve(values, np.full(width, 1 / width), "valid"), width // 2
    ends = values[:width], values[-width:]
    first, last = (np.polyval(np.polyfit(range(width), end, 1), range(width)) for end in ends)
    return np.concatenate([first[:half], inner, last[-half:]])


# --- Pictures of runs -------------------------------------------------------------------------------------------------


OF_EXPERTS = ("expert_load", "router_entropy")


def curve_names(metrics: Sequence[Metric]) -> list[str]:
    """The fields of metrics.jsonl that the pictures of a run may show.

    Args:
      metrics: the model's metrics (`ModelConfig.metrics`).
    """
    shown = [name for metric in metrics if metric.axis for name in (metric.name, metric.guess) if isinstance(name, str)]
    return [before + name for name in dict.fromkeys(("loss", *OF_EXPERTS, *shown)) for before in ("", "val_")]


def draw_loss(
    curves: Mapping[str, Curve],
    file: Path,
    title: str,
    metrics: Sequence[Metric] = (),
    forecast: Mapping[float, tuple[float, float, float]] | None = None,
) -> None:
    """Training loss (thin: raw, thick: centered average) and validation loss over steps, as a PNG.

    Args:
      curves: by field of metrics.jsonl.
      file: the picture.
      title: name of the run.
      metrics: the model's metrics (`ModelConfig.metrics`). Metrics with an axis and a curve are drawn next to each
        other, instead of the loss.
      forecast: validation loss, and low and high end of its interval, by step.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    drawn = [metric for metric in metrics if metric.axis and metric.name in curves]
    drawn = drawn or [Metric("loss", "", axis="loss (nats per token)")]
    figure = Figure(figsize=(4 + 4 * len(drawn), 4.5), dpi=120, layout="constrained")
    for metric, panel in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        guess = metric.guess
        if isinstance(guess, str):
            guess = curves[f"val_{guess}"].last if f"val_{guess}" in curves else None
        level = None if guess is None else (guess, metric.guess_label.format(guess=guess))
        _draw_curves(panel, curves, metric.name, "{:.1%}" if metric.share else "{:.3f}", level)
        if forecast and metric.name == "loss":
            loss, low, high = zip(*forecast.values(), strict=True)
            label = f"forecast, last {loss[-1]:.3f}"
            panel.plot([*forecast], loss, color=PALETTE[3], linestyle="--", label=label)
            panel.fill_between([*forecast], low, high, color=PALETTE[3], alpha=0.2, linewidth=0)
            panel.legend(frameon=False, loc="upper right")
        panel.set(xlabel="step", ylabel=metric.axis)
        panel.set_title(": ".join(filter(None, (title, metric.title))), parse_math=False)  # a name may contain dollars
        if metric.share:
            panel.yaxis.set_major_formatter(PercentFormatter(1, 0))
        else:
            add_perplexity(panel)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    save(figure, file)


def draw_experts(curves: Mapping[str, Curve], step: int, shares: np.ndarray, file: Path, title: str) -> None:
    """Balance of a mixture's experts, as a PNG: load and entropy over steps, and the share of each expert.

    Args:
      curves: by field of metrics.jsonl.
      step: the shares were measured at this step.
      shares: of each expert in the assignments of its layer, [l, E], of the layers with experts.
      file: the picture.
      title: name of the run.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    layers, experts = shares.shape
    balanced, height = 1 / experts, min(max(0.4 * layers, 2), 6)
    figure = Figure(figsize=(12, 4 + height), dpi=120, layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name may contain dollars
    panels = figure.subplot_mosaic([["load", "entropy"], ["shares", "shares"]], height_ratios=(4, height))
    load, entropy, heat = panels["load"], panels["entropy"], panels["shares"]
    _draw_curves(load, curves, OF_EXPERTS[0], "{:.2f}", (1, "balanced, 1"))
    load.set(xlabel="step", ylabel="load", title="busiest expert over the mean, in the worst layer")
    uniform = math.log(experts)
    _draw_curves(entropy, curves, OF_EXPERTS[1], "{:.3f}", (uniform, f"uniform, log {experts} = {uniform:.3f}"))
    entropy.set(xlabel="step", ylabel="nats per token", title="entropy of the router")
    entropy.legend(frameon=False, loc="center right")  # below the line of log E

    norm = TwoSlopeNorm(balanced, 0, max(2 * balanced, shares.max()))
    edges = (-0.5, experts - 0.5, layers + 0.5, 0.5)
    image = heat.imshow(shares, cmap="RdBu_r", norm=norm, aspect="auto", extent=edges, interpolation="nearest")
    heat.set(xlabel="expert", ylabel="layer with experts", title=f"share of a layer's assignments at step {step:,}")
    for axis in (heat.xaxis, heat.yaxis):
        axis.set_major_locator(MaxNLocator(32, integer=True))
    bar = figure.colorbar(image, ax=heat, format=PercentFormatter(1, 2), pad=0.01)
    bar.set_label(f"balanced: {balanced:.2%}")
    save(figure, file)


def draw_runs(runs: Mapping[str, tuple[Curve, Curve]], file: Path, x: str = "step") -> None:
    """Losses of runs: training, smoothed and raw, and validation; below, their difference from the first.

    Args:
      runs: losses in training and in validation by name of the run.
      file: .png, .pdf or .svg.
      x: name of the x axis, step or tokens.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    first, (reference, _) = next(iter(runs.items()))
    distances = {name: _difference(training, reference) for name, (training, _) in runs.items() if name != first}
    panels = 2 if any(len(steps) for steps, _ in distances.values()) else 1
    figure = Figure(figsize=(8, 2.5 + 2 * panels), dpi=120, layout="constrained")
    axes, *below = figure.subplots(panels, 1, squeeze=False, sharex=True, height_ratios=(2, 1)[:panels])[:, 0]
    for number, (name, (training, validation)) in enumerate(runs.items()):
        # Where curves coincide, each shows at the sides of the next.
        color, wider = f"C{number}", (len(runs) - 1 - number) / len(runs)
        label = f"{name}, last {training.last:.4f}"
        _draw_raw(axes, training, color=color, alpha=0.25, linewidth=0.7, zorder=1)
        _draw_smoothed(axes, training, color=color, linewidth=1.2 + 6 * wider, label=label)
        bins = validation.bins()
        axes.plot(bins.steps, bins.means, "o", color=color, markersize=4 + 6 * wider)
        if below and name != first:
            below[0].plot(*distances[name], color=color, linewidth=1)
    axes.set_title("Loss in training (lines: averaged; thin: raw) and validation (dots)")
    axes.set_ylabel("loss (nats per token)")
    if below:
        below[0].axhline(0, color="C0", linewidth=1)
        below[0].set_title(f"Training loss minus the loss of {first}", parse_math=False)  # a name may contain dollars
        below[0].set_ylabel("nats per token")
    last = [axes, *below][-1]
    last.set(xlabel=x)
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    last.xaxis.set_major_formatter("{x:,.0f}")
    for panel in (axes, *below):
        panel.grid(alpha=0.25)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    save(figure, file)


def _draw_curves(
    axes: Axes, curves: Mapping[str, Curve], name: str, form: str, level: tuple[float, str] | None = None
) -> None:
    """The values of a metric in training and in evaluations, their last values in the legend, and a `level` to compare
    with."""
    if training := curves.get(name):
        _draw_raw(axes, training, color="C0", alpha=0.3, linewidth=0.8)
        label = f"training, last {form.format(training.last)}"
        _draw_smoothed(axes, training, color="C0", linewidth=1.8, label=label)
    if validation := curves.get(f"val_{name}"):
        label = f"validation, last {form.format(validation.values[-1])}"
        bins = validation.bins()
        axes.plot(bins.steps, bins.means, "o-", color="C1", markersize=4, label=label)
    if level is not None:
        axes.axhline(level[0], color="0.4", linestyle="--", linewidth=1, label=level[1])
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")  # "best" is slow with many steps


def _draw_raw(axes: Axes, curve: Curve, **style: Any) -> None:
    """The lowest and the highest value in each bin."""
    import numpy as np

    bins = curve.bins()
    axes.plot(np.repeat(bins.steps, 2), np.stack([bins.lows, bins.highs], axis=1).ravel(), **style)


def _draw_smoothed(axes: Axes, curve: Curve, **style: Any) -> None:
    """The means of the bins, averaged over neighbors as far as bins are shorter than `MAX_WINDOW`."""
    bins = curve.bins()
    window = min(MAX_WINDOW // curve.width, smoothing_window(len(bins.means)))
    axes.plot(bins.steps, smooth(bins.means, window), **style)


def _difference(curve: Curve, reference: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and differences of two curves in the bins that both have."""
    import numpy as np

    width = max(curve.width, reference.width)
    bins, base = curve.bins(width), reference.bins(width)
    common, i, j = np.intersect1d(bins.numbers, base.numbers, return_indices=True)
    end = min(bins.numbers[-1], base.numbers[-1]) + (width == 1)  # a last bin may have steps of one curve only
    i, j = i[common < end], j[common < end]
    return bins.steps[i], bins.means[i] - base.means[j]


# --- Tasks ------------------------------------------------------------------------------------------------------------


LINE, MARK = PALETTE[0], PALETTE[6]


def draw_positions(bins: Sequence[dict[str, Any]], file: Path, about: str, trained: int | None) -> None:
    """Loss over positions with its standard error, and perplexity on the right.

    Args:
      bins: first and last position, loss and standard error of each, nats per token.
      file: .png, .pdf or .svg.
      about: what was evaluated on what, and how much text it is, in lines.
      trained: positions before they were scaled, to be marked.
    """
    import numpy as np
    from matplotlib.figure import Figure

    first, last, loss = (np.array([row[name] for row in bins], np.float64) for name in ("first", "last", "loss"))
    error = np.array([row["standard_error"] or 0.0 for row in bins])
    middle = np.sqrt(first * last)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    band = {"color": LINE, "alpha": 0.2, "linewidth": 0, "label": "± standard error"}
    axes.fill_between(middle, loss - error, loss + error, **band)
    axes.plot(middle, loss, "o-", color=LINE, markersize=4, linewidth=1.8, label="mean of a bin")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if trained is not None:
        axes.axvline(trained, color=MARK, linewidth=1.2, linestyle="--", label=f"trained on {trained:,} positions")
    axes.set(xlabel="position: tokens read before the one that is predicted", ylabel="loss (nats per token)")
    add_perplexity(axes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    add_heading(axes, "Loss by position", about)
    save(figure, file)
