"""The frozen weights of a run with adapters: they come from another run's checkpoint and are not saved again.

    runs/q/checkpoints/0        the base, never written again
    runs/q-lora/base.json       where it is, and a digest of its numbers
    runs/q-lora/checkpoints/    adapters, their moments, and the rest of the state

A base is recognised by its digest, which depends on the numbers alone: not on the mesh that wrote them, nor on the
files they are in. A base that was converted again or moved is the same one.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mjax.checkpoint.arrays import leaves_by_path, read_in_blocks
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import BASE, Base, read_base, read_manifest
from mjax.checkpoint.mirror import read_folder
from mjax.config import read_config
from mjax.errors import PrintLine, UsageError
from mjax.models.protocol import Model
from mjax.parallel.random import mix_bits, uint32_words
from mjax.parallel.weights import combine, partition_trainable, trainable_only
from mjax.step.precision import parameter_type
from mjax.utils.files import path_below
from mjax.utils.stores import FETCHED, WRITTEN, find_address, mirror_address, to_absolute


def base_folder(base: Base, run: Path) -> Path:
    """The run folder of the base: where it was, or next to `run` if both were moved.

    Raises:
      UsageError: it is in neither folder, or at an address that only base.json names.
    """
    address = find_address(mirror_address(base.run))
    may_fetch = address is None or _is_named_by_user(address, run)
    sibling = path_below(run.resolve().parent, Path(base.run).name, f"{run / BASE}: run")
    for folder in (*([read_folder(base.run)] if may_fetch else []), sibling):
        if (folder / "config.json").is_file():
            return folder
    if not may_fetch:
        runs = address.rpartition("/")[0]
        remedy = f"if you trust that store, type: mjax runs --runs {runs}, and then this command again"
        raise UsageError(f"{run} has adapters of {address}, not fetched because only {BASE} names it; {remedy}")
    remedy = f"put that run back, or write its path into {run / BASE}"
    raise UsageError(f"{run} has adapters of {base.run}, which is gone; {remedy}")


def _is_named_by_user(address: str, run: Path) -> bool:
    """True if a command of the user named the store: `run` is in the same bucket, or `address` was fetched before."""
    store = find_address(run)
    same_bucket = store is not None and store.split("/")[:3] == address.split("/")[:3]
    return same_bucket or any((mirror_address(address, kind) / "config.json").is_file() for kind in (WRITTEN, FETCHED))


def without_base(model: Model) -> Model:
    """The weights that a run saves itself: all, or the adapters without their base."""
    return trainable_only(model) if model.config.lora_rank else model


def restore_weights(run: Path, abstract_model: Model, step: int | None, on_notice: PrintLine) -> tuple[int, Model]:
    """The weights of checkpoint `step` of a run, by default of the newest intact one, and its step.

    Raises:
      UsageError: there is no such checkpoint, it has another model, or the base of its adapters is gone or another.
      RunError: it is damaged.
    """
    with Checkpoints(run / "checkpoints", on_notice=on_notice) as checkpoints:
        step, weights = checkpoints.restore(without_base(abstract_model), step, field="model")
    return step, with_base(weights, abstract_model, run, on_notice)


def with_base(saved: Model, target: Model, run: Path, print_line: PrintLine) -> Model:
    """All weights of a run, from those that it saves itself.

    Args:
      saved: the weights of `without_base(target)`.
      target: the model of ShapeDtypeStructs with shardings.
      run: folder of the run.
      print_line: called with notices.

    Raises:
      UsageError: the base of its adapters is gone, or has other weights.
    """
    if not target.config.lora_rank:
        return saved
    base = read_base(run)
    folder = base_folder(base, run)
    frozen, frozen_base = read_frozen(folder, base.step, partition_trainable(target)[1], print_line)
    check_base(base, frozen_base.digest, folder, run)
    return combine(saved, frozen)


def check_base(base: Base, digest: str, folder: Path, run: Path) -> None:
    """Check that weights have the digest of those that the adapters of `run` belong to.

    Raises:
      UsageError: the digests differ.
    """
    if digest != base.digest:
        digests = f"{base.digest}, and checkpoint {base.step} of {folder} has {digest}"
        remedy = f"restore that run, or write the path of the right one into {run / BASE}"
        raise UsageError(f"{run} has adapters of weights with the digest {digests}; {remedy}")


def read_frozen(folder: Path, step: int | None, target: Model, print_line: PrintLine) -> tuple[Model, Base]:
    """The weights of a checkpoint of `folder` as a base.

    Args:
      folder: of a run without adapters.
      step: of the checkpoint; None: the newest intact one.
      target: the frozen weights of ShapeDtypeStructs with shardings, and None in place of adapters.
      print_line: called with notices.

    Raises:
      UsageError: there is no such checkpoint, or it has another model.
      RunError: it is damaged.
    """
    stored, weights, sums = cast_to_trained(target, folder), [], {}
    with Checkpoints(folder / "checkpoints", on_notice=print_line) as checkpoints:
        step = checkpoints.find(stored, step, field="model")
        # One by one: all in float32 would need twice the memory of the weights in their final dtype.
        for (name, leaf), narrow in zip(leaves_by_path(stored, "model").items(), jax.tree.leaves(target), strict=True):
            weight = checkpoints.read(step, {name: leaf})[name]
            sums[name.removeprefix("model.")] = np.asarray(_digest_sums(weight))
            weights.append(_cast_to_stored(weight, narrow))
    return jax.tree.unflatten(jax.tree.structure(target), weights), Base(to_absolute(folder), step, _digest(sums))


def cast_to_trained(target: Model, folder: Path) -> Model:
    """The ShapeDtypeStructs of `target` in the dtype in which the run in `folder` saves the weights that it trains."""
    wide = parameter_type(read_config(folder / "config.json").precision.compute)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, wide, sharding=leaf.sharding), target)


def _cast_to_stored(weight: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The weight in the dtype of `leaf`; the array is donated."""
    if weight.dtype == leaf.dtype:
        return weight
    return jax.jit(lambda w: w.astype(leaf.dtype), out_shardings=leaf.sharding, donate_argnums=0)(weight)


