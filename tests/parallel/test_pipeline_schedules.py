"""Pipeline schedules: each table is run tick by tick, as the interpreter of the pipeline would, with labels as data."""

import re
from dataclasses import replace

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.parallel.pipeline_schedules import SCHEDULES, build_schedule, forward_schedule

SHAPES = [
    *((stages, micro_batches, 1) for stages in (1, 2, 3, 4, 7) for micro_batches in (1, 2, 3, 5, 9, 16)),
    *((stages, groups * stages, chunks) for stages in (1, 2, 3, 5) for groups in (1, 2, 4) for chunks in (2, 3)),
]
"""(stages, micro-batches, chunks) of pipelines that can run."""


def kinds(schedule):
    named = zip("FB", (schedule.forward, schedule.backward), strict=True)
    return [(kind, slots) for kind, slots in named if slots is not None]


def interpret(schedule):
    """Run the table; returns [(kind, stage, micro-batch, chunk, tick)], and raises if a read finds another label.

    A message is the label (micro-batch, chunk) of the operation that it is for. A stage that sends nothing sends None,
    and it is stored like everything that arrives, so a table that does not name the spare slot then destroys a value.
    """
    stages = range(schedule.stages)
    activations = [[None] * (schedule.activation_slots + 1) for _ in stages]
    gradients = [[None] * (schedule.gradient_slots + 1) for _ in stages]
    residuals = [[None] * schedule.residual_slots for _ in stages]
    outputs = [[None] * (schedule.output_slots + 1) for _ in stages]
    ran, sent_activation, sent_gradient = [], [None] * schedule.stages, [None] * schedule.stages
    for tick in range(schedule.ticks):
        for p in stages:
            activations[p][schedule.forward.receive[tick, p]] = sent_activation[p - 1]
            if schedule.backward is not None:
                gradients[p][schedule.backward.receive[tick, p]] = sent_gradient[(p + 1) % schedule.stages]
        sent_activation, sent_gradient = [None] * schedule.stages, [None] * schedule.stages
        for p in stages:
            for kind, slots in kinds(schedule):
                if not slots.on[tick, p]:
                    continue
                m, v = label = int(slots.micro_batch[tick, p]), int(slots.chunk[tick, p])
                ran.append((kind, p, m, v, tick))
                first, last = bool(slots.first[tick, p]), bool(slots.last[tick, p])
                assert (first, last) == ((p, v) == (0, 0), (p, v) == (schedule.stages - 1, schedule.chunks - 1))
                message, residual = slots.message[tick, p], slots.residual[tick, p]
                if kind == "F":
                    assert first or activations[p][message] == label
                    sent_activation[p] = (m, v + (p == schedule.stages - 1))
                    if schedule.backward is not None:
                        residuals[p][residual] = label
                        outputs[p][slots.output[tick, p]] = label
                else:
                    assert last or gradients[p][message] == label
                    assert residuals[p][residual] == label
                    assert not last or outputs[p][slots.output[tick, p]] == label
                    sent_gradient[p] = (m, v - (p == 0))
    return ran


def waiting(ran, stage, begin, end):
    """Most (micro-batch, chunk) of `stage` between kind `begin` and kind `end`, counted from what ran."""
    begun, ended = ([tick for kind, p, _, _, tick in ran if (kind, p) == (wanted, stage)] for wanted in (begin, end))
    return max(sum(t <= now for t in begun) - sum(t < now for t in ended) for now in begun)


@pytest.mark.parametrize("name", [*SCHEDULES, "forward"])
def test_schedule_runs_every_operation_once(name):
    """Backwards behind forwards, with every message, residual and output in its slot when it is read."""
    for shape in SHAPES:
        schedule = forward_schedule(*shape) if name == "forward" else build_schedule(name, *shape)
        ran = interpret(schedule)
        order = {operation[:4]: index for index, operation in enumerate(ran)}
        places = list(np.ndindex(schedule.stages, schedule.micro_batches, schedule.chunks))
        assert set(order) == {(kind, *place) for kind, _ in kinds(schedule) for place in places}
        assert len(ran) == len(order)
        for (kind, *place), index in order.items():
            assert kind == "F" or order["F", *place] < index
        for _, slots in kinds(schedule):
            for field, column in vars(slots).items():
                assert column.shape == (schedule.ticks, schedule.stages)
                assert field == "receive" or not column[slots.on == 0].any()
                assert not column.flags.writeable, "schedules are cached: a reader must not change the next one's"


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_of_schedule_is_formula(name):
    """GPipe holds every micro-batch; 1F1B as many as a round trip has ticks."""
    for shape in SHAPES:
        stages, micro_batches, chunks = shape
        every, more, schedule = micro_batches * chunks, (chunks - 1) * stages, build_schedule(name, *shape)
        ran = interpret(schedule)
        for p in range(stages):
            formula = {"gpipe": every, "1f1b": 2 * (stages - 1 - p) + more + 1}[name]
            assert schedule.max_in_flight(p) == min(every, formula) == waiting(ran, p, "F", "B")
        assert schedule.residual_slots == max(schedule.max_in_flight(p) for p in range(stages))
        assert schedule.activation_slots == schedule.gradient_slots == (stages > 1 or chunks > 1)  # read at once


@pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
def test_bubble_and_ticks_are_formula(shape):
    """Holds for any cost of a backward pass."""
    stages, micro_batches, chunks = shape
    sweep = micro_batches * chunks + stages - 1
    assert forward_schedule(*shape).ticks == sweep
    assert build_schedule("gpipe", *shape).ticks == 2 * sweep - 1  # the last forward and the first backward share one
    assert build_schedule("1f1b", *shape).ticks == sweep + chunks * stages - 1
    for name in ("gpipe", "1f1b"):
        for forward, backward in ((1.0, 2.0), (3.0, 0.5)):
            bubble = build_schedule(name, *shape).bubble(forward, backward)
            assert bubble == pytest.approx((stages - 1) / (chunks * micro_batches), abs=1e-9)


def test_tick_costs_its_slowest_stage():
    """Its longest forward and its longest backward."""
    assert forward_schedule(2, 3).makespan(1.5, 9.0) == 4 * 1.5
    assert build_schedule("1f1b", 2, 1).makespan(1.0, 2.0) == 1 + (1 + 2) + 2
    uneven = replace(forward_schedule(2, 3), layers=(1, 3))  # a tick of one layer, and three of three; a mean of two
    assert uneven.makespan(1.0, 9.0) == (1 + 3 * 3) / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b", 4, 8), "no schedule '1f2b'; use gpipe or 1f1b"),
        (("1f1b", 4, 10, 2), "--train.micro-batch) 8 or 12, or use --mesh.virtual-stages 1"),
        (("gpipe", 4, 3, 2), "--train.micro-batch) 4, or use --mesh.virtual-stages 1"),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        build_schedule(*arguments)
