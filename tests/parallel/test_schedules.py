"""Pipeline schedules: each table is run tick by tick, as the interpreter of the pipeline would, with labels as data."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.errors import UsageError
from mjax.parallel import schedules
from mjax.parallel.schedules import SCHEDULES, Schedule, build_schedule, forward_only
from tests.work import calls_of


@st.composite
def shapes(draw, most_chunks=3):
    """(stages, micro-batches, chunks) of a pipeline that can run."""
    stages, chunks = draw(st.integers(1, 7)), draw(st.integers(1, most_chunks))
    return stages, draw(st.integers(1, 16 if chunks == 1 else 4)) * (stages if chunks > 1 else 1), chunks


@st.composite
def any_schedule(draw) -> Schedule:
    """Any schedule there is, the forward pass alone included."""
    name = draw(st.sampled_from([*SCHEDULES, "forward"]))
    shape = draw(shapes())
    return forward_only(*shape) if name == "forward" else build_schedule(name, *shape)


patient = settings(max_examples=150, deadline=None)  # the machine may be busy


def kinds(schedule):
    named = zip("FBW", (schedule.forward, schedule.backward, schedule.weight), strict=True)
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
    pending = [[None] * schedule.pending_slots for _ in stages]
    ran, sent_activation, sent_gradient = [], [None] * schedule.stages, [None] * schedule.stages
    for tick in range(schedule.ticks):
        for p in stages:
            activations[p][schedule.receive_activation[tick, p]] = sent_activation[p - 1]
            gradients[p][schedule.receive_gradient[tick, p]] = sent_gradient[(p + 1) % schedule.stages]
        sent_activation, sent_gradient = [None] * schedule.stages, [None] * schedule.stages
        for p in stages:
            for kind, slots in kinds(schedule):
                if not slots.on[tick, p]:
                    continue
                m, v = label = int(slots.micro_batch[tick, p]), int(slots.chunk[tick, p])
                ran.append((kind, p, m, v, tick))
                first, last = bool(slots.first[tick, p]), bool(slots.last[tick, p])
                assert (first, last) == ((p, v) == (0, 0), (p, v) == (schedule.stages - 1, schedule.chunks - 1))
                message, residual, postponed = (x[tick, p] for x in (slots.message, slots.residual, slots.pending))
                if kind == "F":
                    assert first or activations[p][message] == label
                    sent_activation[p] = (m, v + (p == schedule.stages - 1))
                    if schedule.backward is not None:
                        residuals[p][residual] = label
                elif kind == "B":
                    assert last or gradients[p][message] == label
                    assert residuals[p][residual] == label
                    sent_gradient[p] = (m, v - (p == 0))
                    if schedule.weight is not None:
                        pending[p][postponed] = label
                else:
                    assert pending[p][postponed] == label
    return ran


@patient
@given(any_schedule())
def test_every_message_residual_and_postponed_gradient_is_in_its_slot_when_it_is_read(schedule):
    interpret(schedule)


@patient
@given(any_schedule())
def test_every_stage_runs_every_operation_on_every_micro_batch_and_chunk_once(schedule):
    expected = {
        (kind, p, m, v)
        for kind, _ in kinds(schedule)
        for p in range(schedule.stages)
        for m in range(schedule.micro_batches)
        for v in range(schedule.chunks)
    }
    ran = Counter(operation[:4] for operation in interpret(schedule))
    assert set(ran) == expected
    assert set(ran.values()) == {1}


@patient
@given(any_schedule())
def test_a_backward_follows_its_forward_and_a_weight_gradient_its_backward(schedule):
    order = {operation[:4]: index for index, operation in enumerate(interpret(schedule))}
    for (kind, *rest), index in order.items():
        if kind != "F":
            assert order["F" if kind == "B" else "B", *rest] < index


@patient
@given(any_schedule())
def test_where_a_slot_is_off_all_its_fields_are_zero_and_nothing_can_be_written(schedule):
    for _, slots in kinds(schedule):
        for column in vars(slots).values():
            assert column.dtype == np.int32
            assert column.shape == (schedule.ticks, schedule.stages)
            assert not column[slots.on == 0].any()
            assert not column.flags.writeable, "schedules are cached: a reader must not change the next one's"
    for column in (schedule.receive_activation, schedule.receive_gradient):
        assert (column.dtype, column.shape) == (np.int32, (schedule.ticks, schedule.stages))
        assert not column.flags.writeable


@patient
@given(any_schedule())
def test_buffers_have_no_slot_too_many(schedule):
    stages = range(schedule.stages)
    assert schedule.residual_slots == max(schedule.in_flight(p) for p in stages)
    if schedule.name in ("gpipe", "1f1b", "forward"):  # what arrives is read at once
        several = schedule.stages > 1 or schedule.chunks > 1
        assert schedule.activation_slots == several
        assert schedule.gradient_slots == (several and schedule.name != "forward")


def longest_wait(schedule, begin, end, stage):
    """Most (micro-batch, chunk) of `stage` between kind `begin` and kind `end`, counted from what ran."""
    ran = [(kind, tick) for kind, p, _, _, tick in interpret(schedule) if p == stage]
    begun, ended = ([tick for kind, tick in ran if kind == wanted] for wanted in (begin, end))
    return max(sum(t <= now for t in begun) - sum(t < now for t in ended) for now in begun)


@patient
@given(shapes())
def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_a_round_trip_has_ticks(shape):
    stages, micro_batches, chunks = shape
    every = micro_batches * chunks
    for p in range(stages):
        round_trip = 2 * (stages - 1 - p) + (chunks - 1) * stages + 1
        for name, expected in (("gpipe", every), ("1f1b", min(every, round_trip))):
            schedule = build_schedule(name, *shape)
            assert schedule.in_flight(p) == expected == longest_wait(schedule, "F", "B", p)


def test_what_1f1b_and_zb_h1_hold_does_not_grow_with_the_number_of_micro_batches():
    for name in ("1f1b", "zb-h1"):
        few, many = build_schedule(name, 4, 8), build_schedule(name, 4, 64)
        assert few.residual_slots == many.residual_slots
        assert few.pending_slots == many.pending_slots
        assert (few.activation_slots, few.gradient_slots) == (many.activation_slots, many.gradient_slots)


@patient
@given(shapes())
def test_zb_h1_holds_what_the_asynchronous_1f1b_holds(shape):
    stages, micro_batches, chunks = shape
    schedule, more = build_schedule("zb-h1", *shape), (chunks - 1) * stages
    for p in range(stages):
        expected = min(micro_batches * chunks, stages - p + more)
        assert schedule.in_flight(p) == expected == longest_wait(schedule, "F", "B", p)
        assert longest_wait(schedule, "F", "W", p) <= stages + more


@patient
@given(shapes(), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_of_gpipe_and_1f1b_is_the_formula_for_any_cost_of_a_backward(shape, forward, backward):
    stages, micro_batches, chunks = shape
    for name in ("gpipe", "1f1b"):
        bubble = build_schedule(name, *shape).bubble(forward, backward)
        assert bubble == pytest.approx((stages - 1) / (chunks * micro_batches), abs=1e-9)


@patient
@given(shapes())
def test_the_number_of_ticks_is_the_formula(shape):
    stages, micro_batches, chunks = shape
    sweep = micro_batches * chunks + stages - 1
    assert forward_only(*shape).ticks == sweep
    assert build_schedule("gpipe", *shape).ticks == 2 * sweep - 1  # the last forward and the first backward share one
    assert build_schedule("1f1b", *shape).ticks == sweep + chunks * stages - 1


@patient
@given(shapes())
def test_zb_h1_has_a_third_of_the_bubble(shape):
    stages, micro_batches, chunks = shape
    schedule = build_schedule("zb-h1", *shape)
    if micro_batches >= stages:
        assert schedule.ticks == 3 * micro_batches * chunks + stages - 1
        assert schedule.bubble(1.0, 1.0, 1.0) == pytest.approx((stages - 1) / (3 * micro_batches * chunks))
    else:  # the first micro-batch's way there and back is longer
        assert schedule.ticks == 2 * micro_batches + 2 * stages - 1


@patient
@given(any_schedule())
def test_only_tables_with_one_operation_a_tick_are_exclusive(schedule):
    together = Counter((stage, tick) for _, stage, _, _, tick in interpret(schedule)).most_common(1)[0][1]
    assert schedule.exclusive == (together == 1)
    assert schedule.exclusive == (schedule.name in ("zb-h1", "forward"))


def test_a_tick_costs_its_longest_forward_and_its_longest_backward_or_the_longest_of_all_if_it_has_one_operation():
    assert forward_only(2, 3).makespan(1.5, 9.0) == 4 * 1.5
    assert build_schedule("1f1b", 2, 1).makespan(1.0, 2.0) == 1 + (1 + 2) + 2
    # tick by tick: F on stage 0, F on 1, B on 1, B on 0 beside W on 1, W on 0
    assert build_schedule("zb-h1", 2, 1).makespan(1.0, 2.0, 4.0) == 1 + 1 + 2 + 4 + 4


def test_a_forward_pass_alone_holds_nothing():
    schedule = forward_only(4, 8, 2)
    assert schedule.backward is None
    assert schedule.weight is None
    assert [schedule.in_flight(p) for p in range(4)] == [0, 0, 0, 0]
    assert (schedule.residual_slots, schedule.pending_slots, schedule.gradient_slots) == (0, 0, 0)


def test_the_picture_in_the_docstring_is_the_schedule():
    lines = schedules.__doc__.splitlines()
    (header,) = (line for line in lines if line.strip().startswith("tick "))
    columns = [found.start() for found in re.finditer(r"\d+", header)]
    schedule = build_schedule("1f1b", 3, 6)
    assert schedule.ticks == len(columns)
    drawn = {
        (kind, stage, int(m), 0, tick)
        for stage in range(3)
        for line in (next(line for line in lines if line.startswith(f"    stage {stage} ")),)
        for tick, (left, right) in enumerate(zip(columns, [*columns[1:], 200], strict=True))
        for kind, m in re.findall(r"([FB])(\d+)", line[left:right])
    }
    assert drawn == set(interpret(schedule))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 8), "there is no schedule '1f2b', did you mean '1f1b'?; use --mesh.schedule gpipe, 1f1b or zb-h1"),
        (("1f1b", 4, 10, 2), "--train.micro-batch) 8 or 12, or use --mesh.chunks 1"),
        (("gpipe", 4, 3, 2), "--train.micro-batch) 4, or use --mesh.chunks 1"),
        (
            ("1f1b", 0, 8),
            "a pipeline of 0 stages, 8 micro-batches and 1 chunks is not possible; each must be at least 1",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_what_to_type(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        build_schedule(*arguments)


@pytest.mark.parametrize(
    "arguments", [("zb-h1", 64, 512, 1), ("gpipe", 64, 512, 1), ("1f1b", 35, 280, 3), ("zb-h1", 35, 280, 3)]
)
def test_the_tables_of_the_largest_pipelines_take_a_few_calls_a_slot(arguments):
    calls, schedule = calls_of(build_schedule.__wrapped__, *arguments)
    assert calls < 15 * schedule.ticks * schedule.stages
