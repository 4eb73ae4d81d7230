"""What a plan says of Muon: the collectives of the ledger, the products of the iteration, one moment for a matrix."""

from dataclasses import replace

import pytest

from mjax.config import MeshConfig, load_config
from mjax.hardware import gpu_named
from mjax.parallel.mesh import abstract_mesh
from mjax.planner import muon
from mjax.planner.comms import ledger
from mjax.planner.memory import predict_memory
from mjax.planner.time import predict_time
from mjax.planner.weights import held_by, matrices_of
from mjax.state.layout import lay_out
from mjax.training import muon as training
from tests.small import small_config

MESHES = [
    {"data": 2, "model": 4},
    {"data": 4, "model": 2, "zero": 1},
    {"pipe": 2, "data": 3, "zero": 3},
    {"pipe": 4, "data": 2, "model": 2},
    {"data": 8},
]


def config_of(mesh, **optimizer):
    config = small_config(compute="bf16", layers=4, global_batch=24)
    optimizer = replace(config.optimizer, name="muon", **optimizer)
    return replace(config, mesh=MeshConfig(**mesh), optimizer=optimizer)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_collectives_of_the_plan_are_those_of_the_traced_step(mesh):
    config = config_of(mesh)
    records = [record for record in ledger(config).records if record.part == "optimizer" and record.dtype == "bfloat16"]
    found, expected = {}, {}
    for record in records:
        key = record.operation, record.axes[0]
        found[key] = found.get(key, 0) + record.count * record.payload
    for each in muon.sent(config):
        key = each.operation, each.axis
        expected[key] = expected.get(key, 0) + each.times * each.elements * muon.width(config)
    assert found == expected
    assert expected


def test_the_matrices_of_the_plan_are_those_of_the_layout():
    for mesh in MESHES:
        config = config_of(mesh)
        layout = training.matrices_of(lay_out(config, abstract_mesh(config.mesh)), config.mesh)
        planned = matrices_of(config.model, config.mesh)
        assert [(each.count, each.size, each.moves) for each in planned] == [
            (each.count, each.size, each.moves) for each in layout.values()
        ]


def test_the_products_are_three_in_each_of_five_iterations_on_the_smaller_dim():
    m, n = 64, 256
    for shape in ((m, n), (n, m)):
        found = muon.products(3, *shape)
        assert len(found) == 15
        assert sum(each.flops for each in found) == 5 * 3 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def test_a_matrix_has_one_moment_and_everything_else_two():
    config = load_config("gpt_1b")
    other = replace(config, optimizer=replace(config.optimizer, name="muon"))
    held, adam, ours = held_by(config.model, config.mesh), predict_memory(config), predict_memory(other)
    hidden, layers = config.model.hidden, config.model.layers
    assert held.matrices == 12 * hidden**2 * layers
    assert adam.optimizer - ours.optimizer == 4 * held.matrices
    assert replace(adam, optimizer=ours.optimizer) == ours


def test_time_counts_the_products_and_what_moves_the_matrices():
    gpu = gpu_named("h100")
    config = load_config("gpt_8b")
    other = replace(config, optimizer=replace(config.optimizer, name="muon"))
    adam, ours = predict_time(config, gpu).parts, predict_time(other, gpu).parts
    assert {name for name in adam if adam[name] != ours[name]} == {"model", "data", "optimizer"}
    assert all(ours[name] >= adam[name] for name in adam)
    flops = sum(
        p.flops for each in matrices_of(config.model, config.mesh) for p in muon.products(each.each, *each.size)
    )
    assert ours["optimizer"] - adam["optimizer"] > 0.5 * flops / gpu.peak("bf16")
