"""What a run records: a line a step in metrics.jsonl, a curve in loss.png, the same scalars for TensorBoard and W&B."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjax.data.atomic import write_whole
from mjax.errors import UsageError

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes


@dataclass
class Record:
    """One line of metrics.jsonl.

    Attributes:
      step: steps taken, this one included.
      loss: mean cross entropy of the batch before the update, nats a token; null where it is not finite.
      grad_norm: global norm before clipping; null where it is not finite.
      learning_rate: as applied.
      loss_scale: fp16's; 1 otherwise.
      skipped: whether nothing was updated because a gradient was not finite.
      tokens: tokens read since the beginning of training.
      seconds: wall-clock time of the step.
      tokens_per_second: over all devices.
      tflops: model TFLOP/s of one device (see `flops.py` for the formula).
      mfu: tflops over the device's peak; null where the peak is not known.
      nonfinite: which gradient was not finite, and how many; null where all were finite.
      val_loss: mean cross entropy on the validation batches after this step, where it was measured.
      figures, val_figures: of a BERT its two losses and how often it finds the order; lines of their own in the record,
        such as mlm_loss and val_mlm_loss. In an evaluation also what guessing masked tokens by their frequency costs,
        val_unigram_entropy.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    nonfinite: str | None = None
    val_loss: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    val_figures: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `val_loss` only where it was measured."""
        values = asdict(self)
        if self.val_loss is None:
            del values["val_loss"]
        of_validation = {f"val_{name}": value for name, value in values.pop("val_figures").items()}
        return values | values.pop("figures") | of_validation


def finite_or_none(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


class MetricsLog:
    """Appends to metrics.jsonl, TensorBoard and W&B, and draws loss.png.

    Args:
      folder: the run's.
      step: the step the run continues from; lines after it belong to a future that did not happen and are dropped.
      tensorboard: whether to write TensorBoard scalars.
      wandb: Weights & Biases project, or None.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool = True, wandb: str | None = None):
        self.folder = folder
        self.records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] <= step]
        write_whole(folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = (folder / "metrics.jsonl").open("a", buffering=1)
        self._tensorboard = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._wandb = _start_wandb(wandb, folder) if wandb else None

    def write(self, record: Record) -> None:
        """Record one step."""
        values = record.as_dict()
        self.records.append(values)
        self._file.write(json.dumps(values) + "\n")
        scalars = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "step"}
        if self._tensorboard:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record.step)
        if self._wandb:
            self._wandb.log(scalars, step=record.step)

    def draw(self) -> None:
        """Redraw loss.png."""
        draw_loss(self.records, self.folder / "loss.png", self.folder.name)

    def close(self) -> None:
        """Finish all files."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def check_wandb(project: str | None) -> None:
    """Refuse `--log.wandb` where the package is missing, before anything is started.

    Raises:
      UsageError: wandb is not installed.
    """
    if project:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise UsageError("--log.wandb needs the wandb package: pip install wandb, or leave the flag out") from None


def _start_wandb(project: str, folder: Path):
    import wandb

    return wandb.init(project=project, name=folder.name, dir=str(folder), resume="allow", id=folder.name)


def draw_loss(records: Iterable[dict[str, Any]], file: Path, title: str) -> None:
    """Training loss (thin as measured, thick as a moving average) and validation loss over steps, as a PNG.

    Of a BERT it is that of the masked tokens, with what guessing by frequency costs; and beside it the share of pairs
    whose order is found.
    """
    from matplotlib.figure import Figure

    records = list(records)
    bert = any("order_accuracy" in record for record in records)
    figure = Figure(figsize=(12 if bert else 8, 4.5), dpi=120, layout="constrained")
    axes, *beside = figure.subplots(1, 2 if bert else 1, squeeze=False)[0]
    _draw_curves(axes, records, "mlm_loss" if bert else "loss", "{:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per masked token)" if bert else "loss (nats per token)", title=title)
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
    temporary.replace(file)


def _draw_curves(axes: Axes, records: list[dict[str, Any]], name: str, form: str) -> None:
    """A figure of the training steps and of the evaluations, each with its last value in the legend."""

    def curve(name: str) -> list[tuple[int, float]]:
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    if training := curve(name):
        steps, values = zip(*training, strict=True)
        smoothed = _smoothed(values)
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8)
        axes.plot(steps, smoothed, color="tab:blue", linewidth=1.8, label=f"training, {form.format(smoothed[-1])}")
    if validation := curve(f"val_{name}"):
        steps, values = zip(*validation, strict=True)
        axes.plot(steps, values, "o-", color="tab:orange", markersize=4, label=f"validation, {form.format(values[-1])}")


def _smoothed(values: tuple[float, ...]) -> list[float]:
    """Moving average over about a thirtieth of the run, 50 steps at most, without the bias of its start."""
    decay = 1.0 - 1.0 / max(1.0, min(50.0, len(values) / 30))
    smoothed, average, weight = [], 0.0, 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(average / weight)
    return smoothed
