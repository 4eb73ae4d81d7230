"""Float8 in a plan, on GPUs that do not have it, and compiled for those that do (with the CUDA wheels)."""

import re
from dataclasses import replace

import pytest

from mjax import cli
from mjax.config import MeshConfig, load_config
from mjax.errors import UsageError
from mjax.hardware import GPUS, gpu_named
from mjax.planner.calibration import H100 as H100_RATES
from mjax.planner.compile import compile_step
from mjax.planner.float8 import (
    ADA,
    agreed,
    agreement_seconds,
    check_float8,
    of_weights,
    roundings,
    transposed,
)
from mjax.planner.kernel_bytes import depending
from mjax.planner.memory import predict_memory
from mjax.planner.rates import Rates, filled_share
from mjax.planner.roofline import PRODUCTS, roofline
from mjax.training.trace import Traced, layer_backward, layer_program
from tests.compiler import needs_compiler

H100 = gpu_named("h100")


def config_with(compute="fp8", name="gpt_1b", layers=2, micro_batch=16, recompute="none", model=None, mesh=None):
    config = load_config(name)
    return replace(
        config,
        model=replace(config.model, layers=layers, hidden_dropout=0.0, attention_dropout=0.0, **(model or {})),
        mesh=replace(config.mesh, data=1, **(mesh or {})),
        data=replace(config.data, mock=True),
        precision=replace(config.precision, compute=compute),
        train=replace(config.train, global_batch=micro_batch, micro_batch=micro_batch, recompute=recompute),
    )


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "gpu", "sentence"),
    [
        ({}, "a100", "fp8 needs a GPU with compute capability 8.9 or more, such as an H100, and a100 has 8.0"),
        ({"model": {"sequence": 1001}, "micro_batch": 8}, "h100", "batch 8 has 8008; use a --train.micro-batch that"),
        ({"model": {"hidden": 1544, "heads": 8}}, "h100", "model 1 has a weight of 1544 × 1544; change the mesh"),
        ({"model": {"heads": 64}, "mesh": {"model": 64}}, "h100", "of --mesh.model 64 has a weight of 1536 × 24"),
    ],
)
def test_what_the_gpu_cannot_multiply_is_refused(changes, gpu, sentence):
    config = config_with(**changes)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        check_float8(config, gpu, gpu_named(gpu).compute_capability)
    check_float8(config_with("bf16"), gpu, gpu_named(gpu).compute_capability)


def test_gpus_with_float8_are_those_with_a_peak_for_it():
    assert {gpu.name for gpu in GPUS if gpu.compute_capability >= ADA} == {gpu.name for gpu in GPUS if gpu.peak("fp8")}
    for gpu in GPUS:
        assert gpu.peak("fp8") is None or gpu.peak("fp8") == pytest.approx(2 * gpu.peak("bf16"), rel=1e-3)


def test_a_plan_has_a_line_for_float8_and_says_that_its_time_has_no_error_bar(capsys):
    argv = ["plan", "--config", "gpt_1b", "--precision.compute", "fp8", "--gpu"]
    assert cli.main([*argv, "h100"]) == 0
    told = capsys.readouterr().out
    assert "products     with the layers' weights in float8: e4m3, gradients e5m2; all others in bf16" in told
    assert "a step" in told
    assert "no error bar for fp8: ±45% was found on runs in bf16; the rate of products in float8, 65% of their" in told
    assert "of 989.4 TFLOP/s of bf16" in told
    assert "float8: assumed" in told
    assert cli.main([*argv, "a100"]) == 2
    assert "use --precision.compute bf16" in capsys.readouterr().err


# --- The time of rounding ---------------------------------------------------------------------------------------------

H, TOKENS = 1536, 1024  # of gpt_1b, one sequence


