"""Muon in a plan: collectives of the ledger, products of the iteration, one moment for a matrix."""

from collections import Counter
from dataclasses import replace

import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import MeshConfig, load_config
from mjax.parallel.mesh import abstract_mesh
from mjax.planner.ledger import ledger
from mjax.planner.memory import device_weights, muon_matrices, muon_products, predict_memory
from mjax.planner.time import Rates, muon_exchange_seconds, predict_time
from mjax.step import muon as training
from mjax.step.layout import build_layout
from tests.planner.configs import changed
from tests.planner.test_time import BYTE_A_SECOND, OPEN
from tests.products import one_in
from tests.small import small_config


@pytest.mark.parametrize(
    "mesh",
    one_in(
        3,
        [{"data": 2, "model": 4}, {"data": 4, "model": 2, "zero": 1}, {"pipe": 4, "data": 2, "model": 2}, {"data": 4}],
    ),
    ids=str,
)
def test_matrices_and_collectives_are_those_of_step(mesh):
    config = small_config(compute="bf16", layers=4, global_batch=24)
    config = changed(config, mesh=mesh, optimizer={"name": "muon"})
    layout = training.collect_matrices(build_layout(config, abstract_mesh(config.mesh)), config.mesh)
    planned = muon_matrices(config.model, config.mesh)
    assert [(each.num_matrices, each.matrix_shape, each.exchanges) for each in planned] == [
        (each.num_matrices, each.matrix_shape, each.exchanges) for each in layout.values()
    ]
    expected, rates = Counter(), Rates(BYTE_A_SECOND, OPEN, "bf16")
    for record in ledger(config).records:
        if (record.part, record.dtype) == ("optimizer", "bfloat16"):
            expected[record.axes[0]] += record.count * record.wire
    assert expected
    assert {axis: sent for axis, sent in muon_exchange_seconds(config, rates).items() if sent} == pytest.approx(
        expected
    )


def test_iteration_has_fifteen_products_on_smaller_dim():
    m, n = 64, 256
    for shape in ((m, n), (n, m)):
        found = muon_products(3, *shape)
        assert len(found) == 15
        assert sum(each.flops for each in found) == 5 * 3 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def test_matrix_has_one_moment_and_its_own_time():
    adam = replace(load_config("gpt_1b"), mesh=MeshConfig(data=8, model=2))
    ours, gpu = changed(adam, optimizer={"name": "muon"}), gpu_named("h100")
    held, with_two, with_one = device_weights(adam.model, adam.mesh), predict_memory(adam), predict_memory(ours)
    assert held.matrices == 12 * adam.model.hidden**2 * adam.model.layers / 2
    assert with_two.optimizer - with_one.optimizer == 4 * held.matrices
    before, after = predict_time(adam, gpu).parts, predict_time(ours, gpu).parts
    assert {name for name in before if before[name] != after[name]} == {"model", "data", "optimizer"}
    matrices = muon_matrices(ours.model, ours.mesh)
    flops = sum(
        product.flops for each in matrices for product in muon_products(each.count_per_rank, *each.matrix_shape)
    )
    assert after["optimizer"] - before["optimizer"] > 0.5 * flops / gpu.peak("bf16")
