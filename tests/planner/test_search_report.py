"""Output and result of the search, from made-up memory and time."""

import json

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import load_config
from mjax.planner.command import search_section
from mjax.planner.memory import Memory
from mjax.planner.search import search
from mjax.planner.time import StepTime
from mjax.utils.figures import GIB


def seconds_of(matmul, model=0.0, bubble=0.0):
    """Return the seconds of a run with a growing batch."""
    parts = {"matmul": matmul, "model": model, "bubble": bubble}
    return StepTime(parts, 400.0, 0.4, 0.05, 0.9 * sum(parts.values()))


def memory_of(config):
    held = {"none": 60, "selective": 30, "full": 3, "offload": 0}[config.train.recompute] * config.train.micro_batch
    return Memory(160 * GIB / (config.mesh.pipe * config.mesh.model), 0.0, 0.0, GIB * held / config.mesh.model)


def time_of(config):
    mesh = config.mesh
    products = {"none": 3.0, "selective": 3.06, "full": 4.0, "offload": 4.2}[config.train.recompute]
    bubble = products * (mesh.pipe - 1) / config.micro_batches / mesh.virtual_stages
    return seconds_of(products, 5.12 * mesh.model * mesh.data / mesh.devices, bubble)


@pytest.fixture(scope="module")
def found():
    config = load_config("gpt_8b")
    keep = ["mesh.zero", "mesh.schedule", "mesh.sequence_parallel"]
    return search(config, 64, memory_of, time_of, 71 * GIB, keep, top=10**6)


def reported(result):
    return search_section(result, "gpt_8b", load_config("gpt_8b"), gpu_named("h100"))


def test_report_shows_fastest_cost_and_plain_values(found):
    section = reported(found)
    assert section.lines[0] == (
        f"{found.tried:,} candidates: {len(found.ranked):,} fit; {len(found.out_of_memory):,} out of memory "
        "(under 5% of 71.0 GiB free, or host memory); 0 pruned (over 10% slower than the fastest)"
    )
    best, values = found.ranked[0], json.loads(json.dumps(section.values))
    hours = 300_000 * best.time.mean / 3600
    text = f"300,000 steps, 157,286,400,000 tokens: {hours / 24:.3g} days, {64 * hours:,.0f} GPU-hours (±5%)"
    assert text in section.text
    first = values["best"][0]
    assert len(values["best"]) == 10
    assert first["mesh.pipe"] == best.config.mesh.pipe
    assert first["gpu_hours"] == pytest.approx(64 * hours)
    assert first["seconds_at_global_batch"] == sum(first["parts"].values())
