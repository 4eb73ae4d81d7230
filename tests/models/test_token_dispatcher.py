"""Experts on several devices by all-to-alls in rounds, directly or by node: the same loss and gradients as on one
device, for any router.

In `training/table.txt` the rows with four ranks of `expert` have all-to-alls too, with the router of their weights.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.models.parts import experts
from mjax.models.parts.config import ExpertsConfig
from mjax.parallel.autodiff import sum_rounds
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.parallel.weights import leaf_name
from mjax.step.step import build_program
from tests import against_reference, small
from tests.models.test_mixture import MIXTURE

ALLTOALL = {
    **MIXTURE,
    "experts": 8,
    "router": "sigmoid",
    "router_bias_update_rate": 0.01,
    "moe_token_dispatcher": "alltoall",
    "layers": 2,
    "sequence": 16,
}
# Experts 0 to 3 are on ranks 0 and 1: a node. A token has experts of one node of two, or of two of four.
NODES = {"router_n_groups": 2, "router_topk_groups": 1, "experts_per_token": 3}
FOUR_NODES = {"router_n_groups": 4, "router_topk_groups": 2, "experts_per_token": 3}
# Added to the scores of these experts, of which every token chooses two.
ROUTERS = {"balanced": {}, "one-sided": {5: 9.0}, "all-to-one": {0: 9.0, 1: 9.0}}


@pytest.fixture
def router(request, monkeypatch):
    """All weights of the test have this router."""
    draw = small.weights_of

    def weights_of(config):
        def with_bias(path, weight):
            if leaf_name(path).endswith("router.bias"):
                weight = np.zeros_like(weight)
                for expert, value in ROUTERS[request.param].items():
                    weight[..., expert] = value
            return weight

        return jax.tree_util.tree_map_with_path(with_bias, draw(config))

    for module in (small, against_reference):
        monkeypatch.setattr(module, "weights_of", weights_of)
    against_reference._serial.cache_clear()
    yield request.param
    against_reference._serial.cache_clear()


def config_of(data=4, model=1, micro_batch=1, recompute="none", mesh=None, compute="fp64", dropout=0.1, **changes):
    changes = {**ALLTOALL, **changes}
    return small.small_config(data, model, micro_batch, recompute, compute, dropout, 16, mesh, **changes)


CASES = [
    ("balanced", {}, {"expert": 2}),
    ("balanced", {}, {"expert": 4}),
    ("one-sided", {}, {"expert": 2}),
    ("all-to-one", {}, {"expert": 4}),
]
MESHES = [
    ({"model": 2}, {"expert": 2, "sequence_parallel": True, "zero": 3}),
    ({"model": 2, "recompute": "selective"}, {"expert": 4, "zero": 1}),
    ({"recompute": "full"}, {"expert": 4, "pipe": 2, "zero": 3}),
    ({"recompute": "offload"}, {"expert": 2, "context": 2, "context_attention": "allgather"}),
    ({"unroll": "on"}, {"expert": 2, "zero": 3, "replicate": 2}),
    ({"model": 2, "unroll": "on", "recompute": "full"}, {"expert": 4, "sequence_parallel": True, "context": 2}),
    ({"micro_batch": 2, "layers": 4}, {"expert": 2, "pipe": 2, "virtual_stages": 2}),
    ({"shared_expert_ffn_hidden": 20, "model": 2}, {"expert": 2, "pipe": 2, "sequence_parallel": True}),
]
CASES += [(("all-to-one", "one-sided")[i % 2], *mesh) for i, mesh in enumerate(MESHES)]
OF_TEST = 6
CASES = [pytest.param(*case, marks=pytest.mark.ci if i >= OF_TEST else ()) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("router", "changes", "mesh"), CASES, indirect=["router"], ids=str)
def test_rounds_equal_the_serial_reference(router, changes, mesh):
    errors = against_reference.largest_error(config_of(mesh=mesh, **changes), scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


NODE_CASES = [
    ("balanced", {}, {"expert": 4}),
    ("one-sided", {}, {"expert": 4}),
    ("all-to-one", {}, {"expert": 4}),
    ("all-to-one", {**FOUR_NODES, "data": 8}, {"expert": 8}),
    ("balanced", {"data": 8, "recompute": "selective"}, {"expert": 8, "zero": 1}),
    ("one-sided", {"model": 2}, {"expert": 4, "sequence_parallel": True, "zero": 3}),
    ("all-to-one", {"recompute": "full"}, {"expert": 4, "pipe": 2, "zero": 3}),
    ("one-sided", {"model": 2, "unroll": "on", "recompute": "full"}, {"expert": 4}),
    ("all-to-one", {"recompute": "offload"}, {"expert": 4, "context": 2, "context_attention": "allgather"}),
    (
        "one-sided",
        {**FOUR_NODES, "data": 8, "shared_expert_ffn_hidden": 20, "recompute": "full"},
        {"expert": 8, "pipe": 2},
    ),
    ("all-to-one", {"data": 8, "unroll": "on"}, {"expert": 4, "zero": 3, "replicate": 2}),
]
NODE_CASES = [pytest.param(*case, marks=pytest.mark.ci if i >= OF_TEST else ()) for i, case in enumerate(NODE_CASES)]


@pytest.mark.parametrize(("router", "changes", "mesh"), NODE_CASES, indirect=["router"], ids=str)
def test_rounds_by_node_equal_the_serial_reference(router, changes, mesh):
    test_rounds_equal_the_serial_reference(router, NODES | changes, mesh)


@pytest.mark.parametrize(
    ("router", "changes", "rounds"),
    [("balanced", {}, 2), ("all-to-one", {}, 4), pytest.param("all-to-one", NODES, 2, marks=pytest.mark.ci)],
    indirect=["router"],
)
def test_mean_number_of_rounds_is_a_metric(router, changes, rounds):
    """A rank has 32 assignments, and sends 10 rows to each of 4 ranks in a round, or of 16 tokens 10 to each node."""
    config = config_of(mesh={"expert": 4}, dropout=0.0, **changes)
    with jax.enable_x64(True):
        program, step = small.compiled_step(config)
        state, batch = small.state_of(config), program.put_on_devices(small.batch_of(config))
        evaluation = program.eval_step(state.model, batch)
        assert evaluation.means["dispatch_rounds"] == rounds
        assert float(evaluation.loss) == pytest.approx(against_reference.reference_of(config)[0][0], rel=1e-12)
        assert step(state, batch, jnp.float32(np.inf))[1].metrics["dispatch_rounds"] == rounds


@pytest.mark.parametrize(
    ("recompute", "compute", "nodes"),
    [
        ("none", "bf16", {}),
        ("full", "bf16", NODES),
        *(pytest.param(*case, marks=pytest.mark.ci) for case in product(("none", "full"), ["fp32"], ({}, NODES))),
    ],
)
def test_memory_does_not_depend_on_the_router(recompute, compute, nodes, monkeypatch):
    """One program runs any number of rounds; it needs at most a tenth more than one with only the first, of a balanced
    router, or 15% with rounds in rounds."""

    def temporaries():
        changes = {"sequence": 512, "hidden": 64, "moe_ffn_hidden": 64, "attention": "xla_blocks", **nodes}
        config = config_of(4, 1, 2, recompute, {"expert": 4}, compute, 0.0, **changes)
        program = build_program(config, make_mesh(config.mesh))
        compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    any_router = temporaries()
    monkeypatch.setattr(experts, "sum_rounds", lambda function, x, constants, rounds: function(0, x, constants))
    assert any_router <= (1.15 if nodes else 1.1) * temporaries()


def test_rounds_are_summed_in_float32():
    """In bf16 a sum of ones ends at 256."""
    total = partial(sum_rounds, lambda number, x, one: x * one)
    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.bfloat16(1), jnp.bfloat16(1), jnp.int32(300))
    assert (value.dtype, value, gradient) == (jnp.bfloat16, 300, 300)


@pytest.mark.parametrize(("nodes", "kernels", "exchanges"), [({}, 2 * 2, 2 * 3), (NODES, 4 * 2, 2 * 3 + 4 * 3)])
def test_kernel_of_gpus_runs_in_rounds(nodes, kernels, exchanges):
    """Two kernels and three all-to-alls of the first round, and of the loop over the other ones; with nodes three of
    each round between nodes, which has a first round and a loop in the node."""
    changes = {"sequence": 64, "hidden": 64, "moe_ffn_hidden": 64, "moe_kernel": "pallas", **nodes}
    config = config_of(4, 1, 1, "none", {"expert": 4}, "bf16", 0.0, **changes)
    program = build_program(config, abstract_mesh(config.mesh))
    evaluation = program.eval_step.trace(program.abstract_state.model, program.abstract_batch)
    text = evaluation.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == kernels
    assert text.count("stablehlo.all_to_all") == exchanges


@pytest.mark.parametrize(
    ("ranks", "changes", "hops"),
    [
        (64, {}, [(8, 8, 640), (8, 1, 1280)]),  # 1.25 · 4 / 8 and 1.25 · 8 / 8 of 1,024 tokens
        (16, {}, [(8, 2, 640), (2, 1, 5120)]),
        (16, {"router_topk_groups": 7}, [(8, 2, 1024), (2, 1, 5120)]),  # no more than all
        (8, {}, [(8, 1, 1280)]),
        (4, {}, [(4, 1, 2560)]),
        (64, {"router_topk_groups": 8}, [(64, 1, 160)]),
        (64, {"experts_per_token": 4}, [(64, 1, 80)]),
    ],
)
def test_router_with_groups_sends_by_node(ranks, changes, hops):
    model = ExpertsConfig(experts=256, experts_per_token=8, router_n_groups=8, router_topk_groups=4)
    assert replace(model, **changes).hops(1024, ranks) == tuple(hops)


@pytest.mark.parametrize(
    ("ranks", "chosen", "requested"),
    [(1, "local", "alltoall"), (2, "allgather", "auto"), (4, "alltoall", "auto"), (2, "alltoall", "alltoall")],
)
def test_auto_sends_fewer_bytes(ranks, chosen, requested):
    """An all-to-all sends less than 2.5 rows for each token, which has two experts; an all-gather sends ranks - 1."""
    assert ExpertsConfig(moe_token_dispatcher=requested).token_dispatcher(ranks) == chosen
