"""Experts on several devices by all-to-all in rounds: the same loss and gradients as on one device, for any router."""

import jax
import numpy as np
import pytest

from tests import against_reference, small
from tests.models.test_mixture import MIXTURE

K, RANKS_EXPERTS = 2, 8
ALLTOALL = {
    **MIXTURE, "experts": 8, "experts_per_token": K, "router": "sigmoid", "router_bias_update_rate": 0.01,
    "moe_token_dispatcher": "alltoall", "layers": 2,
    "sequence": 16,
}  # fmt: skip
# What is added to the scores by which a token chooses: to none; to both experts of all tokens; to one of the two.
ROUTERS = {"balanced": {}, "all-to-one": {0: 9.0, 1: 9.0}, "one-sided": {5: 9.0}}


@pytest.fixture
def router(request, monkeypatch):
    """The router's biases, in all weights of this test."""
    draw = small.weights_of

    def weights_of(config):
        model = draw(config)
        bias = model.blocks.mlp.router.bias
        bias[...] = np.zeros_like(bias[...])
        for expert, value in ROUTERS[request.param].items():
            bias[...][:, expert] = value
        return model

    for module in (small, against_reference):
        monkeypatch.setattr(module, "weights_of", weights_of)
    against_reference._serial.cache_clear()
    yield request.param
    against_reference._serial.cache_clear()


def config_of(data=4, model=1, micro_batch=1, recompute="none", mesh=None, **changes):
    return small.small_config(data, model, micro_batch, recompute, "fp64", 0.1, 16, mesh, **{**ALLTOALL, **changes})


@pytest.mark.parametrize("mesh", [{"expert": 2}, {"expert": 4}], ids=str)
@pytest.mark.parametrize("router", ROUTERS, indirect=True)
def test_loss_and_gradients_equal_the_serial_reference(router, mesh):
    errors = against_reference.largest_error(config_of(mesh=mesh), scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


MESHES = [
    ({"model": 2}, {"expert": 2, "sequence_parallel": True, "zero": 3}),
    ({"model": 2, "recompute": "selective"}, {"expert": 4, "zero": 1}),
    ({"recompute": "full"}, {"expert": 4, "pipe": 2, "zero": 3}),
    ({"recompute": "offload"}, {"expert": 2, "context": 2, "context_attention": "allgather"}),
    ({"unroll": "on"}, {"expert": 2, "zero": 3, "replicate": 2}),
    ({"model": 2, "unroll": "on", "recompute": "full"}, {"expert": 4, "sequence_parallel": True, "context": 2}),
    ({"micro_batch": 2, "layers": 4}, {"expert": 2, "pipe": 2, "virtual_stages": 2, "schedule": "1f1b"}),
    ({"shared_expert_ffn_hidden": 20, "model": 2}, {"expert": 2, "pipe": 2, "sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "mesh"), MESHES, ids=str)
@pytest.mark.parametrize("router", ["all-to-one", "one-sided"], indirect=True)
def test_with_every_other_axis(router, changes, mesh):
    errors = against_reference.largest_error(config_of(mesh=mesh, **changes), scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("router", "rounds"), [("balanced", 1), ("one-sided", 3), ("all-to-one", 4)], indirect=["router"]
)
def test_rounds_are_reported(router, rounds):
    config = config_of(
        mesh={"expert": 4},
    )
    with jax.enable_x64(True):
        program, step = small.compiled_step(config)
        _, metrics = step(small.state_of(config), program.put_on_devices(small.batch_of(config)), np.float32(np.inf))
        print(metrics.metrics["dispatch_rounds"])
        evaluated = program.eval_step(small.state_of(config).model, program.put_on_devices(small.batch_of(config)))
        print(evaluated.means)
    assert metrics.metrics["dispatch_rounds"] == rounds
