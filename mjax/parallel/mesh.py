"""The mesh: devices laid out along the axes pipe × replicate × data × expert × context × model (`axes.py`).

`model` is the innermost axis, so the devices that exchange activations in every layer are neighbours, on one server and
its NVLink. Replicas along `data` communicate once per step, over the network (arXiv 2104.04473, section 3.4).

    8 GPUs as data 2 × model 4:     data 0: GPU 0 1 2 3     data 1: GPU 4 5 6 7
                                    model:      0 1 2 3                 0 1 2 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig, axes
from mjax.errors import UsageError

BATCH_AXES = axes.axes_splitting("batch")  # axes over which the samples of a batch are split


def batch_specs(arrays: Mapping[str, tuple[tuple[int, ...], str]], positions: int) -> dict[str, P]:
    """PartitionSpecs of the arrays of a batch, by name: samples are split over the replicas, positions over `context`.

    Args:
      arrays: shape of one sample and dtype, as `Config.batch_arrays` returns them.
      positions: s; an array whose last dim is another one is not split by positions.
    """

    def array_spec(shape: tuple[int, ...]) -> P:
        if shape[-1:] != (positions,):
            return P(BATCH_AXES)
        return P(BATCH_AXES, *[None] * (len(shape) - 1), axes.CONTEXT)

    return {name: array_spec(tuple(shape)) for name, (shape, _) in arrays.items()}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (all by default), in the order in which JAX lists them.

    Raises:
      UsageError: there are fewer devices than the mesh needs.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.devices:
        mesh = f"the mesh needs {config.devices} devices ({axes.describe_mesh(config)}); there are {len(devices)}"
        raise UsageError(f"{mesh}: give smaller axes, or call mjax.simulate({config.devices}) first")
    sizes = axes.sizes(config)
    # Auto outside, manual inside shard_map: by default make_mesh would type arrays with explicit shardings.
    types, devices = (AxisType.Auto,) * len(sizes), devices[: config.devices]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The same mesh without devices: enough to trace a step for 512 GPUs on a laptop."""
    sizes = axes.sizes(config)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def sharded_shapes(shapes, specs, mesh: Mesh | AbstractMesh):
    """ShapeDtypeStructs with shardings, from `shapes` as given by `jax.eval_shape` and a PartitionSpec per leaf."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )
