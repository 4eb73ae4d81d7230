"""The compiled step for a GPU has no kernel that only moves what another has just written.

What compiles needs the CUDA wheels, as in test_compile.py. Products are cuBLAS's, as on a GPU that has timed them.
"""

import re
from dataclasses import replace

import jax
import pytest

from mjax.config import load_config
from mjax.hardware import GIB, gpu_named
from mjax.planner.compile import compile_step
from mjax.planner.memory import predict_memory
from mjax.planner.memory_section import memory_section
from mjax.planner.roofline import COLLECTIVES, COPIES, FILLS, PRODUCTS, roofline
from mjax.planner.time import predict_time
from mjax.planner.unrolling import MOST_LAYERS, with_unrolling
from tests.compiler import needs_compiler

H100 = gpu_named("h100")
NEWER = jax.__version_info__ >= (0, 11)


def gpt_1b(layers, unroll="auto", recompute="none", micro_batch=16, streams=1, **mesh):
    """Its width, and the micro-batch of one GPU."""
    config = load_config("gpt_1b")
    data, ranks, micro_batches = mesh.pop("data", 1), mesh.get("model", 1), mesh.pop("micro_batches", 1)
    return replace(
        config,
        model=replace(config.model, layers=layers, hidden_dropout=0.0, attention_dropout=0.0),
        mesh=replace(config.mesh, data=data, **mesh),
        data=replace(config.data, mock=True),
        train=replace(
            config.train,
            global_batch=data * micro_batch * micro_batches,
            micro_batch=micro_batch,
            recompute=recompute,
            unroll=unroll,
            streams=streams,
        ),
    ), data * ranks


@pytest.fixture(scope="module")
def compiled():
    """Steps by what they are, compiled once."""
    done = {}

    def step(name, *arguments, **options):
        if name not in done:
            config, devices = gpt_1b(*arguments, **options)
            done[name] = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False}), devices
        found, devices = done[name]
        return found, roofline(found.text, H100, devices)

    return step


@needs_compiler
def test_without_a_loop_no_layer_is_copied_into_a_stack_and_no_stack_is_filled(compiled):
    (loop, in_loop), (written_out, apart) = compiled("loop", 3, "off"), compiled("layers", 3)
    assert (loop.unrolled, written_out.unrolled) == (False, True)
    assert in_loop.copied_stacks > 3 * 10 or NEWER  # from jax 0.11 on products read and write stacks in place
    assert apart.copied_stacks == 0
    table = 4 * 50304 * 1536  # the gradient of the embedding is a sum over tokens, which begins at zero
    assert in_loop.rows[FILLS].bytes > 5 * table
    assert apart.rows[FILLS].bytes <= 1.1 * table
    assert apart.seconds < 0.9 * in_loop.seconds
    assert written_out.memory.total <= 1.02 * loop.memory.total


@needs_compiler
@pytest.mark.parametrize("name", ["loop", "layers"])
def test_sums_over_tokens_write_no_float32_copy_of_what_they_add(compiled, name):
    found, _ = compiled(name, 3, "on" if name == "layers" else "off")
    tokens = 16 * 1024
    entry = "\n".join(line for line in found.text.split("\n") if "calls=" in line or "custom-call(" in line)
    written = re.findall(
        rf"^\s+(?:ROOT )?%[\w.\-]+ = \(?(?:[^=]*, )?(f32\[{tokens},(?:1536|4608|6144|7680)\])", entry, re.M
    )
    assert written == []


@needs_compiler
def test_queries_keys_and_values_are_not_cut_out_of_one_array(compiled):
    found, table = compiled("layers", 3)
    assert not re.findall(r"= \(?bf16\[16,1024,1,16,96\]", found.text)
    # What is left of copies are the weights of queries, keys and values, which the backward pass has as one.
    # jax 0.11 also cuts each layer's weights out of their stack.
    least = 3 * 8 * 3 * 1536 * 1536 + NEWER * 3 * 4 * 12 * 1536 * 1536
    assert COPIES not in table.rows or table.rows[COPIES].bytes < least


