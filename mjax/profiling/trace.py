"""The kernels in a trace of the profiler, their kinds, and tables of their time.

On a GPU each stream of a device is a line of the plane /device:GPU:N, and its events are the kernels. On a CPU the
lines are threads of the host, and XLA's runtime executes the events with an `hlo_op`; the profiler names the device.
Both carry the name of an instruction of the compiled program, whose text has its operation and part of the model
(`parallel/named_scopes.py`).
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from jax.profiler import ProfileData

from mjax.parallel import named_scopes
from mjax.planner.ledger import find_source
from mjax.utils.figures import format_table

WINDOW = "profiled steps"  # the event that spans them
PAUSE = "between steps"  # events within it: evaluations and saves
MATMULS, ATTENTION, OPTIMIZER, OTHER = "matmuls", "attention", "optimizer", "other kernels"
COPIES, COLLECTIVES, OTHER_PROGRAMS = "copies and fills", "collectives (exposed)", "other programs"
KINDS = (MATMULS, ATTENTION, OPTIMIZER, OTHER, OTHER_PROGRAMS, COPIES, COLLECTIVES)
# Name, opcode and operation of the traced program of each line of a compiled program.
INSTRUCTION = re.compile(r'^ +(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((?:.*op_name="([^"]*)")?', re.MULTILINE)
# Instructions without kernels: loops and calls, whose kernels are events too, and waits.
WITHOUT_KERNEL = re.compile(r"while|conditional|call|async-update|.*-done")
BY_NAME = (
    (COLLECTIVES, r"nccl|AllReduceKernel|all-?(reduce|gather|to-all)|reduce-?scatter|collective-permute"),
    (ATTENTION, rf"fmha|flash|sdpa|/{named_scopes.ATTENTION}[/)]"),
    (MATMULS, r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitKreduce|\bdot|convolution"),
    (COPIES, r"^mem(cpy|set)|^copy"),
)
GENERIC = re.compile("loop|input|fusion|wrapped|start")  # words in instruction names without an operation
MOVES = re.compile(
    "copy|slice|dynamic|update|concatenate|transpose|broadcast|in|dim|pad|reshape|reverse|squeeze|bitcast"
)
IDLE, UNKNOWN = "idle", "other"
RANKS = {COPIES: 1, COLLECTIVES: 2}  # of all other kinds: 0
MAX_KERNELS = 3  # rows of each kind
MAX_NAME_WIDTH = 64


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
      between them. Also the kernels on all devices of this process, some of them from before and after the steps.

    Raises:
      ValueError: the trace does not have the event WINDOW, or has no kernels.
    """
    planes = list(profile.planes)
    threads = [line for plane in planes if plane.name.startswith("/host:CPU") for line in plane.lines]
    marks = [event for line in threads for event in line.events if event.name in (WINDOW, PAUSE)]
    window = next((event for event in marks if event.name == WINDOW), None)
    kernels = list(_kernels(_events(planes), program))
    if window is None or not kernels:
        missing = f"event {WINDOW!r}" if window is None else "kernels"
        raise ValueError(f"the trace has no {missing}; its planes are {', '.join(plane.name for plane in planes)}")
    pauses = sorted((event.start_ns, event.end_ns) for event in marks if event.name == PAUSE)
    edges = [window.start_ns, *itertools.chain.from_iterable(pauses), window.end_ns]
    return list(zip(edges[::2], edges[1::2], strict=True)), kernels


def _events(planes) -> Iterator[tuple]:
    """Yield (device, event, its statistics) of kernels."""
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # all other lines repeat its events, by operation, module or step
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
        part, label = " ".join(filter(None, find_source(source))), stem
        if operation and operation != stem:
            label = f"{operation} ({stem})"
        kind, label = operation_kind(f"{event.name} {name} {opcode}", source), f"{part}: {label}" if part else label
        if module != train_step:
            kind, label = OTHER_PROGRAMS, f"{module}: {name}"
        yield Kernel(device, event.start_ns, event.end_ns, kind, part, label)


@cache
def operation_kind(names: str, source: str) -> str:
    """The kind of a kernel by the names of the kernel, its instruction and opcode, and by its source."""
    texts = {kind: names if kind in (COLLECTIVES, COPIES) else f"{names} {source}" for kind, _ in BY_NAME}
    kind = next((kind for kind, words in BY_NAME if re.search(words, texts[kind], re.IGNORECASE)), OTHER)
    if kind != COLLECTIVES and find_source(source)[0] == named_scopes.OPTIMIZER:
        return OPTIMIZER
    words = re.findall("[a-z]+", GENERIC.sub("", names.split(" ")[-2])) or re.findall("[a-z]+", source.split("/")[-1])
    return COPIES if kind == OTHER and words and all(map(MOVES.fullmatch, words)) else kind


