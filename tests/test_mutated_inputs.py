"""The worst of thousands of mutated inputs: one sentence each, whatever the reader, and never another meaning."""

import base64
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from io import BytesIO

import pytest

from benchmarks.mutated_files import READERS
from benchmarks.mutations import _read, mutated
from mjax import cli
from mjax.errors import LONGEST, RunError, UsageError, one_sentence
from mjax.json_files import DEEPEST, parse_json
from mjax.state.manifest import Unusable
from tests.conftest import ROOT

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


def last_data_bit(content):
    """A bit of the last tensor in an archive of torch.save."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        member = [member for member in archive.infolist() if "/data/" in member.filename][-1]
    name, extra = struct.unpack_from("<HH", content, member.header_offset + 26)
    place = member.header_offset + 30 + name + extra
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def stretched(content):
    """A state_dict in which one stored number stands for 45 GiB of them."""
    import torch

    tensors = torch.load(BytesIO(content), weights_only=True)
    tensors["transformer.wte.weight"] = torch.ones(1).expand(3 * 2**32)
    out = BytesIO()
    torch.save(tensors, out)
    return out.getvalue()


def header_of(change):
    """Another header of a safetensors file."""

    def changed(content):
        (size,) = struct.unpack_from("<Q", content)
        header = change(content[8 : 8 + size])
        return struct.pack("<Q", len(header)) + header + content[8 + size :]

    return changed


def characters(table):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


NEW_PIECE = b"\n\x0c\n\x05\xff\xfe\xff\xfe\xff\x15\x00\x00\x00\x00"  # of sentencepiece's protobuf: (text, score)
WORST = [
    ("config.json of a run", "config.json", to(DEEP), "nested"),
    ("config.json of a run", "config.json", to(b'{"train": {"steps": ' + DIGITS + b"}}"), "is not JSON"),
    ("config.json of a run", "config.json", to(b"\xff{}"), "is not JSON"),
    ("config.json of a run", "config.json", to(FOLDER), "cannot be read (Is a directory)"),
    ("config.json of a run", "config.json", json_with("train", "steps", 10**400), "not a whole number"),
    ("config.json of a run", "config.json", json_with("optimizer", "epsilon", 10**400), "not a number"),
    ("config.json of a run", "config.json", json_with("data", "cache", "a\0b"), "which is not text"),
    ("config.json of a run", "config.json", json_with("data", "cache", "\ud800"), "which is not text"),
    ("config.json of a run", "config.json", json_with("data", "path", "\ud800"), "data.path is"),
    ("config.json of a run", "config.json", json_with("model", {"heads": 2**60 + 1, "hidden": 2**60}), "use 1, 2"),
    ("config.json of a run", "config.json", json_with("x" * 5000, 1), "unknown field xxxx"),
    ("dataset's metadata", "d.json", to(DEEP), "nested"),
    ("dataset's metadata", "d.json", json_with("tokens", "100"), "tokens is '100', which is not a whole number"),
    ("dataset's metadata", "d.json", json_with("inputs", [1]), "inputs is [1], which is not a list of text"),
    ("dataset's metadata", "d.json", json_with("eod", 257), "its counts are impossible"),
    ("metrics.jsonl", "metrics.jsonl", to(FOLDER), "cannot be read (Is a directory); move it away"),
    ("checkpoint", "5/manifest.json", to(DEEP), "manifest.json is not what was written"),
    ("calibration", "c.json", to(DEEP), "nested"),
    ("request.json", "request.json", to(FOLDER), "cannot be read"),
    ("request.json", "request.json", json_with("train", [["a.tsv"]]), "--train ['a.tsv'], now a.tsv"),
    ("epochs.json", "epochs.json", to(b"[1]"), "is not a list of epochs"),
    ("epochs.json", "epochs.json", to(DEEP), "nested"),
    ("tokenizer.json", "tokenizer.json", json_with("normalizer", characters(b"\xff" * 40)), "that is cut off"),
    ("tokenizer.json", "tokenizer.json", json_with("normalizer", characters(b"\4\0\0\0\xff")), "Cannot parse"),
    ("tokenizer.json", "tokenizer.json", json_with("pre_tokenizer", {"type": "FixedLength", "length": 0}), "non-zero"),
    ("tokenizer.json", "tokenizer.json", json_with("model", "vocab", "a", 2**32 - 1), "the id 4,294,967,295"),
    ("vocab.json, merges.txt", "vocab.json", to(DEEP), "nested"),
    ("vocab.json, merges.txt", "merges.txt", lambda content: content + b"a " + DIGITS, "does not belong to"),
    ("tokenizer's folder", "mjax_tokenizer.json", to(DEEP), "nested"),
    ("sentencepiece model", "a.model", lambda content: content + NEW_PIECE, "is not a sentencepiece model"),
    ("GPT-2 of Hugging Face", "m/config.json", to(FOLDER), "cannot be read"),
    ("GPT-2 of Hugging Face", "m/config.json", json_with("n_layer", 10**7), "asks for 10,000,000 layers, and"),
    ("GPT-2 of Hugging Face", "m/config.json", json_with("n_embd", 10**400), "not a whole number above 0"),
    ("GPT-2 of Hugging Face", "m/config.json", json_with("layer_norm_epsilon", 10**400), "not a number from 0 on"),
    ("GPT-2 of Hugging Face", "m/model.safetensors", header_of(to(DEEP)), "not a safetensors file"),
    (
        "BLOOM in three files", "m/model.safetensors.index.json",
        json_with("weight_map", "transformer.ln_f.bias", "x" * 5000), "does not exist",
    ),
    ("pytorch_model.bin", "pytorch_model.bin", last_data_bit, "is not what was written (checksum)"),
    ("pytorch_model.bin", "pytorch_model.bin", stretched, "4 bytes stored of it, which do not suffice"),
    ("Megatron's ranks", "iter_0000005/mp_rank_01/model_optim_rng.pt", last_data_bit, "was written (checksum)"),
    ("Megatron's ranks", "latest_checkpointed_iteration.txt", to(DIGITS), "which is not a step"),
    ("Megatron's torch_dist", "iter_0000005/common.pt", lambda content: content.replace(b"args", b"arks"), "checksum"),
    ("WikiText103", "a.tokens", to(b"( [ { \" ' " * 30_000), None),
    ("squad1.1", "dev-v1.1.json", json_with("data", 0, "paragraphs", 0, "context", "( " * 50_000), None),
    ("text, .jsonl.gz", "a.jsonl.gz", to(b""), "is empty, so it is not a compressed file"),
    ("text, .jsonl", "a.jsonl", lambda content: content + b'{"' + b"x" * 5000 + b'": 1}', "there is no key 'text'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The files of a reader, written once."""
    written = {}

    def files(reader):
        if reader.name not in written:
            folder = tmp_path_factory.mktemp("sound")
            reader.write(folder)
            found = (file for file in sorted(folder.rglob("*")) if file.is_file())
            written[reader.name] = {str(file.relative_to(folder)): file.read_bytes() for file in found}
        return written[reader.name]

    return files


