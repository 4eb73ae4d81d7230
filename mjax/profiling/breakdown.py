"""The time of a step by kind of kernel and by part of the model, in tables whose rows add up to the step.

At each instant several kernels may run, on the streams of a GPU or on the threads of a CPU. The instant counts for one
kind: for those that compute before those that only move data, and for these before collectives. Kernels of one rank
share it. So the time of the collectives is what nothing hides (*exposed*); what runs beside others is *hidden*. An
instant in which nothing runs is idle. With several devices each row is their mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from mjax.profiling.kernels import COLLECTIVES, COPIES, KINDS, Trace
from mjax.utils.figures import table

IDLE, UNKNOWN = "idle", "elsewhere"
RANKS = {COPIES: 1, COLLECTIVES: 2}  # others: 0
SHOWN = 3  # kernels of each kind
WIDTH = 64  # columns of a name
Key = tuple[str, str, str]  # kind, part, label


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      name: of the kind, of the part of the model, or of a kernel.
      milliseconds: of a step that count for it.
      hidden: milliseconds of a step in which it ran beside what counts before it, or beside its like.
      kernels: on a device in a step.
    """

    name: str
    milliseconds: float
    hidden: float
    kernels: float


@dataclass(frozen=True)
class Breakdown:
    """The time of the profiled steps by kind and by part.

    Attributes:
      devices: names of the devices of this process.
      milliseconds: of a step.
      kinds: adds up to `milliseconds`, with a row IDLE.
      parts: of the model, by pass; adds up to `milliseconds` too.
      top: by kind, its kernels, the longest first.
    """

    devices: tuple[str, ...]
    milliseconds: float
    kinds: tuple[Row, ...]
    parts: tuple[Row, ...]
    top: Mapping[str, tuple[Row, ...]]


def break_down(trace: Trace, steps: int) -> Breakdown:
    """The table of a trace of so many steps."""
    devices = sorted({kernel.device for kernel in trace.kernels})
    total = sum(end - begin for begin, end in trace.spans)
    counted, ran, launches = Counter(), Counter(), Counter()
    unit = len(devices) * steps
    for device in devices:
        spans = []
        for kernel in trace.kernels:
            if kernel.device == device:
                for span in trace.spans:
                    begin, end = max(kernel.begin, span[0]), min(kernel.end, span[1])
                    if begin < end:
                        key = kernel.kind, kernel.part or UNKNOWN, kernel.label
                        spans.append((begin, end, RANKS.get(kernel.kind, 0), key))
                        ran[key] += end - begin
                        launches[key] += 1
        counted.update(share_out(spans))

    def rows(name_of: Callable[[Key], str], keys: Iterable[Key] = ran) -> list[Row]:
        totals = defaultdict(Counter)
        for key in keys:
            totals[name_of(key)].update(counted=counted[key], ran=ran[key], launches=launches[key])
        rows = [
            Row(name, of["counted"] / unit / 1e6, (of["ran"] - of["counted"]) / unit / 1e6, of["launches"] / unit)
            for name, of in totals.items()
        ]
        return sorted(rows, key=lambda row: -row.milliseconds)

    kinds = sorted(rows(lambda key: key[0]), key=lambda row: KINDS.index(row.name))
    top = {kind.name: tuple(rows(_kernel_name, [key for key in ran if key[0] == kind.name])) for kind in kinds}
    idle = Row(IDLE, (len(devices) * total - counted.total()) / unit / 1e6, 0.0, 0.0)
    parts = rows(lambda key: key[1])
    return Breakdown(tuple(devices), total / steps / 1e6, (*kinds, idle), (*parts, idle), top)


def share_out(spans: Iterable[tuple[float, float, int, Key]]) -> Counter:
    """For each key, the time that counts for it.

    Args:
      spans: (begin, end, rank, key); of all spans at an instant those of the lowest rank share it equally.
    """
    spans, counted = list(spans), Counter()
    edges = sorted(
        [(span[0], 1, i) for i, span in enumerate(spans)] + [(span[1], -1, i) for i, span in enumerate(spans)]
    )
    running: dict[int, Counter] = defaultdict(Counter)
    before = edges[0][0] if edges else 0.0
    for now, change, i in edges:
        first = min((rank for rank, keys in running.items() if keys), default=None)
        if now > before and first is not None:
            together = running[first].total()
            for key, number in running[first].items():
                counted[key] += (now - before) * number / together
        _, _, rank, key = spans[i]
        running[rank][key] += change
        if not running[rank][key]:
            del running[rank][key]
        before = now
    return counted


def _kernel_name(key: Key) -> str:
    return key[2] if key[1] == UNKNOWN else f"{key[1]}: {key[2]}"


def kinds_table(step: Breakdown) -> list[str]:
    """Kinds of kernels with the longest kernels of each, in lines that add up to the step."""
    rows = []
    for kind in step.kinds:
        rows.append(replace(kind, name="collectives, exposed") if kind.name == COLLECTIVES else kind)
        rows += [replace(row, name=f"  {row.name}"[:WIDTH]) for row in step.top.get(kind.name, ())[:SHOWN]]
    return _table("kind of kernel, and the longest", rows, step)


def parts_table(step: Breakdown) -> list[str]:
    """Parts of the model, in lines that add up to the step."""
    return _table("part of the model", step.parts, step)


def _table(title: str, rows: Iterable[Row], step: Breakdown) -> list[str]:
    hidden, kernels = (sum(getattr(row, field) for row in step.kinds) for field in ("hidden", "kernels"))
    cells = [
        (
            row.name, f"{row.milliseconds:,.2f}", f"{row.milliseconds / step.milliseconds:.1%}", f"{row.hidden:,.2f}",
            f"{row.kernels:,.0f}",
        )
        for row in (*rows, Row("a step", step.milliseconds, hidden, kernels))
    ]  # fmt: skip
    return table((title, "ms", "share", "hidden ms", "kernels"), cells)
