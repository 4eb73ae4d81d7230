"""The section of the planner's search: the fastest candidates, their bottlenecks, and what each choice is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mjax.config import Config
from mjax.hardware import GIB, Gpu, gpu_named
from mjax.planner.memory import HEADROOM
from mjax.planner.search import (
    SEARCHED,
    WITHIN,
    Alternative,
    Candidate,
    Found,
    TimeOf,
    alternatives,
    describe,
    value_of,
    word,
)
from mjax.planner.section import Section, good_to, table
from mjax.planner.step_time import StepTime
from mjax.planner.time_section import run_tokens


@dataclass(frozen=True)
class Question:
    """The question of a search.

    Attributes:
      name: of the config.
      config: as given, with its own mesh.
      gpu: the GPU and its server.
      price: of a GPU-hour, or None.
      top: number of candidates to show.
      time_of: seconds of a step.
      kernel_of: the attention kernel of a config on the GPU.
    """

    name: str
    config: Config
    gpu: Gpu
    price: float | None
    top: int
    time_of: TimeOf
    kernel_of: Callable[[Config], str]

    @property
    def hardware(self) -> str:
        """The GPU, and the size of its server if it is not the usual one."""
        usual = gpu_named(self.gpu.name).gpus_per_node
        return self.gpu.name + (f", {self.gpu.gpus_per_node} a server" * (self.gpu.gpus_per_node != usual))


LeftOut = tuple[dict[str, Any] | None, str]
"""What a batch ramp-up excludes from a search: plain values for JSON, and a sentence; None and empty if nothing."""


def report(
    found: Found, question: Question, seconds: float, written: str | None = None, left_out: LeftOut = (None, "")
) -> Section:
    """The section `search` of a plan.

    Args:
      found: with at least one candidate that fits.
      question: the question of the search.
      seconds: duration of the search.
      written: the file into which the best was written.
      left_out: excluded by a batch ramp-up.
    """
    shown = found.ranked[: question.top]
    costs = [cost(each, found.devices, question) for each in shown]
    others, rank = alternatives(found), _own_rank(found, question.config)
    return Section(
        title=f"Search: {question.name} on {found.devices:,} × {question.hardware}",
        values={
            "gpu": question.gpu.name,
            "devices_per_node": question.gpu.gpus_per_node,
            "network_bytes_per_second": question.gpu.network_bandwidth_per_node,
            "devices": found.devices,
            "global_batch": question.config.train.global_batch,
            "tokens": run_tokens(question.config),
            "usable_bytes": found.capacity,
            "tried": found.tried,
            "too_big": len(found.too_big),
            "tight": len(found.tight),
            "without_host": found.without_host,
            "slower": len(found.slower),
            "seconds": seconds,
            "best": [_values(*each) for each in zip(shown, costs, strict=True)],
            "alternatives": [_alternative_values(each) for each in others],
            "own": None if rank is None else {"rank": rank, "seconds": found.ranked[rank - 1].time.mean},
            "narrowed": left_out[0],
            "written": written,
        },
        lines=[
            f"{found.tried:,} ways to run it: {len(found.too_big):,} are too big for {found.capacity / GIB:.1f} GiB, "
            f"{len(found.tight):,} leave less than {HEADROOM:.0%} of it free, "
            + (f"{found.without_host:,} need more host memory than there is, " if found.without_host else "")
            + f"{len(found.roomy):,} fit"
            + (f", and {len(found.slower):,} take {WITHIN - 1:.0%} longer or more" if found.slower else "")
            + f" ({seconds:.1f} s)",
            "",
            *_table(found, shown, costs, question.price),
            "",
            *_reasons(found, others),
            "",
            *_remarks(found, question, costs[0]),
            *filter(None, [left_out[1], f"written to {written}" if written else ""]),
        ],
    )


# --- Cost -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Cost of the whole run: days, GPU-hours, and money if a GPU-hour has a price."""

    days: float
    gpu_hours: float
    money: float | None


def cost(candidate: Candidate, devices: int, question: Question) -> Cost:
    """The cost of all steps of a candidate."""
    hours = candidate.time.mean * candidate.config.train.steps / 3600
    return Cost(hours / 24, hours * devices, None if question.price is None else hours * devices * question.price)


# --- Lines ------------------------------------------------------------------------------------------------------------