def _programs(**changes):
    """The traced forward and backward pass of a layer, each with the values that depend on the tokens."""
    config = config_with(**changes)
    of, recompute = Traced.of(config), config.train.recompute
    (forward, constants), backward = layer_program(of), layer_backward(of, "cudnn", recompute)
    tokens = [v for n, v in enumerate(backward.program.inputs) if n not in backward.weights]
    return [
        (forward, depending(forward, forward.inputs[constants : constants + 1])),
        (backward.program, depending(backward.program, filter(backward.program.shape, tokens))),
    ]


def test_every_operand_of_a_linear_layer_is_rounded_once_and_the_gradients_of_q_k_v_as_one():
    (forward, of_tokens), (backward, of_gradient) = _programs()
    inputs = [each for each in roundings(forward) if each.sources & of_tokens]
    assert [forward.values[each.value].size for each in inputs] == [TOKENS * H * n for n in (1, 1, 1, 4)]
    weights = [each for each in roundings(forward) if not each.sources & of_tokens]
    assert sum(forward.values[each.value].size for each in weights) == 12 * H**2
    gradients = [each for each in roundings(backward) if each.sources & of_gradient]
    assert [(backward.values[each.value].size // (TOKENS * H), len(each.sources)) for each in gradients] == [
        (1, 1), (4, 1), (1, 1), (3, 3),
    ]  # fmt: skip


def test_arrays_of_weight_gradients_and_other_products_are_written_twice_and_gathered_ones_copied():
    (forward, of_tokens), (backward, of_gradient) = _programs()
    assert transposed(forward, of_tokens, kept=True)[0] == (1 + 1 + 1 + 4) * TOKENS * H
    assert transposed(forward, of_tokens, kept=False)[0] == 0
    assert transposed(backward, of_gradient, kept=False)[0] == (3 + 1 + 4 + 1) * TOKENS * H
    whole = _programs(recompute="full")[1]  # inputs of products are rounded in the backward pass
    # Of them the input of down is needed transposed only: its product is not computed again.
    assert transposed(*whole, kept=False)[0] == (9 + 3) * TOKENS * H
    split = _programs(mesh={"model": 4, "sequence_parallel": True})
    # Gathered: the inputs of q, k, v and of up. This rank's quarter: those of the projection and of down.
    assert transposed(*split[0], kept=True)[0] == (2 + 2 + 1 / 4 + 4 / 4) * TOKENS * H
    assert transposed(*split[1], kept=False)[0] == (2 + 2 + 3 / 4 + 4 / 4) * TOKENS * H


def test_a_weight_is_read_twice_and_written_in_one_byte_and_transposed():
    (forward, of_tokens), (backward, of_gradient) = _programs()
    assert of_weights(forward, of_tokens, kept=True)[0] == (2 + 2 + 1 + 1) * 12 * H**2
    assert of_weights(backward, of_gradient, kept=False)[0] == 0  # both copies are there
    again = _programs(recompute="selective")
    assert of_weights(*again[0], kept=False)[0] == of_weights(*again[1], kept=False)[0] == (2 + 2 + 1) * 12 * H**2


def test_ranks_agree_on_the_scales_of_four_inputs_and_four_gradients_and_on_those_of_weights_together():
    for program, depends in _programs(mesh={"model": 4, "sequence_parallel": True}, recompute="selective"):
        axes = agreed(program, depends)
        assert sorted(axes, key=len)[1:] == [("model", "data", "expert", "context")] * 4
        rates = Rates(H100, H100_RATES, "fp8")
        over_model, over_data = agreement_seconds(axes, MeshConfig(data=1, model=4), rates)
        assert (over_model, over_data) == (pytest.approx(4 * rates.agree(4, 1)), 0)
        over_model, over_data = agreement_seconds(axes, MeshConfig(data=16, model=4), rates)
        assert (over_model, over_data) == (rates.agree(4, 1), pytest.approx(4 * rates.agree(64, 1)))


def test_an_all_reduce_of_a_number_takes_the_messages_of_a_tree():
    """NVIDIA/nccl, src/graph/tuning.cc: base + 2 × ((ranks of a server - 1) × NVLink + log2(servers) × network)."""
    rates, base = Rates(H100, H100_RATES, "fp8"), H100_RATES.collective
    assert rates.agree(1, 1) == 0
    assert rates.agree(8, 1) == pytest.approx(base + 2 * 7 * 0.6e-6)
    assert rates.agree(512, 1) == pytest.approx(base + 2 * (7 * 0.6e-6 + 6 * 5e-6))
    assert rates.agree(64, 8) == pytest.approx(base + 2 * 6 * 5e-6)


def test_a_product_in_float8_has_its_own_rate_and_reads_half_the_bytes():
    slow = replace(H100_RATES, launch=0.0)
    large, rates = 2 * 8192**3, Rates(H100, slow, "fp8")
    expected = large / (1978.9e12 * 0.65) * (8192 + slow.inner) / 8192 / filled_share(8192, 8192, H100.multiprocessors)
    assert rates.product(8192, 8192, 8192, float8=True) == pytest.approx(expected)
    assert rates.product(8192, 8192, 8192) == Rates(H100, slow, "bf16").product(8192, 8192, 8192)
    thin = rates.product(16, 8192, 8192, float8=True)
    assert thin == pytest.approx(rates.bytes(16 * 8192 + 8192**2 + 2 * 16 * 8192))
    with pytest.raises(UsageError, match="no fp8 peak is known for a100"):
        Rates(gpu_named("a100"), H100_RATES, "fp8")


# --- Compiled ---------------------------------------------------------------------------------------------------------


def compiled(config, devices=1):
    found = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False})
    return found, roofline(found.text, H100, devices, config.precision.compute)


