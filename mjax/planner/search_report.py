"""What the planner's search has to say: the fastest candidates, what holds each back, and what each choice is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mjax.config import Config
from mjax.hardware import GIB
from mjax.planner.search import Alternative, Candidate, Found, TimeOf, alternatives, describe, value_of, word
from mjax.planner.section import Section, table
from mjax.planner.space import SEARCHED
from mjax.planner.time_section import run_tokens

# With less of the memory free than this, the error of the prediction decides whether it fits.
TIGHT = 0.05


@dataclass(frozen=True)
class Question:
    """What was asked.

    Attributes:
      name: of the config.
      config: as it was given, with its own mesh.
      gpu: name of the GPU.
      price: of a GPU for an hour, or None.
      top: candidates to show.
      time_of: seconds of a step.
      run_of: seconds of all steps.
      kernel_of: the attention kernel of a config on the GPU.
    """

    name: str
    config: Config
    gpu: str
    price: float | None
    top: int
    time_of: TimeOf
    run_of: Callable[[Config], float]
    kernel_of: Callable[[Config], str]


def report(found: Found, question: Question, seconds: float, written: str | None = None) -> Section:
    """The section `search` of a plan.

    Args:
      found: with at least one candidate that fits.
      question: what was asked.
      seconds: how long the search took.
      written: the file that the best was written into.
    """
    shown = found.ranked[: question.top]
    costs = [cost(each.config, found.devices, question) for each in shown]
    others = alternatives(found)
    return Section(
        title=f"Search: {question.name} on {found.devices:,} × {question.gpu}",
        values={
            "gpu": question.gpu,
            "devices": found.devices,
            "global_batch": question.config.train.global_batch,
            "tokens": run_tokens(question.config),
            "usable_bytes": found.capacity,
            "tried": found.tried,
            "too_big": len(found.too_big),
            "seconds": seconds,
            "best": [_values(*each) for each in zip(shown, costs, strict=True)],
            "alternatives": [_alternative_values(each) for each in others],
            "own": _own_values(found, question.config),
            "written": written,
        },
        lines=[
            f"{found.tried:,} ways to run it: {len(found.too_big):,} are too big for {found.capacity / GIB:.1f} GiB, "
            f"{len(found.ranked):,} fit ({seconds:.1f} s)",
            "",
            *_table(found, shown, costs, question.price),
            "",
            *_reasons(found, others),
            "",
            *_remarks(found, question, costs[0]),
            *([f"written to {written}"] if written else []),
        ],
    )


# --- Cost -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of the whole run: days, GPU-hours, and money where a GPU-hour has a price."""

    days: float
    gpu_hours: float
    money: float | None


def cost(config: Config, devices: int, question: Question) -> Cost:
    """What all steps of a config cost."""
    hours = question.run_of(config) / 3600
    return Cost(hours / 24, hours * devices, None if question.price is None else hours * devices * question.price)


# --- Lines ------------------------------------------------------------------------------------------------------------


def _table(found: Found, shown: list[Candidate], costs: list[Cost], price: float | None) -> list[str]:
    header = ["", "pipe", "data", "model", "schedule", "micro-batch", "recompute", "seq. par.", "ZeRO"]
    header += ["s/step", "TFLOP/s", "MFU", "GiB", "days", "GPU-hours", *(["cost"] if price else []), "held back by"]
    rows = []
    for number, (candidate, spent) in enumerate(zip(shown, costs, strict=True), 1):
        mesh, train, time = candidate.config.mesh, candidate.config.train, candidate.time
        chunks = f" × {mesh.chunks}" if mesh.chunks > 1 else ""
        rows.append(
            [
                number, mesh.pipe, mesh.data, mesh.model, f"{mesh.schedule}{chunks}" if mesh.pipe > 1 else "-",
                train.micro_batch, train.recompute, "yes" if mesh.sequence_parallel else "-", mesh.zero or "-",
                f"{time.total:.3g}", f"{time.model_tflops:.0f}", "-" if time.mfu is None else f"{time.mfu:.1%}",
                f"{candidate.memory.total / GIB:.1f}", f"{spent.days:.3g}", f"{spent.gpu_hours:,.0f}",
                *([f"{spent.money:,.0f}"] if price else []), held_back_by(candidate, found.capacity),
            ]
        )  # fmt: skip
    return table(header, rows)


def held_back_by(candidate: Candidate, capacity: float) -> str:
    """What takes the most time beside the matrix products, and the memory where little is left of it."""
    parts = {name: seconds for name, seconds in candidate.time.parts.items() if name != "matmul"}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    words = [f"{name} {parts[name] / candidate.time.total:.0%}" for name in largest if parts[name] > 0]
    free = 1 - candidate.memory.total / capacity
    return ", ".join([*words, *([f"memory, {free:.0%} free"] if free < TIGHT else [])])