def _table(found: Found, shown: list[Candidate], costs: list[Cost], price: float | None) -> list[str]:
    split = any(each.config.mesh.expert > 1 for each in shown)
    cut = any(each.config.mesh.context > 1 for each in shown)
    header = ["", "pipe", "data", *(["expert"] if split else []), *(["context"] if cut else []), "model", "schedule"]
    header += ["micro-batch", "recompute"]
    header += ["seq. par.", "ZeRO"]
    some = any(each.config.train.loss_chunks > 1 for each in shown)
    header += ["loss chunks"] if some else []
    offloaded = any(each.memory.host for each in shown)
    header += ["s/step", "TFLOP/s", "MFU", "GiB", *(["host GiB"] if offloaded else [])]
    header += ["days", "GPU-hours", *(["cost"] if price else []), "held back by"]
    rows = []
    for number, (candidate, spent) in enumerate(zip(shown, costs, strict=True), 1):
        mesh, train, time = candidate.config.mesh, candidate.config.train, candidate.time
        chunks = f" × {mesh.chunks}" if mesh.chunks > 1 else ""
        rows.append(
            [
                number, mesh.pipe, mesh.data, *([mesh.expert] if split else []),
                *([_context(candidate.config)] if cut else []), mesh.model,
                f"{mesh.schedule}{chunks}" if mesh.pipe > 1 else "-", train.micro_batch, train.recompute,
                "yes" if mesh.splits_tokens else "-", mesh.zero or "-",
                *([train.loss_chunks if train.loss_chunks > 1 else "-"] if some else []),
                f"{time.mean:.3g}", f"{time.model_tflops:.0f}", "-" if time.mfu is None else f"{time.mfu:.1%}",
                f"{candidate.memory.total / GIB:.1f}",
                *([f"{candidate.memory.host / GIB:.1f}" if candidate.memory.host else "-"] if offloaded else []),
                f"{spent.days:.3g}", f"{spent.gpu_hours:,.0f}",
                *([f"{spent.money:,.0f}"] if price else []), held_back_by(candidate, found),
            ]
        )  # fmt: skip
    return table(header, rows)


def _context(config: Config) -> str:
    return f"{config.mesh.context} ({config.across})" if config.across else "1"


def held_back_by(candidate: Candidate, found: Found) -> str:
    """The parts that take most time besides the matrix products, and the memory if too little of it is free."""
    parts = {name: seconds for name, seconds in candidate.time.parts.items() if name != "matmul"}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    words = [f"{name} {parts[name] / candidate.time.total:.0%}" for name in largest if parts[name] > 0]
    free = found.free(candidate)
    return ", ".join([*words, *([f"memory, {free:.1%} free"] if free < HEADROOM else [])])


def _reasons(found: Found, others: list[Alternative]) -> list[str]:
    best = found.ranked[0]
    lines = []
    if len(found.ranked) > 1:
        lines += [f"1 before 2: {faster_by(best, found.ranked[1])}", ""]
    rows = []
    for other in others:
        if other.candidate is None:
            what = "nothing fits" if other.least > found.capacity else f"nothing leaves {HEADROOM:.0%} free"
            verdict = f"{what}: {other.least / GIB:.1f} GiB at least"
        else:
            verdict = _beside(other.candidate.time, best.time)
        with_it = ", ".join(other.others(best.config))
        rows.append([other.field, word(other.best), word(other.value), verdict, with_it])
    return lines + table(["what a choice is worth", "best", "else", "the fastest so", "which also has"], rows, left=5)


def _beside(time: StepTime, best: StepTime) -> str:
    """The seconds per step of a candidate, and the difference from the best one."""
    return f"{time.mean:.3g} s, {time.mean / best.mean - 1:+.1%}"


def faster_by(first: Candidate, second: Candidate) -> str:
    """Parts in which the second of two candidates takes more, or less, time."""
    change = second.time.mean - first.time.mean
    if abs(change) < 1e-4 * first.time.mean:
        return "the same time to four digits; the simpler one comes first"
    parts = {name: second.time.parts[name] - seconds for name, seconds in first.time.parts.items()}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:3]
    words = [f"{name} {1e3 * parts[name]:+,.1f} ms" for name in largest if abs(parts[name]) > 0.05 * abs(change)]
    where = "" if first.time.mean == first.time.total else "at the whole batch: "
    return f"2 takes {1e3 * change:,.1f} ms more ({where}{', '.join(words)})"


