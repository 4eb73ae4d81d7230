"""The instructions of a compiled program by name, which is what a profile calls them; for GPUs and CPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mjax.planner.hlo import FREE, Line, Module

MOVES = {
    "broadcast", "concatenate", "copy", "copy-start", "dynamic-slice", "dynamic-update-slice", "pad", "reshape",
    "reverse", "slice", "transpose",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      kernel: type of the kernel that it launches, as in `ScheduledProgram.kernels`; None if none, or a collective.
      collective: its operation, as in `ScheduledCollective`; None for others.
      moves: whether it computes nothing but indices: a copy, a slice, a fill, or a fusion of these.
      source: the operation of the traced program that it comes from, in XLA's words; empty if XLA does not say.
    """

    kernel: str | None
    collective: str | None
    moves: bool
    source: str


def read_instructions(text: str) -> dict[str, Instruction]:
    """All instructions of a compiled program by name.

    Args:
      text: `compiled.as_text()`.
    """
    module = Module(text)
    return {line.name: _instruction(module, line) for lines in module.computations.values() for line in lines}


def _instruction(module: Module, line: Line) -> Instruction:
    inner = module.computations[line.attribute("calls")][-1] if line.opcode == "async-start" else line
    source = line.source or inner.source
    return Instruction(module.kernel_of(inner), module.operation_of(line), moves(module, inner), source)


def moves(module: Module, line: Line) -> bool:
    """Whether a line computes nothing but indices."""
    if line.opcode == "fusion":
        inside = module.computations[line.attribute("calls")]
        return all(moves(module, inner) or re.fullmatch(r"\w+\[\]", inner.shape) for inner in inside)
    return line.opcode in MOVES or line.opcode in FREE
