"""The files of Megatron without torch: parts of tensors, metadata read as data, which checkpoint is meant."""

import io
import pickle
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.commands import cli
from mjax.errors import UsageError
from mjax.interop.distributed_files import StoredTensor, StoredTensors, read_metadata
from mjax.interop.megatron.checkpoint import find_folder
from mjax.interop.megatron.tensors import open_stacks
from mjax.interop.torch_files import TensorChunk, load_tensors

# --- Format torch_dist ------------------------------------------------------------------------------------------------


@pytest.fixture
def stacked(tmp_path):
    """A tensor [3, 8, 6] in four parts, cut along layers and along its last dim."""
    whole = np.arange(3 * 8 * 6, dtype=np.float32).reshape(3, 8, 6)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    chunks, parts = [], {}
    places = [((0, 1), (0, 6)), ((1, 3), (0, 2)), ((1, 2), (2, 6)), ((2, 3), (2, 6))]
    for number, ((first, end), (left, right)) in enumerate(places):
        parts[number] = whole[first:end, :, left:right]
        chunks.append(TensorChunk((first, 0, left), (end - first, 8, right - left), "__0_0.distcp", number, 600))
    return whole, tmp_path, StoredTensor("float32", (3, 8, 6), tuple(chunks)), parts


STACKED = "decoder.layers.mlp.linear_fc2.weight"


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(7, 20)], ids=str)
def test_layers_stored_as_one_tensor_are_split(stacked, rows, monkeypatch):
    whole, folder, stored, parts = stacked
    monkeypatch.setattr(StoredTensors, "_load_chunk", lambda _, chunk: parts[chunk.start])
    tensors = open_stacks(folder, {STACKED: stored})
    assert list(tensors) == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(3)]
    for layer, tensor in enumerate(tensors.values()):
        assert tensor.shape == (8, 6)
        np.testing.assert_array_equal(tensor[rows], whole[layer, rows])


def test_parts_that_do_not_cover_tensor_are_missed(stacked, monkeypatch):
    _, folder, stored, parts = stacked
    *others, before_last, last = stored.chunks  # of equal sizes, so that these still add up
    twice = (*others, before_last, replace(last, offsets=before_last.offsets))
    monkeypatch.setattr(StoredTensors, "_load_chunk", lambda _, chunk: parts[chunk.start])
    tensors = open_stacks(folder, {STACKED: replace(stored, chunks=twice)})
    assert np.isnan(tensors["decoder.layers.2.mlp.linear_fc2.weight"][:][:, 2:]).all()
    with pytest.raises(UsageError, match=f"lists other parts of {STACKED} than the whole"):
        open_stacks(folder, {STACKED: replace(stored, chunks=stored.chunks[1:])})
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(UsageError, match=r"__0_0.distcp does not exist, though .metadata names it"):
        open_stacks(folder, {STACKED: stored})


# --- .metadata --------------------------------------------------------------------------------------------------------


class Pickler(pickle._Pickler):
    """Writes classes by the names that they claim, whether there are such modules or not."""

    def save_global(self, named, name=None):
        self.write(f"c{named.__module__}\n{name or named.__qualname__}\n".encode())
        self.memoize(named)

    dispatch = pickle._Pickler.dispatch | {type: save_global}


def write_metadata(folder, content):
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(content)
    (folder / ".metadata").write_bytes(stream.getvalue())
    return folder / ".metadata"


def of_torch(name, module="metadata", **values):
    """An object of a class of torch.distributed.checkpoint."""
    made = type(name, (), {"__module__": f"torch.distributed.checkpoint.{module}"})()
    made.__dict__.update(values)
    return made