# --- Tables ----------------------------------------------------------------------------------------------------------


class Breakdown:
    """The time of profiled steps by kind of kernel and by part of the model, in tables whose rows add up to the step.

    At each instant several kernels may run, on the streams of a GPU or on the threads of a CPU. The instant counts for
    kernels that compute; without any, for copies; without these, for collectives. Kernels of one rank share it. So the
    time of the collectives is *exposed*; all other time of a kernel is *overlapped*. An instant in which nothing runs
    is idle. With several devices each row is their mean.

    Attributes:
      devices: number of devices of this process.
      milliseconds: of a step.
    """

    def __init__(self, spans: Sequence[tuple[float, float]], kernels: Iterable[Kernel], steps: int):
        """Count the `kernels` within the `spans` of a number of steps."""
        self._totals, by_device = defaultdict(Counter), defaultdict(list)
        for kernel, (start, stop) in itertools.product(kernels, spans):
            begin, end = max(kernel.begin, start), min(kernel.end, stop)
            if begin < end:
                key = kernel.kind, kernel.part or UNKNOWN, kernel.label
                by_device[kernel.device].append((begin, end, RANKS.get(kernel.kind, 0), key))
                self._totals[key].update(ran=end - begin, launches=1)
        for events in by_device.values():
            for key, counted in attribute_time(events).items():
                self._totals[key]["counted"] += counted
        self.devices, self._unit = len(by_device), len(by_device) * steps
        self.milliseconds = sum(end - begin for begin, end in spans) / steps / 1e6

    def rows(self, name_of: Callable[[tuple[str, str, str]], str | None]) -> list[tuple[str, float, float, float]]:
        """Sum the kernels with the same name, from (kind, part, label), longest first; the name None is left out.

        Returns:
          Name, milliseconds, overlapped milliseconds and number of kernels, per step and device.
        """
        by_name = defaultdict(Counter)
        for key, totals in self._totals.items():
            by_name[name_of(key)].update(totals)
        by_name.pop(None, None)
        scale = 1 / self._unit / 1e6
        rows = [
            (name, sums["counted"] * scale, (sums["ran"] - sums["counted"]) * scale, sums["launches"] / self._unit)
            for name, sums in by_name.items()
        ]
        return sorted(rows, key=lambda row: -row[1])

    def lines(self) -> list[str]:
        """Two tables: kinds of kernels with the longest kernels of each, and parts of the model."""
        rows = []
        for kind, *numbers in sorted(self.rows(lambda key: key[0]), key=lambda row: KINDS.index(row[0])):
            rows.append((kind, *numbers))
            longest = self.rows(lambda key, kind=kind: key[2] if key[0] == kind else None)
            rows += [(f"  {name}"[:MAX_NAME_WIDTH], *numbers) for name, *numbers in longest[:MAX_KERNELS]]
        parts = self.rows(lambda key: key[1])
        return [*self._table("kernels by kind, longest first", rows), "", *self._table("part of the model", parts)]

    def _table(self, title: str, rows: Sequence[tuple]) -> list[str]:
        ((_, busy, overlapped, launches),) = self.rows(lambda key: "")
        rows = [*rows, (IDLE, self.milliseconds - busy, 0.0, 0.0), ("step", self.milliseconds, overlapped, launches)]
        cells = [
            (name, f"{ms:,.2f}", f"{ms / self.milliseconds:.1%}", f"{overlapped:,.2f}", f"{launches:,.0f}")
            for name, ms, overlapped, launches in rows
        ]
        return format_table((title, "ms", "share", "overlapped ms", "launches"), cells)


def attribute_time(events: Sequence[tuple]) -> Counter:
    """The time that counts for each key.

    Args:
      events: (begin, end, rank, key); the running events of the lowest rank share an instant equally.
    """
    counted, running, before = Counter(), defaultdict(Counter), 0.0
    edges = [(event[0], 1, event) for event in events] + [(event[1], -1, event) for event in events]
    for now, change, (_, _, rank, key) in sorted(edges, key=lambda edge: edge[:2]):
        lowest = running[min((rank for rank, keys in running.items() if keys), default=0)]
        for owner, number in lowest.items():
            counted[owner] += (now - before) * number / lowest.total()
        running[rank][key] += change
        if not running[rank][key]:
            del running[rank][key]
        before = now
    return counted
