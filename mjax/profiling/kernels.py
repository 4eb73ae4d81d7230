"""The kernels in a trace of the profiler, and what each of them is.

On a GPU each stream of a device is a line of the plane /device:GPU:N, and its events are the kernels. On a CPU the
lines are threads of the host, and the events that have an `hlo_op` are what XLA's runtime executes; the profiler names
the device of each. Both carry the name of an instruction of the compiled program, whose text says the rest: the
operation, and the part of the model that it belongs to (`parallel/scopes.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

from mjax.parallel import scopes
from mjax.planner.hlo import CONTROL, Line, Module, arrays_of
from mjax.planner.ledger import source_of

WINDOW = "profiled steps"  # the event that spans them
ASIDE = "between steps"  # events within it: evaluations and saves
PRODUCTS, ATTENTION, OPTIMIZER, OTHER = "products", "attention", "optimizer", "other kernels"
COPIES, COLLECTIVES, ELSEWHERE = "copies and fills", "collectives", "other programs"
KINDS = (PRODUCTS, ATTENTION, OPTIMIZER, OTHER, ELSEWHERE, COPIES, COLLECTIVES)

# Names of kernels on a GPU without an instruction: those of a CUDA graph, and copies of the runtime.
BY_NAME = (
    (COLLECTIVES, r"nccl|AllReduceKernel|all-?(reduce|gather)|reduce-?scatter"),
    (ATTENTION, r"fmha|flash|sdpa"),
    (PRODUCTS, r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitKreduce"),
    (COPIES, r"^mem(cpy|set)|copy|dynamic[_-](update[_-])?slice"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran.

    Attributes:
      device: it ran on.
      line: stream of a GPU, or thread of a CPU.
      begin, end: ns since the profiler was started.
      kind: one of KINDS.
      part: of the model with the pass, such as `layer backward`; empty if unknown.
      name: of the instruction, or of the kernel if the trace has no instruction.
      source: the operation of the traced program, in XLA's words; empty if unknown.
    """

    device: str
    line: str
    begin: float
    end: float
    kind: str
    part: str
    name: str
    source: str

    @property
    def label(self) -> str:
        """The operation of the traced program, and the instruction without its number: `dot_general (ynn_fusion)`."""
        stem = re.sub(r"[._]?\d+$", "", self.name)[:48]
        operation = re.split(r"[/:()]+", self.source.rstrip("):/"))[-1]
        return f"{operation} ({stem})" if operation and operation != stem else stem


@dataclass(frozen=True)
class Trace:
    """Kernels and host events of the profiled steps.

    Attributes:
      spans: begin and end of them, ns since the profiler was started: one span, or more with evaluations and saves
        between them.
      kernels: on all devices of this process, also some from before and after them.
      host: name, begin and end of the events of Python's thread, with the annotations of the steps.
    """

    spans: list[tuple[float, float]]
    kernels: list[Kernel]
    host: list[tuple[str, float, float]]


class TraceError(ValueError):
    """A trace is not in the known form."""


def read_trace(profile: ProfileData, program: str) -> Trace:
    """Read a trace.

    Args:
      profile: of the profiler.
      program: text of the compiled train step, `compiled.as_text()`.

    Raises:
      TraceError: the trace does not have the event WINDOW, or has no kernels.
    """
    planes = list(profile.planes)
    threads = [line for plane in planes if plane.name.startswith("/host:CPU") for line in plane.lines]
    host = next((spans for spans in map(_spans, threads) if any(span[0] == WINDOW for span in spans)), None)
    if host is None:
        raise TraceError(f"the trace has no event {WINDOW!r}")
    _, begin, end = next(span for span in host if span[0] == WINDOW)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    kernels = list(_kernels(_gpu_events(gpus) if gpus else _cpu_events(threads), program))
    if not kernels:
        raise TraceError(f"the trace has no kernels; its planes are {', '.join(plane.name for plane in planes)}")
    breaks = [(begin, begin), *sorted(span[1:] for span in host if span[0] == ASIDE), (end, end)]
    spans = [(before[1], after[0]) for before, after in itertools.pairwise(breaks)]
    return Trace(spans, kernels, host)


def _spans(line) -> list[tuple[str, float, float]]:
    return [(event.name, event.start_ns, event.end_ns) for event in line.events if event.duration_ns > 0]


