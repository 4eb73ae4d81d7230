"""Float8 in a plan, on GPUs that do not have it, and compiled for those that do (with the CUDA wheels)."""

import re
from dataclasses import replace

import pytest

from benchmarks.aot.hlo import read_collectives
from benchmarks.aot.roofline import PRODUCTS
from mjax.cluster.hardware import gpu_named
from mjax.config import axes, load_config
from mjax.errors import UsageError
from mjax.planner.command import ADA, check_float8
from mjax.planner.memory import predict_memory
from mjax.planner.time import H100 as H100_RATES
from mjax.planner.time import Rates, tile_efficiency
from tests.planner.configs import changed
from tests.planner.test_waste import compiled

H100 = gpu_named("h100")


def config_with(compute="fp8", layers=2, micro_batch=16, global_batch=None, recompute="none", model=None, mesh=None):
    samples = {"micro_batch": micro_batch, "global_batch": global_batch or micro_batch}
    return changed(
        load_config("gpt_1b"),
        model={"layers": layers, "hidden_dropout": 0.0, "attention_dropout": 0.0, **(model or {})},
        mesh={"data": 1, **(mesh or {})},
        data={"mock": True},
        precision={"compute": compute},
        train={"recompute": recompute, **samples},
    )


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "gpu", "sentence"),
    [
        ({}, "a100", "fp8 needs compute capability 8.9 or more, as an H100 has, and a100 has 8.0"),
        ({"model": {"sequence": 1001}, "micro_batch": 8}, "h100", "--train.micro-batch 8 has 8008 tokens; change that"),
        ({"model": {"heads": 64}, "mesh": {"model": 64}}, "h100", "of --mesh.model 64 has a weight of 1536 × 24"),
    ],
)
def test_impossible_float8_is_rejected(changes, gpu, sentence):
    config = config_with(**changes)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        check_float8(config, gpu, gpu_named(gpu).compute_capability)
    check_float8(config_with("bf16"), gpu, gpu_named(gpu).compute_capability)
    check_float8(config_with(), "an L40S", ADA)


# --- The time of products and scales ----------------------------------------------------------------------------------


def test_float8_matmul_has_its_own_rate():
    slow = replace(H100_RATES, launch=0.0)
    large, rates = 2 * 8192**3, Rates(H100, slow, "fp8")
    expected = (
        large / (1978.9e12 * 0.65) * (8192 + slow.inner) / 8192 / tile_efficiency(8192, 8192, H100.multiprocessors)
    )
    assert rates.product(8192, 8192, 8192, float8=True) == pytest.approx(expected)
    assert rates.product(8192, 8192, 8192) == Rates(H100, slow, "bf16").product(8192, 8192, 8192)
    thin = rates.product(16, 8192, 8192, float8=True)
    assert thin == pytest.approx(rates.bytes(16 * 8192 + 8192**2 + 2 * 16 * 8192))


# --- Compiled ---------------------------------------------------------------------------------------------------------


def products_of_layers(text):
    """The target of each product outside the head."""
    lines = re.findall(r'custom_call_target="(__cublas[^"]*)".*op_name="([^"]*)"', text)
    return [target for target, name in lines if "(head)" not in name]


@pytest.mark.compiler
def test_compiled_layers_multiply_in_float8():
    (narrow, fast), (wide, slow) = (compiled(config_with(compute, layers=4)) for compute in ("fp8", "bf16"))
    # Queries, keys and values, projection, up and down; backwards two for each of the four weights.
    assert products_of_layers(narrow.text) == ["__cublas$lt$matmul$f8"] * (6 + 8) * 4
    assert fast.rows[PRODUCTS].seconds < 0.85 * slow.rows[PRODUCTS].seconds  # a third of it is the head
    assert narrow.memory.total < 0.95 * wide.memory.total
    for each in (narrow, wide):
        assert predict_memory(each.config).total == pytest.approx(each.memory.total, rel=0.02)


@pytest.mark.compiler
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_1_gathers_weights_in_float8(recompute):
    """And all products of the layers are in float8, those that are computed again too."""
    config = config_with(micro_batch=4, global_batch=32, recompute=recompute, mesh={"data": 8, "zero": 1})
    found, _ = compiled(config)
    gathers = [
        each.dtype for each in read_collectives(found.text, axes.sizes(config.mesh)) if each.operation == "all-gather"
    ]
    assert gathers.count("float8_e4m3fn") == 4 * config.model.layers  # layer by layer
    assert set(products_of_layers(found.text)) == {"__cublas$lt$matmul$f8"}
