"""The compiled step for a GPU has no kernel that only moves what another has just written.

Compiling needs the CUDA wheels, as in test_compile.py. Products are cuBLAS's, as on a GPU that has timed them.
"""

import re
from functools import cache

import jax
import pytest

from benchmarks.aot.roofline import COLLECTIVES, FILLS, PRODUCTS, roofline
from benchmarks.aot.schedule import read_overlaps
from mjax.cluster.hardware import gpu_named
from mjax.config import axes, load_config
from mjax.config.kernels import MAX_UNROLLED_LAYERS, with_unrolling
from mjax.planner.command import compile_step
from mjax.planner.memory import predict_memory
from mjax.utils.figures import GIB
from tests.planner.configs import changed

H100 = gpu_named("h100")
NEWER = jax.__version_info__ >= (0, 11)


def gpt_1b(layers, unroll="auto", recompute="none", micro_batch=16, data=1, micro_batches=1, **mesh):
    """Its width, and the micro-batch of one GPU."""
    samples = {"micro_batch": micro_batch, "global_batch": data * micro_batch * micro_batches}
    return changed(
        load_config("gpt_1b"),
        model={"layers": layers, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        mesh={"data": data, **mesh},
        data={"mock": True},
        train={"recompute": recompute, "unroll": unroll, **samples},
    )


@cache
def compiled(config):
    found = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False})
    return found, roofline(found.text, H100, config.mesh.devices, config.precision.compute)


@pytest.mark.compiler
def test_without_a_loop_no_stack_is_copied():
    (loop, in_loop), (written_out, apart) = compiled(gpt_1b(3, "off")), compiled(gpt_1b(3))
    assert (loop.config.train.unroll, written_out.config.train.unroll) == ("off", "on")
    assert in_loop.copied_stacks > 3 * 10 or NEWER  # from jax 0.11 on products read and write stacks in place
    assert apart.copied_stacks == 0
    table = 4 * 50304 * 1536  # the gradient of the embedding is a sum over tokens, which begins at zero
    assert in_loop.rows[FILLS].bytes > 5 * table
    assert apart.rows[FILLS].bytes <= 1.1 * table
    assert apart.seconds < 0.9 * in_loop.seconds
    assert written_out.memory.total <= 1.02 * loop.memory.total


@pytest.mark.compiler
def test_backward_sum_over_ranks_overlaps_a_matmul():
    found, _ = compiled(gpt_1b(2, recompute="selective", model=4, sequence_parallel=True))
    collectives = read_overlaps(found.text, axes.sizes(found.config.mesh))
    sums = [c for c in collectives if c.operation == "reduce-scatter" and "transpose" in c.source]
    assert len(sums) >= 4
    assert {c.overlap for c in sums} == {"products"}


@pytest.mark.compiler
@pytest.mark.parametrize(("zero", "recompute"), [(1, "full"), (3, "none")])
def test_without_a_loop_zero_overlaps_layers(zero, recompute):
    """XLA alone would join the sums of all layers, and keep the inputs of the gradients for them."""
    shown = {}
    for unroll in ("off", "on"):
        config = gpt_1b(12, unroll, data=16, zero=zero, recompute=recompute, micro_batch=8)
        found, shown[unroll] = compiled(config)
        predicted = predict_memory(config).total
        logits = 2 * 8 * 1024 * 50304 * (unroll == "off")  # once more; in the table their product is Triton's
        assert 0.95 * (found.memory.total - logits) < predicted
    # The embedding is gathered before the first layer, and its gradient comes after the last.
    assert shown["on"].rows[COLLECTIVES].seconds < 0.5 * shown["on"].collectives
    assert shown["on"].seconds < shown["off"].seconds


@pytest.mark.compiler
def test_loss_in_chunks_writes_no_whole_logits():
    """It costs one more product of the output layer, and saves what a plan says."""
    memory, flops, predicted = [], [], []
    for chunks in (1, 8):
        config = changed(gpt_1b(12, "on", "selective"), train={"loss_chunks": chunks})
        found, table = compiled(config)
        memory.append(found.memory.total)
        predicted.append(predict_memory(config).total)
        flops.append(table.rows[PRODUCTS].flops)
    model, tokens = config.model, 16 * config.model.sequence
    assert not re.search(rf"\[(?:\d+,)?{tokens},{model.padded_vocabulary}\]", found.text)
    assert flops[1] - flops[0] == pytest.approx(2 * tokens * model.hidden * model.padded_vocabulary)
    assert predicted[0] - predicted[1] > 0.5 * GIB
    assert memory[0] - memory[1] > predicted[0] - predicted[1] - 0.05 * memory[0]


# --- Which steps have a loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "mesh", "recompute", "unroll"),
    [
        (MAX_UNROLLED_LAYERS, {"data": 8, "zero": 1}, "selective", "on"),
        (MAX_UNROLLED_LAYERS + 1, {}, "none", "off"),
        (40, {"pipe": 2}, "none", "off"),
        (40, {"context": 2}, "none", "off"),
        (40, {"data": 8, "zero": 3}, "none", "on"),
        (40, {"data": 16, "zero": 3}, "none", "off"),
        (40, {}, "offload", "off"),
        (40, {"data": 8}, "full", "off"),  # XLA would keep what all gradients of weights are computed from
    ],
)
def test_layers_are_unrolled_on_gpus(layers, mesh, recompute, unroll):
    config = changed(gpt_1b(layers, recompute=recompute, micro_batch=8), mesh=mesh)
    assert with_unrolling(config, on_gpu=True).train.unroll == unroll
    assert with_unrolling(config, on_gpu=False).train.unroll == "off"
    for asked in ("off", "on"):
        assert with_unrolling(changed(config, train={"unroll": asked}), on_gpu=True).train.unroll == asked
