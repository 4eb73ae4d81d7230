"""`mjax dedup`: keep only the first of documents that are the same, or nearly the same.

Exact duplicates have the same text, byte for byte. Near-duplicates have a Jaccard similarity of their shingles at or
above a threshold (0.7 in arXiv 1909.08053, section 4): shingles.py defines it, and near_duplicates.py
finds candidates and compares them. Similar pairs are joined into clusters, and the first document of each cluster is
kept. So a removed document is at least as similar as the threshold to some other document of its cluster, which need
not be the one that was kept.

The corpus is read three times. Worker processes get raw blocks of it, so that the main process only reads and writes.
Memory holds about 100 bytes a document, however long it is, and the names of those that are removed:

    1. every text    → its digest, its signature, its bands           files of 600 to 950 bytes a document
    2. candidates    → their shingles                                 a file of 8 bytes a word
    3. every text    → kept or removed

These files lie beside the output until it is complete.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from mjax.config.bounds import Count
from mjax.data.corpus import Corpus, Document, near_duplicates, outputs, parse
from mjax.data.corpus.blocks import Block
from mjax.data.corpus.near_duplicates import Bands, Clusters
from mjax.data.corpus.outputs import EXAMPLES, CleanedFiles, FilterArguments, Tally, where_they_differ
from mjax.data.corpus.shingles import Unit, shingle_hashes, shingle_set
from mjax.data.corpus.workers import Workers, useful_workers
from mjax.errors import RunError
from mjax.utils.progress import progress

DIGEST = "V16"  # of a text: 128 bits of BLAKE2b
EXACT, NEAR = "exact duplicate", "near-duplicate"
KEPT, NAMED, SHOWN = 1, 2, 4  # what is needed of a document: its line for the output, its source, its text


@dataclass(frozen=True, kw_only=True)
class DedupArguments(FilterArguments):
    """Remove exact and near-duplicate documents; the first of each group of similar ones in the input is kept."""

    exact: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Remove only documents whose text is the same, byte for byte."""
    threshold: float = 0.7
    """Jaccard similarity of shingles at which documents are near-duplicates, 0.3 to 1."""
    shingles: Unit = "words"
    """Unit of a shingle: words in lower case without punctuation, or characters as they are (for languages that put no
    spaces between words)."""
    shingle_size: Count = 5
    """Words or characters in a shingle. Megatron's tools took 5 characters."""


def dedup(arguments: DedupArguments) -> dict[str, Any]:
    """Remove duplicates, print a summary and return the report.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or the input changed while it was read.
    """
    corpus, bands = arguments.open(), near_duplicates.choose_bands(arguments.threshold)
    files = CleanedFiles(arguments, corpus.files)
    with files, Workers(useful_workers(arguments.workers, corpus.size)) as workers:
        duplicates = find_duplicates(corpus, arguments, bands, files.folder, workers)
        report = {"command": "dedup", "inputs": corpus.names, **_write(corpus, arguments, files, duplicates, workers)}
        if duplicates.clusters is not None:
            report["near_duplicates"] = _near_report(arguments, bands, duplicates)
        report = files.finish(report, corpus)
    files.show(report, _remarks(arguments, report))
    return report


def _remarks(arguments: DedupArguments, report: dict[str, Any]) -> Iterator[str]:
    """Remarks below the table."""
    if near := report.get("near_duplicates"):
        recall = near["expected_recall"][f"{arguments.threshold:.3g}"]
        plural = "s" * (near["clusters"] != 1)
        yield (
            f"{near['clusters']:,} cluster{plural} of near-duplicates, the largest of {near['largest_cluster']:,}; "
            f"{near['pairs_compared']:,} pairs compared, {near['pairs_confirmed']:,} of them similar.\n"
            f"{near['bands']} bands of {near['rows']} hashes are expected to find {recall:.1%} of the pairs at "
            f"{near['threshold']:g}, and more of those above."
        )


# --- Finding: the first two readings ----------------------------------------------------------------------------------


