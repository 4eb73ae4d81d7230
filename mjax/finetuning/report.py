"""The results of all seeds: a table and report.json.

The metrics of a seed are those after its best epoch. The papers report their median over five seeds (arXiv 1909.08053,
table 5): the variation between seeds can exceed the difference between two models.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from mjax.finetuning.seed import best_of

Epochs = Mapping[int, list[dict]]  # `SeedRun.epochs`, by seed


def summary(metric: str, epochs: Epochs) -> dict[str, Any]:
    """The best epoch of each seed, the median of every metric over the seeds, and the best seed."""
    best = {seed: best_of(measured, metric) for seed, measured in epochs.items()}
    names = next(iter(best.values()))["figures"]
    values = {name: [epoch["figures"][name] for epoch in best.values()] for name in names}
    chosen = max(best, key=lambda seed: best[seed]["figures"][metric])
    return {
        "metric": metric,
        "seeds": [{"seed": seed, **epoch} for seed, epoch in best.items()],
        "median": {name: statistics.median(found) for name, found in values.items() if None not in found},
        "best": {"seed": chosen, **best[chosen]},
    }


def print_table(report: dict[str, Any], title: str) -> None:
    """Print a `summary` on stdout: one column per seed, then the median of several."""
    seeds, several = report["seeds"], len(report["seeds"]) > 1
    names = [name for name, value in report["best"]["figures"].items() if isinstance(value, float)]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for _ in range(len(seeds) + several):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("seed", *(str(seed["seed"]) for seed in seeds), *(["median"] if several else []), style="dim")
    table.add_row("best epoch", *(str(seed["epoch"]) for seed in seeds))
    table.add_row("loss", *(f"{seed['loss']:.4f}" for seed in seeds))
    for name in names:
        values = [seed["figures"][name] for seed in seeds] + ([report["median"][name]] if several else [])
        table.add_row(name.replace("_", " "), *(f"{value:.4f}" for value in values))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{title}\n", markup=False)
    console.print(table)
