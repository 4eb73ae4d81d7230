"""The real step compiled for GPUs that are not there, and held against the ledger, to the byte.

Compiling needs JAX's CUDA wheels, which weigh gigabytes and are not among the requirements of the tests: with
`pip install -r requirements-cuda.txt`, this file takes some minutes and no GPU.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.aot.hlo import counted, read_collectives
from benchmarks.aot.saved_program import open_program, save_program
from benchmarks.aot.schedule import read_launches, read_overlaps
from mjax.cluster.hardware import gpu_named
from mjax.config import axes
from mjax.errors import UsageError
from mjax.planner.command import TARGETS, AllocatedMemory, Compilation, compile_section, compile_step, sheet_names
from mjax.planner.ledger import ledger
from mjax.planner.memory import Memory, predict_memory
from mjax.profiling.trace import INSTRUCTION, KINDS, OTHER_PROGRAMS, operation_kind
from mjax.utils.figures import GIB
from tests.conftest import ROOT
from tests.small import small_config
from tests.traced import count_in_program

# Of a real model: cuDNN's attention, a vocabulary that is split, dropout between the layers.
MODEL = {"layers": 4, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1000, "vocabulary_multiple": 1024}


def config_of(mesh, micro_batch=4, recompute="selective", **changes):
    sizes = {"micro_batch": micro_batch, "recompute": recompute, "global_batch": 16, "compute": "bf16"}
    config = small_config(mesh.pop("data"), mesh.pop("model"), mesh=mesh, **sizes, **(MODEL | changes))
    return replace(config, model=replace(config.model, attention="auto", attention_dropout=0.0))


MODES = {
    "tensor parallel": lambda: config_of({"data": 2, "model": 4}),
    "sequence parallel": lambda: config_of({"data": 2, "model": 4, "sequence_parallel": True}),
    "ZeRO-1": lambda: config_of({"data": 4, "model": 2, "zero": 1}),
    "FSDP": lambda: config_of({"data": 4, "model": 2, "zero": 3}),
    # cuDNN with grouped heads and a window; with more ranks than key-value heads.
    "Llama": lambda: config_of({"data": 2, "model": 4}, kind="llama", kv_heads=4, window=64, qk_norm="heads"),
    "Llama, fewer key-value heads than ranks": lambda: config_of(
        {"data": 1, "model": 8, "sequence_parallel": True}, kind="llama", kv_heads=2, head_dim=32, qk_norm="head"
    ),
    "inputs in host memory": lambda: config_of({"data": 2, "model": 4, "zero": 3}, 1, "offload"),
    "pipe, data and model": lambda: config_of({"pipe": 2, "data": 2, "model": 2}, 1),
}


@pytest.mark.compiler
@pytest.mark.parametrize("mode", MODES)
def test_ledger_has_bytes_of_compiled_step(mode, tmp_path):
    config = MODES[mode]()
    compiled = compile_step(config, "h100")
    text, collectives = compiled.text, read_collectives(compiled.text, axes.sizes(config.mesh))
    assert not re.findall(r"= (?:bf16|f16)\[\S* (?:reduce|scatter)\(.*", text)  # sums over tokens are float32
    assert compiled.config.model.attention == "cudnn"
    windows = {int(length) for length in re.findall(r'"sliding_window_length": (\d+)', text)}
    assert windows == {kind.window or 0 for kind in config.model.pattern.group}
    expected = count_in_program(ledger(config))
    found = counted(collectives)
    assert {key: size for key, (_, size) in found.items()} == {key: size for key, (_, size) in expected.items()}
    # XLA puts several collectives into one, and never cuts one in pieces.
    for key, (calls, _) in expected.items():
        found = sum(c.calls for c in collectives if (c.axes, c.operation, c.dtype) == key)
        assert 1 <= found <= calls, key
    copies = {"copy to host memory", "copy from host memory"}.intersection(read_launches(compiled.text))
    assert compiled.memory.host == predict_memory(compiled.config).host
    assert (":S(5)" in text, len(copies), compiled.memory.host > 0) == (
        (True, 2, True) if mode == "inputs in host memory" else (False, 0, False)
    )
    if mode == "tensor parallel":
        check_report(config, compiled, tmp_path)
        instructions = INSTRUCTION.findall(text)  # a profile finds something of every kind
        kinds = {operation_kind(f"{name} {name} {opcode}", source) for name, opcode, source in instructions}
        assert kinds == {*KINDS} - {OTHER_PROGRAMS}


def check_report(config, compiled, folder):
    """Check the report of `mjax plan`: one more compilation would cost a minute."""
    section = compile_section(compiled, Memory(1.1 * compiled.memory.total, 0.0, 0.0))
    assert json.loads(json.dumps(section.values))["collectives"]["all-reduce"] > 2
    assert "+10.0%" in section.text
    assert compiled.memory.outputs - compiled.memory.aliased < 4096  # the new state takes the place of the old
    # Forward twice and backward, layers, batches.
    assert read_launches(compiled.text)["attention, cuDNN"]["launches"] == 3 * 4 * 2
    if importlib.util.find_spec("flatbuffers"):
        file = folder / "step.mjax"
        save_program(file, config, compiled.step, "cuda", {"gpu": "h100"}, compiled.text)
        saved = open_program(file)
        assert (saved.step.nr_devices, saved.step.platforms) == (8, ("cuda",))
        assert saved.manifest["arguments"][-1]["name"] == "tokens"
        assert "__cudnn$fmhaSoftmaxBackward" in saved.step.mlir_module()
    # At least one of each layer's backward all-reduces overlaps the wgrad matmuls.
    hidden = [c for c in read_overlaps(compiled.text, axes.sizes(config.mesh)) if c.overlap == "products"]
    assert {c.axes for c in hidden} == {("model",)}


def test_report_compares_with_formula():
    text = (
        "%a = f32[2] all-reduce-start(%x), to_apply=%sum\n%b = f32[2] all-reduce-done(%a)\n%c = f32[2] all-gather(%b)"
    )
    memory, config = AllocatedMemory(GIB, GIB, GIB, GIB, host=GIB), config_of({"data": 1, "model": 2})
    compiled = Compilation("NVIDIA H100", config, None, {"tracing": 1.0, "compiling": 2.0}, memory, text)
    section = compile_section(compiled, Memory(2.2 * GIB, 0, 0))
    assert "2.00 GiB per device, 1.00 of it temporaries; predicted 2.20 GiB (+10.0%)" in section.text
    assert "collectives   1 × all-gather, 1 × all-reduce" in section.text
    assert section.values["memory"]["host"] == GIB


@pytest.mark.compiler
def test_impossible_head_size_is_one_sentence():
    config = config_of({"data": 1, "model": 1}, heads=1, hidden=160)
    with pytest.raises(UsageError, match=r"got 160\. .* add --model\.attention xla") as caught:
        compile_step(config, "h100")
    assert "\n" not in str(caught.value)


def test_sheets_describe_their_gpus():
    gigabytes = {"a100": 80, "b200": 180, "h100": 80, "h200": 141}
    assert sheet_names() == sorted(gigabytes)
    for name, size in gigabytes.items():
        text = (TARGETS / f"{name}.txtpb").read_text()
        assert f"cuda_compute_capability {{ major: {gpu_named(name).compute_capability[0]} " in text
        memory = int(re.search(r"device_memory_size: (\d+)", text)[1])
        assert 1.0 < memory / (size * 1e9) < 1.07


COMPILE_REPEATABLE = """
import re
from mjax.cluster.launch import set_deterministic_flags
if {deterministic}:
    set_deterministic_flags()
from mjax.planner.command import compile_step
from tests.planner.test_compile import config_of
text = compile_step(config_of({{"data": 1, "model": 1}}, layers=1), "h100").text
print(*re.findall(r" scatter\\(.*?(?=, to_apply)", text), sep="\\n")
"""


@pytest.mark.compiler
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_step_has_no_atomic_additions(deterministic):
    code = COMPILE_REPEATABLE.format(deterministic=deterministic)
    variables = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-2000:]
    scatters = result.stdout.splitlines()
    assert len(scatters) == 1  # of the embedding
    # Without this promise XLA writes each addition as an atomic one, in the order in which threads arrive.
    assert ("unique_indices=true" in scatters[0]) == deterministic
