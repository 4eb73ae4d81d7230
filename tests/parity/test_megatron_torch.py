"""Megatron's files of torch.save: halves, the state next to the weights, and damaged, foreign or executable files.

tests/interop/test_megatron.py has what needs no torch.
"""

import argparse
import os
import random
import sys
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest

from mjax.interop.torch_files import PickleStub, load_megatron_file
from tests.interop.megatron_files import draw
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import BERT, FLAGS, GPT, convert, write

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")

pytestmark = pytest.mark.parity


@dataclass
class _Trap:
    function: object
    arguments: tuple

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
@pytest.mark.parametrize("where", ["args", "optimizer"])
def test_harmful_file_is_refused_unexecuted(where, legacy, tmp_path, capsys):
    trap = _Trap(os.system, (f"touch {tmp_path / 'sprung'}",))
    source = write(tmp_path / "in", draw(GPT), GPT, legacy=legacy, **{where: {"x": trap}})
    assert convert(source, tmp_path / "run", *FLAGS) == 2
    assert "wants to call posix.system, which is not part of" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "run").exists()


MLP, TODAY = "layers.1.mlp.dense_h_to_4h.weight", "decoder.layers.1.mlp.linear_fc1.weight"


def test_damaged_file_is_refused(tmp_path, capsys):
    file = write(tmp_path / "in", draw(GPT), GPT) / "release" / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:3000])
    assert convert(tmp_path / "in", tmp_path / "run", *FLAGS) == 2
    assert "is truncated or not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mlp: mlp.to(torch.int8), f"{TODAY} is of type int8"),
        (lambda mlp: torch.ones(240).as_strided((40, 24), (5, 1)), "(40, 24) and 960 bytes stored of it"),
        (lambda mlp: 5, f"{MLP} is 5, which is not a tensor"),
    ],
    ids=["integers", "larger than its storage", "no tensor"],
)
def test_tensor_of_another_kind_is_refused(change, words, tmp_path, capsys):
    file = write(tmp_path / "in", draw(GPT), GPT) / "release" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    layers = content["model"]["language_model"]["transformer"]
    layers[MLP] = change(layers[MLP])
    torch.save(content, file)
    assert convert(tmp_path / "in", tmp_path / "run", *FLAGS) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("dtype", "legacy"), [(torch.float16, True), (torch.bfloat16, False)])
def test_halves_are_read_exactly(dtype, legacy, tmp_path):
    rounded = {name: torch.tensor(array).to(dtype).float().numpy() for name, array in draw(BERT).items()}
    source = write(tmp_path / "in", rounded, BERT, legacy=legacy, dtype=dtype)
    assert convert(source, tmp_path / "run", *FLAGS) == 0
    assert_same(weights_of(tmp_path / "run"), rounded)


def test_training_state_is_passed_over(tmp_path, monkeypatch):
    """Classes of Megatron's own are nowhere to be found when the file is read."""
    module = ModuleType("megatron.fp16")
    module.LossScaler = type("LossScaler", (), {"__module__": module.__name__})
    for name in ("megatron", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    scaler = module.LossScaler()
    scaler.cur_scale = 2.0**32
    beside = {
        "args": argparse.Namespace(num_attention_heads=4, num_layers=2, params_dtype=torch.half, seed=1234),
        "iteration": 300_000,
        "optimizer": {"loss_scaler": scaler, "fp32_from_fp16": [[torch.ones(3)]]},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    source = write(tmp_path / "in", draw(GPT), GPT, 2.0, **beside)
    del sys.modules[module.__name__]
    content = load_megatron_file(source / "release" / "mp_rank_00" / "model_optim_rng.pt")
    assert isinstance(content["optimizer"]["loss_scaler"], PickleStub)
    assert content["optimizer"]["loss_scaler"].cur_scale == 2.0**32
    assert convert(source, tmp_path / "run", "--vocabulary", "29") == 0