@pytest.mark.parametrize(("name", "file", "change", "words"), WORST, ids=[f"{w[0]}-{i}" for i, w in enumerate(WORST)])
def test_what_no_reader_can_mean_is_refused_in_one_sentence(tmp_path, sound, name, file, change, words):
    if name.startswith(("Megatron", "pytorch")):
        pytest.importorskip("torch")
    (reader,) = [reader for reader in READERS if reader.name == name]
    files = sound(reader)
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
    assert len(sentence) < 2 * LONGEST


def test_a_cache_nested_too_deeply_is_built_again(tmp_path, sound):
    (reader,) = [reader for reader in READERS if reader.name == "cache of indices"]
    files = sound(reader)
    (manifest,) = [name for name in files if name.endswith(".json")]
    assert _read(reader, {**files, manifest: DEEP}, tmp_path / "case") == _read(reader, files, tmp_path / "whole")


def test_the_layers_of_a_distributed_checkpoint_need_room_in_its_files(tmp_path):
    from mjax.interop.megatron.distributed import DistributedTensors
    from mjax.interop.megatron.pickles import Chunk, Stored

    (tmp_path / "__0_0.distcp").write_bytes(bytes(1000))
    chunk = Chunk((0, 0), (10**9, 6), "__0_0.distcp", 0, 1000)
    stored = Stored("float32", (10**9, 6), (chunk,))
    for tensor in (stored, replace(stored, chunks=(replace(chunk, length=10**12),)), Stored("float32", (10**9, 0), ())):
        with pytest.raises(UsageError, match=r"have no room|other parts"):
            DistributedTensors(tmp_path, {"decoder.layers.mlp.linear_fc2.bias": tensor})