def digest_in_blocks(folder: Path) -> str:
    """The digest of the weights of the checkpoint in `folder`, as of `read_frozen`, with one block of one in memory.

    Args:
      folder: of the checkpoint, which `Checkpoints.find` has checked.
    """
    sums = {}
    for name, (_, shape) in read_manifest(folder)["arrays"].items():
        if not name.startswith("model."):
            continue
        total, row = np.zeros(2, np.uint32), math.prod(shape[1:])
        for first, block in read_in_blocks(folder, name, len(shape)):
            bits = np.ascontiguousarray(block).reshape(-1).view(np.uint32)
            words = len(bits) // block.size  # two of float64
            index = words * first * row + np.arange(len(bits), dtype=np.uint64)
            total += np.asarray(_hash_sums(jnp.asarray(bits), jnp.asarray(index.astype(np.uint32))))
        sums[name.removeprefix("model.")] = total
    return _digest(sums)


def _digest(sums: Mapping[str, np.ndarray]) -> str:
    """16 hexadecimal digits that depend on the names and on every bit of the weights, in order, and on nothing else."""
    text = json.dumps({name: sums[name].tolist() for name in sorted(sums)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _digest_sums(array: jax.Array) -> jax.Array:
    bits = uint32_words(array)  # [*shape], or [*shape, 2] of float64
    index = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(bits.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    return _hash_sums(bits, index)


@jax.jit
def _hash_sums(bits: jax.Array, index: jax.Array) -> jax.Array:
    """Two sums modulo 2³² of hashed bits and indices, uint32 [2], the same in whatever order they are added."""
    hashed = mix_bits(bits ^ mix_bits(index))
    return jnp.stack([part.sum(dtype=jnp.uint32) for part in (hashed, mix_bits(hashed))])
