"""One small valid file of each kind that mjax reads, and its reader, for `mutations.py`.

A reader's `read` returns the contents of the files as plain values that can be compared. `expected` is a second reader,
independent of mjax, if the format is simple enough for one.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import os
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import EllipsisType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mjax.checkpoint.folders import Base, check_files, read_manifest, write_manifest
from mjax.config import Config, HealthConfig, read_config, save_config, to_dict
from mjax.config.checks import validate
from mjax.config.datasets import DatasetMetadata, read_metadata
from mjax.config.model_file import ModelFile
from mjax.data.cache import MIN_CACHED_BYTES, IndexCache
from mjax.data.corpus.documents import TextFiles
from mjax.data.indexed import HEADER, IndexedDataset, IndexedDatasetWriter, write_metadata
from mjax.finetuning.recipe import FinetuneArguments, make_request, with_start_step
from mjax.finetuning.tuning import read_epochs
from mjax.run.continuing import Origin
from mjax.run.health import Health
from mjax.run.metrics import read_metrics
from mjax.tasks.labelled import RECIPES, open_task
from mjax.tasks.zero_shot import Lambada, WikiText103
from tests.data.vocabularies import LLAMA, TEXTS, bert_file, foreign_model, gpt2_files, hf_byte_pairs
from tests.faults.mutated_models import (
    expected_hf,
    read_hf,
    read_megatron,
    spec_reader,
    write_distributed,
    write_megatron,
    write_pickled,
)
from tests.interop.folders import BERT, BLOOM, tensors_of, write_folder
from tests.small import small_config
from tests.tasks.synthetic import tokenizer_of, write_task

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Files = dict[str, bytes | EllipsisType | None]
LINES = [{"text": "Once upon a time."}, {"text": "été 漢字 \U0001f600", "n": 1}, {"id": 7, "text": ""}] * 5
BINARY = np.random.default_rng(0)


@dataclass(frozen=True)
class Reader:
    """A kind of files and its reader.

    Attributes:
      name: in the table.
      write: writes valid files into an empty folder.
      read: returns the contents of the files in a folder.
      expected: the same by a second reader, from the files' bytes by name.
      checked: patterns of the names of files that are protected by checksums.
      only: patterns of the names of the files to damage.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    expected: Callable[[Files], Any] | None = None
    checked: tuple[str, ...] = ()
    only: tuple[str, ...] = ("*",)

    def make(self, folder: Path) -> Files:
        """The valid files by name, written into an empty folder by another process, which may start JAX."""
        writer = multiprocessing.get_context("fork").Process(target=self.write, args=(folder,))
        writer.start()
        writer.join()
        files = (file for file in sorted(folder.rglob("*")) if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}

    def damaged(self, files: Files) -> list[str]:
        """The names of the files to damage."""
        return [name for name in files if any(fnmatch(name, pattern) for pattern in self.only)]

    def is_checked(self, name: str, how: str) -> bool:
        """True if damage to a file cannot change its contents unnoticed, because a checksum detects it."""
        return how != "zipped again" and any(fnmatch(name, pattern) for pattern in self.checked)


# --- Text -------------------------------------------------------------------------------------------------------------


def _jsonl() -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [line["text"] for line in LINES], "n": list(range(len(LINES)))})
    parquet.write_table(table, folder / "a.parquet", write_page_checksum=True)


def _texts(name: str) -> Callable[[Path], list[str]]:
    return lambda folder: [document.text for document in TextFiles([folder / name])]


def _expected_lines(name: str, unpack: Callable[[bytes], bytes] = bytes) -> Callable[[Files], list[str]]:
    return lambda files: [json.loads(line)["text"] for line in unpack(files[name]).split(b"\n") if line.strip()]


def _expected_text(files: Files) -> list[str]:
    return ["\n".join(files["a.txt"].decode("utf-8-sig").replace("\r\n", "\n").split("\r"))]


# --- Datasets ---------------------------------------------------------------------------------------------------------


def _write_indexed(folder: Path) -> None:
    with IndexedDatasetWriter(folder / "d", 70_000) as writer:
        for length in ([3], [1, 0, 6], [5], [100]):
            writer.add_document(*(BINARY.integers(0, 70_000, n) for n in length))


def _read_indexed(folder: Path) -> list:
    data = IndexedDataset(folder / "d")
    joined = data.read_span(np.arange(len(data)), 0, int(data.lengths[-1]))
    assert joined.tolist() == [token for i in range(len(data)) for token in data.get(i).tolist()]
    return [data.get(i).tolist() for i in range(len(data))]


