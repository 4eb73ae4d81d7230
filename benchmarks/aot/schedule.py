"""Work that overlaps the collectives of a compiled program, and the kernels that it launches.

A collective is two lines of scheduled HLO, and the kernels between them overlap with it:

    %all-reduce-start = … all-reduce-start(%product), replica_groups=…
    %weight_gradient  = … fusion(…)                                      beside the collective
    %all-reduce-done  = … all-reduce-done(%all-reduce-start)             waits for it
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.aot.hlo import HloError, Line, ScheduledCollective
from benchmarks.aot.kernels import Kernels


@dataclass(frozen=True)
class Beside:
    """Kernels that a GPU runs between the start of a collective and the wait for it.

    Attributes:
      products: matrix products and attention kernels.
      kernels: all others.
    """

    products: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class Overlapped(ScheduledCollective):
    """One operand of one collective, with the kernels that overlap it.

    Attributes:
      beside: kernels that overlap with it.
      source: the operation of the traced program that it comes from, in XLA's words; empty if XLA does not say.
    """

    beside: Beside
    source: str

    @property
    def overlap(self) -> str:
        """`products`, `kernels` or `nothing`: the best that hides it."""
        return "products" if self.beside.products else "kernels" if self.beside.kernels else "nothing"


def read_overlaps(text: str, mesh: Mapping[str, int]) -> list[Overlapped]:
    """The collectives of a compiled program; arguments and errors as in `read_collectives`."""
    module = Kernels(text)
    found = []
    for collective, computation, place in module.collectives(mesh):
        line = computation[place]
        source = line.source or module.described(line).source
        found.append(Overlapped(**vars(collective), beside=_beside(module, computation, place), source=source))
    return found


def _beside(module: Kernels, computation: list[Line], place: int) -> Beside:
    """The kernels between the collective at `place` and the wait for it."""
    start, found = computation[place], []
    if not start.opcode.endswith("-start"):
        return Beside()
    for line in computation[place + 1 :]:
        if line.opcode.endswith("-done") and start.name in line.operands:
            products = sum(kernel.startswith(("matrix product", "attention")) for kernel in found)
            return Beside(products, len(found) - products)
        found += filter(None, map(module.kernel_of, module.all_lines([line])))
    raise HloError(f"nothing waits for {start.name}")


def read_launches(text: str) -> dict[str, dict[str, int]]:
    """Count the `different` kernels and the `launches` of a step by type of kernel, with every branch taken."""
    module, launches, different = Kernels(text), Counter(), defaultdict(set)
    for computation, times, _ in module.executed():
        for line in computation:
            if (kernel := module.kernel_of(line)) is not None:
                launches[kernel] += times
                different[kernel].add(line.attribute("calls") or line.name)
    return {kernel: {"different": len(different[kernel]), "launches": launches[kernel]} for kernel in sorted(launches)}
