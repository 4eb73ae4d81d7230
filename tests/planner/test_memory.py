"""Predicted bytes against those that XLA's ahead-of-time compile for GPUs allocates, and the rules they come from."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import PrecisionConfig, from_dict, load_config, to_dict
from mjax.config.axes import copies
from mjax.generation.generate import Generator
from mjax.parallel.mesh import make_mesh
from mjax.parallel.pipeline_schedules import build_schedule
from mjax.planner.command import memory_section
from mjax.planner.memory import (
    _bound_sizes,
    _chunks_in_flight,
    _live_weights,
    _Sizes,
    cache_bytes,
    device_weights,
    predict_memory,
)
from mjax.planner.search import LOSS_CHUNKS, changes_that_fit, with_loss_chunks
from tests.conftest import ROOT
from tests.models.own_models import hybrid, mtp
from tests.planner.configs import changed

H100 = gpu_named("h100")
COMPILED = json.loads((ROOT / "tests" / "planner" / "compiled_memory.json").read_text())
ROWS = {row["name"]: row for row in COMPILED["rows"]}
# A row of each way to run, in the tier `test`; most share their traced layers.
OFTEN = (
    "345m-sel-cudnn", "8b-sel-tp8", "8b-none-sp", "8b-acc", "8b-zero1", "8b-zero3", "8b-pipe-gpipe", "8b-pipe-1f1b",
    "8b-pipe-chunks", "8b-z3-pipe", "8b-8k-sel", "1b-muon-full", "8b-muon-zero1",
    "qwen3moe-8-fsdp-expert8", "llama3-8b-128k-context8", "llama3-8b-8k-fsdp-offload",
)  # fmt: skip


def config_of(row):
    values = to_dict(load_config(row["config"]))
    values["data"]["mock"] = True
    values["train"] |= {"batch_rampup": None, "unroll": "off"}  # as they were compiled
    for flag, value in row["flags"].items():
        section, knob = flag.split(".")
        values[section][knob] = value
    return from_dict(values)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name, marks=() if name in OFTEN else pytest.mark.ci) for name, row in ROWS.items()]
)
def test_memory_is_within_five_percent_of_xla(row):
    """And the step's arguments, master weights, moments and the batch, have the very bytes of the compiled step."""
    config = config_of(row)
    memory = predict_memory(config)
    assert abs(memory.total / row["total"] - 1) < 0.05
    assert memory.host == row.get("host", 0)
    assert 0.35 * memory.total < predict_memory(config, least=True).total <= memory.total
    elements = sum(math.prod(shape) * {"int32": 4, "bool": 1}[kind] for shape, kind in config.batch_arrays().values())
    batch = elements * config.train.global_batch / copies(config.mesh)
    expected = 4 * device_weights(config.model, config.mesh).stored + memory.optimizer + batch
    assert row["argument"] == pytest.approx(expected, rel=1e-5, abs=1e5)  # the counters of the loss scale, alignment


@pytest.mark.parametrize("names", [OFTEN, pytest.param(ROWS, marks=pytest.mark.ci)], ids=["often", "all"])
def test_memory_is_off_by_one_percent_on_average(names):
    """1.1 at most, 2.5 for mixtures, 3 for sequences over context."""
    limits, errors = {"dense": 0.011, "mixture": 0.025, "over context": 0.03}, defaultdict(list)
    for row in map(ROWS.get, names):
        config = config_of(row)
        kind = "mixture" if config.model.experts else "dense"
        error = abs(predict_memory(config).total / row["total"] - 1)
        errors["over context" if config.mesh.context > 1 else kind].append(error)
    assert errors.keys() == limits.keys()
    assert all(sum(found) / len(found) < limits[kind] for kind, found in errors.items())


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_in_flight_are_slots_of_schedule(name):
    config = load_config("gpt_8b")
    for stages, chunks in ((2, 1), (3, 2), (4, 1), (4, 3)):
        for micro_batches in (stages, 5 * stages, *((1, 2 * stages + 1) if chunks == 1 else ())):
            schedule = build_schedule(name, stages, micro_batches, chunks)
            mesh = {"pipe": stages, "data": 1, "schedule": name, "virtual_stages": chunks}
            run = changed(config, mesh=mesh, train={"micro_batch": 1, "global_batch": micro_batches})
            assert _chunks_in_flight(run) == schedule.residual_slots