def _reasons(found: Found, others: list[Alternative]) -> list[str]:
    best = found.ranked[0]
    lines = []
    if len(found.ranked) > 1:
        lines += [f"1 before 2: {faster_by(best, found.ranked[1])}", ""]
    rows = []
    for other in others:
        if other.candidate is None:
            verdict = f"nothing fits: {other.least / GIB:.1f} GiB at least"
        else:
            percent = other.candidate.time.total / best.time.total - 1
            verdict = f"{other.candidate.time.total:.3g} s, {percent:+.1%}"
        with_it = ", ".join(other.others(best.config))
        rows.append([other.field, word(other.best), word(other.value), verdict, with_it])
    return lines + table(["what a choice is worth", "best", "else", "the fastest so", "which also has"], rows, left=5)


def faster_by(first: Candidate, second: Candidate) -> str:
    """Where the second of two candidates takes more time, and where less."""
    change = second.time.total - first.time.total
    if abs(change) < 1e-4 * first.time.total:
        return "the same time to four digits; the simpler one comes first"
    parts = {name: second.time.parts[name] - seconds for name, seconds in first.time.parts.items()}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:3]
    words = [f"{name} {1e3 * parts[name]:+,.1f} ms" for name in largest if abs(parts[name]) > 0.05 * abs(change)]
    return f"2 takes {1e3 * change:,.1f} ms more ({', '.join(words)})"


def _remarks(found: Found, question: Question, spent: Cost) -> list[str]:
    best, config = found.ranked[0], question.config
    money = "" if spent.money is None else f", {spent.money:,.0f} at {question.price:g} a GPU-hour"
    lines = [
        f"{run_tokens(config):,} tokens in {config.train.steps:,} steps: {spent.days:.3g} days, "
        f"{spent.gpu_hours:,.0f} GPU-hours{money}; the prediction is good to ±{best.time.error:.0%}",
        *best.time.caveats,
    ]
    if config.mesh.devices == found.devices:
        lines.append(f"the config's own mesh, {describe(config)}: {_own_verdict(found, config)}")
    free = 1 - best.memory.total / found.capacity
    if free < TIGHT:
        lines.append(
            f"the best leaves {free:.1%} of the memory free, less than the prediction may be off; {_roomier(found)}"
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


def _roomier(found: Found) -> str:
    """The fastest candidate that leaves memory free."""
    for rank, each in enumerate(found.ranked, 1):
        if each.memory.total <= (1 - TIGHT) * found.capacity:
            seconds = each.time.total
            return f"the fastest that leaves {TIGHT:.0%} is {rank:,}, {describe(each.config)}, {seconds:.3g} s"
    return f"none leaves {TIGHT:.0%}"


def _own_verdict(found: Found, config: Config) -> str:
    rank = _own_rank(found, config)
    if rank is not None:
        own, best = found.ranked[rank - 1], found.ranked[0]
        return f"{own.time.total:.3g} s, {own.time.total / best.time.total - 1:+.1%}, rank {rank:,}"
    size = next((size for each, size in found.too_big if each == config), None)
    return "is not among those that were tried" if size is None else f"{size / GIB:.1f} GiB, which is too big"


def _own_rank(found: Found, config: Config) -> int | None:
    """Where the config itself is among those that fit, counted from 1."""
    ranks = (rank for rank, each in enumerate(found.ranked, 1) if each.config == config)
    return next(ranks, None)


# --- Plain values -----------------------------------------------------------------------------------------------------


def _values(candidate: Candidate, spent: Cost) -> dict[str, Any]:
    time, memory = candidate.time, candidate.memory
    return {
        **settings(candidate.config),
        "seconds": time.total,
        "error": time.error,
        "parts": time.parts,
        "model_tflops": time.model_tflops,
        "mfu": time.mfu,
        "memory": {**dataclasses.asdict(memory), "total": memory.total},
        **dataclasses.asdict(spent),
    }


def _alternative_values(other: Alternative) -> dict[str, Any]:
    return {
        "field": other.field,
        "best": other.best,
        "else": other.value,
        "seconds": None if other.candidate is None else other.candidate.time.total,
        "settings": None if other.candidate is None else settings(other.candidate.config),
        "bytes": other.least if other.candidate is None else other.candidate.memory.total,
    }


def _own_values(found: Found, config: Config) -> dict[str, Any] | None:
    rank = _own_rank(found, config)
    return None if rank is None else {"rank": rank, "seconds": found.ranked[rank - 1].time.total}


def settings(config: Config) -> dict[str, Any]:
    """The fields in which candidates differ, by dotted name."""
    return {name: value_of(config, name) for name in SEARCHED}
