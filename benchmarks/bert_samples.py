"""BERT's samples, indexed and masked, compared with megatron-core on the same machine at the same time.

    python benchmarks/bert_samples.py

Documents are synthetic: sentences per document and tokens per sentence are log-normal with means of 18 and 24. The
contenders alternate in one process, on one thread of one core; the fastest round counts. Their arrays must be equal, or
the exit code is 1. megatron-core must be installed (pip install -r requirements-parity.txt).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.command import check_counts, check_peers, in_one_sentence
from mjax.data.bert import BertDataset, WordPieceVocabulary, build_pair_index
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter

SEED, SHORT = 1234, 0.1
IS_CONTINUATION = np.random.default_rng(0).random(30_522) < 0.19
PIECES = WordPieceVocabulary(cls=101, sep=102, mask=103, pad=0, is_continuation=IS_CONTINUATION)


def sentences(documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of sentences, and the bounds of documents."""
    random = np.random.default_rng(0)
    counts = np.maximum(1, random.lognormal(2.5, 0.9, documents)).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return np.clip(random.lognormal(3.1, 0.5, bounds[-1]), 1, 400).astype(np.int32), bounds


def datasets(prefix: str, samples: int, sequence: int) -> tuple:
    """Both libraries' datasets over the same files, ours first."""
    from megatron.core.datasets import bert_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    indexed = IndexedDataset(prefix)
    ours = BertDataset(indexed, range(indexed.documents), samples, sequence, SEED, pieces=PIECES)
    words = {number: "##x" if continues else "x" for number, continues in enumerate(PIECES.is_continuation.tolist())}
    ids = {"cls": PIECES.cls, "sep": PIECES.sep, "mask": PIECES.mask, "pad": PIECES.pad}
    config = bert_dataset.BERTMaskedWordPieceDatasetConfig(
        random_seed=SEED,
        sequence_length=sequence,
        split="1,0,0",
        path_to_cache=f"{prefix}.megatron",
        tokenizer=SimpleNamespace(**ids, inv_vocab=words, unique_identifiers={}),
        masking_probability=0.15,
        short_sequence_probability=SHORT,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    documents = np.arange(indexed.documents, dtype=np.int32)
    opened = indexed_dataset.IndexedDataset(prefix)
    theirs = bert_dataset.BERTMaskedWordPieceDataset(opened, prefix, documents, samples, Split.train, config)
    return ours, theirs


def compare(what: str, rounds: int, ours: Callable, theirs: Callable, unit: int | None = None) -> bool:
    """Print a row of the table; return whether both contenders made the same array."""
    seconds, made = ([], []), [None, None]
    for _ in range(rounds):
        for turn, work in enumerate((ours, theirs)):
            start = time.thread_time()
            made[turn] = work()
            seconds[turn].append(time.thread_time() - start)
    one, two = map(min, seconds)
    speed = f": {unit / one:,.0f} samples/s" if unit else ""
    print(f"| {what}{speed} | {one:.2f} | {two:.2f} | {one / two:.2f} |", flush=True)
    return bool((made[0] == made[1]).all())


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns that each contender takes (default: 3)")
    parser.add_argument("--documents", type=int, default=10**6, help="documents that are indexed (default: 10^6)")
    parser.add_argument("--samples", type=int, default=1024, help="samples that are masked (default: 1024)")
    arguments = parser.parse_args()
    check_counts(arguments, "rounds", "documents", "samples")
    check_peers("megatron", "torch")
    import torch
    from megatron.core.datasets import helpers

    torch.distributed.get_rank = lambda: 0  # megatron-core asks for its rank even where nothing is distributed

    print("| what | mjax s | megatron-core s | mjax / megatron-core |\n| --- | ---: | ---: | ---: |", flush=True)
    agree = True
    lengths, bounds = sentences(arguments.documents)
    for sequence in (128, 512):
        agree &= compare(
            f"index of {arguments.documents:,} documents, s = {sequence}",
            arguments.rounds,
            lambda most=sequence - 3: build_pair_index(lengths, bounds, None, most, SEED),
            lambda most=sequence - 3: helpers.build_mapping(bounds, lengths, 1, 2**40, most, SHORT, SEED, False, 2),
        )
    with tempfile.TemporaryDirectory() as folder:
        lengths, bounds = sentences(max(10, arguments.samples))
        tokens = np.random.default_rng(1).integers(1000, len(PIECES.is_continuation), lengths.sum())
        with IndexedDatasetWriter(f"{folder}/d", len(PIECES.is_continuation)) as writer:
            writer.add_documents(tokens, lengths, np.diff(bounds))
        chosen = range(arguments.samples)
        for sequence in (128, 512):
            ours, theirs = datasets(f"{folder}/d", arguments.samples, sequence)
            agree &= compare(
                f"{arguments.samples:,} samples, s = {sequence}",
                arguments.rounds,
                lambda data=ours: np.stack([data[i]["tokens"] for i in chosen]),
                lambda data=theirs: np.stack([data[i]["text"] for i in chosen]),
                arguments.samples,
            )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "megatron-core"))
    print(f"\nThe fastest of {arguments.rounds} rounds; {versions}")
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} CPU cores, load {os.getloadavg()[0]:.1f}")
    if not agree:
        print("mjax and megatron-core made different samples", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
