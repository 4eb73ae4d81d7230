"""The search as `mjax plan --gpu … --devices …` runs it: checks, progress, the written config."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from mjax.bounds import Count, NotNegative
from mjax.config import Config
from mjax.errors import UsageError
from mjax.hardware import GIB, Gpu
from mjax.models.kernels import attention_on_gpu
from mjax.planner.calibration import Calibration
from mjax.planner.config_file import WIDTH, check_new
from mjax.planner.memory import predict_memory
from mjax.planner.narrowed import narrowed
from mjax.planner.search import Found, describe, search
from mjax.planner.search_limits import check_searchable, refuse_too_big
from mjax.planner.search_report import Question, cost, report, tight_warning
from mjax.planner.section import Section
from mjax.planner.target_batch import with_batch
from mjax.planner.time import predict_time
from mjax.planner.time_section import run_tokens


@dataclass(frozen=True)
class SearchArguments:
    """Flags of the search."""

    devices: Count | None = None
    """Search the fastest way to run the config on this many GPUs: mesh, micro-batch, recomputation (needs --gpu)."""
    target_batch: Count | None = None
    """Search at this global batch, in sequences; the samples of the run stay, so its steps change. The learning rate
    stays too."""
    keep: tuple[str, ...] = ()
    """Fields that the search leaves as they are: any of mesh.pipe, mesh.data, mesh.model, mesh.sequence_parallel,
    mesh.schedule, mesh.chunks, mesh.zero, train.micro_batch, train.recompute."""
    top: Count = 10
    """Candidates to show, the fastest first."""
    price: NotNegative | None = None
    """Price of a GPU for an hour, in any currency, to show what the run costs."""
    write: Path | None = None
    """Write the fastest config into this new file, which train.py runs: ends in .py."""


def check_search(arguments: SearchArguments, gpu: str | None) -> None:
    """Refuse flags that cannot work.

    Raises:
      UsageError: a flag has no meaning without another, the file cannot be written.
    """
    if arguments.devices is not None and gpu is None:
        raise UsageError(f"--devices {arguments.devices} needs to know of what kind; add --gpu, such as --gpu h100")
    if arguments.devices is None:
        for flag in fields(SearchArguments):
            if getattr(arguments, flag.name) != flag.default:
                name = flag.name.replace("_", "-")
                raise UsageError(f"--{name} is for the search; add --devices, such as --devices 8")
        return
    if arguments.write is not None:
        check_new(arguments.write)


def run_search(
    arguments: SearchArguments, name: str, config: Config, gpu: Gpu, calibration: Calibration | None = None
) -> tuple[Config, Section, str]:
    """Search; nothing is written yet.

    Args:
      arguments: checked, with `devices`.
      name: of the config.
      config: valid but for what the search decides.
      gpu: what it runs on.
      calibration: rates that are reached; the planner's own when not given.

    Returns:
      The fastest config, the section of a plan that says how it was found, and the docstring of its file.

    Raises:
      UsageError: nothing can be searched, or nothing fits.
    """
    keep, devices = arguments.keep, arguments.devices
    if arguments.target_batch is not None:
        config = with_batch(config, arguments.target_batch)
    check_searchable(config, devices, gpu.gpus_per_node, keep)
    time_of = partial(predict_time, gpu=gpu, calibration=calibration)
    kernel_of = partial(attention_on_gpu, capability=gpu.compute_capability)
    memory_of = partial(predict_memory, capability=gpu.compute_capability)

    began = time.perf_counter()
    found = search(config, devices, memory_of, time_of, gpu.usable_bytes, keep, _showing)
    seconds = time.perf_counter() - began
    refuse_too_big(found, config, name, gpu.name, memory_of, gpu.gpus_per_node, keep)

    question = Question(name, config, gpu, arguments.price, arguments.top, time_of, kernel_of)
    best, file = found.ranked[0].config, arguments.write
    less = narrowed(found, config, memory_of, time_of, keep)
    return best, report(found, question, seconds, None if file is None else str(file), less), _about(found, question)


def _showing(every: list[Config]) -> Iterator[Config]:
    """The candidates one after the other; after the first second with a bar, on a terminal only."""
    from mjax.progress import progress

    began = time.perf_counter()
    for done, candidate in enumerate(every):
        if time.perf_counter() - began > 1:
            with progress("searching", len(every), transient=True) as advance:
                advance(done)
                for later in every[done:]:
                    yield later
                    advance(1)
            return
        yield candidate


def _about(found: Found, question: Question) -> str:
    """Docstring of the written config: what it is and how it was chosen."""
    best, config = found.ranked[0], question.config
    spent = cost(best, found.devices, question)
    mfu = "" if best.time.mfu is None else f", {best.time.mfu:.1%} MFU"
    rows = {
        "parameters": f"{config.model.parameters:,}",
        "hardware": f"{found.devices:,} × {question.hardware}: {describe(best.config)}",
        "predicted": f"{best.time.total:.3g} s a step (±{best.time.error:.0%}), {best.time.model_tflops:.0f} model "
        f"TFLOP/s a GPU{mfu}; {best.memory.total / GIB:.1f} of {found.capacity / GIB:.1f} GiB a GPU",
        "cost": f"{run_tokens(config):,} tokens in {spent.days:.3g} days, {spent.gpu_hours:,.0f} GPU-hours",
        "chosen": f"by `mjax plan`: the fastest of {len(found.ranked):,} ways that fit, of {found.tried:,} to run "
        f"{question.name} at a global batch of {config.train.global_batch:,}; model and learning rate are its own",
    }
    if warning := tight_warning(found):
        rows["memory"] = warning
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<13}", subsequent_indent=" " * 13)
        for name, text in rows.items()
    ]
    return f"{question.name} for {found.devices:,} × {question.hardware}, as the planner found it.\n\n" + "\n".join(
        lines
    )
