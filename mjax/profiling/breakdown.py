"""Where the time of a step went: a table whose rows add up to the step.

At each instant several kernels may run, on the streams of a GPU or on the threads of a CPU. The instant counts for one
kind: for those that compute before those that only move data, and for these before collectives. Kernels of one rank
share it. So the time of the collectives is what nothing hides (*exposed*); what runs beside others is *hidden*. An
instant in which nothing runs is idle. With several devices each row is their mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mjax.planner.section import table
from mjax.profiling.kernels import COLLECTIVES, COPIES, KINDS, Trace

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
    """Where the time of the profiled steps went.

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
    idle = len(devices) * total - sum(counted.values())
    unit = len(devices) * steps

    def rows(keys: Mapping[str, list[Key]]) -> list[Row]:
        totals = {
            name: [sum(of[key] for key in group) for of in (counted, ran, launches)] for name, group in keys.items()
        }
        found = [Row(name, c / unit / 1e6, (r - c) / unit / 1e6, n / unit) for name, (c, r, n) in totals.items()]
        return sorted(found, key=lambda row: -row.milliseconds)

    nothing = Row(IDLE, idle / unit / 1e6, 0.0, 0.0)
    kinds = _grouped(ran, lambda key: key[0])
    return Breakdown(
        devices=tuple(devices),
        milliseconds=total / steps / 1e6,
        kinds=(*sorted(rows(kinds), key=lambda row: KINDS.index(row.name)), nothing),
        parts=(*rows(_grouped(ran, lambda key: key[1])), nothing),
        top={kind: tuple(rows(_grouped(keys, _kernel_name))) for kind, keys in kinds.items()},
    )


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


def _grouped(keys: Iterable[Key], name) -> dict[str, list[Key]]:
    groups = defaultdict(list)
    for key in keys:
        groups[name(key)].append(key)
    return groups


# --- In words ---------------------------------------------------------------------------------------------------------


def kinds_table(found: Breakdown) -> list[str]:
    """Kinds of kernels with the longest kernels of each, in lines that add up to the step."""
    rows = []
    for kind in found.kinds:
        name = "collectives, exposed" if kind.name == COLLECTIVES else kind.name
        rows.append(_row(name, kind, found))
        rows += [_row(f"  {row.name}"[:WIDTH], row, found) for row in found.top.get(kind.name, ())[:SHOWN]]
    rows.append(_row("a step", _total(found), found))
    return table(("kind of kernel, and the longest", "ms", "share", "hidden ms", "kernels"), rows)


def parts_table(found: Breakdown) -> list[str]:
    """Parts of the model, in lines that add up to the step."""
    rows = [_row(row.name, row, found) for row in (*found.parts, _total(found))]
    return table(("part of the model", "ms", "share", "hidden ms", "kernels"), rows)


def _total(found: Breakdown) -> Row:
    return Row(
        "a step", found.milliseconds, sum(row.hidden for row in found.kinds), sum(row.kernels for row in found.kinds)
    )


def _row(name: str, row: Row, found: Breakdown) -> tuple[str, ...]:
    share = row.milliseconds / found.milliseconds
    return name, f"{row.milliseconds:,.2f}", f"{share:.1%}", f"{row.hidden:,.2f}", f"{row.kernels:,.0f}"
