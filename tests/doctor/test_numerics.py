"""Wrong numbers are found, and named by the operation that gives them."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mjax.config import load_config
from mjax.doctor import GREEN, RED, YELLOW, MachineInfo, numerics
from mjax.doctor.checks import run_check
from mjax.doctor.numerics import OPERATIONS, Operation, check_attention, check_experts, check_numerics
from mjax.models.parts import attention_kernels
from mjax.parallel import grouped


def test_this_device_is_right():
    (finding,) = check_numerics(MachineInfo())
    assert finding.status == GREEN
    assert 0 < finding.figures["LayerNorm_relative"] < 1e-5


@pytest.mark.parametrize(("operation", "factor"), [*((each, 2.0) for each in OPERATIONS), (OPERATIONS[0], jnp.nan)])
def test_wrong_element_is_red_and_named(monkeypatch, operation, factor):
    def run(*inputs):
        output = operation.run(*inputs)
        return (
            output.at[0, 0].add(factor * operation.bound * jnp.abs(output).max())
            if output.ndim > 1
            else output * factor
        )

    monkeypatch.setattr(numerics, "OPERATIONS", [replace(operation, run=run)])
    finding, *_ = check_numerics(MachineInfo())
    assert finding.status == RED
    assert finding.message.startswith(f"{operation.name} on {jax.default_backend().upper()} 0 is wrong")


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_wrong_device_is_named(monkeypatch):
    def run(x):
        return x if jax.config.jax_default_device is first else x + 1

    first, second = jax.local_devices()[:2]
    monkeypatch.setattr(numerics, "devices_to_check", lambda: [first, second])
    monkeypatch.setattr(numerics, "OPERATIONS", [Operation("one", run, lambda x: x, ((3,),), jnp.float32, 1e-3)])
    (finding,) = check_numerics(MachineInfo())
    assert (finding.status, f"one on {numerics.device_name(second)} is wrong:" in finding.message) == (RED, True)


# --- The kernels of a run ---------------------------------------------------------------------------------------------


def small(name, **changes):
    config = load_config(name)
    precision = replace(config.precision, compute="fp32")
    return MachineInfo(config=replace(config, model=replace(config.model, sequence=32, **changes), precision=precision))


def test_attention_without_config_is_right():
    (finding,) = check_attention(MachineInfo())
    assert finding.status == GREEN
    assert ("cudnn" if jax.default_backend() == "gpu" else "xla_blocks") in finding.message


@pytest.mark.parametrize(
    ("name", "change", "model"),
    [
        ("gpt_demo", {"causal": False}, {}),
        ("bert_demo", {"documents": None}, {}),
        ("bloom_560m", {"slopes": None}, {}),
        ("gpt_demo", {"window": None}, {"window": 4}),
        ("gpt_demo", {"window": None}, {"window": 100}),
        ("llama_demo", {"causal": False}, {}),
    ],
)
def test_wrong_kernel_is_red(monkeypatch, name, change, model):
    """The attention of the config itself is checked: its mask, documents, slopes, window and groups."""
    facts, right = small(name, **model), attention_kernels.attend
    assert check_attention(facts)[0].status == GREEN

    def attend(q, k, v, mask, kernel):
        return right(q, k, v, replace(mask, **change), kernel)

    monkeypatch.setattr(attention_kernels, "attend", attend)
    (finding,) = check_attention(facts)
    assert (finding.status, " is wrong: " in finding.message) == (RED, True)


def test_kernel_that_does_not_run_is_red(monkeypatch):
    def attend(*_):
        raise RuntimeError("cuDNN has no engine for this\nand a stack trace")

    monkeypatch.setattr(attention_kernels, "attend", attend)
    (finding,) = check_attention(MachineInfo())
    assert (finding.status, finding.advice) == (RED, "--model.attention xla, and report it")
    assert finding.message.endswith("does not run (cuDNN has no engine for this)")


def test_kernel_that_cannot_be_used_is_red():
    (finding,) = run_check("attention", small("gpt_demo", attention="cudnn"))
    assert finding.status == RED
    assert finding.message.startswith("--model.attention cudnn is not supported here (it needs an NVIDIA GPU")


def test_slower_kernel_of_gpu_is_yellow(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", id=0, compute_capability="7.0")
    monkeypatch.setattr(Operation, "error", lambda *_: 0.0)
    monkeypatch.setattr(numerics.jax, "default_device", contextlib.nullcontext)
    monkeypatch.setattr(numerics.jax, "local_devices", lambda: [gpu])
    _, finding = check_attention(MachineInfo())
    assert finding.status == YELLOW
    assert "it needs compute capability 8.0" in finding.message


def test_experts_are_checked_if_there_are_any(monkeypatch):
    assert check_experts(MachineInfo(config=load_config("gpt_demo"))) == []
    facts, right = small("moe_demo"), grouped.grouped_matmul
    assert check_experts(facts)[0].status == GREEN
    monkeypatch.setattr(grouped, "grouped_matmul", lambda x, kernels, *rest: right(x, kernels[::-1], *rest))
    assert check_experts(facts)[0].status == RED
