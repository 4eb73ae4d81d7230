"""The longest sequence that fits on a number of GPUs."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.commands import cli
from mjax.config import LlamaConfig
from mjax.errors import UsageError
from mjax.planner.command import longest_section
from mjax.planner.memory import HEADROOM, Memory
from mjax.planner.search import SEQUENCE_STEP, largest_within, longest_sequence
from mjax.utils.figures import GIB
from tests.small import small_config

H100 = gpu_named("h100")


def small():
    config = small_config(compute="bf16", dropout=0.0)
    model = LlamaConfig(layers=4, hidden=1024, heads=8, kv_heads=4, feed_forward=2048, sequence=64, vocabulary=128)
    return replace(config, model=model)


def memory_of(config):
    """Return the memory of a model whose ranks share all weights and split tokens over `context` and `model`."""
    tokens = config.train.micro_batch * config.model.sequence / (config.mesh.context * config.mesh.model)
    return Memory(GIB / config.mesh.devices, 0.0, 0.0, 8192 * tokens)


def time_of(config):
    return Mock(mean=1.0)


# --- The search -------------------------------------------------------------------------------------------------------


def test_largest_number_within_limit_is_found():
    """Tries functions with steps and bends; a number that fits exactly is found too."""
    assert largest_within(lambda number: 5.0 + 0.5 * number, 10.0) == 10
    assert largest_within(lambda number: max(7.0, 3 * number - 4), 100.0) == 34
    assert largest_within(lambda number: 11.0 + number, 10.0) == 0
    assert [largest_within(float, 10.0, first=4, end=end) for end in (5, 7, 10, 20)] == [5, 7, 10, 10]


def test_longest_sequence_fits_and_next_does_not():
    capacity = 3 * GIB
    best = longest_sequence(small(), 4, "full", 8, memory_of, time_of, capacity)
    config = best.config
    assert best.memory.total <= (1 - HEADROOM) * capacity
    assert config.mesh.context * config.mesh.model == 4
    longer = replace(config.model, sequence=config.model.sequence + SEQUENCE_STEP * 4)
    assert memory_of(replace(config, model=longer)).total > (1 - HEADROOM) * capacity


def test_host_memory_limits_longest_sequence():
    def with_host(config):
        return memory_of(config)._replace(host=100_000.0 * config.model.sequence / config.mesh.devices)

    best = longest_sequence(small(), 4, "offload", 8, with_host, time_of, 3 * GIB, 1 * GIB)
    assert best.config.train.recompute == "offload"
    assert 0.8 * GIB < best.memory.host <= 1 * GIB
    assert best.memory.total < 0.5 * 3 * GIB


def test_context_doubles_sequence_with_twice_the_gpus():
    few, many = (
        longest_sequence(small(), devices, "full", 2, memory_of, time_of, 3 * GIB).config for devices in (4, 8)
    )
    assert many.model.sequence / few.model.sequence == pytest.approx(2, abs=0.1)
    assert longest_sequence(small(), 2, "full", 8, memory_of, time_of, 1e6) is None  # nothing fits


def test_longest_keeps_model_within_a_server():
    def less_with_model(config):
        memory = memory_of(config)
        return memory._replace(activations=memory.activations / config.mesh.model)

    meshes = [
        longest_sequence(small(), 8, "full", servers, less_with_model, time_of, 3 * GIB).config.mesh
        for servers in (2, 4)
    ]
    assert [(mesh.model, mesh.context) for mesh in meshes] == [(2, 4), (4, 2)]


# --- The command ------------------------------------------------------------------------------------------------------

FLAGS = ["--config", "llama_demo", "--gpu", "h100"]


def test_plan_longest_prints_what_it_finds(capsys):
    assert cli.main(["plan", *FLAGS, "--max-sequence-on", "2"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["plan", *FLAGS, "--max-sequence-on", "2", "--json"]) == 0
    full, offload = json.loads(capsys.readouterr().out)["longest"]["best"]
    assert (full["train.recompute"], offload["train.recompute"]) == ("full", "offload")
    assert 0 < full["sequence"] <= offload["sequence"]
    assert all(f"{each['sequence']:,}" in printed for each in (full, offload))


def test_impossible_longest_is_rejected(monkeypatch):
    monkeypatch.setattr("mjax.planner.search.make_predictors", lambda *_: (lambda _: Memory(1e15, 0.0, 0.0), time_of))
    with pytest.raises(UsageError, match=r"^no sequence of small fits on 1 × h100; try --max-sequence-on 2$"):
        longest_section(small(), "small", 1, H100, None)
