"""Float8 in a plan, on GPUs that do not have it, and compiled for those that do (with the CUDA wheels)."""

import re
from dataclasses import replace

import pytest

from mjax import cli
from mjax.config import load_config
from mjax.errors import UsageError
from mjax.hardware import GPUS, gpu_named
from mjax.packages import cuda_build
from mjax.planner.compile import compile_step
from mjax.planner.float8 import ADA, check_float8
from mjax.planner.memory import predict_memory
from mjax.planner.roofline import PRODUCTS, roofline

needs_compiler = pytest.mark.skipif(
    cuda_build() is None, reason="needs JAX's CUDA wheels: pip install -r requirements-cuda.txt"
)
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


def test_a_plan_has_a_line_for_float8_and_none_for_its_time(capsys):
    argv = ["plan", "--config", "gpt_1b", "--precision.compute", "fp8", "--gpu"]
    assert cli.main([*argv, "h100"]) == 0
    told = capsys.readouterr().out
    assert "products     with the layers' weights in float8: e4m3, gradients e5m2; all others in bf16" in told
    assert "the time of --precision.compute fp8 cannot be predicted; use --precision.compute bf16" in told
    assert cli.main([*argv, "a100"]) == 2
    assert "use --precision.compute bf16" in capsys.readouterr().err


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
    saved = wide.memory.total - narrow.memory.total
    predicted = predict_memory(wide.config).total - predict_memory(narrow.config).total
    assert predicted == pytest.approx(saved, rel=0.1)


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
