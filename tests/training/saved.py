"""States of a small model on a mesh of eight devices, and saving them."""

import contextlib
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def state_on(mesh, spec=None, value: float | None = None, width: int = 16) -> dict:
    """Random weights (or all `value`), the same on every mesh; the matrices are sharded by `spec`."""
    draw = np.random.default_rng(0).standard_normal if value is None else lambda shape: np.full(shape, value)

    def put(dtype, *shape):
        sharding = NamedSharding(mesh, spec if spec and len(shape) == 2 else P())
        return jax.device_put(jnp.asarray(draw(shape), dtype), sharding)

    whole = NamedSharding(mesh, P())
    return {
        "model": {"up": put(jnp.float32, 8, width), "bias": put(jnp.float32, width)},
        "optimizer": {
            "mu": put(jnp.bfloat16, 8, width),
            "nu": put(jnp.float16, 8, width),
            "count": jax.device_put(np.arange(3, dtype=np.uint32) + np.uint32(2**31), whole),
        },
        "step": jax.device_put(jnp.int32(value or 7), whole),
    }


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_all(checkpoints, *steps: int) -> dict:
    """Save constant states, one a step, and return the tree to restore to."""
    mesh = mesh_of(4, 2)
    for step in steps:
        checkpoints.save(step, state_on(mesh, value=step))
    checkpoints.check_for_errors()
    return abstract(state_on(mesh))


def entries(checkpoints) -> list[str]:
    return sorted(entry.name for entry in checkpoints.folder.iterdir())


def data_file(folder: Path) -> Path:
    """The file that holds the arrays' bytes: the largest one."""
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_a_bit(folder: Path) -> str:
    """Damage the arrays' bytes; returns the expected report."""
    file = data_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return r"model/.* is not what was written \(checksum\)"


@contextlib.contextmanager
def small_disk(folder: Path):
    """A disk of 1 MB at `folder`, on machines that may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def save_large(checkpoints, *steps: int):
    """Incompressible weights, so that most bytes of the data file are theirs."""
    state = {"model": jax.random.normal(jax.random.key(0), (256, 256)), "step": jnp.int32(0)}
    for step in steps:
        checkpoints.save(step, {**state, "step": jnp.int32(step)})
    checkpoints.check_for_errors()
    return abstract(state)