def newest_trace(folder: Path) -> Path:
    """The file that the profiler has written below `folder`.

    Raises:
      TraceError: there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise TraceError(f"the profiler has written no trace into {folder}")
    return files[-1]


def _gpu_events(planes) -> Iterator[tuple]:
    """Yield (device, stream, event, its statistics)."""
    for plane in planes:
        for line in plane.lines:
            if line.name.startswith("Stream"):  # the other lines repeat its events, by operation, module or step
                for event in line.events:
                    yield plane.name.removeprefix("/device:"), line.name, event, dict(event.stats)


def _cpu_events(threads) -> Iterator[tuple]:
    """Yield (device, thread, event, its statistics)."""
    for line in threads:
        for event in line.events:
            if event.duration_ns > 0 and "::" not in event.name:  # the runtime's own functions
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    yield f"CPU:{stats.get('device_ordinal', 0)}", line.name, event, stats


def _kernels(events: Iterable[tuple], program: str) -> Iterator[Kernel]:
    """Yield the kernels of the events, without loops and calls: their kernels are events too."""
    heading = re.match(r"HloModule ([\w.\-]+)", program)
    if heading is None:
        raise TraceError("the text of the train step is not HLO")
    train_step, instructions = heading[1], read_instructions(program)
    for device, line, event, stats in events:
        name, module = str(stats.get("hlo_op", event.name)), stats.get("hlo_module", train_step)
        instruction = instructions.get(name) if module == train_step else None
        source = instruction.source if instruction else ""
        part, phase = source_of(source) if instruction else ("", "")
        if module != train_step:
            kind, name = ELSEWHERE, f"{module}: {name}"
        elif instruction is None:
            kind = next((kind for kind, words in BY_NAME if re.search(words, event.name, re.IGNORECASE)), OTHER)
        else:
            kind = kind_of(instruction, part)
        if kind is not None:
            words = f"{part} {phase}".strip()
            yield Kernel(device, line, event.start_ns, event.end_ns, kind, words, name, source)


def kind_of(instruction: Instruction, part: str) -> str | None:
    """The kind of an instruction; None if it runs no kernel of its own."""
    kernel = instruction.kernel
    if instruction.collective:
        return COLLECTIVES
    if kernel is None:
        return None
    if part == scopes.OPTIMIZER:
        return OPTIMIZER
    if kernel.startswith("attention") or re.search(rf"[/(]{scopes.ATTENTION}[)/]", instruction.source):
        return ATTENTION
    if kernel.startswith("matrix product") or kernel in ("dot", "convolution"):
        return PRODUCTS
    return COPIES if instruction.moves or kernel.startswith("copy") else OTHER


# --- Instructions of a compiled program by name, as a profile calls them ----------------------------------------------


# Lines that cost nothing: they name values, or move less than a kernel launch costs.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "domain",
}  # fmt: skip
LIBRARIES = {"__cudnn$fmha": "attention, cuDNN", "__cublas": "matrix product, cuBLAS"}  # by the call's target
PALLAS, FLASH = "__gpu$xla.gpu.triton", "/flash_"  # its target, and the names of our kernels
HOST = ":S(5)"  # the memory space of an array in host memory, in its layout
TO_HOST, FROM_HOST = "copy to host memory", "copy from host memory"  # kernels of no multiprocessor
MOVES = {
    "broadcast", "concatenate", "copy", "copy-start", "dynamic-slice", "dynamic-update-slice", "pad", "reshape",
    "reverse", "slice", "transpose",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      kernel: type of the kernel that it launches; None if none, or a collective.
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
    module, instructions = Kernels(text), {}
    for line in itertools.chain.from_iterable(module.computations.values()):
        inner = module.computations[line.attribute("calls")][-1] if line.opcode == "async-start" else line
        instructions[line.name] = Instruction(
            module.kernel_of(inner), module.operation_of(line), module.moves(inner), line.source or inner.source
        )
    return instructions


class Kernels(Module):
    """The computations of a module, and the kernels that their lines launch."""

    def __init__(self, text: str):
        super().__init__(text)
        self._products: dict[str, bool] = {}

    def kernel_of(self, line: Line) -> str | None:
        """The type of kernel that a line launches; None if it launches none, or a collective."""
        opcode = line.opcode
        if opcode in FREE or opcode in CONTROL or opcode == "async-update" or opcode.endswith("-done"):
            return None
        if self.operation_of(line):
            return None
        if copied := self.host_copy(line):
            return copied[0]
        if opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', line.attributes)[1]
            if target == "AllocateBuffer":
                return None
            if target == PALLAS and FLASH in line.source:
                return "attention, Pallas"
            known = (kernel for prefix, kernel in LIBRARIES.items() if target.startswith(prefix))
            return next(known, f"custom call {target}")
        if opcode == "fusion":
            return self._fusion(line)
        if opcode in ("copy", "copy-start"):
            return "copy"
        return opcode.removesuffix("-start")

    def _fusion(self, line: Line) -> str:
        inside = self.computations[line.attribute("calls")]
        if called := [inner for inner in inside if inner.opcode == "custom-call"]:
            return self.kernel_of(called[0])  # with a slice of a buffer, or written into one (jax 0.11)
        config = re.search(r'"fusion_backend_config":\{"kind":"([^"]*)"', line.attributes)
        emitter = config[1] if config else ""
        if self._has_product(line.attribute("calls")):
            maker = "Triton" if emitter.startswith("__triton") else "cuDNN" if "cudnn" in emitter else "XLA"
            return f"matrix product, {maker}"
        if emitter.startswith("__triton"):
            return "fusion, Triton"
        if emitter == "__custom_fusion":
            return "copy"  # a slice of a buffer, passed on or written in place
        return "fusion, reduction" if "kind=kInput" in line.attributes else "fusion, element-wise"

    def _has_product(self, name: str) -> bool:
        if name not in self._products:
            lines = self.computations[name]
            self._products[name] = any(
                line.opcode in ("dot", "convolution", "scaled-dot")
                or (line.opcode == "fusion" and self._has_product(line.attribute("calls")))
                for line in lines
            )
        return self._products[name]

    def moves(self, line: Line) -> bool:
        """True if a line computes nothing but indices."""
        if line.opcode == "fusion":
            inside = self.computations[line.attribute("calls")]
            return all(self.moves(inner) or re.fullmatch(r"\w+\[\]", inner.shape) for inner in inside)
        return line.opcode in MOVES or line.opcode in FREE

    def host_copy(self, line: Line) -> tuple[str, int] | None:
        """The direction and the bytes of a copy between device and host that `line` starts, or is; None for others.

        Arrays of all layers stay where they are: a slice of one moves, or is written in place.
        """
        if not line.opcode.startswith(("copy", "fusion", "dynamic-")) or line.opcode.endswith("-done"):
            return None
        arrays = re.findall(r"[a-z]\w*\[[\d,]+\](?:\{[^}]*\})?", line.shape)  # without numbers, such as indices
        if HOST not in line.shape or not arrays:
            return None
        result = arrays[0] if line.opcode == "copy-start" else arrays[-1]
        return TO_HOST if HOST in result else FROM_HOST, min(arrays_of(shape)[0][1] for shape in arrays)
