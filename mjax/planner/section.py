"""What a plan is asked, by the flags of its search, and what it answers: one section for each part of a plan.

Nothing here imports JAX, so flags are checked before any slow import.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mjax.config.bounds import Count, NotNegative, Positive
from mjax.config.source import check_new
from mjax.errors import UsageError


@dataclass(frozen=True)
class Section:
    """One part of a plan.

    Attributes:
      title: its headline.
      values: for --json, plain values only.
      lines: printed below the headline.
    """

    title: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The section as printed."""
        return "\n".join([f"--- {self.title} ---", *self.lines])


def good_to(error: float | None) -> str:
    """An error bar in words: '±30%'."""
    return "no error bar" if error is None else f"±{error:.0%}"


def layers_in_words(unrolled: bool) -> str:
    """The row of a plan that says how the layers are compiled."""
    return "one after the other, without a loop" if unrolled else "in a loop"


@dataclass(frozen=True)
class SearchArguments:
    """Flags of the search."""

    devices: Count | None = None
    """Search the fastest way to run the config on this many GPUs: mesh, micro-batch, recomputation. Needs --gpu."""
    target_batch: Count | None = None
    """Search at this global batch, in sequences; samples and learning rate of the run stay, so the number of steps
    changes."""
    keep: tuple[str, ...] = ()
    """Fields to keep fixed in the search: any of mesh.pipe, mesh.data, mesh.model, mesh.expert, mesh.context,
    mesh.context_attention, mesh.sequence_parallel, mesh.schedule, mesh.chunks, mesh.zero, train.micro_batch,
    train.recompute, train.loss_chunks."""
    top: Count = 10
    """Number of candidates to show, fastest first."""
    price: NotNegative | None = None
    """Price of a GPU-hour, in any currency, for the cost of the run."""
    days: Positive | None = None
    """With --devices: find the largest model that this many days train, among those of --config in other sizes (by
    default llama3_8b), or of --family."""
    tokens_per_parameter: Positive = 20.0
    """With --days: training tokens for each parameter of the model; 20 are compute-optimal (arXiv 2203.15556)."""
    family: str | None = None
    """With --days: choose among the configs whose name begins so: gpt, llama, qwen, …"""
    write: Path | None = None
    """Write the fastest config into this new file for `mjax train`; must end in .py."""


def check_search(arguments: SearchArguments, gpu: str | None) -> None:
    """Refuse flags that cannot work.

    Raises:
      UsageError: a flag has no effect without another one, or the file cannot be written.
    """
    if arguments.devices is not None and gpu is None:
        raise UsageError(f"--devices {arguments.devices} needs a GPU to plan for; add --gpu, such as --gpu h100")
    if arguments.devices is None:
        for flag in fields(SearchArguments):
            if getattr(arguments, flag.name) != flag.default:
                name = flag.name.replace("_", "-")
                raise UsageError(f"--{name} is for the search; add --devices, such as --devices 8")
        return
    for name in ("tokens_per_parameter", "family"):
        value = getattr(arguments, name)
        if arguments.days is None and value != getattr(SearchArguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is for a budget of time; add --days, such as --days 30"
            )
    if arguments.write is not None:
        check_new(arguments.write)
