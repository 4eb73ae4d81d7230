"""The time of a step by kind of kernel and by part of the model, in tables whose rows add up to the step.

At each instant several kernels may run, on the streams of a GPU or on the threads of a CPU. The instant counts for one
kind: for those that compute before those that only move data, and for these before collectives. Kernels of one rank
share it. So the time of the collectives is what nothing hides (*exposed*); what runs beside others is *hidden*. An
instant in which nothing runs is idle. With several devices each row is their mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from mjax.profiling.trace import COLLECTIVES, COPIES, KINDS, Kernel
from mjax.utils.figures import table

IDLE, UNKNOWN = "idle", "elsewhere"
RANKS = {COPIES: 1, COLLECTIVES: 2}  # others: 0
SHOWN = 3  # kernels of each kind
WIDTH = 64  # columns of a name


class Breakdown:
    """The time of profiled steps.

    Attributes:
      devices: number of devices of this process.
      milliseconds: of a step.
    """

    def __init__(self, spans: Sequence[tuple[float, float]], kernels: Iterable[Kernel], steps: int):
        """Count the `kernels` within the `spans` of so many steps."""
        self._ran, self._launches, by_device = Counter(), Counter(), defaultdict(list)
        for kernel in kernels:
            for start, stop in spans:
                begin, end = max(kernel.begin, start), min(kernel.end, stop)
                if begin < end:
                    key = kernel.kind, kernel.part or UNKNOWN, kernel.label
                    by_device[kernel.device].append((begin, end, RANKS.get(kernel.kind, 0), key))
                    self._ran[key] += end - begin
                    self._launches[key] += 1
        self._counted = sum((share_out(events) for events in by_device.values()), Counter())
        self.devices, self._unit = len(by_device), len(by_device) * steps
        self.milliseconds = sum(end - begin for begin, end in spans) / steps / 1e6

    def rows(self, name_of: Callable[[tuple[str, str, str]], str | None]) -> list[tuple[str, float, float, float]]:
        """Rows of the kernels with the same name, from (kind, part, label); those with the name None are left out.

        Returns:
          Of a step on one device: the name; the milliseconds that count for it; the milliseconds in which it ran beside
          what counts before it, or beside its like; and the number of kernels.
        """
        totals = defaultdict(Counter)
        for key, ran in self._ran.items():
            if (name := name_of(key)) is not None:
                totals[name].update(counted=self._counted[key], ran=ran, launches=self._launches[key])
        scale = 1 / self._unit / 1e6
        rows = [
            (name, of["counted"] * scale, (of["ran"] - of["counted"]) * scale, of["launches"] / self._unit)
            for name, of in totals.items()
        ]
        return sorted(rows, key=lambda row: -row[1])

    def lines(self) -> list[str]:
        """Two tables: kinds of kernels with the longest kernels of each, and parts of the model."""
        rows = []
        for kind, *numbers in sorted(self.rows(lambda key: key[0]), key=lambda row: KINDS.index(row[0])):
            rows.append(("collectives, exposed" if kind == COLLECTIVES else kind, *numbers))
            longest = self.rows(lambda key, kind=kind: key[2] if key[0] == kind else None)
            rows += [(f"  {name}"[:WIDTH], *numbers) for name, *numbers in longest[:SHOWN]]
        parts = self.rows(lambda key: key[1])
        return [*self._table("kind of kernel, and the longest", rows), "", *self._table("part of the model", parts)]

    def _table(self, title: str, rows: Sequence[tuple]) -> list[str]:
        ((_, busy, hidden, kernels),) = self.rows(lambda key: "")
        rows = [*rows, (IDLE, self.milliseconds - busy, 0.0, 0.0), ("a step", self.milliseconds, hidden, kernels)]
        cells = [
            (name, f"{ms:,.2f}", f"{ms / self.milliseconds:.1%}", f"{hidden:,.2f}", f"{kernels:,.0f}")
            for name, ms, hidden, kernels in rows
        ]
        return table((title, "ms", "share", "hidden ms", "kernels"), cells)


def share_out(events: Sequence[tuple]) -> Counter:
    """For each key, the time that counts for it.

    Args:
      events: (begin, end, rank, key); of all events at an instant those of the lowest rank share it equally.
    """
    counted, running, before = Counter(), defaultdict(Counter), 0.0
    edges = [(event[0], 1, event) for event in events] + [(event[1], -1, event) for event in events]
    for now, change, (_, _, rank, key) in sorted(edges, key=lambda edge: edge[:2]):
        lowest = min((rank for rank, keys in running.items() if keys), default=0)
        for each, number in running[lowest].items():
            counted[each] += (now - before) * number / running[lowest].total()
        running[rank][key] += change
        if not running[rank][key]:
            del running[rank][key]
        before = now
    return counted