def _expected_indexed(files: Files) -> list:
    index, tokens = files["d.idx"], files["d.bin"]
    magic, version, code, sequences, _ = HEADER.unpack_from(index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    form = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    return [list(struct.unpack_from(f"<{n}{form}", tokens, begin)) for begin, n in zip(pointers, lengths, strict=True)]


METADATA = DatasetMetadata("bytes", 257, 256, True, 3, 100, 97, ["a.txt", "b.jsonl"], "1.0", 3, None, 1, ["a:1: no"])


def _expected_metadata(files: Files) -> dict | None:
    if files["d.json"] in (None, ...):
        return None
    values, plain = json.loads(files["d.json"]), dataclasses.asdict(METADATA)
    defaults = {"sequences": None, "sentences": None, "malformed": 0, "malformed_examples": []}
    return {name: values[name] if name in values else defaults[name] for name in plain}


def _cached(folder: Path) -> dict[str, int]:
    built = {"a": np.arange(MIN_CACHED_BYTES // 4, dtype=np.int32), "b": np.ones((3, 2), np.int64)}
    arrays = IndexCache([folder], lambda line: None).load_or_build({"seed": 1, "kind": "x"}, ("a", "b"), lambda: built)
    return {
        name: (str(array.dtype), array.shape, zlib.crc32(np.ascontiguousarray(array))) for name, array in arrays.items()
    }


# --- Configs and what else is JSON ------------------------------------------------------------------------------------


def _read_run_config(folder: Path) -> dict:
    config = read_config(folder / "config.json")
    validate(config)
    return json.loads(json.dumps(to_dict(config)))


def _expected_run_config(files: Files) -> dict:
    values, plain = json.loads(files["config.json"]), json.loads(json.dumps(to_dict(Config())))
    found = {section: {**fields, **values.get(section, {})} for section, fields in plain.items()}
    for name, default in plain["data"].items():
        if isinstance(default, list) and not isinstance(found["data"][name], list):  # none or one, as it once was
            found["data"][name] = [] if found["data"][name] is None else [found["data"][name]]
    return found


def _settings(step: int | None) -> dict:
    arguments = FinetuneArguments(Path("runs/a"), "mnli", ("a.tsv",), ("b.tsv",), step=step)
    return make_request(arguments, RECIPES["mnli"], 10, "fp32")


def _request(folder: Path) -> dict:
    return with_start_step(_settings(None), folder)


def _write_request(folder: Path) -> None:
    (folder / "request.json").write_text(json.dumps(_settings(5)))


EPOCHS = [{"epoch": n, "step": 8 * n, "loss": 1.0 / n, "figures": {"accuracy": 0.5}} for n in (1, 2, 3)]
METRICS = "".join(json.dumps({"step": n, "loss": 2.0, "val_loss": None, "tokens": 8 * n}) + "\n" for n in range(1, 9))


RECORDS = [
    {"step": n, "loss": 9.0 - n, "tokens": 8 * n, "tokens_per_second": 5.0, "skipped": False} | more
    for n, more in enumerate(({}, {"val_loss": 7.0}, {"nonfinite": None, "expert_load": 1.0}), start=1)
]
START = {"began": "2026-01-01T00:00:00+00:00", "seen": "2026-01-01T01:00:00+00:00", "first": 0, "last": 3}
ROLLBACK = {"steps": [1, 2], "spike": 2, "loss": 9.5, "from": 1}
HOST = {"health": Health(HealthConfig()).as_dict(), "suspect": True, "passed_over": [ROLLBACK], "continued_from": None}
RUN_FILES = {
    "config.json": to_dict(small_config()),
    "metrics.jsonl": RECORDS,
    "environment.json": [{"parameters": 1000, "mesh": "data 1"}],
    "goodput.json": [START | {"seconds": {"steps": 60.0}}, START | {"seconds": {"saving": 1.5}}],
    "checkpoints/good.json": {"step": 3},
    "checkpoints/3/manifest.json": HOST,  # its values for the host; damage to others changes its checksum
    "base.json": asdict(Base("/runs/base", 3, "00ff")),
    "init.json": asdict(Origin("/runs/origin", 3, {"model.dropout": ("0.1", "0.0")})),
    "data.json": {"path": ["5d41", "402a"]},
    "model.json": asdict(ModelFile("/models/file.py", "00ff", 1000)),
    "experts.json": {"step": 3, "shares": [[0.5, 0.5]]},
    "passed_over.json": [ROLLBACK],
    "unhealthy.json": {"problem": "4 steps in a row were skipped", "way_out": "continue with --step 1"},
}


def _write_checkpoint(folder: Path) -> None:
    (folder / "5" / "model").mkdir(parents=True)
    for name in ("model/a", "model/b", "_METADATA"):
        (folder / "5" / name).write_bytes(BINARY.bytes(300))
    write_manifest(folder / "5", 5, {"model.a": ["float32", [3, 4]]})


def _read_checkpoint(folder: Path) -> dict:
    manifest = read_manifest(folder / "5", lambda line: None)
    check_files(folder / "5", manifest["files"], None, lambda line: None)
    return manifest


# --- Tasks ------------------------------------------------------------------------------------------------------------


def _task(name: str) -> tuple[Callable[[Path], object], Callable[[Path], Any]]:
    def read(folder: Path) -> list:
        files = sorted(str(file.relative_to(folder)) for file in folder.iterdir() if file.name != "vocab.txt")
        train = [str(folder / file) for file in files if "train" in file]
        validation = [str(folder / file) for file in files if "dev" in file]
        task = open_task(name, train, validation, tokenizer_of(folder), 32)
        sets = [task.train, *task.validation.values()]
        return [(one.tokens.tolist(), {key: part.tolist() for key, part in one.labels.items()}) for one in sets]

    return lambda folder: write_task(folder, name, train=8, validation=8), read


def _task_reader(name: str) -> Reader:
    write, read = _task(name)
    return Reader(name, write, read, only=("*train*", "*dev*"))


def _windows(task: type, name: str) -> Callable[[Path], list]:
    def read(folder: Path) -> list:
        from mjax.data.tokenizers import ByteTokenizer

        made = task(str(folder / name), ByteTokenizer(), 64)
        return [[(window.tokens.tolist(), window.counted) for window in windows] for windows in made.passes]

    return read


def _write(name: str, content: Callable[[], bytes] | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content() if callable(content) else content)


READERS = [
    Reader("text, .txt", _write("a.txt", "".join(TEXTS).encode()), _texts("a.txt"), _expected_text),
    Reader("text, .jsonl", _write("a.jsonl", _jsonl), _texts("a.jsonl"), _expected_lines("a.jsonl")),
    Reader(
        "text, .jsonl.gz",
        _write("a.jsonl.gz", lambda: gzip.compress(_jsonl())),
        _texts("a.jsonl.gz"),
        _expected_lines("a.jsonl.gz", gzip.decompress),
    ),
    Reader(
        "text, .jsonl.zst",
        _write("a.jsonl.zst", lambda: zstd.compress(_jsonl(), options={zstd.CompressionParameter.checksum_flag: 1})),
        _texts("a.jsonl.zst"),
        _expected_lines("a.jsonl.zst", zstd.decompress),
    ),
    Reader("text, .parquet", _parquet, _texts("a.parquet")),
    Reader("indexed dataset", _write_indexed, _read_indexed, _expected_indexed),
    Reader(
        "dataset's metadata",
        lambda folder: write_metadata(folder / "d", METADATA),
        lambda folder: (found := read_metadata(folder / "d")) and dataclasses.asdict(found),
        _expected_metadata,
    ),
    Reader("cache of indices", _cached, _cached, checked=("*",)),
    Reader(
        "tokenizer.json",
        _write("tokenizer.json", lambda: hf_byte_pairs().to_str().encode()),
        spec_reader("hf:{}/tokenizer.json"),
    ),
    Reader("vocab.json, merges.txt", gpt2_files, spec_reader("gpt2:{0}/vocab.json,{0}/merges.txt")),
    Reader("vocab.txt", lambda folder: bert_file(folder, lowercase=True), spec_reader("bert-uncased:{}/vocab.txt")),
    Reader(
        "sentencepiece model",
        _write("a.model", lambda: foreign_model(**LLAMA, control_symbols=["<|endoftext|>"])),
        spec_reader("sentencepiece:{}/a.model"),
    ),
    Reader(
        "config.json of a run",
        lambda folder: save_config(small_config(), folder / "config.json"),
        _read_run_config,
        _expected_run_config,
    ),
    Reader(
        "metrics.jsonl",
        _write("metrics.jsonl", METRICS.encode()),
        lambda folder: read_metrics(folder / "metrics.jsonl"),
    ),
    Reader("checkpoint", _write_checkpoint, _read_checkpoint, checked=("*",)),
    Reader("request.json", _write_request, _request),
    Reader("epochs.json", _write("epochs.json", lambda: json.dumps(EPOCHS, indent=1).encode()), read_epochs),
    Reader(
        "GPT-2 of Hugging Face",
        lambda folder: write_folder(folder / "m"),
        lambda folder: read_hf(folder / "m"),
        expected_hf,
    ),
    Reader(
        "BERT of Hugging Face",
        lambda folder: write_folder(folder / "m", BERT, tensors_of(BERT)),
        lambda folder: read_hf(folder / "m"),
        expected_hf,
    ),
    Reader(
        "BLOOM in three files",
        lambda folder: write_folder(folder / "m", BLOOM, tensors_of(BLOOM), parts=3),
        lambda folder: read_hf(folder / "m"),
        expected_hf,
    ),
    Reader("pytorch_model.bin", write_pickled, lambda folder: read_hf(folder, True), checked=("*.bin",)),
    Reader("Megatron's ranks", write_megatron, read_megatron, checked=("*.pt",)),
    Reader("Megatron's ranks of 2020", lambda folder: write_megatron(folder, legacy=True), read_megatron),
    Reader("Megatron's torch_dist", write_distributed, read_megatron, checked=("*.pt", "*.distcp")),
    *map(_task_reader, ("mnli", "qqp", "race", "squad1.1", "squad2.0")),
    Reader("LAMBADA", _write("a.jsonl", b'{"text": "we saw the old red house"}\n' * 4), _windows(Lambada, "a.jsonl")),
    Reader(
        "WikiText103",
        _write("a.tokens", b" = Title = \n \n we saw 1 @,@ 000 old houses . \n" * 3),
        _windows(WikiText103, "a.tokens"),
    ),
]
