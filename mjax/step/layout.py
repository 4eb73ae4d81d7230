"""The layout of a model's weights on a mesh, for training, inference and conversion; and the state of a run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from mjax.config import Config, kernels
from mjax.errors import UsageError
from mjax.models.build import mixing_class
from mjax.models.protocol import Model, build_model
from mjax.parallel.mesh import sharded_shapes
from mjax.parallel.weights import weight_metadata
from mjax.parallel.zero import plan_storage, split_into_virtual_stages
from mjax.step.parametrization import scale_initial_weights
from mjax.step.precision import COMPUTE_TYPES, LossScale, parameter_type


@dataclass(frozen=True)
class Layout:
    """The layout of a model's weights on a mesh.

    Attributes:
      plan: the storage of each weight (`zero.plan_storage`).
      specs: PartitionSpec of each weight, for `shard_map`.
      abstract_model: the model of ShapeDtypeStructs with shardings: the target for restoring weights.
    """

    plan: Any
    specs: Any
    abstract_model: Model


def with_kernel(config: Config, announce: Callable[[str], None] = print) -> Config:
    """`config` with `model.attention` set to the kernel for this process's devices, in a mixture of experts
    `model.moe_kernel`, and `train.unroll` (`with_unrolling`).

    Args:
      announce: called with one sentence for each slower kernel that `auto` has to use on a GPU.

    Raises:
      UsageError: a requested kernel does not support the run.
    """
    platform, capability = jax.default_backend(), kernels.gpu_capability(jax.local_devices()[0])
    config, notes = kernels.with_kernels(config, platform, capability)
    for note in notes:
        announce(note)
    return kernels.with_unrolling(config, on_gpu=platform == "gpu")


def initial_weights(config: Config) -> Model:
    """The initial weights of a run, a function of its seed, with layers split into the chunks of its pipeline."""
    model = build_model(config.train.seed, config.model, parameter_type(config.precision.compute))
    model = cast_frozen_weights(scale_initial_weights(config, model), config)
    return split_into_virtual_stages(model, config.mesh)


def cast_frozen_weights(model: Model, config: Config) -> Model:
    """The model with frozen weights in the compute dtype."""
    leaves, structure = jax.tree.flatten(model)
    marks = zip(leaves, weight_metadata(model, "frozen"), weight_metadata(model, "keep_fp32"), strict=True)
    narrow = COMPUTE_TYPES[config.precision.compute]
    return structure.unflatten(x.astype(narrow) if frozen and not keep_fp32 else x for x, frozen, keep_fp32 in marks)


def build_layout(config: Config, mesh: Mesh | AbstractMesh) -> Layout:
    """The layout of the model of `config` on `mesh`, which has the shape `config.mesh`; nothing is allocated.

    Raises:
      UsageError: the config has a pipeline, which cannot split the pattern of the layers; or it splits positions, and
        a class of the model may mix them.
    """
    if config.mesh.context > 1 and (name := mixing_class(config.model)):
        mixes = f"splits the positions of a sequence, and {name} of {config.model.title} may mix them"
        fix = "remove it, or set mixes_positions = False in the class if it computes token by token"
        raise UsageError(f"--mesh.context {config.mesh.context} {mixes}; {fix}, or with context.position_ids()")
    shapes = jax.eval_shape(lambda: initial_weights(config))
    plan = plan_storage(shapes, nnx.get_partition_spec(shapes), config.mesh)
    specs = jax.tree.map(lambda storage: storage.spec, plan)
    return Layout(plan, specs, sharded_shapes(shapes, specs, mesh))


def with_sequence_length(config: Config, batch: Mapping[str, Array | np.ndarray]) -> Config:
    """`config` for the length of the sequences in a batch, which may be below `model.sequence`: the weights are
    unchanged, and of learned positions the first ones are used.

    Raises:
      UsageError: the arrays have several lengths, or one that is too long or that the mesh or kernel cannot split.
    """
    model, whole = config.model, config.model.sequence
    split = [name for name, (shape, _) in config.batch_arrays().items() if shape[-1:] == (whole,) and name in batch]
    lengths = {name: batch[name].shape[-1] for name in split}
    first = next(iter(lengths.values()), whole)
    if {first, *lengths.values()} == {whole}:
        return config
    if other := next((name for name in split if lengths[name] != first), None):
        differ = f"{split[0]} of the batch has {first} positions and {other} {lengths[other]}"
        raise UsageError(f"{differ}; give equal lengths")
    if not 0 < first <= whole:
        raise UsageError(f"the batch has sequences of {first} and model.sequence is {whole}; give 1 to {whole}")
    mesh, sequences = config.mesh, config.train.micro_batch * model.sequences
    parts = mesh.model if mesh.splits_tokens else 1  # of the tokens of a micro-batch
    even = 2 if model.attention == "cudnn" and (model.biased_scores or "documents" in batch) else 1
    unit = math.lcm(kernels.position_multiple(config), mesh.context * (parts // math.gcd(parts, sequences)), even)
    if first % unit:
        split = f"which the mesh or model.attention {model.attention!r} cannot split"
        raise UsageError(f"the batch has sequences of {first}, {split}; give a multiple of {unit}")
    return replace(config, model=replace(model, sequence=first))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run.

    Attributes:
      model: float32 master weights, sharded by their PartitionSpecs.
      optimizer: its count and moments, sharded like the weights.
      loss_scale: fp16's loss scale.
      step: int32 [], steps taken, including skipped ones; it numbers batches and dropout masks. Fine-tuning starts each
        seed at another number, for different masks.
      samples: int32 [], samples that have trained the model, skipped steps excluded, modulo 2³²; the learning rate
        follows it.
    """

    model: Model
    optimizer: optax.OptState
    loss_scale: LossScale
    step: Array
    samples: Array
