"""A checkpoint that megatron-core 0.19.2 wrote, recorded: arguments and version are a shard, and there is no common.pt.

`llama_stacked` of `write_megatron_core.py` with 2 layers, hidden size 8, 2 heads, 1 group and an MLP of 12; scores.npz
contains megatron-core's scores. 0.19 needs Python 3.12.
"""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.interop.torch_files import TensorChunk, load_megatron_file
from tests.parity.megatron_written import convert
from tests.parity.peers import scores_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")

pytestmark = pytest.mark.parity


@pytest.fixture
def recorded(tmp_path):
    with tarfile.open(Path(__file__).with_name("megatron_core_0_19_2.tar.xz")) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    return tmp_path / "in"


def test_scores_match_recorded_megatron_core(recorded, tmp_path):
    assert convert(recorded, tmp_path / "run", "--vocabulary", "29") == 0
    theirs = np.load(recorded / "scores.npz")
    config, found = scores_of(tmp_path / "run", theirs["ids"])
    assert (config.model.rope_theta, config.model.rope_factor, config.model.kv_heads) == (500_000, 32, 1)
    np.testing.assert_allclose(found[..., :29], theirs["scores"][..., :29], atol=1e-5)


def test_checkpoint_without_common_state_is_refused(recorded, tmp_path, capsys):
    file = recorded / "iter_0000005" / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"common_state/shard_0_1", b"common_stale/shard_0_1"))
    assert convert(recorded, tmp_path / "run") == 2
    assert "holds neither common.pt nor common_state/shard_0_1; copy the whole" in capsys.readouterr().err


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize(
    ("state", "cut", "words"),
    [
        ([Trap], 0, "wants to call posix.system, which is not part of"),
        ([{"args": None}], 40, "is truncated or not a file of torch.save"),
        ([{}, {}], 0, "is truncated or not a file of torch.save"),
        (["args"], 0, "holds a str, and a checkpoint is a dict"),
    ],
    ids=["executes", "cut off", "two states", "no dict"],
)
def test_harmful_common_state_is_refused_unexecuted(state, cut, words, tmp_path):
    content = io.BytesIO()
    torch.save([Trap(tmp_path / "sprung") if each is Trap else each for each in state], content)
    (tmp_path / "__0_0.distcp").write_bytes(b"before" + content.getvalue())
    chunk = TensorChunk((), (), "__0_0.distcp", 6, len(content.getvalue()) - cut)
    with pytest.raises(UsageError) as refused:
        load_megatron_file(tmp_path / chunk.file, chunk)
    assert words in str(refused.value)
    assert not (tmp_path / "sprung").exists()
