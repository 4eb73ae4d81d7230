"""Comparing the weights of data-parallel replicas, which must be bit-identical.

Every replica keeps its own copy of the weights and updates it with the same summed gradient, so the copies stay equal
without being compared. A bit that flips in the memory of one device, a device that computes wrongly, or a process
that runs something else affects one copy, and through its gradients slowly corrupts all others.

So each device hashes its shards, and the hashes, four bytes per array, are gathered and compared on the host of every
process, all with the same result. Weights that ZeRO splits over the replicas exist once: there is nothing to compare.
Ranks of `context` have copies too. Experts that `expert` splits have one in each of its groups.

The hash of an array of words x_i is Σ (2i + 1) x_i modulo 2^32. Odd numbers have inverses, so a change of a single
element is always detected, and any other change is missed with probability 2^-32.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mjax.errors import UnhealthyError
from mjax.parallel import mappings
from mjax.parallel.axes import NAMES, holding
from mjax.utils.names import leaf_name

MOST_SHOWN = 4  # devices
DIMS = [NAMES.index(axis) for axis in holding()]
"""The dims of the device array along which replicas are numbered."""


class Replicas:
    """The copies of one model on its data-parallel replicas.

    Args:
      model: abstract weights with shardings.
      mesh: the mesh they are on.
    """

    def __init__(self, model: Any, mesh: Mesh):
        leaves = jax.tree_util.tree_leaves_with_path(model)
        self.mesh = mesh
        along = [self._copied_along(leaf.sharding.spec) for _, leaf in leaves]
        self._copied = [index for index, dims in enumerate(along) if dims]
        self._along = [along[index] for index in self._copied]
        self._names = [leaf_name(leaves[index][0]) for index in self._copied]
        specs = [leaves[index][1].sharding.spec for index in self._copied]
        self._hash = jax.jit(jax.shard_map(_hashes, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=True))

    def check(self, step: int, model: Any) -> None:
        """Compare the copies of the weights after `step`. Every process calls this.

        Raises:
          UnhealthyError: they differ; in every process.
        """
        if not self._names:
            return
        leaves = jax.tree.leaves(model)
        hashes = jax.device_get(self._hash([leaves[index] for index in self._copied]))
        odd: dict[tuple[int, ...], list[str]] = defaultdict(list)  # by place on the mesh, the arrays that differ there
        places = np.moveaxis(np.indices(hashes.shape[:-1]), 0, -1)  # [*mesh, dims of the mesh]
        for leaf, dims in enumerate(self._along):
            last = range(-len(dims), 0)
            copies = np.moveaxis(hashes[..., leaf], dims, last).reshape(-1, self._copies(dims))
            of_copies = np.moveaxis(places, dims, [dim - 1 for dim in last]).reshape(*copies.shape, len(NAMES))
            for same, where in zip(copies.tolist(), of_copies.tolist(), strict=True):
                (usual, most), *others = Counter(same).most_common()
                if not others:
                    continue
                tied = others[0][1] == most  # either may be right
                for copy, place in zip(same, where, strict=True):
                    if tied or copy != usual:
                        odd[*place].append(self._names[leaf])
        if odd:
            raise UnhealthyError(self._sentence(step, odd))

    def _copied_along(self, spec: P) -> list[int]:
        """The dims of the device array along which a weight with this spec has copies to compare."""
        split = jax.tree.leaves(tuple(spec))
        return [dim for dim in DIMS if NAMES[dim] not in split and self.mesh.shape[NAMES[dim]] > 1]

    def _copies(self, dims: list[int]) -> int:
        return math.prod(self.mesh.shape[NAMES[dim]] for dim in dims)

    def _replica(self, place: tuple[int, ...]) -> int:
        """The number of the replica at a place on the mesh."""
        number = 0
        for dim in DIMS:
            number = number * self.mesh.shape[NAMES[dim]] + place[dim]
        return number

    def _sentence(self, step: int, odd: dict[tuple[int, ...], list[str]]) -> str:
        names = list(dict.fromkeys(name for of_device in odd.values() for name in of_device))
        places = [self._place(place) for place in sorted(odd, key=self._replica)]
        if len(places) > MOST_SHOWN:
            places[MOST_SHOWN:] = [f"{len(places) - MOST_SHOWN} more"]
        what = names[0] + (f" and {len(names) - 1} more arrays" if len(names) > 1 else "")
        differ = "differs from the others" if len(places) == 1 else "differ"
        return (
            f"after step {step} the replicas have different weights: {' and '.join(places)} {differ} in {what}; "
            "a device or its memory is faulty, or a process computes something else; nothing was saved since the last "
            "comparison: find out which, exclude that host, and run the same command to continue"
        )

    def _place(self, place: tuple[int, ...]) -> str:
        device = self.mesh.devices[place]
        return f"replica {self._replica(place)} (device {device.id} of process {device.process_index})"


def _hashes(shards: list[Array]) -> Array:
    """A hash of each shard of each device, replicated: uint32 [pipe, data, expert, context, model, arrays]
    (`axes.NAMES`)."""
    everywhere = frozenset(NAMES)
    own = jnp.stack([_hash_of(mappings.vary(shard, everywhere)) for shard in shards]).reshape(*[1] * len(NAMES), -1)
    for dim, axis in enumerate(NAMES):
        own = mappings.gather_whole(own, axis, dim)
    return own


def _hash_of(shard: Array) -> Array:
    """uint32 []; also of 64-bit numbers, which are two words."""
    words = jax.lax.bitcast_convert_type(shard, jnp.uint32).reshape(-1)
    odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return (words * odd).sum(dtype=jnp.uint32)