def test_without_a_loop_logits_and_gradient_exist_both():
    """Compiled without a loop gpt_1b, 12 layers, took the logits of a micro-batch once more than in a loop."""
    config = load_config("gpt_1b")
    config = replace(config, model=replace(config.model.without_dropout(), layers=2))
    loop, apart = (
        predict_memory(changed(config, mesh={"data": 1}, train={"global_batch": 8, "unroll": unroll}))
        for unroll in ("off", "on")
    )
    assert (loop.moment, apart.moment) == ("head", "head")
    assert apart.logits == 2 * loop.logits == 2 * 2 * 8 * 1024 * 50304


def test_full_recomputation_keeps_inputs_alone():
    """2 s b h bytes of a layer in bf16."""
    config = changed(load_config("gpt_1b"), train={"recompute": "full", "unroll": "off"})
    model, samples = config.model, config.train.micro_batch
    assert predict_memory(config).activations == model.layers * 2 * samples * model.sequence * model.hidden


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
def test_least_memory_with_sequence_parallelism(recompute):
    mesh = {"pipe": 4, "data": 8, "model": 4, "virtual_stages": 10, "sequence_parallel": True, "zero": 1}
    config = changed(load_config("llama3_70b"), mesh=mesh, train={"micro_batch": 1, "recompute": recompute})
    assert predict_memory(config, least=True).total <= predict_memory(config).total


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_least_memory_with_experts(recompute):
    """`selective` dispatches tokens to experts again."""
    mesh, train = {"data": 8, "zero": 3}, {"micro_batch": 4, "recompute": recompute}
    config = changed(load_config("qwen3_30b_a3b"), mesh=mesh, train=train)
    assert predict_memory(config, least=True).total <= predict_memory(config).total


def test_rounds_to_experts_sum_gradients_of_one_layer():
    """4 bytes an element of a rank's experts for the sum over the rounds, and 2 for the gradient of one."""
    config = changed(load_config("mixtral_8x7b"), mesh={"data": 8, "expert": 8, "zero": 1})
    gather, rounds = (
        _live_weights(_Sizes(changed(config, model={"moe_token_dispatcher": way}), "cudnn", _bound_sizes))
        for way in ("allgather", "alltoall")
    )
    assert rounds - gather == 6 * 3 * 4096 * 14336


def test_batch_is_split_over_replicas():
    config = load_config("gpt_8b")
    few, many = (predict_memory(changed(config, train={"global_batch": 64 * 8 * n})) for n in (2, 4))
    assert many.workspace - few.workspace == 2 * 8 * 1024 * 2 * 4  # tokens and labels


# --- The section of a plan --------------------------------------------------------------------------------------------


def test_plan_compares_host_memory():
    config = config_of(ROWS["llama3-8b-128k-offload"])
    section = memory_section(config, H100)
    assert {"host": 4 * 2**30, "fits": True}.items() <= section.values.items()
    small = memory_section(config, replace(H100, host_memory_per_node=16 * 2**30))
    assert "but not in the 2.0 GiB of host memory; use --train.recompute full" in small.answer["memory"]
    assert not small.values["fits"]


# --- The loss in chunks -----------------------------------------------------------------------------------------------


def test_chunks_are_proposed_where_logits_are_peak():
    train = {"global_batch": 2, "micro_batch": 2, "recompute": "selective", "unroll": "on"}
    config = changed(load_config("llama32_1b"), model={"layers": 8}, mesh={"data": 1, "zero": 0}, train=train)
    memory = predict_memory(config)
    assert memory.moment == "head"
    (chunked,) = with_loss_chunks(config, memory)
    smaller = predict_memory(chunked).total
    changes = changes_that_fit(config, smaller / 0.94)
    assert f"--train.loss-chunks {LOSS_CHUNKS}" in {change.flags for change in changes}
    assert with_loss_chunks(chunked, memory) == []
    assert with_loss_chunks(config, memory._replace(moment="backward")) == []


@pytest.mark.parametrize("config", [mtp.config, hybrid.config], ids=["latent", "hybrid"])
def test_cache_has_the_bytes_of_generation(config):
    config, sequences, slots = replace(config, precision=PrecisionConfig("bf16")), 3, 16
    generator = Generator(config, make_mesh(config.mesh))
    weights = jax.eval_shape(generator._weights, generator.abstract_model)
    ids = jnp.zeros((sequences, slots), int), jnp.full(sequences, 2)
    caches = jax.tree.leaves(jax.eval_shape(partial(generator._read, slots), weights, *ids).cached.layers)
    per_token, per_sequence = cache_bytes(config)
    assert sum(array.size * array.dtype.itemsize for array in caches) == sequences * (slots * per_token + per_sequence)


def test_cache_of_llama3_8b_is_128_kib_per_token():
    assert cache_bytes(load_config("llama3_8b")) == (128 * 1024, 0)
    assert cache_bytes(load_config("bert_demo")) is None
