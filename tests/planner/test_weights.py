"""The layout of weights as numbers is the one that `build_layout` decides by their arrays."""

import dataclasses
import math
import re

import jax
import pytest

from mjax.config import available_configs, axes, load_config
from mjax.parallel.mesh import abstract_mesh
from mjax.parallel.weights import leaf_name
from mjax.parallel.zero import num_layer_dims
from mjax.planner.memory import DeviceWeights, device_weights
from mjax.step.layout import build_layout
from mjax.step.muon import collect_matrices
from tests.planner.configs import changed
from tests.products import one_in


def counted(config):
    """Count the values of `device_weights` on the layout of the arrays."""
    layout = build_layout(config, abstract_mesh(config.mesh))
    plan = [storage for _, storage in jax.tree_util.tree_leaves_with_path(layout.plan)]
    matrices = collect_matrices(layout, config.mesh)
    found = dict.fromkeys((field.name for field in dataclasses.fields(DeviceWeights)), 0)
    for (path, leaf), storage in zip(jax.tree_util.tree_leaves_with_path(layout.abstract_model), plan, strict=True):
        name = leaf_name(path)
        stored = math.prod(leaf.sharding.shard_shape(leaf.shape))
        shard = stored
        if storage.rows and not storage.rows.even:  # every stage gets its layers of all shards
            shard = (
                stored // leaf.shape[0] * storage.rows.slots * (config.mesh.pipe if "pipe" in str(storage.spec) else 1)
            )
            found["exchanged"] += shard
        computed = shard * math.prod(axes.sizes(config.mesh)[axis] for names, _ in storage.gathers for axis in names)
        found["stored"] += stored
        found["matrices"] += stored * (name in matrices)
        found["layers" if name.startswith("blocks.") else "shared"] += computed
        found["largest"] = max(found["largest"], computed * name.startswith("blocks."))
        found["table"] += computed * (name == "embedding.table")
        found["gathered"] += computed * storage.gather_per_layer
        found["gathered_shards"] += shard * storage.gather_per_layer
        if (
            storage.gather_per_layer
            and math.prod(leaf.sharding.shard_shape(leaf.shape)[num_layer_dims(storage.rows) : storage.gathers[0][1]])
            > 1
        ):
            found["transposed"] = max(found["transposed"], computed)
        is_expert = re.fullmatch(r"blocks\.(1\.)?mlp\.(up|down)", name) and "expert" in str(leaf.sharding.spec)
        found["experts"] += computed * bool(is_expert)
    return found


OFTEN = ("gpt_8b", "bert_4b", "bloom_176b", "llama3_8b", "qwen3_30b_a3b", "gpt_1b")  # one of each family


@pytest.mark.parametrize("name", [*OFTEN, *one_in(1, sorted({*available_configs()} - {*OFTEN}), pytest.mark.ci)])
def test_held_weights_are_those_of_layout(name):
    config = load_config(name)
    assert counted(config) == vars(device_weights(config.model, config.mesh))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt_demo", {"pipe": 2, "data": 2, "zero": 3, "model": 4}),
        ("bloom_560m", {"pipe": 2, "virtual_stages": 2, "data": 4, "zero": 1}),
        ("bert_demo", {"pipe": 4, "model": 2, "sequence_parallel": True, "data": 5, "zero": 3}),
        ("qwen3_30b_a3b", {"data": 4, "expert": 4, "zero": 0}),
        ("gpt_demo", {"pipe": 3, "data": 2, "zero": 1, "model": 2}),
        ("llama_demo", {"pipe": 3, "data": 2, "zero": 3, "model": 2}),
        ("qwen3_30b_a3b", {"pipe": 3, "virtual_stages": 2, "data": 4, "expert": 4, "zero": 0}),
    ],
    ids=str,
)
def test_held_weights_follow_every_kind_of_sharding(name, mesh):
    mesh = {"pipe": 1, "model": 1, "sequence_parallel": False, **mesh}
    config = changed(load_config(name), model={"layers": 8}, mesh=mesh)
    assert counted(config) == vars(device_weights(config.model, config.mesh))