@needs_compiler
def test_a_sum_over_ranks_in_the_backward_pass_is_beside_a_product(compiled):
    found, _ = compiled("split", 2, recompute="selective", micro_batch=16, model=4, sequence_parallel=True)
    sums = [c for c in found.program.collectives if c.operation == "reduce-scatter" and "transpose" in c.source]
    assert len(sums) >= 4
    assert {c.overlap for c in sums} == {"products"}


@needs_compiler
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_two_streams_wait_less_than_half_as_long_for_the_same_bytes(compiled, recompute):
    split = {"micro_batch": 16, "model": 4, "sequence_parallel": True, "recompute": recompute}
    _, one = compiled(f"one stream, {recompute}", 4, "on", **split)
    _, two = compiled(f"two streams, {recompute}", 4, "on", streams=2, **split)
    assert two.rows[COLLECTIVES].seconds < 0.5 * one.rows[COLLECTIVES].seconds
    assert two.rows[COLLECTIVES].bytes < 1.2 * one.rows[COLLECTIVES].bytes
    assert two.rows[PRODUCTS].flops == one.rows[PRODUCTS].flops  # nothing is computed twice
    assert two.seconds < 0.95 * one.seconds


@needs_compiler
@pytest.mark.parametrize(
    ("name", "unroll"),
    [
        pytest.param("loop", "off", marks=pytest.mark.skipif(NEWER, reason="the roofline reads its stacks whole")),
        ("layers", "on"),
    ],
)
def test_the_plan_predicts_the_time_of_the_compiled_step_from_its_trace(compiled, name, unroll):
    _, table = compiled(name, 3, unroll)
    config, _ = gpt_1b(3, unroll)
    assert predict_time(config, H100).total == pytest.approx(table.seconds, rel=0.05)


@needs_compiler
def test_without_a_loop_gradients_are_summed_over_data_beside_the_backward_pass(compiled):
    """XLA does it by itself: nothing but a loop would make the first sum wait for the last layer."""
    (_, loop), (_, apart) = (compiled(f"data, {unroll}", 4, unroll, data=16) for unroll in ("off", "on"))
    assert loop.rows[COLLECTIVES].seconds > 0.7 * loop.collectives
    assert apart.rows[COLLECTIVES].seconds < 0.5 * apart.collectives


@needs_compiler
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_without_a_loop_zero_communicates_beside_the_layers_and_holds_two_of_them_at_most(compiled, zero, recompute):
    """By itself XLA would join the sums of all layers, and keep what the gradients are computed from for them."""
    shown = {}
    for unroll in ("off", "on"):
        how = {"data": 16, "zero": zero, "recompute": recompute, "micro_batch": 8}
        found, shown[unroll] = compiled(f"{how}, {unroll}", 12, unroll, **how)
        predicted = predict_memory(gpt_1b(12, unroll, **how)[0]).total
        logits = 2 * 8 * 1024 * 50304 * (unroll == "off")  # once more; in the table their product is Triton's
        assert 0.95 * (found.memory.total - logits) < predicted
    # The embedding is gathered before the first layer, and its gradient comes after the last.
    assert shown["on"].rows[COLLECTIVES].seconds < 0.5 * shown["on"].collectives
    assert shown["on"].seconds < shown["off"].seconds


@needs_compiler
@pytest.mark.parametrize("zero", [0, 1])
def test_the_last_of_several_micro_batches_has_the_sums_beside_its_layers_and_none_copies_their_weights(compiled, zero):
    how = {"data": 16, "zero": zero, "micro_batch": 4, "micro_batches": 3}
    found, table = compiled(f"several micro-batches, {zero}", 12, "on", **how)
    config, _ = gpt_1b(12, "on", **how)
    # The embedding and all gathers have nothing beside them.
    assert table.rows[COLLECTIVES].seconds < 0.65 * table.collectives
    assert predict_time(config, H100).total == pytest.approx(table.seconds, rel=0.05)
    assert found.memory.total == pytest.approx(predict_memory(config).total, rel=0.05)
    weights = 2 * 12 * 12 * 1536 * 1536
    assert table.rows[COPIES].bytes < 4 * weights  # gathered and laid out once, not in each micro-batch


