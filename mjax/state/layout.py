"""How the weights of a model lie on a mesh: decided once, for training, for inference and for conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from mjax.config import Config
from mjax.errors import UsageError
from mjax.models.build import build_model, has_several_stacks
from mjax.models.protocol import Model
from mjax.parallel.mesh import sharded_shapes
from mjax.parallel.zero import cut_into_chunks, plan_storage
from mjax.state.precision import parameter_type


@dataclass(frozen=True)
class Layout:
    """How the weights of a model lie on a mesh.

    Attributes:
      plan: for each weight how it is stored (`zero.plan_storage`).
      specs: for each weight its PartitionSpec: what `shard_map` takes.
      abstract_model: the model of ShapeDtypeStructs with shardings: what weights are restored to.
    """

    plan: Any
    specs: Any
    abstract_model: Model


def initial_weights(config: Config) -> Model:
    """The weights a run begins with, a function of its seed, with layers cut into the chunks of its pipeline."""
    model = build_model(config.train.seed, config.model, parameter_type(config.precision.compute))
    return cut_into_chunks(model, config.mesh)


def lay_out(config: Config, mesh: Mesh | AbstractMesh) -> Layout:
    """The layout of the model of `config` on `mesh`, which has the shape `config.mesh`; nothing is allocated.

    Raises:
      UsageError: a pipeline is asked for, and the model has several stacks of layers.
    """
    if config.mesh.pipe > 1 and has_several_stacks(config.model):
        raise UsageError(
            f"--mesh.pipe {config.mesh.pipe} cannot split {config.model.title}, which has several stacks of layers; "
            "leave it out"
        )
    shapes = jax.eval_shape(lambda: initial_weights(config))
    plan = plan_storage(shapes, nnx.get_partition_spec(shapes), config.mesh)
    specs = jax.tree.map(lambda storage: storage.spec, plan)
    return Layout(plan, specs, sharded_shapes(shapes, specs, mesh))
