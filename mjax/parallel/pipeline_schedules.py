"""Pipeline schedules as tables: which stage works on which micro-batch in which tick.

A pipeline splits the layers of a model into p *stages*, one per rank of the axis `pipe`. The global batch is split into
m *micro-batches* that follow each other through the stages, forward and then backward. With V *chunks* a stage holds V
groups of layers instead of one, and a micro-batch goes round the ring of stages V times. Virtual stage v × p + i is
chunk v of stage i (interleaving).

Time is counted in *ticks*. In every tick a stage runs the operations in its *slots*: a forward pass F of one
micro-batch through one chunk, a backward pass B, both, or neither. Then it sends the results to its neighbours, which
can use them from the next tick on. A schedule is the table of all slots. p = 3, m = 6, V = 1, the schedule 1F1B:

    tick      0    1    2      3      4      5      6      7      8    9
    stage 0   F0   F1   F2     F3     F4 B0  F5 B1  B2     B3     B4   B5
    stage 1        F0   F1     F2 B0  F3 B1  F4 B2  F5 B3  B4     B5
    stage 2             F0 B0  F1 B1  F2 B2  F3 B3  F4 B4  F5 B5
              └ warm-up ┘      └ one F, one B ┘     └ cool-down       ┘

While the pipeline fills (warm-up) and drains (cool-down) stages are idle. The *bubble* is that idle time as a fraction
of compute time: (p − 1) / (V m) for both schedules here.

    gpipe   all forwards, then all backwards: the activations of all micro-batches are stored (arXiv 1811.06965).
    1f1b    backwards start as soon as they can, and each frees memory for a forward: memory does not grow with m.
            With V > 1 it is the interleaved schedule (arXiv 2104.04473, section 2.2).

**Lock-step.** The stages run one program and synchronize at the end of every tick, so a tick takes as long as its
slowest stage. That is why a tick of gpipe and 1f1b has a slot for F and one for B. With one operation per tick, a stage
in its forward would always wait for a neighbour in its backward, and every tick would cost max(f, b). With both, a tick
of the steady state costs f + b on every stage, and the bubble is exactly the formula's for any ratio f : b.

The cost is memory. In the papers stages run asynchronously and stage i of 1F1B stores p − i micro-batches. In lock-step
a micro-batch that has left stage i comes back 2 (p − 1 − i) ticks later. A new one enters in every tick, so the stage
stores 2 (p − 1 − i) + 1. (Megatron's interleaved order stores as many, and (V − 1) p more, for the same reason.)

Results wait in numbered slots of fixed-size buffers, which the table assigns too: the interpreter in `pipeline.py` only
follows it. This module is plain NumPy.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import check_pipeline
from mjax.config.pattern import layers_of_stages
from mjax.errors import UsageError
from mjax.parallel import named_scopes

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True, eq=False)
class Slots:
    """The operations of one kind: when each stage runs them and on what; int32 [ticks, stages] each, and all but
    `receive` 0 where `on` is 0.

    Attributes:
      on: 1 where the stage runs this operation in this tick.
      micro_batch: the micro-batch it runs on.
      chunk: the chunk of the stage that it runs.
      first: 1 on the first virtual stage (stage 0, chunk 0), to which the embedding belongs.
      last: 1 on the last virtual stage (stage p − 1, chunk V − 1), to which the head belongs.
      message: slot of the received message that it reads: an activation for F, a gradient for B. The first virtual
        stage reads none in F and the last none in B (0).
      residual: slot of the residuals that F writes and B reads.
      output: slot of the stream that F of the last virtual stage writes for the head, which is a part of B; elsewhere
        the spare slot, which is never read.
      receive: slot into which the message sent in the previous tick is written at the start of the tick. Messages that
        are not read go to the spare slot, the last one.
    """

    on: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray
    first: np.ndarray
    last: np.ndarray
    message: np.ndarray
    residual: np.ndarray
    output: np.ndarray
    receive: np.ndarray


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """A schedule: the slots of every tick and the sizes of the buffers they name.

    Within a tick a stage first stores arrived arrays, then runs F and B in this order, then sends. F's result goes to
    stage i + 1 (from the last stage to stage 0, for its next chunk), B's to stage i − 1 (from stage 0 to the last).

    Attributes:
      name: one of SCHEDULES, or "forward".
      stages: p. micro_batches: m. chunks: V.
      forward: the slots of F.
      backward: the slots of B; None where there is only a forward pass.
      activation_slots, gradient_slots: most messages that a stage stores in a tick. The buffers have one slot more.
      residual_slots: most residuals of F that a stage stores in a tick.
      output_slots: most streams that wait for the head in a tick; their buffer has one slot more.
      layers: of each virtual stage; empty if all have equally many.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    forward: Slots
    backward: Slots | None
    activation_slots: int
    gradient_slots: int
    residual_slots: int
    output_slots: int
    layers: tuple[int, ...] = ()

    @property
    def ticks(self) -> int:
        """Length of the table."""
        return len(self.forward.on)

    def runs(self, kinds: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The number of times each stage runs each pass of each kind, and the parts of it that belong to the first or
        the last virtual stage: int64 [kinds, stages] by the names in `named_scopes`; `kinds` of the virtual stages."""
        counts, numbers = {}, np.arange(max(kinds) + 1)[:, None, None]
        for name, slots in zip((named_scopes.F, named_scopes.B), (self.forward, self.backward), strict=True):
            if slots is not None:
                on = slots.on * (np.array(kinds)[slots.chunk * self.stages + np.arange(self.stages)] == numbers)
                counts[name] = on.sum(axis=1, dtype=np.int64)
                counts[f"{name}_first"] = (on * slots.first).sum(axis=1, dtype=np.int64)
                counts[f"{name}_last"] = (on * slots.last).sum(axis=1, dtype=np.int64)
        return counts

    def max_in_flight(self, stage: int) -> int:
        """Maximum number of pairs of micro-batch and chunk whose F has run on `stage` and whose B has not finished."""
        if self.backward is None:
            return 0
        begun, ended = (slots.on[:, stage].cumsum() for slots in (self.forward, self.backward))
        return int((begun - ended + self.backward.on[:, stage]).max())  # a B stores its residuals through its tick

    def makespan(self, forward: float, backward: float) -> float:
        """Time of the whole table in lock-step, in the unit of the times of F and B of a mean chunk: a tick costs its
        longest F + its longest B, in proportion to layers."""
        layers = np.array(self.layers or [1] * self.stages * self.chunks)

        def longest(slots: Slots) -> float:
            local = layers[slots.chunk * self.stages + np.arange(self.stages)]
            return (slots.on * local).max(axis=1).sum() / layers.mean()

        times = [(self.forward, forward), (self.backward, backward)]
        return float(sum(longest(slots) * time for slots, time in times if slots is not None))

    def bubble(self, forward: float, backward: float) -> float:
        """Idle time of a stage as a fraction of its compute time (arXiv 2104.04473, section 2.2)."""
        work = forward if self.backward is None else forward + backward
        return self.makespan(forward, backward) / (self.micro_batches * self.chunks * work) - 1.0


@lru_cache(maxsize=64)
def build_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """The schedule `name` for p stages, m micro-batches and V chunks a stage.

    Raises:
      UsageError: there is no such schedule, or chunks > 1 and p does not divide m.
    """
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; use gpipe or 1f1b")
    check_pipeline(stages, micro_batches, chunks)
    forward = _forward_ticks(stages, micro_batches, chunks)
    # The last stage begins its backwards in the tick of its last forward, or of the first one that ends in the head.
    begin = micro_batches * chunks + stages - 2 if name == "gpipe" else stages * chunks - 1
    # Backwards are mirrored forwards: from the last stage to the first and from the last chunk to the first.
    backward = begin + _forward_ticks(stages, micro_batches, chunks)[::-1, :, ::-1]
    return _build_table(name, forward, backward)


def find_schedule(config: Config) -> PipelineSchedule:
    """The schedule of a config that has a pipeline."""
    mesh = config.mesh
    schedule = build_schedule(mesh.schedule, mesh.pipe, config.micro_batches, mesh.virtual_stages)
    return replace(schedule, layers=tuple(layers_of_stages(config.model, mesh)))


def slot_times(config: Config) -> tuple[float, float]:
    """Time of F and B of a micro-batch, in forwards.

    A backward pass has two matmuls for each one of the forward pass, for the gradients of inputs and of weights; full
    recomputation adds a forward.
    """
    return 1.0, 3.0 if config.train.recompute == "full" else 2.0


@lru_cache(maxsize=64)
def forward_schedule(stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """The forward passes alone, for evaluation: V m + p − 1 ticks, with no residuals.

    Raises:
      UsageError: chunks > 1 and p does not divide m.
    """
    check_pipeline(stages, micro_batches, chunks)
    return _build_table("forward", _forward_ticks(stages, micro_batches, chunks))


# --- The tick of each operation: int [p, m, V] ------------------------------------------------------------------------


def _forward_ticks(stages: int, micro_batches: int, chunks: int) -> np.ndarray:
    """Ticks of the forwards: stage i runs its k-th in tick i + k.

    The order is the same on every stage: p micro-batches go through all chunks before the next p enter. The first of a
    group leaves chunk v when stage 0 has sent the last one in, so stage 0 continues with it in chunk v + 1.
    """
    i, j, v = np.indices((stages, micro_batches, chunks))
    return i + (j // stages * chunks + v) * stages + j % stages


# --- From ticks to a table --------------------------------------------------------------------------------------------


def _build_table(name: str, forward: np.ndarray, backward: np.ndarray | None = None) -> PipelineSchedule:
    """The schedule whose operations run in these ticks."""
    stages, micro_batches, chunks = forward.shape
    ticks = 1 + max(int(x.max()) for x in (forward, backward) if x is not None)
    i, j, v = np.indices(forward.shape)
    first, last = (i == 0) & (v == 0), (i == stages - 1) & (v == chunks - 1)
    residuals, residual_slots, outputs, output_slots = np.zeros_like(forward), 0, np.zeros_like(forward), 0
    if backward is not None:
        residuals, residual_slots = _assign_slots(forward, backward, np.ones_like(first))
        outputs, output_slots = _assign_slots(forward, backward, last)
        outputs = np.where(last, outputs, output_slots)

    def slots(when: np.ndarray, step: int, is_read: np.ndarray) -> tuple[Slots, int]:
        """The slots of operations whose messages go `step` stages on, and the number of messages that are stored."""
        # A message lives from its arrival, the tick after it was sent, to the tick in which it is read.
        arrival, end = 1 + np.roll(when, step, axis=0), min(step, 0)
        arrival[end] = np.roll(arrival[end], step, axis=-1)  # round the ring into the next chunk
        messages, number = _assign_slots(arrival, when, is_read)
        columns = np.ones_like(when), j, v, first, last, messages, residuals, outputs
        receive = _to_column(ticks, arrival, messages, where=is_read, otherwise=number)
        return Slots(*(_to_column(ticks, when, column) for column in columns), receive), number

    forward_slots, activation_slots = slots(forward, 1, ~first)
    backward_slots, gradient_slots = (None, 0) if backward is None else slots(backward, -1, ~last)
    return PipelineSchedule(
        name,
        stages,
        micro_batches,
        chunks,
        forward_slots,
        backward_slots,
        activation_slots,
        gradient_slots,
        residual_slots,
        output_slots,
    )


def _to_column(ticks: int, when: np.ndarray, values: np.ndarray, where: np.ndarray | bool = True, otherwise: int = 0):
    """Column [ticks, p] with values[i, j, v] in tick when[i, j, v]; read-only, because schedules are cached."""
    column = np.full((ticks, len(when)), otherwise, np.int32)
    where = np.broadcast_to(where, when.shape)
    column[when[where], np.indices(when.shape)[0][where]] = values[where]
    column.setflags(write=False)
    return column


def _assign_slots(begin: np.ndarray, end: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, int]:
    """Buffer slots [p, m, V] for values that live from tick `begin` to tick `end`, inclusive, and their number.

    On each stage values take slots in the order in which they begin, reusing free ones: for intervals that gives the
    minimum.
    """
    slots, number = np.zeros_like(begin), 0
    for i in range(len(begin)):
        ends = np.empty(0, int)  # of each slot, the tick after which it is free
        keys = np.argwhere(where[i])
        for j, v in keys[np.argsort(begin[i][where[i]], kind="stable")]:
            free = np.flatnonzero(ends < begin[i, j, v])
            slot = slots[i, j, v] = free[0] if free.size else len(ends)
            ends = np.append(ends, 0) if slot == len(ends) else ends
            ends[slot] = end[i, j, v]
        number = max(number, len(ends))
    return slots, number