def products_of_layers(text):
    """The target of each product outside the head."""
    lines = re.findall(r'custom_call_target="(__cublas[^"]*)".*op_name="([^"]*)"', text)
    return [target for target, name in lines if "(head)" not in name]


@needs_compiler
def test_every_product_of_a_layer_is_in_float8_and_saves_time_and_memory():
    (narrow, fast), (wide, slow) = (compiled(config_with(compute, layers=4)) for compute in ("fp8", "bf16"))
    # Queries, keys and values, projection, up and down; backwards two for each of the four weights.
    assert products_of_layers(narrow.text) == ["__cublas$lt$matmul$f8"] * (6 + 8) * 4
    assert fast.rows[PRODUCTS].seconds < 0.85 * slow.rows[PRODUCTS].seconds  # a third of it is the head
    assert fast.seconds < slow.seconds
    assert narrow.memory.total < 0.95 * wide.memory.total
    for each in (narrow, wide):
        assert predict_memory(each.config).total == pytest.approx(each.memory.total, rel=0.02)


@needs_compiler
def test_split_tokens_are_gathered_in_float8():
    split = {"name": "gpt_8b", "micro_batch": 8, "mesh": {"model": 8, "sequence_parallel": True}}
    found, _ = compiled(config_with(**split), 8)
    assert set(products_of_layers(found.text)) == {"__cublas$lt$matmul$f8"}
    gathers = [each for each in found.program.collectives if each.operation == "all-gather" and "layer" in each.source]
    assert {each.dtype for each in gathers} == {"float8_e4m3fn", "float8_e5m2"}
    assert len(gathers) == 2 * 4


@needs_compiler
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_products_are_in_float8_too(recompute):
    found, _ = compiled(config_with(recompute=recompute, micro_batch=4))
    assert set(products_of_layers(found.text)) == {"__cublas$lt$matmul$f8"}


@needs_compiler
def test_zero_1_gathers_the_four_weights_of_a_layer_in_float8():
    config = config_with(micro_batch=4)
    train = replace(config.train, global_batch=32)
    found, _ = compiled(replace(config, mesh=replace(config.mesh, data=8, zero=1), train=train), 8)
    gathers = [each.dtype for each in found.program.collectives if each.operation == "all-gather"]
    assert gathers.count("float8_e4m3fn") == 4 * config.model.layers  # layer by layer
