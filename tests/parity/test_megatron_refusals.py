"""Damaged, foreign or executable checkpoints of Megatron: rejected in one sentence each.

tests/interop/test_megatron.py has what needs no torch.
"""

import os
from dataclasses import dataclass

import pytest

from tests.interop.megatron_files import draw
from tests.parity.megatron_written import FLAGS, GPT, convert, write

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
