"""The files of Megatron without torch: parts of tensors, metadata read as data, which checkpoint is meant."""

import pickle
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest

from mjax import cli
from mjax.errors import UsageError
from mjax.interop.megatron.checkpoint import find_folder
from mjax.interop.megatron.distributed import DistributedTensors
from mjax.interop.megatron.pickles import Chunk, Stored, read_metadata

# --- Format torch_dist ------------------------------------------------------------------------------------------------


class InMemory(DistributedTensors):
    """Its parts come from a dictionary instead of files."""

    def __init__(self, folder, stored, parts):
        super().__init__(folder, stored)
        self._parts = parts

    def _chunk(self, chunk):
        return self._parts[chunk.start]


@pytest.fixture
def stacked(tmp_path):
    """A tensor [3, 8, 6] in four parts, cut along layers and along its last dim."""
    whole = np.arange(3 * 8 * 6, dtype=np.float32).reshape(3, 8, 6)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    chunks, parts = [], {}
    for number, (layers, columns) in enumerate(
        [((0, 1), (0, 6)), ((1, 3), (0, 2)), ((1, 2), (2, 6)), ((2, 3), (2, 6))]
    ):
        offsets, ends = (layers[0], 0, columns[0]), (layers[1], 8, columns[1])
        parts[number] = whole[layers[0] : layers[1], :, columns[0] : columns[1]]
        chunks.append(
            Chunk(offsets, tuple(e - o for o, e in zip(offsets, ends, strict=True)), "__0_0.distcp", number, 600)
        )
    stored = {"decoder.layers.mlp.linear_fc2.weight": Stored("float32", (3, 8, 6), tuple(chunks))}
    return whole, tmp_path, stored, parts


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(7, 20)], ids=str)
def test_layers_that_are_stored_as_one_tensor_are_read_one_by_one(stacked, rows):
    whole, folder, stored, parts = stacked
    tensors = InMemory(folder, stored, parts)
    assert list(tensors.kinds) == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(3)]
    for layer, name in enumerate(tensors.kinds):
        assert tensors.kinds[name].shape == (8, 6)
        np.testing.assert_array_equal(tensors.read(name, rows), whole[layer, rows])


def test_what_no_part_covers_is_no_number(stacked):
    _, folder, stored, parts = stacked
    ((name, tensor),) = stored.items()
    *others, before_last, last = tensor.chunks  # of equal sizes, so that these still add up
    twice = (*others, before_last, replace(last, offsets=before_last.offsets))
    tensors = InMemory(folder, {name: replace(tensor, chunks=twice)}, parts)
    assert np.isnan(tensors.read("decoder.layers.2.mlp.linear_fc2.weight")[:, 2:]).all()


def test_a_part_that_is_not_listed_is_missed(stacked):
    _, folder, stored, _ = stacked
    (tensor,) = stored.values()
    with pytest.raises(UsageError, match=r"lists other parts of decoder.layers.mlp.linear_fc2.weight than the whole"):
        DistributedTensors(folder, {"decoder.layers.mlp.linear_fc2.weight": replace(tensor, chunks=tensor.chunks[1:])})


def test_a_file_that_is_not_there_is_named(stacked):
    _, folder, stored, _ = stacked
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(UsageError, match=r"__0_0.distcp does not exist, though .metadata names it"):
        DistributedTensors(folder, stored)


@pytest.fixture
def metadata(monkeypatch):
    """The classes that .metadata is a pickle of, under torch's names, whether torch is there or not."""
    modules = {}
    for name in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "torch"):
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    for package in ("torch.distributed", "torch.distributed.checkpoint"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))

    def plain(module, name):
        made = type(name, (), {"__module__": module, "__init__": lambda self, **values: self.__dict__.update(values)})
        setattr(modules[module], name, made)
        return made

    of = "torch.distributed.checkpoint.metadata"
    names = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
    classes = {name: plain(of, name) for name in names}
    classes["_StorageInfo"] = plain("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    properties = plain(of, "TensorProperties")
    properties.__getstate__ = lambda self: (self.dtype, None, False, None, False)

    class Dtype:
        def __reduce__(self):
            return "bfloat16"

    Dtype.__module__ = "torch"
    modules["torch"].bfloat16 = Dtype()
    classes["properties"] = lambda: properties(dtype=modules["torch"].bfloat16)
    return classes


def _metadata_of(make, offsets=(0, 0), file="__0_0.distcp", **info):
    chunk = make["ChunkStorageMetadata"](offsets=(0, 0), sizes=(4, 3))
    index = make["MetadataIndex"](fqn="decoder.final", offset=offsets, index=0)
    extra = make["MetadataIndex"](fqn="decoder.state", offset=None, index=None)
    place = make["_StorageInfo"](relative_path=file, offset=5, length=70, **info)
    return make["Metadata"](
        state_dict_metadata={
            "decoder.final": make["TensorStorageMetadata"](
                properties=make["properties"](), size=(4, 3), chunks=[chunk]
            ),
            "decoder.state": make["BytesStorageMetadata"](),
        },
        storage_data={index: place, extra: place},
    )


def test_metadata_is_read_as_data(metadata, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_metadata_of(metadata), protocol=4))
    chunk = Chunk((0, 0), (4, 3), "__0_0.distcp", 5, 70)
    assert read_metadata(tmp_path / ".metadata") == {"decoder.final": Stored("bfloat16", (4, 3), (chunk,))}


