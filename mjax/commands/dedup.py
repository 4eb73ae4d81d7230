"""`mjax dedup`: keep only the first of documents that are the same, or nearly the same.

Exact duplicates have the same text, byte for byte. Near-duplicates have a Jaccard similarity of their shingles at or
above a threshold (0.7 in arXiv 1909.08053, section 4): shingles.py defines it, and near_duplicates.py
finds candidates and compares them. Similar pairs are joined into clusters, and the first document of each cluster is
kept. So a removed document is at least as similar as the threshold to some other document of its cluster, which need
not be the one that was kept.

The corpus is read three times, by tasks that share it (tasks.py); between the readings one task sees all documents.
That one holds about 100 bytes a document in memory, and the names of those that are removed:

    read, gather       every text    → its digest, its signature, its bands       files of 600 to 950 bytes a document
    group              equal digests, candidates                                  one task
    shingle, collect   candidates    → their shingles                             a file of 8 bytes a word
    cluster, choose    pairs compared and joined, what is needed of each          one task
    write, merge       every text    → kept or removed
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from mjax.config.bounds import Count
from mjax.data.corpus import Document, MalformedLines, TextFiles, near_duplicates, outputs, parse, tasks
from mjax.data.corpus.blocks import Block
from mjax.data.corpus.near_duplicates import Bands, Clusters, ShingleFile, SketchFiles
from mjax.data.corpus.outputs import EXAMPLES, FilterArguments, FilterJob, Tally, check_outputs, where_they_differ
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


def dedup(arguments: DedupArguments) -> dict[str, Any] | None:
    """Remove duplicates, print a summary and return the report; None if the work was submitted to a cluster.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or the input changed while it was read.
    """
    corpus, bands = arguments.open(), near_duplicates.choose_bands(arguments.threshold)
    check_outputs(arguments, corpus.files)
    return tasks.run(DedupJob(arguments, corpus, bands))


@dataclass
class Duplicates:
    """Duplicates of every document of a corpus, in input order.

    Attributes:
      same: the first document with the same text, which may be itself; int64 [documents].
      clusters: near-duplicates among the first ones; None if only exact duplicates were looked for.
      candidates: documents whose shingles were compared with others'.
    """

    same: np.ndarray
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


class DedupJob(FilterJob):
    """The stages of `mjax dedup`."""

    single = ("group", "cluster", "choose", "finish")
    shows = ("cluster",)

    def __init__(self, arguments: DedupArguments, corpus: TextFiles, bands: Bands):
        near = ["shingle", "collect", "cluster"] * (not arguments.exact)
        stages = ["read", *["gather"] * (not arguments.exact), "group", *near, "choose", "write", "merge", "finish"]
        super().__init__(arguments, corpus, stages)
        self.bands = bands

    # --- Finding: the first two readings ------------------------------------------------------------------------------

    def read(self, rank: int) -> tuple[list[int], MalformedLines]:
        """Write digests and sketches of a share; returns the number of documents in each block."""
        malformed, keys, documents = self.malformed(), [], []
        with self.writing(rank, "digests", "signatures", "keys") as (digests, signatures, key_stream):
            for block in self.blocks(rank):
                part = _read_block(self.arguments, self.bands, block)
                malformed.add(part.malformed)
                part.digests.tofile(digests)
                documents.append(len(part.digests))
                if part.sketches is not None:
                    part.sketches.signatures.tofile(signatures)
                    keys.append(part.sketches.keys)
            if keys:
                np.concatenate(keys, axis=1).tofile(key_stream)
        return documents, malformed

    @property
    def _firsts(self) -> np.ndarray:
        """The number of each task's first document, and of all documents; int64 [tasks + 1]."""
        return np.cumsum([0, *(sum(documents) for documents, _ in self.results("read"))])

    def gather(self, rank: int) -> None:
        """Copy the sketches of a share to their places in the files of all documents."""
        first = int(self._firsts[rank])
        SketchFiles(self.folder, self.bands.count).put(first, self.part("keys", rank), self.part("signatures", rank))

    def group(self, rank: int) -> None:
        """Find equal texts, and documents that share a band."""
        digests = [np.fromfile(self.part("digests", rank), DIGEST) for rank in range(self.tasks)]
        _, first, group = np.unique(np.concatenate(digests), return_index=True, return_inverse=True)
        same = first[group]
        np.save(self.folder / "same.npy", same)
        if not self.arguments.exact:
            sketches = SketchFiles(self.folder, self.bands.count)
            chosen = near_duplicates.candidates(sketches, same == np.arange(len(same)))
            np.save(self.folder / "candidates.npy", chosen)

    def _read_again(self, rank: int, values: np.ndarray) -> Iterator[tuple[np.ndarray, list[Document]]]:
        """Read a share again: the documents of its blocks, each with its part of `values` [all documents]."""
        first = self._firsts[rank]
        for block, count in zip_longest(self.blocks(rank), self.results("read")[rank][0]):
            documents = parse(block, self.corpus.key)[0] if block else []
            if block is None or len(documents) != count:
                name = block.file if block else self.corpus.names[-1]
                raise RunError(f"{name} changed while it was read; run the same command again")
            yield values[first : first + count], documents
            first += count

    def shingle(self, rank: int) -> np.ndarray:
        """Write the distinct shingles of the candidates in a share; returns their number for each, int64."""
        wanted = np.zeros(self._firsts[-1], bool)
        wanted[np.load(self.folder / "candidates.npy")] = True
        how, sizes = self.arguments, []
        with self.writing(rank, "shingles") as (stream,):
            for want, documents in self._read_again(rank, wanted):
                texts = [document.text for document, wants in zip(documents, want, strict=True) if wants]
                if texts:
                    hashes, offsets = shingle_hashes(texts, how.shingle_size, how.shingles)
                    for begin, end in pairwise(offsets):
                        distinct = shingle_set(hashes[begin:end])
                        distinct.tofile(stream)
                        sizes.append(len(distinct))
        return np.array(sizes, np.int64)

    def collect(self, rank: int) -> None:
        """Copy the shingles of a share to their place in the file of all."""
        self.put_part("shingles", rank, self.folder / "shingles", self.offset("shingles", rank))

    def cluster(self, rank: int) -> Clusters:
        """Compare candidates and join similar ones."""
        how, same = self.arguments, np.load(self.folder / "same.npy")
        sizes = np.concatenate(self.results("shingle"))
        shingles = ShingleFile(self.folder / "shingles", np.load(self.folder / "candidates.npy"), sizes)
        sketches = SketchFiles(self.folder, self.bands.count)
        workers = 1 if how.executor else useful_workers(how.workers, self.corpus.size)
        with Workers(workers) as pool, progress("cluster", self.bands.count) as advance:
            distinct = same == np.arange(len(same))
            return near_duplicates.find_clusters(sketches, distinct, shingles, how.threshold, pool, lambda: advance(1))

    # --- Writing: the third reading -----------------------------------------------------------------------------------

    @cached_property
    def _duplicates(self) -> Duplicates:
        same = np.load(self.folder / "same.npy")
        if self.arguments.exact or not len(same):
            return Duplicates(same)
        return Duplicates(same, self.results("cluster")[0], len(np.load(self.folder / "candidates.npy")))

    def _similar(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """The document that each is most similar to, their similarity, and the examples of the report."""
        same, near = self._duplicates.same, self._duplicates.near
        similar, similarity = same.copy(), np.ones(len(same))
        if (clusters := self._duplicates.clusters) is not None:
            similar[near], similarity[near] = clusters.similar[near], clusters.similarity[near]
        # Examples are the least similar near-duplicates, the most doubtful removals.
        doubtful = np.flatnonzero(near)[np.argsort(similarity[near], kind="stable")]
        exact = np.flatnonzero(same != np.arange(len(same)))
        return similar, similarity, {EXACT: exact[:EXAMPLES], NEAR: doubtful[:EXAMPLES]}

    def choose(self, rank: int) -> None:
        """Decide what is needed of each document."""
        instead = self._duplicates.instead
        similar, _, examples = self._similar()
        is_kept = instead == np.arange(len(instead))
        removed = np.flatnonzero(~is_kept)
        needed = np.where(is_kept, KEPT, 0).astype(np.uint8)
        needed[np.concatenate((removed, instead[removed], similar[removed]))] |= NAMED
        for shown in examples.values():
            needed[np.concatenate((shown, similar[shown]))] |= SHOWN
        np.save(self.folder / "needed.npy", needed)

    def write(self, rank: int) -> "_Part":
        """Write the documents of a share that are kept."""
        sizes, sources, texts = [], {}, {}
        number = int(self._firsts[rank])
        with self.writing(rank, "kept", "removed") as (kept, _):
            for needed, documents in self._read_again(rank, np.load(self.folder / "needed.npy", mmap_mode="r")):
                for document, need in zip(documents, needed.tolist(), strict=True):
                    sizes.append(len(document.text.encode()))
                    if need & KEPT:
                        kept.write(outputs.document_line(document, self.corpus.key))
                    if need & NAMED:
                        sources[number] = document.source
                    if need & SHOWN:
                        texts[number] = document.text
                    number += 1
        return _Part(np.array(sizes, np.int64), sources, texts)

    def finish(self, rank: int) -> dict[str, Any]:
        """Write the record of the documents removed and the report, and give the files their names."""
        parts, duplicates = self.results("write"), self._duplicates
        size = np.concatenate([part.sizes for part in parts])
        sources, texts = ({k: v for part in parts for k, v in part[field].items()} for field in (1, 2))
        instead, near = duplicates.instead, duplicates.near
        similar, similarity, examples = self._similar()
        numbers = np.arange(len(instead))
        is_kept, exact = instead == numbers, duplicates.same != numbers

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

        def tally(name: str, which: np.ndarray) -> Tally:
            shown = [example(number) for number in examples.get(name, np.empty(0, int)).tolist()]
            return Tally(name, int(which.sum()), int(size[which].sum()), shown)

        if (self.folder / "removed").exists():
            with (self.folder / "removed").open("wb") as stream:
                stream.writelines(outputs.json_line(story(number)) for number in np.flatnonzero(~is_kept).tolist())
        steps = [tally(EXACT, exact)] + ([] if duplicates.clusters is None else [tally(NEAR, near)])
        report = {"command": "dedup", "inputs": self.corpus.names, "read": tally("read", is_kept | ~is_kept)}
        report |= {"removed": steps, "kept": tally("kept", is_kept)}
        if duplicates.clusters is not None:
            report["near_duplicates"] = _near_report(self.arguments, self.bands, duplicates)
        return self.put_files(report, self.malformed([malformed for _, malformed in self.results("read")]))

    def remarks(self, report: dict[str, Any]) -> Iterator[str]:
        """Remarks below the table."""
        if near := report.get("near_duplicates"):
            recall = near["expected_recall"][f"{self.arguments.threshold:.3g}"]
            plural = "s" * (near["clusters"] != 1)
            yield (
                f"{near['clusters']:,} cluster{plural} of near-duplicates, the largest of {near['largest_cluster']:,}; "
                f"{near['pairs_compared']:,} pairs compared, {near['pairs_confirmed']:,} of them similar.\n"
                f"{near['bands']} bands of {near['rows']} hashes are expected to find {recall:.1%} of the pairs at "
                f"{near['threshold']:g}, and more of those above."
            )


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


class _Part(NamedTuple):
    """Sizes, sources and texts of the documents of a share, for the report.

    Attributes:
      sizes: bytes of text in UTF-8, int64 [documents].
      sources: of the documents that are NAMED, by number.
      texts: of the documents that are SHOWN, by number.
    """

    sizes: np.ndarray
    sources: dict[int, str]
    texts: dict[int, str]


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
