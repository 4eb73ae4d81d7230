"""Silent corruption of one replica's weights, planted on simulated devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.errors import UnhealthyError
from mjax.parallel.mesh import make_mesh
from mjax.run.health import Replicas
from tests.training.saved import abstract, state_on


def with_flipped_bit(array, device, word=0, bit=3):
    """`array` with one bit of one device's copy flipped, which JAX does not know of."""
    parts = []
    for shard in array.addressable_shards:
        words = np.array(shard.data)
        words = words.view(f"uint{8 * min(words.itemsize, 4)}")
        if shard.device.id == device.id:
            words.flat[word] ^= words.dtype.type(1 << bit)
        parts.append(jax.device_put(words.view(array.dtype), shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.parametrize(("name", "word", "bit"), [("up", 0, 0), ("up", 63, 31), ("bias", 15, 12)])
def test_flipped_bit_names_its_device(name, word, bit):
    """The mesh is data 4 × model 2: `up` is split over `model`, and `bias` is on every device."""
    mesh = make_mesh(MeshConfig(data=4, model=2))
    model = state_on(mesh, P(None, "model"))["model"]
    replicas = Replicas(abstract(model), mesh)
    replicas.check(7, model)
    device = mesh.devices[0, 0, 2, 0, 0, 1]
    model[name] = with_flipped_bit(model[name], device, word, bit)
    words = rf"after step 40 .* replica 2 \(device {device.id} of process 0\) differs from the others in {name};"
    with pytest.raises(UnhealthyError, match=words):
        replicas.check(40, model)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float64"])
def test_weights_of_every_dtype_are_compared(dtype):
    mesh = make_mesh(MeshConfig(data=2))
    with jax.enable_x64(True):
        model = jax.tree.map(lambda weight: weight.astype(dtype), state_on(mesh)["model"])
        replicas = Replicas(abstract(model), mesh)
        replicas.check(1, model)
        model["up"] = with_flipped_bit(model["up"], mesh.devices[0, 0, 1, 0, 0, 0], word=9, bit=7)
        with pytest.raises(UnhealthyError, match="differ in up;"):
            replicas.check(2, model)


def test_replicas_compare_what_has_copies():
    """ZeRO's shards have one copy each, and of two that differ either may be wrong."""
    mesh = make_mesh(MeshConfig(data=2))
    model = state_on(mesh, P("data"))["model"]
    replicas = Replicas(abstract(model), mesh)
    model["up"] = with_flipped_bit(model["up"], mesh.devices[0, 0, 1, 0, 0, 0])
    replicas.check(1, model)
    model["bias"] = with_flipped_bit(model["bias"], mesh.devices[0, 0, 1, 0, 0, 0])
    words = r"replica 0 \(device 0 .*\) and replica 1 \(device 1 .*\) differ in bias;"
    with pytest.raises(UnhealthyError, match=words):
        replicas.check(2, model)