def _remarks(found: Found, question: Question, spent: Cost) -> list[str]:
    best, config = found.ranked[0], question.config
    money = "" if spent.money is None else f", {spent.money:,.0f} at {question.price:g} a GPU-hour"
    lines = [
        f"{run_tokens(config):,} tokens in {config.train.steps:,} steps: {spent.days:.3g} days, "
        f"{spent.gpu_hours:,.0f} GPU-hours{money}; the prediction "
        + ("has no error bar" if best.time.error is None else f"is good to {good_to(best.time.error)}"),
        *best.time.caveats,
    ]
    if best.time.mean != best.time.total:
        lines.append(
            f"s/step is the mean of the run, whose batch grows; at the whole batch, of {config.train.global_batch:,}, "
            f"the best takes {best.time.total:.3g} s"
        )
    if config.mesh.devices == found.devices:
        verdict = _own_verdict(found, config, question.time_of)
        lines.append(f"the config's own mesh, {describe(config)}: {verdict}")
    if warning := tight_warning(found):
        lines.append(warning)
    elif found.tight and found.tight[0].time.mean < best.time.mean:
        fast = found.tight[0]
        lines.append(
            f"not ranked, because it leaves {found.free(fast):.1%} of the memory free and the prediction may be off by "
            f"{HEADROOM:.0%}: {describe(fast.config)}, {_beside(fast.time, best.time)}"
        )
    without = replace(best.config, model=replace(best.config.model, attention_dropout=0.0))
    if question.kernel_of(best.config) != question.kernel_of(without):
        change = question.time_of(without).total / best.time.total - 1
        less = f"{abs(change):.1%} {'less' if change < 0 else 'more'} time"
        lines.append(
            f"attention dropout {config.model.attention_dropout:g} rules out cuDNN's attention; with "
            f"--model.attention-dropout 0 the best would take {less}, and others may fit"
        )
    return lines


def tight_warning(found: Found) -> str:
    """A warning if no candidate leaves enough memory free; else an empty string."""
    if found.roomy:
        return ""
    return (
        f"warning: no way to run it leaves {HEADROOM:.0%} of the memory free, by which the prediction may be off; the "
        f"best leaves {found.free(found.ranked[0]):.1%} and may not fit"
    )


def _own_verdict(found: Found, config: Config, time_of: TimeOf) -> str:
    best, rank = found.ranked[0], _own_rank(found, config)
    if rank is not None:
        return f"{_beside(found.ranked[rank - 1].time, best.time)}, rank {rank:,}"
    for tight in found.tight:
        if _is_own(tight.config, config):
            return f"{_beside(tight.time, best.time)}, not ranked: it leaves {found.free(tight):.1%} of the memory free"
    sizes = [size for each, size in found.too_big if _is_own(each, config)]
    for slower in filter(lambda each: _is_own(each, config), found.slower):
        return f"{_beside(time_of(slower), best.time)}, not ranked"
    return f"{sizes[0] / GIB:.1f} GiB at least, which is too big" if sizes else "is not among those that were tried"


def _own_rank(found: Found, config: Config) -> int | None:
    """The rank of the config itself among those that fit, counted from 1."""
    ranks = (rank for rank, each in enumerate(found.ranked, 1) if _is_own(each.config, config))
    return next(ranks, None)


def _is_own(each: Config, config: Config) -> bool:
    """True if a candidate is the config itself; the flag of sequence parallelism means nothing with `model` 1."""
    flag = config.mesh.sequence_parallel if config.mesh.model == 1 else each.mesh.sequence_parallel
    return replace(each, mesh=replace(each.mesh, sequence_parallel=flag)) == config


# --- Plain values -----------------------------------------------------------------------------------------------------


def _values(candidate: Candidate, spent: Cost) -> dict[str, Any]:
    time, memory = candidate.time, candidate.memory
    return {
        **settings(candidate.config),
        "seconds": time.mean,
        "seconds_at_global_batch": time.total,
        "error": time.error,
        "parts": time.parts,
        "model_tflops": time.model_tflops,
        "mfu": time.mfu,
        "memory": {**asdict(memory), "total": memory.total},
        **asdict(spent),
    }


def _alternative_values(other: Alternative) -> dict[str, Any]:
    candidate, values = other.candidate, {"field": other.field, "best": other.best, "else": other.value}
    if candidate is None:
        return values | {"seconds": None, "settings": None, "bytes": other.least}
    time, memory = candidate.time, candidate.memory
    return values | {"seconds": time.mean, "settings": settings(candidate.config), "bytes": memory.total}


def settings(config: Config) -> dict[str, Any]:
    """The fields in which candidates differ, by dotted name."""
    return {name: value_of(config, name) for name in SEARCHED}
