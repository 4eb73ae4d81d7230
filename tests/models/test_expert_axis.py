"""The axis `expert`: where the weights of a mixture are, what crosses it, and what runs on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.checkpoint import arrays
from mjax.config import MeshConfig
from mjax.errors import UnhealthyError
from mjax.models.build import build_model
from mjax.parallel import named_scopes
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.planner.ledger import ledger
from mjax.run.health import Replicas
from mjax.step.layout import build_layout
from tests.models.test_mixture import MIXTURE
from tests.models.test_token_dispatcher import FOUR_NODES
from tests.small import small_config
from tests.training.saved import abstract
from tests.training.test_replicas import with_flipped_bit

# --- Where the weights are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "up", "router"), [(0, (2, 1, 32, 2, 12), (2, 32, 4)), (3, (2, 1, 16, 2, 12), (2, 4, 4))]
)
def test_device_has_the_experts_of_its_rank(zero, up, router):
    """ZeRO splits them over the replicas that share them, and all other weights over all replicas."""
    config = small_config(8, 2, 1, mesh={"expert": 4, "zero": zero}, **{**MIXTURE, "layers": 2})
    leaves = arrays.leaves_by_path(build_layout(config, abstract_mesh(config.mesh)).abstract_model)
    for leaf, local in ((leaves["blocks.mlp.up"], up), (leaves["blocks.mlp.router.kernel"], router)):
        assert leaf.sharding.shard_shape(leaf.shape) == local


def test_flipped_bit_of_an_expert_is_found():
    config = small_config(8, 1, 1, mesh={"expert": 2}, **{**MIXTURE, "layers": 1})
    mesh = make_mesh(config.mesh)
    layout = build_layout(config, mesh)
    model = jax.tree.map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding), layout.abstract_model
    )
    replicas = Replicas(abstract(model), mesh)
    replicas.check(1, model)
    up = model.blocks.mlp.up
    up[...] = with_flipped_bit(up[...], mesh.devices[0, 0, 2, 1, 0, 0])
    with pytest.raises(UnhealthyError, match=r"replica 5 \(device 5 .*\) differs from the others in blocks.mlp.up;"):
        replicas.check(2, model)
    up[...] = with_flipped_bit(up[...], mesh.devices[0, 0, 2, 1, 0, 0])
    router = model.blocks.mlp.router.kernel
    router[...] = with_flipped_bit(router[...], mesh.devices[0, 0, 0, 1, 0, 0])
    with pytest.raises(UnhealthyError, match=r"replica 1 \(device 1 .*\) differs from the others in .*router.kernel;"):
        replicas.check(3, model)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_ledger_has_what_the_docstring_of_experts_says(dispatcher):
    """A layer sends rows and routing and gets results back; the backward pass has their transposes. Of the rounds of an
    all-to-all one counts, with 1.25 times the rows of equal shares, each with a weight and an expert."""
    changes = {**MIXTURE, "layers": 3, "sequence": 16, "moe_token_dispatcher": dispatcher}
    config = small_config(8, 1, 1, compute="bf16", mesh={"expert": 4}, **changes)
    found = ledger(config).filter_axes("expert").group_by("part")[named_scopes.LAYER]
    totals = {key: (part.count, part.sent) for key, part in found.group_by("operation", "dtype").items()}
    rows, routing = 16 * 32 * 2, 16 * 2 * 2 * 4  # bytes of this rank: [t, h] in bf16, [t, 2 k] in float32
    slots = 4 * 10  # 16 · 2 / 4 = 8 of equal shares
    expected = {
        "allgather": {
            ("all-gather", "bfloat16"): (2 * 3, 2 * 3 * 3 * rows),  # x, and the gradient of y
            ("all-gather", "float32"): (3, 3 * 3 * routing),
            ("reduce-scatter", "bfloat16"): (2 * 3, 2 * 3 * 3 * rows),
            ("reduce-scatter", "float32"): (3, 3 * 3 * routing),
        },
        "alltoall": {
            ("all-reduce", "int32"): (3, 3 * 2 * 3 / 4 * 4),  # the number of rounds
            ("all-to-all", "bfloat16"): (4 * 3, 4 * 3 * 3 / 4 * slots * 32 * 2),
            ("all-to-all", "float32"): (2 * 3, 2 * 3 * 3 / 4 * slots * 2 * 4),
        },
    }
    assert totals == expected[dispatcher]
    gradients = ledger(config).group_by("axes", "part")  # those of experts are summed over `data`
    assert gradients[("data",), named_scopes.GRADIENT].sent == pytest.approx(2 * (2 - 1) / 2 * 4 * 3 * (3 * 32 * 24))
    assert ("expert",) not in {axes for axes, part in gradients if part == named_scopes.GRADIENT}


def test_token_crosses_the_network_once_per_node():
    """A token has experts on two of four nodes with two ranks each. A layer sends rows, with the weights and numbers of
    their experts, to the nodes, rows of assignments within a node, and results back."""
    config = small_config(
        8,
        1,
        1,
        compute="bf16",
        mesh={"expert": 8},
        **{**MIXTURE, **FOUR_NODES, "layers": 3, "sequence": 16, "experts": 8, "moe_token_dispatcher": "alltoall"},
    )
    found = ledger(config).filter_axes("expert").group_by("part")[named_scopes.LAYER]
    totals = {key: (part.count, part.sent) for key, part in found.group_by("ranks", "operation", "dtype").items()}
    to_nodes, in_node = 1.25 * 16 * 2, 1.25 * 16 * 3
    assert totals == {
        (8, "all-reduce", "int32"): (2 * 3, 2 * 3 * 2 * 7 / 8 * 4),  # the numbers of rounds
        (4, "all-to-all", "bfloat16"): (4 * 3, 4 * 3 * 3 / 4 * to_nodes * 32 * 2),
        (4, "all-to-all", "float32"): (2 * 3, 2 * 3 * 3 / 4 * to_nodes * 3 * 2 * 4),
        (2, "all-to-all", "bfloat16"): (4 * 3, 4 * 3 * 1 / 2 * in_node * 32 * 2),
        (2, "all-to-all", "float32"): (2 * 3, 2 * 3 * 1 / 2 * in_node * 2 * 4),
    }


def test_called_model_is_the_same_on_every_mesh():
    """Whole sequences on all ranks of `expert`, as in generation."""
    config = small_config(dropout=0.0, **{**MIXTURE, "layers": 2, "sequence": 16})
    model, ids = build_model(0, config.model), jnp.arange(32).reshape(2, 16)

    def logits(**sizes):
        specs, out = nnx.get_partition_spec(model), P(None, None, "model")
        mesh = make_mesh(MeshConfig(**sizes))
        return jax.jit(jax.shard_map(lambda m, i: m(i), mesh=mesh, in_specs=(specs, P()), out_specs=out))(model, ids)

    one = logits()
    for sizes in ({"data": 4, "expert": 4}, {"model": 2}):
        np.testing.assert_allclose(logits(**sizes), one, atol=1e-6)