class _Trap:
    """What a pickle can do to whoever opens it."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@dataclass
class _Module:
    function: object

    def __reduce__(self):
        return self.function, ()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda make, folder: _Trap(folder / "sprung"), f"wants to call {open.__module__}.open, which is"),
        (lambda make, folder: _Module(sys.exc_info), "wants to call sys.exc_info"),
        (lambda make, folder: _metadata_of(make, file="../secret"), "names '../secret', which is not a file beside it"),
        (lambda make, folder: _metadata_of(make, offsets=(1, 0)), "is truncated or not a .metadata"),
        (lambda make, folder: _metadata_of(make, transform_descriptors=["zstd"]), "is stored as ['zstd']"),
        (lambda make, folder: {"decoder.final": 1}, "is truncated or not a .metadata"),
    ],
    ids=["opens a file", "calls a function", "another folder", "a part without a place", "compressed", "no metadata"],
)
def test_metadata_that_is_no_metadata_is_refused_and_runs_nothing(damage, expected, metadata, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(damage(metadata, tmp_path), protocol=4))
    with pytest.raises(UsageError) as refused:
        read_metadata(tmp_path / ".metadata")
    assert expected in str(refused.value)
    assert not (tmp_path / "sprung").exists()


def test_metadata_that_is_cut_off_is_refused(metadata, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_metadata_of(metadata))[:-20])
    with pytest.raises(UsageError, match=r"is truncated or not a \.metadata"):
        read_metadata(tmp_path / ".metadata")


# --- Which checkpoint -------------------------------------------------------------------------------------------------


def _folders(folder, *names, tracker=None):
    for name in names:
        (folder / name / "mp_rank_00").mkdir(parents=True)
    if tracker is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    return folder


@pytest.mark.parametrize(
    ("names", "tracker", "step", "found"),
    [
        (["iter_0000100", "iter_0000200"], "200", None, "iter_0000200"),
        (["iter_0000100", "iter_0000200"], "200\n", 100, "iter_0000100"),
        (["iter_0000100", "release"], "release", None, "release"),
        (["release"], None, None, "release"),
        (["iter_12345678"], None, None, "iter_12345678"),
    ],
)
def test_the_tracker_or_the_step_says_which(tmp_path, names, tracker, step, found):
    assert find_folder(_folders(tmp_path, *names, tracker=tracker), step) == tmp_path / found


def test_the_folder_of_one_checkpoint_is_taken_as_it_is(tmp_path):
    folder = _folders(tmp_path, "release") / "release"
    assert find_folder(folder, None) == folder


@pytest.mark.parametrize(
    ("names", "tracker", "flags", "expected"),
    [
        ([], None, [], "has no checkpoint of Megatron and no latest_checkpointed_iteration.txt"),
        (["iter_0000001", "iter_0000002"], None, [], "several checkpoints (iter_0000001, iter_0000002)"),
        (["iter_0000001"], "7", [], "has no checkpoint iter_0000007; there are: iter_0000001"),
        (["iter_0000001"], "1", ["--step", "3"], "has no checkpoint iter_0000003"),
        (["iter_0000001"], "../x", [], "says '../x', which is not a step"),
        (["iter_0000001"], "²", [], "says '²', which is not a step"),
        (["."], None, ["--step", "3"], "is one checkpoint already; leave out --step"),
        (["iter_0000001"], "1", [], "mp_rank_00 has no model_optim_rng.pt"),
        (["iter_0000001"], "1", ["--vocabulary-multiple", "0"], "--vocabulary-multiple is 0"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_checkpoint_is_refused(names, tracker, flags, expected, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    _folders(tmp_path / "in", *names, tracker=tracker)
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out"), *flags]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1, "one line"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (["mp_rank_01"], "lacks mp_rank_00; copy"),
        (["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001"], "lacks mp_rank_01_001; copy"),
        (["mp_rank_00_000_000", "mp_rank_00_001_001"], "lacks mp_rank_00_000_001; copy"),
        (["mp_rank_00_000_000_001"], "is not a rank of a model"),
        ([], "holds neither mp_rank_00 nor .metadata"),
    ],
)
def test_ranks_that_are_missing_are_named(ranks, expected, tmp_path, capsys):
    (tmp_path / "in" / "release").mkdir(parents=True)
    for rank in ranks:
        (tmp_path / "in" / "release" / rank).mkdir()
        (tmp_path / "in" / "release" / rank / "model_optim_rng.pt").touch()
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_other_formats_are_refused_by_name(backend, tmp_path, capsys):
    folder = _folders(tmp_path / "in", "release") / "release"
    (folder / "metadata.json").write_text(f'{{"sharded_backend": "{backend}"}}')
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert f"is in the format '{backend}', and mjax reads torch_dist and torch" in capsys.readouterr().err


def test_without_torch_one_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = _folders(tmp_path / "in", "release")
    (folder / "release" / "mp_rank_00" / "model_optim_rng.pt").touch()
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "read by torch, which is not installed; type `pip install torch`" in capsys.readouterr().err
