"""The kernels in a trace of the profiler, and what each of them is.

On a GPU each stream of a device is a line of the plane /device:GPU:N, and its events are the kernels. On a CPU the
lines are threads of the host, and the events that have an `hlo_op` are what XLA's runtime executes; the profiler names
the device of each. Both carry the name of an instruction of the compiled program, whose text has the operation and the
part of the model that it belongs to (`parallel/scopes.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from jax.profiler import ProfileData

from mjax.parallel import scopes
from mjax.planner.ledger import source_of

WINDOW = "profiled steps"  # the event that spans them
ASIDE = "between steps"  # events within it: evaluations and saves
PRODUCTS, ATTENTION, OPTIMIZER, OTHER = "products", "attention", "optimizer", "other kernels"
COPIES, COLLECTIVES, ELSEWHERE = "copies and fills", "collectives", "other programs"
KINDS = (PRODUCTS, ATTENTION, OPTIMIZER, OTHER, ELSEWHERE, COPIES, COLLECTIVES)
# Name, opcode and operation of the traced program of each line of a compiled program.
INSTRUCTION = re.compile(r'^ +(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((?:.*op_name="([^"]*)")?', re.MULTILINE)
# Lines without kernels: loops and calls, whose kernels are events too, and those that wait for another.
WITHOUT_KERNEL = re.compile(r"while|conditional|call|async-update|.*-done")
BY_NAME = (
    (COLLECTIVES, r"nccl|AllReduceKernel|all-?(reduce|gather|to-all)|reduce-?scatter|collective-permute"),
    (ATTENTION, rf"fmha|flash|sdpa|/{scopes.ATTENTION}[/)]"),
    (PRODUCTS, r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitKreduce|\bdot|convolution"),
    (COPIES, r"^mem(cpy|set)|^copy"),
)
GENERIC = re.compile("loop|input|fusion|wrapped|start")  # words of instructions that name no operation
MOVES = re.compile(
    "copy|slice|dynamic|update|concatenate|transpose|broadcast|in|dim|pad|reshape|reverse|squeeze|bitcast"
)


class TraceError(ValueError):
    """A trace is not in the known form."""


class Kernel(NamedTuple):
    """A kernel that ran.

    Attributes:
      device: it ran on.
      begin, end: ns since the profiler was started.
      kind: one of KINDS.
      part: of the model with the pass, such as `layer backward`; empty if unknown.
      label: the part, the operation of the traced program, and the instruction without its number, such as `layer
        backward: dot_general (ynn_fusion)`.
    """

    device: str
    begin: float
    end: float
    kind: str
    part: str
    label: str


def read_trace(profile: ProfileData, program: str) -> tuple[list[tuple[float, float]], list[Kernel]]:
    """Read a trace.

    Args:
      profile: of the profiler.
      program: text of the compiled train step, `compiled.as_text()`.

    Returns:
      Begin and end of the steps, ns since the profiler was started: one span, or more with evaluations and saves
      between them; and the kernels on all devices of this process, also some from before and after the steps.

    Raises:
      TraceError: the trace does not have the event WINDOW, or has no kernels.
    """
    planes = list(profile.planes)
    threads = [line for plane in planes if plane.name.startswith("/host:CPU") for line in plane.lines]
    marks = [event for line in threads for event in line.events if event.name in (WINDOW, ASIDE)]
    window = next((event for event in marks if event.name == WINDOW), None)
    kernels = list(_kernels(_events(planes), program))
    if window is None or not kernels:
        missing = f"event {WINDOW!r}" if window is None else "kernels"
        raise TraceError(f"the trace has no {missing}; its planes are {', '.join(plane.name for plane in planes)}")
    breaks = sorted((event.start_ns, event.end_ns) for event in marks if event.name == ASIDE)
    edges = [window.start_ns, *itertools.chain.from_iterable(breaks), window.end_ns]
    return list(zip(edges[::2], edges[1::2], strict=True)), kernels


def _events(planes) -> Iterator[tuple]:
    """Yield (device, event, its statistics) of kernels."""
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # the other lines repeat its events, by operation, module or step
            for event in line.events:
                stats = dict(event.stats) if gpus or (event.duration_ns > 0 and "::" not in event.name) else {}
                if gpus or "hlo_op" in stats:  # else a function of the runtime
                    device = plane.name.removeprefix("/device:") if gpus else f"CPU:{stats.get('device_ordinal', 0)}"
                    yield device, event, stats


def _kernels(events: Iterable[tuple], program: str) -> Iterator[Kernel]:
    """Yield the kernels of the events."""
    train_step = re.match(r"HloModule ([\w.\-]+)", program)[1]
    instructions = {name: (opcode, source) for name, opcode, source in INSTRUCTION.findall(program)}
    for device, event, stats in events:
        name, module = str(stats.get("hlo_op", event.name)), stats.get("hlo_module", train_step)
        opcode, source = instructions.get(name, ("", "")) if module == train_step else ("", "")
        if WITHOUT_KERNEL.fullmatch(opcode):
            continue
        stem, operation = re.sub(r"[._]?\d+$", "", name)[:48], re.split(r"[/:()]+", source.rstrip("):/"))[-1]
        part, label = " ".join(filter(None, source_of(source))), stem
        if operation and operation != stem:
            label = f"{operation} ({stem})"
        kind, label = kind_of(f"{event.name} {name} {opcode}", source), f"{part}: {label}" if part else label
        if module != train_step:
            kind, label = ELSEWHERE, f"{module}: {name}"
        yield Kernel(device, event.start_ns, event.end_ns, kind, part, label)


@cache
def kind_of(names: str, source: str) -> str:
    """The kind of a kernel, by the names of the kernel, its instruction and opcode, and by its source."""
    texts = {kind: names if kind in (COLLECTIVES, COPIES) else f"{names} {source}" for kind, _ in BY_NAME}
    kind = next((kind for kind, words in BY_NAME if re.search(words, texts[kind], re.IGNORECASE)), OTHER)
    if kind != COLLECTIVES and source_of(source)[0] == scopes.OPTIMIZER:
        return OPTIMIZER
    words = re.findall("[a-z]+", GENERIC.sub("", names.split(" ")[-2])) or re.findall("[a-z]+", source.split("/")[-1])
    return COPIES if kind == OTHER and words and all(map(MOVES.fullmatch, words)) else kind
