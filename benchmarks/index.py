"""Building, blending, opening and reading indices, compared with megatron-core's compiled C++ at the same time.

    python benchmarks/index.py

Everything is synthetic: documents of log-normal lengths without their tokens (a sparse file of zeros), so nothing is
downloaded and a billion tokens take no disk space. Each contender runs in a separate process, whose peak anonymous
memory is reported: pages of memory-mapped files are excluded. Seconds are CPU time of one thread, which is wall time on
an idle machine. Contenders alternate; the fastest round counts. Their results must be equal byte for byte, or the exit
code is 1.

megatron-core is measured if it is installed (pip install -r requirements-parity.txt).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.command import check_counts, in_one_sentence
from mjax.config.batch_size import BatchSizes
from mjax.config.datasets import normalize
from mjax.data.batches import Batches
from mjax.data.cache import IndexCache
from mjax.data.indexed import HEADER, MAGIC, IndexedDataset, index_file, token_file
from mjax.data.samples import GPTDataset, build_blend_index, build_dataset_sample_index
from mjax.errors import UsageError

BILLION = 10**9
BUILDS = {  # name: mean length of a document, epochs
    "documents of 1,000 tokens": (1000, 1),
    "documents of 100 tokens": (100, 1),
    "documents of 1,000 tokens, 3 epochs": (1000, 3),
}
PILE = [18.1, 14.4, 12.1, 9.0, 8.2, 6.1, 4.9, 3.9, 3.7, 3.6, 3.1, 2.6, 2.2, 1.7, 1.5, 1.3, 1.0, 0.7, 0.6, 0.5, 0.4, 0.3]
BLENDS = {"2 datasets": [0.3, 0.7], "4 datasets": [1, 2, 3, 4], "22, as the Pile's": PILE, "100, equal": [1] * 100}
SEQUENCE = 2048
SEED = 1234


def write_dataset(prefix: Path, documents: int, mean: float) -> None:
    """The index of `documents` documents whose lengths are log-normal, and a token file that is one hole."""
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, documents)
    lengths = np.maximum(1, lengths * (mean / lengths.mean())).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with index_file(prefix).open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for array in (lengths, ends - 2 * lengths.astype(np.int64), np.arange(documents + 1, dtype=np.int64)):
            array.tofile(stream)
    with token_file(prefix).open("wb") as stream:
        stream.truncate(int(ends[-1]))


# --- Measurements, each in a separate process -------------------------------------------------------------------------


class Anonymous:
    """The peak anonymous memory of this process during the block, in MB, above that before it."""

    def __enter__(self):
        self.before = self.most = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()
        self.megabytes = max(self.most, self._now()) - self.before

    def _watch(self):
        while not self.done.wait(0.005):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def measured(work) -> dict:
    """Seconds and memory of `work()`, and a checksum of the arrays it returns."""
    with Anonymous() as memory:
        start = time.thread_time()
        arrays = work()
        seconds = time.thread_time() - start
    checksum = [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]
    return {"seconds": seconds, "megabytes": memory.megabytes, "checksum": checksum}


def build_mjax(prefix: str, epochs: int) -> dict:
    indexed = IndexedDataset(prefix)

    def work():
        samples = (epochs * indexed.tokens - 1) // SEQUENCE
        data = GPTDataset(indexed, range(len(indexed)), samples, SEQUENCE, SEED)
        return data.document_index, data.sample_index, data.shuffle_index

    return measured(work)


def build_megatron(prefix: str, epochs: int) -> dict:
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

    indexed = indexed_dataset.IndexedDataset(prefix)

    def work():
        lengths = indexed.sequence_lengths.copy()
        tokens = int(lengths.sum(dtype=np.int64))
        documents = np.arange(len(lengths), dtype=np.int32)
        random = np.random.RandomState(SEED)
        document_index = gpt_dataset._build_document_index(documents, epochs, random, False)
        sample_index = helpers.build_sample_idx(lengths, document_index, SEQUENCE, epochs, tokens)
        samples = len(sample_index) - 1
        return document_index, sample_index, gpt_dataset._build_shuffle_index(samples, samples, random)

    return measured(work)


def cached_mjax(prefix: str, folder: str) -> dict:
    """A start with cached indices: opening the dataset and checking the cache."""

    def work():
        indexed = IndexedDataset(prefix)
        kept = IndexCache([Path(folder)], print)
        data = GPTDataset(indexed, range(len(indexed)), None, SEQUENCE, SEED, cache=kept)
        return data.document_index, data.sample_index, data.shuffle_index

    work()
    return measured(work)


def blend_mjax(weights: list[float], samples: int) -> dict:
    def work():
        index = build_blend_index(normalize(weights), samples)
        return index, build_dataset_sample_index(index)

    return measured(work)


def blend_megatron(weights: list[float], samples: int) -> dict:
    from megatron.core.datasets import helpers

    def work():
        index, number = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
        helpers.build_blending_indices(index, number, normalize(weights), len(weights), samples, False)
        return index, number

    return measured(work)


def open_mjax(prefix: str) -> dict:
    return measured(lambda: [IndexedDataset(prefix).document_indices[-1:]])


def open_megatron(prefix: str) -> dict:
    from megatron.core.datasets import indexed_dataset

    def work():
        indexed = indexed_dataset.IndexedDataset(prefix)
        return [indexed.document_indices[-1:].copy()]  # its views do not outlive it

    return measured(work)


def read_mjax(prefix: str, batch: int) -> dict:
    indexed = IndexedDataset(prefix)
    batches = Batches(GPTDataset(indexed, range(len(indexed)), None, SEQUENCE, SEED), BatchSizes.constant(batch))
    batches.batch_at(1)
    return measured(lambda: batches.batch_at(0).values())


def read_megatron(prefix: str, batch: int) -> dict:
    from types import SimpleNamespace

    from megatron.core.datasets import gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE,
        split="1,0,0",
        path_to_cache=f"{prefix}.megatron",
        tokenizer=SimpleNamespace(vocab_size=50257, eod=50256, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = indexed_dataset.IndexedDataset(prefix)
    documents = np.arange(len(indexed), dtype=np.int32)
    data = gpt_dataset.GPTDataset(indexed, prefix, documents, None, Split.train, config)

    def work():
        samples = [data[i] for i in range(batch)]
        return [
            np.stack([sample[name].numpy() for sample in samples]).astype(np.int32) for name in ("tokens", "labels")
        ]

    work()
    return measured(work)


CONTENDERS = {name: work for name, work in globals().items() if name.endswith(("_mjax", "_megatron"))}

# --- The table --------------------------------------------------------------------------------------------------------


def run(contender: str, *arguments) -> dict:
    command = [sys.executable, __file__, "--contender", contender, json.dumps(arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{contender}{arguments} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


COLUMNS = ("what", "mjax s", "MB", "megatron-core s", "MB", "mjax / megatron-core")


class Rows:
    """Prints the table row by row and records whether all contenders agreed."""

    def __init__(self, rounds: int):
        self.rounds, self.agree = rounds, True
        self.peer = importlib.util.find_spec("megatron") is not None
        print("| " + " | ".join(COLUMNS) + " |\n| --- |" + " ---: |" * (len(COLUMNS) - 1), flush=True)

    def add(self, what: str, name: str, *arguments, peer: bool = True, unit: int | None = None) -> None:
        names = [f"{name}_mjax", *([f"{name}_megatron"] if peer and self.peer else [])]
        turns = [[run(contender, *arguments) for contender in names] for _ in range(self.rounds)]
        best = [min(column, key=lambda found: found["seconds"]) for column in zip(*turns, strict=True)]
        self.agree &= all(found["checksum"] == best[0]["checksum"] for found in best)
        cells = [cell for found in best for cell in (f"{found['seconds']:.2f}", f"{found['megabytes']:.0f}")]
        ratio = f"{best[0]['seconds'] / best[1]['seconds']:.2f}" if len(best) == 2 else ""
        speed = f": {unit / best[0]['seconds']:,.0f} samples/s" if unit else ""
        print("| " + " | ".join([what + speed, *cells, *[""] * (4 - len(cells)), ratio]) + " |", flush=True)


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each contender runs (default: 3)")
    parser.add_argument("--tokens", type=int, default=BILLION, help="tokens of the index builds (default: 10^9)")
    parser.add_argument("--samples", type=int, default=10**7, help="samples of the blends (default: 10^7)")
    parser.add_argument("--sequences", type=int, default=10**8, help="sequences that are opened (default: 10^8)")
    parser.add_argument("--batch", type=int, default=3072, help="samples of the batch that is read (default: 3072)")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, values = arguments.contender
        print(json.dumps(CONTENDERS[name](*json.loads(values))))
        return 0
    check_counts(arguments, "rounds", "samples", "sequences", "batch")
    least = 3 * arguments.batch * SEQUENCE  # two batches are read, and documents are cut off at whole ones
    if arguments.tokens < least:
        raise UsageError(f"--tokens is {arguments.tokens:,}; with --batch {arguments.batch} use {least} or more")

    rows = Rows(arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        prefixes = {}
        for name, (mean, epochs) in BUILDS.items():
            prefixes[mean] = prefix = Path(folder) / f"documents{mean}"
            if not index_file(prefix).exists():
                write_dataset(prefix, arguments.tokens // mean, mean)
            rows.add(f"build, {name}", "build", str(prefix), epochs)
        rows.add(
            "start with indices on disk, documents of 100", "cached", str(prefixes[100]), f"{folder}/c", peer=False
        )
        for name, weights in BLENDS.items():
            rows.add(f"blend of {arguments.samples:,}, {name}", "blend", weights, arguments.samples)
        for mean, prefix in prefixes.items():
            what = f"read {arguments.batch:,} × {SEQUENCE:,}, documents of {mean:,}"
            rows.add(what, "read", str(prefix), arguments.batch, unit=arguments.batch)
        many = Path(folder) / "many"
        write_dataset(many, arguments.sequences, 100)
        rows.add(f"open {arguments.sequences:,} sequences", "open", str(many))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", *["megatron-core"] * rows.peer))
    print(f"\nThe fastest of {arguments.rounds} rounds; {versions}")
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} CPU cores, load {os.getloadavg()[0]:.1f}")
    if not rows.agree:
        print("mjax and megatron-core built different indices", file=sys.stderr)
    return 0 if rows.agree else 1


if __name__ == "__main__":
    sys.exit(main())
