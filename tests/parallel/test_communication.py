"""Laws of what may communicate, and the step of 8.3 billion parameters compiled for 512 devices."""

import ast
import collections
import graphlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from mjax.config import load_config
from mjax.hardware import gpu_named
from mjax.models.build import count_parameters
from mjax.planner.memory import predict_memory
from mjax.planner.search import describe
from mjax.planner.time import predict_time
from mjax.training.announce import describe_mesh
from tests.conftest import COMPILE_QUICKLY, ROOT
from tests.small import small_config
from tests.traced import traced_step


def test_every_collective_of_jax_is_named_in_mappings_only():
    names = "psum|psum_scatter|all_gather|all_to_all|ppermute|pmean|pmax|pmin|pcast|pvary|axis_index|axis_size"
    pattern = rf"\b(lax\.)({names})\b|from jax\.lax import"
    result = subprocess.run(
        ["grep", "-rnE", pattern, "mjax", "train.py", "--include=*.py"], cwd=ROOT, capture_output=True, text=True
    )
    files = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert files == {"mjax/parallel/mappings.py"}


PACKAGES_BELOW = {
    "parallel": set(),
    "models": {"parallel"},
    "data": set(),
    "state": {"data", "models", "parallel"},
    "training": {"data", "models", "parallel", "state"},
    "interop": {"data", "models", "parallel", "state", "training"},
    "planner": {"data", "models", "parallel", "state", "training"},
    "profiling": {"data", "parallel", "planner", "training"},
    "tasks": {"data", "models", "parallel", "state", "training"},
    "finetuning": {"data", "models", "parallel", "state", "tasks", "training"},
    "doctor": {"models", "parallel", "state", "training"},
    "commands": {
        "data",
        "doctor",
        "finetuning",
        "interop",
        "models",
        "parallel",
        "planner",
        "profiling",
        "state",
        "tasks",
        "training",
    },
}
"""What a package of mjax may import from, besides itself and the modules at the root."""

MODULES_BELOW = {
    "parallel": {"bounds", "config", "errors", "launch", "names"},
    "models": {"config", "errors", "llama_config", "mixture_config", "model_config", "names"},
    "data": {
        "batch_size",
        "bounds",
        "config",
        "errors",
        "figures",
        "json_files",
        "model_config",
        "names",
        "places",
        "plain_values",
        "progress",
    },
    "state": {"config", "errors", "names"},
    "training": {
        "batch_size",
        "bounds",
        "config",
        "errors",
        "figures",
        "hardware",
        "json_files",
        "launch",
        "mixture_config",
        "model_config",
        "names",
        "packages",
        "plain_values",
        "validation",
    },
}
"""Packages that may import these modules of the root only."""


def _imports():
    """(file, imported file) of every import in mjax, also of those inside functions; paths relative to mjax/."""
    modules = {file.relative_to(ROOT).with_suffix("").parts: file for file in (ROOT / "mjax").rglob("*.py")}
    modules |= {parts[:-1]: file for parts, file in modules.items() if parts[-1] == "__init__"}
    for file in set(modules.values()):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [tuple(alias.name.split(".")) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                names = [(*node.module.split("."), alias.name) for alias in node.names]
            for name in names:
                found = modules.get(name) or modules.get(name[:-1])
                assert found or name[0] != "mjax", f"{file} imports {'.'.join(name)}, which is not there"
                if found and found != ROOT / "mjax" / "__init__.py":
                    yield file.relative_to(ROOT / "mjax"), found.relative_to(ROOT / "mjax")


def test_imports_run_downward():
    packages = {file.parts[0] for file, _ in _imports() if len(file.parts) > 1}
    assert packages == set(PACKAGES_BELOW)
    for file, imported in _imports():
        importer, package = file.parts[0], imported.parts[0]
        if len(file.parts) == 1:  # modules at the root: the command line finds a command by its name
            assert package != "commands", f"{file} imports {imported}"
        elif len(imported.parts) > 1:
            assert package in {importer, *PACKAGES_BELOW[importer]}, f"{file} imports {imported}"
        elif importer in MODULES_BELOW:
            assert imported.stem in MODULES_BELOW[importer], f"{file} imports {imported}"


def test_no_imports_run_in_a_circle():
    graph = collections.defaultdict(set)
    for file, imported in _imports():
        graph[file].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(map(str, error.args[1])))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_with_one_rank_of_model_sequence_parallelism_has_no_effect(recompute):
    plain = small_config(2, 1, 4, recompute=recompute, unroll="on", compute="bf16")
    asked = replace(plain, mesh=replace(plain.mesh, sequence_parallel=True))

    def answers(config):
        program = re.sub(r" at 0x\w+", "", str(traced_step(config)[1]))
        step = predict_time(config, gpu_named("h100"))
        return program, predict_memory(config), step, describe_mesh(config), describe(config)

    assert answers(asked) == answers(plain)


COMPILE_512 = """
from dataclasses import replace
from mjax.config import load_config
from mjax.parallel.mesh import make_mesh
from mjax.training.step import build_program
from mjax.models.build import count_parameters
config = load_config("gpt_8b")
config = replace(config, model=replace(config.model, attention="xla"))
program = build_program(config, make_mesh(config.mesh))
compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
print("arguments", compiled.memory_analysis().argument_size_in_bytes)
"""


@pytest.mark.ci
def test_8b_compiles_for_512_devices():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=512 {COMPILE_QUICKLY}",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run([sys.executable, "-c", COMPILE_512], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    parameters = count_parameters(load_config("gpt_8b").model)
    argument_bytes = int(result.stdout.split()[1])
    # A device holds 1/8 of the split weights and all of the small ones, three times in float32 (weights and two
    # moments).
    assert 12 * parameters / 8 < argument_bytes < 12 * parameters / 8 * 1.01