@needs_compiler
def test_with_tensor_parallelism_zero_holds_two_layers_at_most_too(compiled):
    """It waits less only where XLA has more than one collective in flight (docs/benchmarks.md)."""
    how = {"data": 16, "model": 4, "zero": 1, "sequence_parallel": True, "recompute": "selective", "micro_batch": 8}
    found, table = compiled("split, layer by layer", 6, "on", **how)
    assert found.memory.total == pytest.approx(predict_memory(gpt_1b(6, "on", **how)[0]).total, rel=0.05)
    assert table.rows[COLLECTIVES].seconds < 0.95 * table.collectives


# --- Which steps have a loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "layers", "mesh", "unroll"),
    [
        (70 * GIB, 40, {}, "on"),
        (None, 40, {}, "off"),  # a CPU
        (33 * GIB, 40, {}, "off"),  # leaves too little
        (70 * GIB, MOST_LAYERS + 8, {}, "off"),
        (70 * GIB, 40, {"pipe": 2}, "off"),
        (70 * GIB, 40, {"data": 8, "zero": 3}, "on"),
        (70 * GIB, 40, {"data": 4, "model": 2, "zero": 3, "sequence_parallel": True}, "on"),
        (70 * GIB, 40, {"data": 4, "model": 2, "zero": 3, "sequence_parallel": False}, "off"),
        (70 * GIB, 40, {"data": 16, "zero": 3}, "off"),  # over two servers
        (70 * GIB, 40, {"data": 8, "zero": 1}, "on"),
    ],
)
def test_layers_are_unrolled_where_the_step_fits_and_no_loop_is_needed(usable, layers, mesh, unroll):
    config, _ = gpt_1b(layers, micro_batch=8)
    config = replace(config, mesh=replace(config.mesh, **mesh))
    assert with_unrolling(config, usable).train.unroll == unroll
    for asked in ("off", "on"):
        told = replace(config, train=replace(config.train, unroll=asked))
        assert with_unrolling(told, usable).train.unroll == asked


def test_inputs_of_layers_in_host_memory_need_a_loop():
    config, _ = gpt_1b(40, micro_batch=8)
    offload = replace(config, train=replace(config.train, recompute="offload"))
    assert [with_unrolling(each, 70 * GIB).train.unroll for each in (config, offload)] == ["on", "off"]


def test_two_streams_need_no_loop():
    config, _ = gpt_1b(2, streams=2, model=2)
    assert with_unrolling(config, None).train.unroll == "on"


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "beside"),
    [
        ({}, 1, False),
        ({"data": 8}, 1, True),
        ({"data": 8}, 4, True),
        ({"data": 4, "model": 2, "sequence_parallel": True}, 1, False),
        ({"data": 8, "zero": 1}, 1, True),
        ({"data": 8, "zero": 1}, 4, True),
        ({"data": 8, "zero": 3}, 4, True),
        ({"data": 4, "model": 2, "zero": 1, "sequence_parallel": True}, 1, True),
        ({"data": 4, "model": 2, "zero": 1, "sequence_parallel": False}, 1, False),
        ({"data": 2, "pipe": 4, "zero": 1}, 4, False),
    ],
)
def test_the_plan_says_where_sums_over_data_run_beside_layers(mesh, micro_batches, beside):
    config, _ = gpt_1b(40, micro_batch=4, micro_batches=micro_batches, **mesh)
    section = memory_section(config, H100)
    assert ("; gradients are summed over data beside them" in section.text) == beside
    assert section.values["sums_beside_layers"] == beside
