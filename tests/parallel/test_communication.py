"""The communication of a step is a contract: counted from the traced program of 8.3 billion parameters on 512
devices."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import jax
import pytest

from mjax.config import load_config
from tests.collectives import collectives, traced_step
from tests.conftest import ROOT
from tests.small import small_config

LAYERS = 72


def _traced(config):
    program, jaxpr = traced_step(config)
    return program, collectives(jaxpr)


def _gpt_8b(**train):
    config = load_config("gpt_8b")
    return replace(config, model=replace(config.model, attention="xla"), train=replace(config.train, **train))


@pytest.mark.parametrize(("recompute", "per_layer"), [("none", 4), ("selective", 4), ("full", 5)])
def test_a_layer_of_8b_has_exactly_this_many_all_reduces_over_model(recompute, per_layer):
    _, found = _traced(_gpt_8b(recompute=recompute))
    in_layers = [c for c in found if LAYERS in c.loops]
    assert {c.kind for c in in_layers} == {"all-reduce"}
    assert {c.axes for c in in_layers} == {("model",)}
    assert sum(c.count for c in in_layers) == per_layer * LAYERS
    activations = {(8 * 1024, 3072)}
    assert {c.shape for c in in_layers} == activations, "only whole activations cross, in the compute type"
    assert {c.dtype for c in in_layers} == {"bfloat16"}


def test_outside_the_layers_of_8b_model_carries_the_embedding_the_loss_and_the_norm():
    _, found = _traced(_gpt_8b())
    outside = Counter((c.shape, c.dtype) for c in found if c.axes == ("model",) and LAYERS not in c.loops)
    activation, per_token = ((8 * 1024, 3072), "bfloat16"), (8 * 1024,)
    assert outside.pop(activation) == 2  # g of the embedding forward, f of the logits backward
    assert outside.pop((per_token, "float32")) == 1  # the row maximum of the cross entropy
    assert outside.pop(((2, *per_token), "float32")) == 1  # its sum of exponentials and the label's logit
    assert len(outside) == 1  # the squared norms of the gradients that are split over `model`
    (shape, dtype), times = outside.popitem()
    assert len(shape) == 1
    assert (dtype, times) == ("float32", 1)


def _on_a_ring(found, ranks):
    """Bytes a device sends: an all-reduce is a reduce-scatter and an all-gather of its operand."""
    total = 0
    for c in found:
        whole = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": ranks}[c.kind]  # a gather's operand is one part
        total += c.count * whole * c.bytes * (ranks - 1) // ranks
    return total


def test_sequence_parallelism_sends_as_many_bytes_as_tensor_parallelism():
    config = _gpt_8b(recompute="none")
    _, plain = _traced(config)
    _, split = _traced(replace(config, mesh=replace(config.mesh, sequence_parallel=True)))
    activations = [[c for c in found if c.dtype == "bfloat16"] for found in (plain, split)]
    assert {c.kind for c in activations[1]} == {"all-gather", "reduce-scatter"}
    assert {c.axes for c in activations[1]} == {("model",)}
    assert _on_a_ring(activations[0], 8) == _on_a_ring(activations[1], 8) == 290 * 2 * (7 * 8 * 1024 * 3072 * 2 // 8)
    # The weights that act on split tokens are summed over `model` as well, with the sum over `data`, once a step.
    both = [c for c in split if set(c.axes) == {"data", "model"}]
    assert Counter(c.shape for c in both) == {(72, 3072): 6, (3072,): 2, (1024, 3072): 1}
    assert {(c.count, c.dtype) for c in both} == {(1, "float32")}


@pytest.mark.parametrize(("recompute", "per_layer"), [("none", (4, 4)), ("selective", (6, 4))])
def test_with_selective_recomputation_the_two_gathers_of_a_layer_are_done_again(recompute, per_layer):
    config = _gpt_8b(recompute=recompute)
    _, found = _traced(replace(config, mesh=replace(config.mesh, sequence_parallel=True)))
    in_layers = [c for c in found if LAYERS in c.loops]
    counts = tuple(sum(c.count for c in in_layers if c.kind == kind) for kind in ("all-gather", "reduce-scatter"))
    assert counts == tuple(n * LAYERS for n in per_layer)


@pytest.mark.parametrize("micro_batch", [8, 1])
def test_gradients_cross_data_once_in_float32_outside_every_loop(micro_batch):
    config = _gpt_8b(micro_batch=micro_batch)
    program, found = _traced(config)
    over_data = [c for c in found if "data" in c.axes]
    assert all(c.axes == ("data",) and c.loops == () and c.dtype == "float32" for c in over_data)
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(program.abstract_state.model)]
    expected = Counter([*shards, ()])  # each gradient once, and the loss
    assert Counter(c.shape for c in over_data) == expected


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
        "data": {"batch_size", "config", "errors", "names", "data"},
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


def test_the_small_model_holds_the_same_contract():
    _, found = _traced(small_config(2, 4, micro_batch=2))
    assert (
        sum(c.count for c in found if c.axes == ("model",) and 2 in c.loops and c.shape == (32, 32))
        == 2 * 2 * 4 + 2 * 2
    )
