"""Laws of what may communicate, and the step of 8.3 billion parameters compiled for 512 devices."""

import subprocess
import sys

from mjax.config import load_config
from tests.conftest import ROOT


def test_every_collective_of_jax_is_named_in_mappings_only():
    names = "psum|psum_scatter|all_gather|all_to_all|ppermute|pmean|pmax|pmin|pcast|pvary|axis_index|axis_size"
    pattern = rf"\b(lax\.)({names})\b|from jax\.lax import"
    result = subprocess.run(
        ["grep", "-rnE", pattern, "mjax", "train.py", "--include=*.py"], cwd=ROOT, capture_output=True, text=True
    )
    files = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert files == {"mjax/parallel/mappings.py"}


def test_imports_run_downward():
    below = {
        "parallel": {"config", "errors", "launch", "names", "parallel"},
        "models": {"config", "errors", "names", "parallel", "models"},
        "data": {"batch_size", "config", "errors", "json_files", "names", "plain_values", "progress", "data"},
    }
    for package, allowed in below.items():
        for file in (ROOT / "mjax" / package).glob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["from"], ["import"]) and words[1].startswith("mjax."):
                    assert words[1].split(".")[1] in allowed, f"{file.name}: {line}"


COMPILE_512 = """
from dataclasses import replace
from mjax.config import load_config
from mjax.parallel.mesh import make_mesh
from mjax.training.step import build_program
config = load_config("gpt_8b")
config = replace(config, model=replace(config.model, attention="xla"))
program = build_program(config, make_mesh(config.mesh))
compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
print("arguments", compiled.memory_analysis().argument_size_in_bytes)
"""


def test_8b_compiles_for_512_devices():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=512",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run([sys.executable, "-c", COMPILE_512], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    parameters = load_config("gpt_8b").model.parameters
    argument_bytes = int(result.stdout.split()[1])
    # A device holds 1/8 of the split weights and all of the small ones, three times in float32 (weights and two
    # moments).
    assert 12 * parameters / 8 < argument_bytes < 12 * parameters / 8 * 1.01
