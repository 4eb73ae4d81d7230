"""The layout of a model's weights on a mesh, for training, inference and conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from mjax.config import Config
from mjax.config.pattern import check_stages
from mjax.errors import UsageError
from mjax.models.build import build_model, mixing_class
from mjax.models.protocol import Model
from mjax.parallel.mesh import sharded_shapes
from mjax.parallel.weights import metadata_of
from mjax.parallel.zero import cut_into_chunks, plan_storage
from mjax.step.precision import COMPUTE_TYPES, parameter_type


@dataclass(frozen=True)
class Layout:
    """The layout of a model's weights on a mesh.

    Attributes:
      plan: how each weight is stored (`zero.plan_storage`).
      specs: PartitionSpec of each weight, for `shard_map`.
      abstract_model: the model of ShapeDtypeStructs with shardings: the target for restoring weights.
    """

    plan: Any
    specs: Any
    abstract_model: Model


def initial_weights(config: Config) -> Model:
    """The initial weights of a run, a function of its seed, with layers split into the chunks of its pipeline."""
    model = build_model(config.train.seed, config.model, parameter_type(config.precision.compute))
    return cut_into_chunks(in_stored_types(model, config), config.mesh)


def in_stored_types(model: Model, config: Config) -> Model:
    """The model with frozen weights in the compute dtype, in which the computation has them."""
    leaves, structure = jax.tree.flatten(model)
    said = zip(leaves, metadata_of(model, "frozen"), metadata_of(model, "keep_fp32"), strict=True)
    narrow = COMPUTE_TYPES[config.precision.compute]
    return structure.unflatten(
        weight.astype(narrow) if frozen and not keep_fp32 else weight for weight, frozen, keep_fp32 in said
    )


def lay_out(config: Config, mesh: Mesh | AbstractMesh) -> Layout:
    """The layout of the model of `config` on `mesh`, which has the shape `config.mesh`; nothing is allocated.

    Raises:
      UsageError: the config has a pipeline, which cannot split the pattern of the layers; or it splits positions, and
        a class of the model may mix them.
    """
    check_stages(config.model, config.mesh)
    if config.mesh.context > 1 and (name := mixing_class(config.model)):
        raise UsageError(
            f"--mesh.context {config.mesh.context} splits the positions of a sequence, and {name} of "
            f"{config.model.title} may mix or count them by itself; leave it out, or set mixes_positions = False in "
            "the class if it computes token by token, or with mjax's Attention and context.position_ids()"
        )
    shapes = jax.eval_shape(lambda: initial_weights(config))
    plan = plan_storage(shapes, nnx.get_partition_spec(shapes), config.mesh)
    specs = jax.tree.map(lambda storage: storage.spec, plan)
    return Layout(plan, specs, sharded_shapes(shapes, specs, mesh))
