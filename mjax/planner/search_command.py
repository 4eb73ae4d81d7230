"""The search as `mjax plan --gpu … --devices …` runs it: checks, progress, the written config."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from functools import partial

from mjax.config import Config
from mjax.hardware import GIB, Gpu
from mjax.models.build import count_parameters
from mjax.models.kernels import attention_on_gpu
from mjax.planner.calibration import Calibration
from mjax.planner.config_file import WIDTH
from mjax.planner.memory import predict_memory
from mjax.planner.search import Found, describe, search
from mjax.planner.search_flags import SearchArguments
from mjax.planner.search_limits import check_searchable, refuse_too_big, with_batch
from mjax.planner.search_report import Question, cost, narrowed, report, tight_warning
from mjax.planner.section import Section
from mjax.planner.time import predict_time
from mjax.planner.time_section import run_tokens


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
    """The candidates one after the other; on a terminal with a progress bar after the first second."""
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
        "parameters": f"{count_parameters(config.model):,}",
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
