"""Seconds of a compiled step on a roofline, kernel by kernel: a model, to compare programs before a GPU is there.

Each kernel takes the longer of two times: its FLOPs over the peak, and the bytes it reads and writes over the bandwidth
of the memory, at the rates of the model of time (`rates.py`). A slice inside a fusion counts with the bytes it reads,
and an update in place with the bytes it writes. Collectives are rings that overlap the kernels: one after the other
within a server, and at the same time one after the other between servers. The step waits for one only where the program
needs its result before it has arrived (*exposed*). Copies to and from host memory overlap all of these, one after the
other in each direction, at the nominal rate of the link.

The kernels, their order and their bytes come from the compiler. The times are not measured.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.aot.hlo import CONTROL, Line, arrays_of, dims_of, groups_of
from benchmarks.aot.kernels import FREE, MOVES, Kernels
from mjax.cluster.hardware import Gpu
from mjax.parallel import named_scopes
from mjax.planner.ledger import find_source
from mjax.planner.time import Rates, default_calibration

PRODUCTS, ATTENTION, COLLECTIVES = "products", "attention", "collectives, exposed"
HOST_COPIES = "host memory, exposed"
COPIES, FILLS, OPTIMIZER = "copies", "fills with zeros", "optimizer"

LATENCY = 10e-6  # seconds of a collective without bytes
# Each result uses one of the operand's.
SAME_ELEMENTS = {"abs", "bitcast", "convert", "copy", "negate", "reshape", "transpose"}
LEAST = 1_000_000  # bytes of a fill or copy that is listed as one


@dataclass
class Row:
    """The kernels of one kind in a step."""

    kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """A modelled step.

    Attributes:
      rows: by kind of kernel.
      collectives: seconds of all, hidden or not.
      copied_stacks: kernels that copy a layer's part into or out of a stack of all layers.
    """

    rows: dict[str, Row]
    collectives: float
    copied_stacks: int

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(row.seconds for row in self.rows.values())

    def mfu(self, flops: float, gpu: Gpu, compute: str = "bf16") -> float:
        """Share of the peak, with the FLOPs of the model on one device (`model_flops`)."""
        return flops / self.seconds / gpu.mfu_peak(compute)


def roofline(text: str, gpu: Gpu, devices: int = 1, compute: str = "bf16") -> Roofline:
    """Model a compiled step.

    Args:
      text: `compiled.as_text()`, scheduled HLO.
      gpu: the hardware.
      devices: of the whole mesh, servers filled one after the other.
      compute: dtype of the products, for their peak.
    """
    rates = Rates(gpu, default_calibration(gpu), compute)  # products in float8 name themselves
    replay = _Replay(Kernels(text), rates, devices)
    replay.run(replay.module.entry)
    return Roofline(dict(replay.rows), replay.communicating, replay.copied_stacks)


class _Cost(NamedTuple):
    """A kernel, or a transfer, each time that it runs; `copies_stack` as in `Roofline.copied_stacks`. A transfer has a
    `link`, on which one waits for the other."""

    kind: str
    seconds: float
    bytes: float
    flops: float = 0.0
    copies_stack: bool = False
    link: str = ""


class _Replay:
    """Runs a program on two clocks: of the kernels, and of the collectives."""

    def __init__(self, module: Kernels, rates: Rates, devices: int):
        self.module, self.gpu, self.rates, self.devices = module, rates.gpu, rates, devices
        self.rows: dict[str, Row] = defaultdict(Row)
        self.now = self.communicating = 0.0
        self.link_free: dict[str, float] = defaultdict(float)  # by link, when its last transfer ends
        self.copied_stacks = 0
        self.costs: dict[str, list[_Cost | None]] = {}  # of the kernels of a computation, which may run many times
        self.arrives: dict[str, tuple[str, float]] = {}  # by the line that starts a transfer, its kind and its end

    def run(self, name: str) -> None:
        lines = self.module.computations[name]
        if name not in self.costs:
            shapes = {line.name: line.shape for line in lines}
            self.costs[name] = [self._cost(line, shapes) for line in lines]
        for line, cost in zip(lines, self.costs[name], strict=True):
            if cost is not None:
                self._run(line, cost)
            elif line.opcode.endswith("-done") and line.operands and line.operands[0] in self.arrives:
                self._wait(*self.arrives.pop(line.operands[0]))
            elif line.opcode in CONTROL:
                for inner, times, _ in self.module.inner(line):
                    for _ in range(times):
                        self.run(inner)

    def _run(self, line: Line, cost: _Cost) -> None:
        row = self.rows[cost.kind]
        row.kernels, row.bytes, row.flops = row.kernels + 1, row.bytes + cost.bytes, row.flops + cost.flops
        if not cost.link:
            row.seconds += cost.seconds
            self.now += cost.seconds
            self.copied_stacks += cost.copies_stack
            return
        self.communicating += cost.seconds * (cost.kind == COLLECTIVES)
        arrives = max(self.now, self.link_free[cost.link]) + cost.seconds
        self.link_free[cost.link] = arrives
        if line.opcode.endswith("-start"):
            self.arrives[line.name] = cost.kind, arrives
        else:
            self._wait(cost.kind, arrives)

    def _wait(self, kind: str, until: float) -> None:
        waited = max(0.0, until - self.now)
        self.rows[kind].seconds += waited
        self.now += waited

    def _cost(self, line: Line, shapes: dict[str, str]) -> _Cost | None:
        """Cost of a line when it runs; None if it is neither a kernel nor a collective between devices."""
        if self.module.operation_of(line):
            return self._collective(line, shapes)
        if line.opcode in (*FREE, *CONTROL) or line.opcode.endswith(("-done", "async-update")):
            return None
        if copied := self.module.host_copy(line):
            direction, moved = copied
            return _Cost(HOST_COPIES, self.rates.host(moved), moved, link=direction)
        if self.module.kernel_of(line) is None:
            return None  # an unused buffer
        return self._kernel(line, shapes)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def _collective(self, line: Line, shapes: dict[str, str]) -> _Cost | None:
        operand, operation = sum(_bytes(shapes[name]) for name in line.operands), self.module.operation_of(line)
        members = groups_of(self.module.described(line), operation, self.devices)[0].tolist()
        ranks, others = len(members), len(members) - 1
        if others == 0:
            return None
        share = {"all-reduce": 2 * others / ranks, "all-gather": others, "permute": 1.0}
        sent = operand * share.get(operation, others / ranks)
        link = "server" if self._in_a_server(members) else "network"
        return _Cost(COLLECTIVES, LATENCY + sent / self._link(members), sent, link=link)

    def _link(self, members: Sequence[int]) -> float:
        """Bytes per second of a ring; rings of neighbours in a server share its network cards."""
        per_server, calibration = self.gpu.gpus_per_node, self.rates.calibration
        inside = calibration.node * self.gpu.node_bandwidth
        if self._in_a_server(members):
            return inside
        rings = min(abs(members[1] - members[0]), per_server)
        return min(inside, calibration.network * self.gpu.network_bandwidth_per_node / rings)

    def _in_a_server(self, members: Sequence[int]) -> bool:
        return len({member // self.gpu.gpus_per_node for member in members}) == 1

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def _kernel(self, line: Line, shapes: dict[str, str]) -> _Cost:
        kind, flops, rate = self._kind(line, shapes), 0.0, 1.0
        moved = self._moved(line, shapes)
        if kind == PRODUCTS:
            times, m, n, k = self._product(line, shapes)
            flops = 2.0 * times * m * n * k
            inside = self.module.computations.get(line.attribute("calls") or "", [])
            float8 = any('$f8"' in each.attributes for each in (line, *inside))
            rate = self.rates.product_rate(times * m, n, k, float8)
        elif kind == ATTENTION and "custom_call_target" in line.attributes:
            flops, rate = self._flash(line, shapes)
        seconds = max(flops / rate, self.rates.bytes(moved)) + self.rates.calibration.launch
        source = self._source(line)
        return _Cost(kind, seconds, moved, flops, kind == COPIES and "/while/body/" in source and "dynamic_" in source)

    def _kind(self, line: Line, shapes: dict[str, str]) -> str:
        kernel = self.module.kernel_of(line) or ""
        part, phase = find_source(self._source(line))
        if kernel.startswith("matrix product"):
            return PRODUCTS
        if kernel.startswith("attention"):
            return ATTENTION
        if _bytes(line.shape) > LEAST and (self.module.moves(line) or kernel == "copy" or line.opcode in MOVES):
            if all(_bytes(shapes.get(name, "")) < 64 for name in line.operands):
                return FILLS
            return COPIES
        return OPTIMIZER if part == named_scopes.OPTIMIZER else f"{part} {phase}".strip() or "other"

    def _source(self, line: Line) -> str:
        inside = self.module.computations.get(line.attribute("calls") or "", [])
        return line.source or next((inner.source for inner in reversed(inside) if inner.source), "")

    def _product(self, line: Line, shapes: dict[str, str]) -> tuple[int, int, int, int]:
        """(batch, m, n, k) of a product."""
        if line.opcode == "fusion":
            return next(self._dots(line))
        return self._called(line, shapes)

    def _called(self, line: Line, shapes: dict[str, str]) -> tuple[int, int, int, int]:
        """(batch, m, n, k) of a product of a library."""
        (_, left), (_, out) = dims_of(shapes[line.operands[0]])[0], dims_of(line.shape)[0]
        contracted = re.findall(r'"lhs_contracting_dimensions":\["([\d",]+)"\]', line.attributes)[0]
        k = math.prod(left[int(dim)] for dim in contracted.replace('"', "").split(","))
        m, n = out[-2:] if len(out) > 1 else (1, *out)
        return math.prod(out[:-2]), m, n, k

    def _dots(self, line: Line) -> Iterator[tuple[int, int, int, int]]:
        inside = self.module.computations[line.attribute("calls")]
        shapes = {inner.name: inner.shape for inner in inside}
        for inner in inside:
            if inner.opcode == "fusion":
                yield from self._dots(inner)
            elif inner.opcode == "custom-call":
                yield self._called(inner, shapes)
            elif inner.opcode == "dot":
                (_, left), (_, out) = dims_of(shapes[inner.operands[0]])[0], dims_of(inner.shape)[0]
                dims = {
                    name: [int(dim) for dim in found[1].split(",")]
                    for name in ("lhs_contracting_dims", "lhs_batch_dims")
                    if (found := re.search(rf"{name}=\{{([\d,]+)\}}", inner.attributes))
                }
                batch = len(dims.get("lhs_batch_dims", ()))
                rows = len(left) - batch - len(dims["lhs_contracting_dims"])
                k = math.prod(left[dim] for dim in dims["lhs_contracting_dims"])
                m, n = math.prod(out[batch : batch + rows]), math.prod(out[batch + rows :])
                yield math.prod(out[:batch]), m, n, k

    def _flash(self, line: Line, shapes: dict[str, str]) -> tuple[float, float]:
        """FLOPs of a fused kernel, whose causal half is skipped, and the rate of cuDNN's."""
        _, (b, s, n, d) = dims_of(shapes[line.operands[0]])[0]
        keys = dims_of(shapes[line.operands[1]])[0][1][1]
        causal, products = bool(re.search(r'"mask_type": *"[A-Z_]*CAUSAL"', line.attributes)), 2
        if "Backward" in line.attributes:
            products = 5
        if ours := re.search(r"flash_(\w+)_of_(\d)", line.source):
            causal, products = "causal" in ours[1], int(ours[2])
        return 2.0 * products * b * n * s * keys * d / (1 + causal), self.rates.flash_rate(d, keys, products > 2)

    # --- Bytes --------------------------------------------------------------------------------------------------------

    def _moved(self, line: Line, shapes: dict[str, str]) -> float:
        """Bytes that a kernel reads and writes."""
        if line.opcode == "async-start":
            inside = self.module.computations[line.attribute("calls")]
            shapes = {inner.name: inner.shape for inner in inside}
            return sum(self._moved(inner, shapes) for inner in inside if inner.opcode not in FREE)
        if line.opcode in ("dynamic-slice", "slice"):
            return 2 * _bytes(line.shape)
        if line.opcode == "dynamic-update-slice":
            return 2 * _bytes(shapes[line.operands[1]])
        if line.opcode != "fusion":
            return sum(_bytes(shapes.get(name, "")) for name in line.operands) + _bytes(line.shape)
        inside = self.module.computations[line.attribute("calls")]
        names, users = {inner.name: inner for inner in inside}, defaultdict(list)
        for inner in inside:
            for name in inner.operands:
                users[name].append(inner)
        given = [inner for inner in inside if inner.opcode == "parameter"]
        read = sum(_share_read(each.name, names, users) * _bytes(each.shape) for each in given)
        written = _bytes(line.shape)
        for inner in inside:
            if inner.opcode == "dynamic-update-slice":  # in place
                written += _bytes(names[inner.operands[1]].shape) - _bytes(inner.shape)
        return read + max(0, written)


def _share_read(name: str, names: dict[str, Line], users: dict[str, list[Line]]) -> float:
    """The share of a value in a fusion that is read: elements that only slices would use are not computed."""

    def by(user: Line) -> float:
        if user.opcode in SAME_ELEMENTS:
            return _share_read(user.name, names, users)
        if user.operands[0] == name and user.opcode in ("dynamic-slice", "slice"):
            return _elements(user.shape) / _elements(names[name].shape)
        return float(user.operands[0] != name or user.opcode != "dynamic-update-slice")

    return min(1.0, sum(map(by, users[name]))) if users[name] else 1.0


def _elements(shape: str) -> int:
    return math.prod(dims_of(shape)[0][1])


def _bytes(shape: str) -> int:
    return sum(size for _, size in arrays_of(shape))
