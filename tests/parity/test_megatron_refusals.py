"""What a checkpoint of Megatron may get wrong, or what it may want to execute: refused in one sentence each.

tests/interop/test_megatron.py has what needs no torch.
"""

import os
from dataclasses import dataclass

import pytest

from tests.interop.megatron_files import draw
from tests.parity.megatron_written import FLAGS, GPT, convert, write

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")

pytestmark = pytest.mark.parity


@dataclass
class _Trap:
    function: object
    arguments: tuple

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
@pytest.mark.parametrize("where", ["args", "optimizer"])
@pytest.mark.parametrize("called", [f"{open.__module__}.open", "posix.system"])
def test_harmful_file_is_refused_unexecuted(called, where, legacy, tmp_path, capsys):
    sprung = str(tmp_path / "sprung")
    trap = _Trap(open, (sprung, "w")) if called.endswith("open") else _Trap(os.system, (f"touch {sprung}",))
    source = write(tmp_path / "in", draw(GPT), GPT, legacy=legacy, **{where: {"x": trap}})
    assert convert(source, tmp_path / "run", *FLAGS) == 2
    message = capsys.readouterr().err
    assert f"wants to call {called}, which is not part of a checkpoint of Megatron, and nothing was executed" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "run").exists()


def _bytes(change):
    def damage(source, weights, model):
        file = source / "release" / "mp_rank_00" / "model_optim_rng.pt"
        file.write_bytes(change(file.read_bytes()))

    return damage


def _content(change):
    def damage(source, weights, model):
        file = source / "release" / "mp_rank_00" / "model_optim_rng.pt"
        content = torch.load(file, weights_only=True)
        content = change(content) or content
        torch.save(content, file)

    return damage


def _mlp(change):
    """What is called MLP in the second layer becomes what `change` makes of it; None: it goes."""

    def damage(content):
        layers = content["model"]["language_model"]["transformer"]
        changed = change(layers.pop(MLP))
        layers.update({} if changed is None else {MLP: changed})

    return _content(damage)


def _flipped(content):
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _second_rank(source, weights, model):
    write(source / "other", weights, model, ranks=2)
    (source / "other" / "release" / "mp_rank_01").rename(source / "release" / "mp_rank_01")


MLP, TODAY = "layers.1.mlp.dense_h_to_4h.weight", "decoder.layers.1.mlp.linear_fc1.weight"
MISTAKES = {
    "cut off": (_bytes(lambda content: content[:3000]), "is truncated or not a file of torch.save"),
    "a flipped bit": (_bytes(_flipped), "is not what was written (checksum)"),
    "a list": (_content(lambda content: [1, 2]), "holds a list, and a checkpoint is a dict"),
    "integers": (_mlp(lambda mlp: mlp.to(torch.int8)), f"{TODAY} is of type int8"),
    "eight bits": (_mlp(lambda mlp: mlp.to(torch.float8_e4m3fn)), f"{MLP} is of type torch.float8_e4m3fn"),
    "a tensor larger than its storage": (
        _mlp(lambda mlp: torch.ones(240).as_strided((40, 24), (5, 1))), "(40, 24) and 960 bytes stored of it",
    ),
    "no tensor": (_mlp(lambda mlp: 5), f"{MLP} is 5, which is not a tensor"),
    "not finite": (_mlp(lambda mlp: mlp.log()), f"{TODAY} holds numbers that are not finite"),
    "a version that is none": (
        _content(lambda content: content.update(checkpoint_version="new")), "is 'new', which is not a version",
    ),
    "arguments that are none": (
        _content(lambda content: content.update(args=[1])), "args is [1], which are not the arguments",
    ),
    "ranks of another model": (_second_rank, "has shape (108, 24), and the rest of the checkpoint asks for (72, 24)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_damaged_checkpoint_is_refused(name, tmp_path, capsys):
    damage, expected = MISTAKES[name]
    weights = draw(GPT)
    source = write(tmp_path / "in", weights, GPT)
    damage(source, weights, GPT)
    assert convert(source, tmp_path / "run", *FLAGS) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1, "one line"
    assert not (tmp_path / "run").exists()
