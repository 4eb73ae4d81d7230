"""Functions of whole arrays, run on ranks of `model`."""

import jax
import jax.numpy as jnp

from mjax.config import MeshConfig
from mjax.parallel.mesh import make_mesh


def on_ranks(ways, function, in_specs, out_specs):
    mesh = make_mesh(MeshConfig(model=ways))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)
