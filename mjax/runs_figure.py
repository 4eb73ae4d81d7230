"""The loss curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.figures import save
from mjax.training.pictures import smoothed

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:cyan")


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
