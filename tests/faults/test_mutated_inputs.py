"""The worst of thousands of mutated inputs: one sentence each, whatever the reader, and never another meaning."""

import base64
import json
import struct
from dataclasses import replace

import pytest

from mjax.checkpoint.folders import Unusable
from mjax.errors import MAX_MESSAGE_CHARACTERS, RunError, UsageError, one_sentence
from mjax.interop.distributed_files import StoredTensor, read_metadata
from mjax.interop.megatron.checkpoint import flatten_names
from mjax.interop.megatron.tensors import open_stacks
from mjax.interop.torch_files import TensorChunk
from tests.faults.mutated_files import READERS
from tests.faults.mutations import _read, run

DEEP = b"[" * 100_000
DIGITS = b"1" * 5000
FOLDER = ...


def to(content):
    return lambda _: content


def json_with(*path_and_value):
    """Another value at a place of a JSON file."""
    *path, last, value = path_and_value

    def change(content):
        values = part = json.loads(content)
        for key in path:
            part = part[key]
        part[last] = value
        return json.dumps(values).encode()

    return change


def header_of_deep_lists(content):
    """A safetensors file whose header is nested."""
    (size,) = struct.unpack_from("<Q", content)
    return struct.pack("<Q", len(DEEP)) + DEEP + content[8 + size :]


CHARACTERS = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 40).decode()}
NEW_PIECE = b"\n\x0c\n\x05\xff\xfe\xff\xfe\xff\x15\x00\x00\x00\x00"  # of sentencepiece's protobuf: (text, score)
RUN, GPT2 = "config.json of a run", "GPT-2 of Hugging Face"
WORST = [
    (RUN, "config.json", to(DEEP), "nested"),
    (RUN, "config.json", to(b'{"train": {"steps": ' + DIGITS + b"}}"), "is not JSON"),
    (RUN, "config.json", to(FOLDER), "cannot be read (Is a directory)"),
    (RUN, "config.json", json_with("optimizer", "epsilon", 10**400), "not a number"),
    (RUN, "config.json", json_with("data", "cache", "\ud800"), "which is not text"),
    (RUN, "config.json", json_with("model", {"heads": 2**60 + 1, "hidden": 2**60}), "use 1, 2"),
    ("dataset's metadata", "d.json", json_with("eod", 257), "its counts are impossible"),
    ("metrics.jsonl", "metrics.jsonl", to(FOLDER), "cannot be read (Is a directory); move it away"),
    ("checkpoint", "5/manifest.json", to(DEEP), "manifest.json is not what was written"),
    ("request.json", "request.json", json_with("train", [["a.tsv"]]), "--train ['a.tsv'], now a.tsv"),
    ("epochs.json", "epochs.json", to(b"[1]"), "is 1, which is not an object"),
    ("tokenizer.json", "tokenizer.json", json_with("normalizer", CHARACTERS), "takes more than 4096 MiB"),
    ("tokenizer.json", "tokenizer.json", json_with("model", "vocab", "a", 2**32 - 1), "the id 4,294,967,295"),
    ("vocab.json, merges.txt", "merges.txt", lambda content: content + b"a " + DIGITS, "does not belong to"),
    ("sentencepiece model", "a.model", lambda content: content + NEW_PIECE, "is not a sentencepiece model"),
    (GPT2, "m/config.json", json_with("n_layer", 10**7), "asks for 10,000,000 layers, and"),
    (GPT2, "m/config.json", json_with("layer_norm_epsilon", 10**400), "not a number from 0 on"),
    (GPT2, "m/model.safetensors", header_of_deep_lists, "not a safetensors file"),
    ("WikiText103", "a.tokens", to(b"( [ { \" ' " * 30_000), None),
    ("text, .jsonl.gz", "a.jsonl.gz", to(b""), "is empty, so it is not a compressed file"),
    ("text, .jsonl", "a.jsonl", lambda content: content + b'{"' + b"x" * 5000 + b'": 1}', "there is no key 'text'"),
]


def sound(name, folder):
    """A reader, and the valid files that it reads."""
    (reader,) = [reader for reader in READERS if reader.name == name]
    folder.mkdir()
    reader.write(folder)
    return reader, {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


@pytest.mark.parametrize(("name", "file", "change", "words"), WORST)
def test_meaningless_file_is_rejected_in_one_sentence(tmp_path, name, file, change, words):
    reader, files = sound(name, tmp_path / "sound")
    changed = {**files, file: change(files[file])}
    assert changed != files
    if words is None:  # read, in time and with little memory
        assert _read(reader, changed, tmp_path / "case")
        return
    with pytest.raises((UsageError, RunError, Unusable)) as refused:
        _read(reader, changed, tmp_path / "case")
    sentence = str(refused.value)
    assert words in sentence
    assert "\n" not in sentence
    assert len(sentence) < 2 * MAX_MESSAGE_CHARACTERS


def test_deeply_nested_cache_is_rebuilt(tmp_path):
    reader, files = sound("cache of indices", tmp_path / "sound")
    (manifest,) = [name for name in files if name.endswith(".json")]
    assert _read(reader, {**files, manifest: DEEP}, tmp_path / "case") == _read(reader, files, tmp_path / "whole")


def test_distributed_layers_need_room_in_their_files(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    chunk = TensorChunk((0, 0), (10**9, 6), "__0_0.distcp", 0, 1000)
    stored = StoredTensor("float32", (10**9, 6), (chunk,))
    for tensor in (
        stored,
        replace(stored, chunks=(replace(chunk, length=10**12),)),
        StoredTensor("float32", (10**9, 0), ()),
    ):
        with pytest.raises(UsageError, match=r"which are too few|other parts"):
            open_stacks(tmp_path, {"decoder.layers.mlp.linear_fc2.bias": tensor})


def test_pickle_cannot_claim_memory_or_hold_itself(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N" + b"r" + struct.pack("<I", 2**31) + b".")  # asks for 32 GiB
    with pytest.raises(UsageError, match=r"not a \.metadata"):
        read_metadata(tmp_path / ".metadata")
    tree = {"model": 1}
    tree["again"] = tree
    with pytest.raises(UsageError, match="nested too deeply"):
        flatten_names(tree)


def test_sentence_is_one_printable_line():
    assert one_sentence("a\nb\x1b[31m\ud800 é\u00a0漢字") == "a\\nb\\x1b[31m\\ud800 é\u00a0漢字"


IN_CI = {"config.json of a run": pytest.mark.ci, "pytorch_model.bin": pytest.mark.parity}


@pytest.mark.parametrize(
    "reader", [pytest.param(one.name, marks=IN_CI.get(one.name, pytest.mark.all)) for one in READERS]
)
def test_no_mutation_is_misread(reader):
    (row,) = run(600, 1, 100, [reader])
    assert (row["tried"], row["worst"]) == (100, [])