@dataclass
class Duplicates:
    """Duplicates of every document of a corpus, in input order.

    Attributes:
      same: the first document with the same text, which may be itself; int64 [documents].
      blocks: documents in each block of the corpus.
      clusters: near-duplicates among the first ones; None if only exact duplicates were looked for.
      candidates: documents whose shingles were compared with others'.
    """

    same: np.ndarray
    blocks: list[int]
    clusters: Clusters | None = None
    candidates: int = 0

    @property
    def instead(self) -> np.ndarray:
        """int64 [documents]: the document kept in place of each, itself where it is kept."""
        return self.same if self.clusters is None else self.clusters.first[self.same]

    @property
    def near(self) -> np.ndarray:
        """bool [documents]: whether it is removed although no earlier document has the same text."""
        numbers = np.arange(len(self.same))
        return (self.instead != numbers) & (self.same == numbers)

    def read_again(self, corpus: Corpus, verb: str, values: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
        """Read the corpus again: its blocks, each with its part of `values` [documents]."""
        parts = np.split(values, np.cumsum(self.blocks)[:-1]) if self.blocks else []
        for block, part in zip_longest(outputs.watched_blocks(corpus, verb), parts):
            if block is None or part is None:
                raise RunError(f"{corpus.names[-1]} changed while it was read; run the same command again")
            yield block, part


def find_duplicates(corpus: Corpus, how: DedupArguments, bands: Bands, folder: Path, workers: Workers) -> Duplicates:
    """Read `corpus` once, or twice to look for near-duplicates; `folder` is for temporary files."""
    sketches = near_duplicates.SketchFiles(folder, bands.count)
    digests = [np.empty(0, DIGEST)]
    for part in outputs.first_reading(corpus, "reading", workers, partial(_read_block, how, bands)):
        digests.append(part.digests)
        if part.sketches is not None:
            sketches.append(part.sketches)
    sketches.close()
    _, first, group = np.unique(np.concatenate(digests), return_index=True, return_inverse=True)
    same = first[group]
    duplicates = Duplicates(same, [len(part) for part in digests[1:]])
    if how.exact or len(same) == 0:
        return duplicates

    distinct = same == np.arange(len(same))
    chosen = near_duplicates.candidates(sketches, distinct)
    duplicates.candidates = len(chosen)
    wanted = np.zeros(len(same), bool)
    wanted[chosen] = True
    shingles = near_duplicates.ShingleFile(folder / "shingles", chosen)
    tasks = (task for task in duplicates.read_again(corpus, "shingling", wanted) if task[1].any())
    shingles.write(workers.map(partial(_shingle_block, how), tasks))
    with progress("comparing", bands.count) as advance:
        duplicates.clusters = near_duplicates.find_clusters(
            sketches, distinct, shingles, how.threshold, workers, lambda: advance(1)
        )
    return duplicates


class _Reading(NamedTuple):
    """The digests of a block's documents, DIGEST [documents], their sketches, and malformed lines."""

    digests: np.ndarray
    sketches: near_duplicates.Sketches | None
    malformed: list[str]


def _read_block(how: DedupArguments, bands: Bands, block: Block) -> _Reading:
    documents, malformed = parse(block, how.key)
    texts = [document.text for document in documents]
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    sketched = None if how.exact or not texts else near_duplicates.sketch(texts, how.shingle_size, how.shingles, bands)
    return _Reading(np.frombuffer(digests, DIGEST), sketched, malformed)


def _shingle_block(how: DedupArguments, task: tuple[Block, np.ndarray]) -> list[np.ndarray]:
    """Distinct shingles of the wanted documents of a block."""
    texts = [document.text for document, want in zip(_documents(how, *task), task[1], strict=True) if want]
    hashes, offsets = shingle_hashes(texts, how.shingle_size, how.shingles)
    return [shingle_set(hashes[begin:end]) for begin, end in pairwise(offsets)]


def _documents(how: DedupArguments, block: Block, values: np.ndarray) -> list[Document]:
    """The documents of a block; `values` holds one for each."""
    documents, _ = parse(block, how.key)
    if len(documents) != len(values):
        raise RunError(f"{block.file} changed while it was read; run the same command again")
    return documents


# --- Writing: the third reading ---------------------------------------------------------------------------------------


def _write(
    corpus: Corpus, how: DedupArguments, files: CleanedFiles, duplicates: Duplicates, workers: Workers
) -> dict[str, Any]:
    """Write the documents kept, and the record of those removed; returns the steps of the report."""
    numbers = np.arange(len(duplicates.same))
    instead, similar, similarity = duplicates.instead, duplicates.same.copy(), np.ones(len(numbers))
    is_kept, exact, near = instead == numbers, duplicates.same != numbers, duplicates.near
    if duplicates.clusters is not None:
        similar[near], similarity[near] = duplicates.clusters.similar[near], duplicates.clusters.similarity[near]
    removed = np.flatnonzero(~is_kept)
    # Examples are the least similar near-duplicates, the most doubtful removals.
    doubtful = np.flatnonzero(near)[np.argsort(similarity[near], kind="stable")]
    examples = {EXACT: np.flatnonzero(exact)[:EXAMPLES], NEAR: doubtful[:EXAMPLES]}

    needed = np.where(is_kept, KEPT, 0).astype(np.uint8)
    needed[np.concatenate((removed, instead[removed], similar[removed]))] |= NAMED
    for shown in examples.values():
        needed[np.concatenate((shown, similar[shown]))] |= SHOWN
    sizes, sources, texts, first = [np.empty(0, np.int64)], {}, {}, 0
    for part in workers.map(partial(_write_block, how), duplicates.read_again(corpus, "writing", needed)):
        files.kept.write(part.lines)
        sizes.append(part.sizes)
        sources |= {first + number: source for number, source in part.sources.items()}
        texts |= {first + number: text for number, text in part.texts.items()}
        first += len(part.sizes)

    def story(number: int) -> dict[str, Any]:
        return {
            "source": sources[number],
            "reason": EXACT if exact[number] else NEAR,
            "kept": sources[instead[number]],
            "similar_to": sources[similar[number]],
            "jaccard": round(float(similarity[number]), 4),
        }

    def example(number: int) -> dict[str, Any]:
        text, other = where_they_differ(texts[number], texts[similar[number]])
        return {**story(number), "text": text, "similar_text": other}

    for number in removed.tolist():
        files.removed.write(outputs.json_line(story(number)))
    size = np.concatenate(sizes)

    def tally(name: str, which: np.ndarray) -> Tally:
        shown = [example(number) for number in examples.get(name, np.empty(0, int)).tolist()]
        return Tally(name, int(which.sum()), int(size[which].sum()), shown)

    steps = [tally(EXACT, exact)] + ([] if duplicates.clusters is None else [tally(NEAR, near)])
    return {"read": tally("read", is_kept | ~is_kept), "removed": steps, "kept": tally("kept", is_kept)}


class _Part(NamedTuple):
    """The result of one block.

    Attributes:
      lines: the documents kept, as lines of JSON.
      sizes: bytes of text in UTF-8, int64 [documents].
      sources: of the documents that are NAMED, by their number in the block.
      texts: of the documents that are SHOWN, by their number in the block.
    """

    lines: bytes
    sizes: np.ndarray
    sources: dict[int, str]
    texts: dict[int, str]


def _write_block(how: DedupArguments, task: tuple[Block, np.ndarray]) -> _Part:
    documents, needed = _documents(how, *task), task[1]
    kept, named, shown = (np.flatnonzero(needed & flag).tolist() for flag in (KEPT, NAMED, SHOWN))
    return _Part(
        lines=b"".join(outputs.document_line(documents[number], how.key) for number in kept),
        sizes=np.array([len(document.text.encode()) for document in documents], np.int64),
        sources={number: documents[number].source for number in named},
        texts={number: documents[number].text for number in shown},
    )


def _near_report(how: DedupArguments, bands: Bands, duplicates: Duplicates) -> dict[str, Any]:
    """The report's section about near-duplicates: how they were found, and how many."""
    clusters, near = duplicates.clusters, duplicates.near
    sizes = np.unique(clusters.first[duplicates.same == np.arange(len(near))], return_counts=True)[1]
    edges = np.linspace(how.threshold, 1, 7)
    counts = np.histogram(clusters.similarity[near], edges)[0].tolist()
    return {
        "threshold": how.threshold,
        "shingles": f"{how.shingle_size} {how.shingles}",
        "hashes": near_duplicates.HASHES,
        "bands": bands.count,
        "rows": bands.rows,
        "expected_recall": {f"{edge:.3g}": round(bands.recall(edge), 5) for edge in edges},
        "candidates": duplicates.candidates,
        "pairs_compared": clusters.compared,
        "pairs_confirmed": clusters.confirmed,
        "clusters": int((sizes > 1).sum()),
        "largest_cluster": int(sizes.max(initial=0)),
        "removed_by_jaccard": {f"{edges[i]:.3g} to {edges[i + 1]:.3g}": count for i, count in enumerate(counts)},
    }
