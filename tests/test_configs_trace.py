"""Every published model traces on its own mesh, up to 3,072 devices that need not exist."""

import math
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from mjax.config import available_configs, load_config
from mjax.models.build import count_parameters
from tests.conftest import COMPILE_QUICKLY, ROOT
from tests.ports import free_port
from tests.traced import traced_step

PUBLISHED = [name for name in available_configs() if load_config(name).mesh.devices > 8]
OFTEN = ("bloom_176b", "gpt_1t", "qwen3_30b_a3b")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.ci) for n in PUBLISHED])
def test_published_model_traces_with_all_its_parameters(name):
    config = load_config(name)
    config = replace(config, model=replace(config.model, attention="xla"))  # cuDNN's wants a GPU even for tracing
    program, _ = traced_step(config)
    weights = jax.tree.leaves(program.abstract_state.model)
    assert sum(weight.size for weight in weights) == count_parameters(config.model)
    # A stage holds its share of the layers, split over `model`, and a share of the embedding; but 35 stages
    # (530B) divide no dim of that: there every stage has the whole of it.
    held = sum(math.prod(weight.sharding.shard_shape(weight.shape)) for weight in weights)
    mesh, model = config.mesh, config.model
    whole = (model.padded_vocabulary / mesh.model + model.sequence) * model.hidden if mesh.pipe == 35 else 0
    assert held < 1.02 * (count_parameters(model) / (mesh.pipe * mesh.model) + whole)


# XLA's CPU backend takes 2,048 devices a process at most, so two processes make up the 3,072. The first one compiles.
COMPILE_1T = """
import sys, jax
from dataclasses import replace
from mjax.config import load_config
from mjax.parallel.mesh import make_mesh
from mjax.step.step import build_program
from mjax.models.build import count_parameters
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
assert jax.device_count() == 3072  # also in the other process: they meet here
config = load_config("gpt_1t")
model = replace(config.model, hidden=32, heads=8, sequence=8, vocabulary=100, vocabulary_multiple=8, attention="xla")
config = replace(config, model=model)
if sys.argv[2] == "0":
    program = build_program(config, make_mesh(config.mesh))
    compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    text = compiled.as_text()
    print("partitions", text.split("num_partitions=")[1].split(",")[0].split()[0])
    print("loops of", *sorted({int(part.split('"')[0]) for part in text.split('known_trip_count":{"n":"')[1:]}))
jax.distributed.shutdown()
"""


@pytest.mark.ci
def test_mesh_of_1t_compiles_at_toy_widths():
    address = f"127.0.0.1:{free_port()}"
    flags = f"--xla_force_host_platform_device_count=1536 {COMPILE_QUICKLY}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command, pipes = [sys.executable, "-c", COMPILE_1T, address], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([*command, index], env=environment, text=True, **pipes) for index in "01"]
    (output, errors), _ = (process.communicate(timeout=300) for process in processes)
    assert processes[0].returncode == 0, errors[-2000:]
    assert "partitions 3072" in output
    ticks = 512 + 2 * (64 - 1)  # one a micro-batch, and a round trip
    assert str(ticks) in output.split("loops of")[1].split()