def test_a_pickle_may_not_number_objects_beyond_its_bytes(tmp_path):
    from mjax.interop.megatron.pickles import read_metadata

    (tmp_path / ".metadata").write_bytes(b"\x80\x04N" + b"r" + struct.pack("<I", 2**31) + b".")  # asks for 32 GiB
    with pytest.raises(UsageError, match=r"not a \.metadata"):
        read_metadata(tmp_path / ".metadata")


def test_a_checkpoint_that_holds_itself_is_refused():
    from mjax.interop.megatron.names import flat

    tree = {"model": 1}
    tree["again"] = tree
    with pytest.raises(UsageError, match="nested too deeply"):
        flat(tree)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--name", "x" * 5000],
        ["train", "--config", "x" * 5000],
        ["train", "--resume", "x" * 5000],
        ["prepare", "x" * 5000, "--output", "y"],
        ["data", "inspect", "x" * 5000],
        ["convert", "from-hf", "x" * 5000, "y"],
        ["generate", "--prompt", "a", "--checkpoint", "x" * 5000],
    ],
    ids=lambda arguments: " ".join(word[:12] for word in arguments),
)
def test_a_name_of_5000_characters_is_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "xxxx" in said
    assert len(said) < 2 * LONGEST
    assert "Errno" not in said


def test_a_sentence_is_one_line_that_can_be_printed():
    assert one_sentence("a\nb\x1b[31m\ud800") == "a\\nb\\x1b[31m\\ud800"
    assert one_sentence("é\u00a0漢字 “x” …") == "é\u00a0漢字 “x” …"
    long = one_sentence(f"begin {'x' * 10_000} end")
    assert long.startswith("begin xxx")
    assert long.endswith("xxx end")
    assert len(long) <= LONGEST


@pytest.mark.parametrize("depth", [DEEPEST, DEEPEST + 1])
def test_json_is_nested_so_deeply_and_no_deeper(depth):
    text = "[" * depth + "]" * depth
    if depth <= DEEPEST:
        assert parse_json(text, "a", "b") is not None
        return
    with pytest.raises(UsageError, match="nested"):
        parse_json(text, "a", "b")


DEFECTS = """
import os, sys, time
import benchmarks.mutations as engine
from benchmarks.mutated_files import Reader

engine.SECONDS = 0.3

def spin(folder):
    while True:
        pass

def allocate(folder):
    return len(bytearray(2**34))

def refuse(folder):
    raise engine.UsageError("no")

def ramble(folder):
    raise engine.UsageError("")

def differ(folder):
    return (folder / "a").read_bytes() if (folder / "a").is_file() else None

def read(one):  # sound while it is read as a whole
    return lambda folder: "whole" if folder.name == "whole" else one(folder)

for one in (spin, allocate, refuse, ramble, differ, lambda folder: os.abort(), lambda folder: 1 / 0):
    reader = Reader("x", lambda folder: (folder / "a").write_bytes(b"abc"), read(one), checked=("*",))
    print(*[outcome.kind for outcome in engine.outcomes_of(reader, 0, 2)])
"""


@pytest.mark.ci
def test_the_campaign_tells_defects_of_every_kind():
    ended = subprocess.run(
        [sys.executable, "-c", DEFECTS], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )
    kinds = ["hangs", "tracebacks", "refused", "tracebacks", "silent", "tracebacks", "tracebacks"]
    assert ended.stdout.splitlines() == [" ".join([kind] * 2) for kind in kinds], ended.stderr


def test_a_case_of_the_campaign_is_always_the_same(sound):
    reader = READERS[1]
    files = sound(reader)
    cases = [mutated(reader, files, 3, case) for case in range(20)]
    assert cases == [mutated(reader, files, 3, case) for case in range(20)]
    assert len({str(case) for case in cases}) > 15
