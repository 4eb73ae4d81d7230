"""Silent corruption of one replica's weights, planted on simulated devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax import cli
from mjax.config import MeshConfig
from mjax.errors import UnhealthyError
from mjax.parallel.mesh import make_mesh
from mjax.training import loop
from mjax.training.metrics import MetricsLog
from mjax.training.replicas import Replicas
from tests.conftest import ROOT
from tests.training.saved import abstract, state_on

pytestmark = pytest.mark.usefixtures("quick_runs")


def model_on(mesh, spec):
    return state_on(mesh, spec).model


def with_flipped_bit(array, device, word=0, bit=3):
    """`array` with one bit of one device's copy flipped, which JAX does not know of."""
    parts = []
    for shard in array.addressable_shards:
        words = np.array(shard.data).view(np.uint32)
        if shard.device.id == device:
            words.flat[word] ^= np.uint32(1 << bit)
        parts.append(jax.device_put(words.view(array.dtype), shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.fixture(scope="module")
def four():
    """Mesh data 4 × model 2 and a model on it: `up` is split over `model`, `bias` is on every device."""
    mesh = make_mesh(MeshConfig(data=4, model=2))
    model = model_on(mesh, P(None, "model"))
    return mesh, model, Replicas(abstract(model), mesh)


def test_equal_replicas_pass(four):
    _, model, replicas = four
    replicas.check(7, model)


@pytest.mark.parametrize(("name", "word", "bit"), [("up", 0, 0), ("up", 63, 31), ("bias", 15, 12)])
def test_one_flipped_bit_on_one_device_is_found_and_the_device_named(four, name, word, bit):
    mesh, model, replicas = four
    device = mesh.devices[0, 2, 0, 0, 1].id
    changed = jax.tree.map(lambda leaf: leaf, model)
    leaf = getattr(changed, name)
    leaf[...] = with_flipped_bit(leaf[...], device, word, bit)
    words = rf"after step 40 .* replica 2 \(device {device} of process 0\) differs from the others in {name};"
    with pytest.raises(UnhealthyError, match=words):
        replicas.check(40, changed)


def test_of_two_replicas_both_are_named():
    mesh = make_mesh(MeshConfig(data=2))
    model = model_on(mesh, P())
    model.up[...] = with_flipped_bit(model.up[...], mesh.devices[0, 1, 0, 0, 0].id)
    with pytest.raises(UnhealthyError, match=r"replica 0 \(device 0 .*\) and replica 1 \(device 1 .*\) differ in"):
        Replicas(abstract(model), mesh).check(1, model)


def test_what_zero_splits_has_no_copy_and_the_rest_is_compared():
    mesh = make_mesh(MeshConfig(data=2))
    model = model_on(mesh, P("data"))
    replicas = Replicas(abstract(model), mesh)
    model.up[...] = with_flipped_bit(model.up[...], mesh.devices[0, 1, 0, 0, 0].id)
    replicas.check(1, model)
    model.bias[...] = with_flipped_bit(model.bias[...], mesh.devices[0, 1, 0, 0, 0].id)
    with pytest.raises(UnhealthyError, match="in bias;"):
        replicas.check(2, model)


def test_one_replica_has_nothing_to_compare_with():
    mesh = make_mesh(MeshConfig(model=2))
    model = model_on(mesh, P(None, "model"))
    Replicas(abstract(model), mesh).check(1, model)


@pytest.mark.ci
def test_a_run_whose_replicas_differ_ends_with_exit_code_3_and_saves_nothing_more(tmp_path, monkeypatch, capsys):
    original = loop.build_program

    def build(config, mesh, **options):
        program = original(config, mesh, **options)

        def step(state, batch, *rest):
            with jax.transfer_guard("allow"):
                if int(state.step) == 5:
                    weight = state.model.final_norm.bias
                    weight[...] = with_flipped_bit(weight[...], mesh.devices[0, 1, 0, 0, 0].id)
            return program.train_step(state, batch, *rest)

        return replace(program, train_step=step)

    monkeypatch.setattr(loop, "build_program", build)
    monkeypatch.setattr(loop, "check_devices", lambda *_: None)  # two of the test's sixteen are enough
    monkeypatch.setattr(MetricsLog, "draw", lambda *_, **__: None)
    flags = ["--config", str(ROOT / "tests" / "tiny_config.py"), "--runs", str(tmp_path), "--mesh.data", "2"]
    assert cli.main(["train", *flags, "--name", "run", "--train.eval-interval", "0"]) == 3
    assert "after step 8 the replicas have different weights: replica 0" in capsys.readouterr().err
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