class Called:
    """A call in a pickle: the harm it can do when a process opens it."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Dtype:
    def __reduce__(self):
        return "bfloat16"


Dtype.__module__ = "torch"


def metadata(offsets=(0, 0), file="__0_0.distcp", **more):
    properties = of_torch("TensorProperties")
    type(properties).__getstate__ = lambda self: (Dtype(), None, False, None, False)
    chunk = of_torch("ChunkStorageMetadata", offsets=(0, 0), sizes=(4, 3))
    tensor = of_torch("TensorStorageMetadata", properties=properties, size=(4, 3), chunks=[chunk])
    place = of_torch("_StorageInfo", "filesystem", relative_path=file, offset=5, length=70, **more)
    index = of_torch("MetadataIndex", fqn="decoder.final", offset=offsets, index=0)
    extra = of_torch("MetadataIndex", fqn="decoder.state", offset=None, index=None)
    listed = {"decoder.final": tensor, "decoder.state": of_torch("BytesStorageMetadata")}
    return of_torch("Metadata", state_dict_metadata=listed, storage_data={index: place, extra: place})


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # until Python 3.12, and of 3.13
def test_metadata_is_read_as_data(module, tmp_path):
    chunk = TensorChunk((0, 0), (4, 3), "__0_0.distcp", 5, 70)
    content = metadata()
    content.storage_meta = Called(type("PosixPath", (), {"__module__": module}), "checkpoint")
    file = write_metadata(tmp_path, content)
    assert read_metadata(file) == {"decoder.final": StoredTensor("bfloat16", (4, 3), (chunk,))}
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"is truncated or not a \.metadata"):
        read_metadata(file)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: Called(open, str(folder / "sprung"), "w"), f"wants to call {open.__module__}.open, which is"),
        (lambda folder: metadata(file="../secret"), "the file of decoder.final, '../secret' has the part '..'"),
        (lambda folder: metadata(offsets=(1, 0)), "is truncated or not a .metadata"),
        (lambda folder: metadata(transform_descriptors=["zstd"]), "is stored as ['zstd']"),
    ],
    ids=["opens a file", "another folder", "a part without a place", "compressed"],
)
def test_harmful_metadata_is_refused_unexecuted(make, words, tmp_path):
    with pytest.raises(UsageError) as refused:
        read_metadata(write_metadata(tmp_path, make(tmp_path)))
    assert words in str(refused.value)
    assert not (tmp_path / "sprung").exists()


# --- Which checkpoint -------------------------------------------------------------------------------------------------


def _folders(folder, *names, tracker=None):
    """Checkpoints of these names; of a name with a rank the file of this rank, too."""
    for name in names:
        place = folder / name if "/" in name else folder / name / "mp_rank_00"
        place.mkdir(parents=True)
        if "/" in name:
            (place / "model_optim_rng.pt").touch()
    if tracker is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    return folder


@pytest.mark.parametrize(
    ("names", "tracker", "step", "found"),
    [
        (["iter_0000100", "iter_0000200"], "200", None, "iter_0000200"),
        (["iter_0000100", "iter_0000200"], "200\n", 100, "iter_0000100"),
        (["iter_0000100", "release"], "release", None, "release"),
    ],
)
def test_tracker_or_step_selects_checkpoint(tmp_path, names, tracker, step, found):
    folder = _folders(tmp_path, *names, tracker=tracker)
    assert find_folder(folder, step) == find_folder(folder / found, None) == folder / found


@pytest.mark.parametrize(
    ("names", "tracker", "expected"),
    [
        ([], None, "has no checkpoint of Megatron and no latest_checkpointed_iteration.txt"),
        (["iter_0000001", "iter_0000002"], None, "several checkpoints (iter_0000001, iter_0000002)"),
        (["iter_0000001"], "7", "has no checkpoint iter_0000007; there are: iter_0000001"),
        (["iter_0000001"], "../x", "says '../x', which is not a step"),
        (["iter_0000001"], "1", "mp_rank_00 has no model_optim_rng.pt"),
        ([f"release/mp_rank_{rank}" for rank in ("00_000", "01_000", "00_001")], None, "lacks mp_rank_01_001"),
        ([f"release/mp_rank_{rank}" for rank in ("00_000_000", "00_001_001")], None, "lacks mp_rank_00_000_001"),
        (["release/other"], None, "holds neither mp_rank_00 nor .metadata"),
    ],
    ids=str,
)
def test_folders_without_checkpoint_are_refused(names, tracker, expected, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    _folders(tmp_path / "in", *names, tracker=tracker)
    assert cli.main(["convert", "from-megatron", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1, "one line"
    assert not (tmp_path / "out").exists()


def test_flipped_bit_in_archive_is_noticed(tmp_path, monkeypatch):
    """torch.save writes checksums, and torch.load does not compare them."""
    names = SimpleNamespace(get_safe_globals=list, clear_safe_globals=list, add_safe_globals=list)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(load=lambda *_, **__: "read", serialization=names))
    file = tmp_path / "model_optim_rng.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data/0", b"numbers")
    assert load_tensors(file) == "read"
    file.write_bytes(file.read_bytes().replace(b"numbers", b"numberr"))
    with pytest.raises(zipfile.BadZipFile, match="archive/data/0 in it is not what was written"):
        load_tensors(file)
