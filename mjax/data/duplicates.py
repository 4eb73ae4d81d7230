"""The passes of `mjax dedup` over a corpus: what is found out about every document, and what becomes of it.

Each pass hands raw blocks of the input to worker processes, which parse them, so that the only work of the main process
is to read and write. Documents are numbered as they come; a later pass gets, with each block, what is known by then of
its documents.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np

from mjax.data.blocks import Block
from mjax.data.corpus import Corpus, Document, Malformed, parse
from mjax.data.minhash import Bands, Sketches, sketch
from mjax.data.near_duplicates import Clusters, ShingleFile, SketchFiles, candidates, find_clusters
from mjax.data.outputs import document_line, watched_blocks
from mjax.data.shingles import Unit, shingle_hashes, shingle_set
from mjax.data.workers import Workers
from mjax.errors import RunError
from mjax.progress import progress


@dataclass(frozen=True)
class Method:
    """What counts as a duplicate."""

    key: str
    """Field that holds the text."""
    exact: bool
    """Whether only equal texts do."""
    threshold: float
    """Jaccard similarity from which documents are near-duplicates."""
    shingles: Unit
    """What a shingle is made of."""
    shingle_size: int
    """Units a shingle."""
    bands: Bands
    """How candidates are found."""


@dataclass
class Duplicates:
    """What was found out about every document of a corpus."""

    same: np.ndarray
    """int64 [documents]: the first document with the same text, itself where there is none before it."""
    clusters: Clusters | None
    """Near-duplicates among those that come first; None where only exact ones were looked for."""
    candidates: int
    """Documents whose shingles were compared with others'."""
    blocks: list[int]
    """Documents of each block of the corpus."""

    @property
    def instead(self) -> np.ndarray:
        """int64 [documents]: the document that stays for each, itself where it stays."""
        return self.same if self.clusters is None else self.clusters.first[self.same]

    def again(self, corpus: Corpus, verb: str, values: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
        """The blocks of the corpus once more, each with its part of `values` [documents]."""
        ends = np.cumsum(self.blocks)
        parts = (values[end - count : end] for end, count in zip(ends, self.blocks, strict=True))
        for block, part in zip_longest(watched_blocks(corpus, verb), parts):
            if block is None or part is None:
                raise RunError(f"{corpus.names[-1]} has changed while it was read; run the same command again")
            yield block, part


def find_duplicates(corpus: Corpus, how: Method, folder: Path, workers: Workers) -> Duplicates:
    """Read `corpus` once, or twice where near-duplicates are looked for; `folder` takes the files in between."""
    sketches = SketchFiles(folder, how.bands.count)
    digests = [np.empty((0, 2), np.uint64)]
    tasks = ((block, how) for block in watched_blocks(corpus, "reading"))
    corpus.malformed.clear()
    for part, sketched, malformed in workers.map(_read_block, tasks):
        for line in malformed:
            corpus.malformed.add(line)
        digests.append(part)
        if sketched is not None:
            sketches.append(sketched)
    sketches.close()
    same = _first_with_the_same(np.concatenate(digests))
    found = Duplicates(same, None, 0, [len(part) for part in digests[1:]])
    if how.exact or len(same) == 0:
        return found

    distinct = same == np.arange(len(same))
    chosen = candidates(sketches, distinct)
    found.candidates = len(chosen)
    wanted = np.zeros(len(same), bool)
    wanted[chosen] = True
    shingles = ShingleFile(folder / "shingles", chosen)
    blocks = found.again(corpus, "shingling", wanted)
    shingles.write(workers.map(_shingle_block, ((block, how, part) for block, part in blocks if part.any())))
    with progress("comparing", how.bands.count) as advance:
        found.clusters = find_clusters(sketches, distinct, shingles, how.threshold, workers, lambda: advance(1))
    return found


def _read_block(task: tuple[Block, Method]) -> tuple[np.ndarray, Sketches | None, list[str]]:
    """Digests of the documents of a block, uint64 [documents, 2], their sketches, and malformed lines."""
    block, how = task
    items = list(parse(block, how.key))
    texts = [item.text for item in items if isinstance(item, Document)]
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    sketched = None if how.exact or not texts else sketch(texts, how.shingle_size, how.shingles, how.bands)
    malformed = [str(item) for item in items if isinstance(item, Malformed)]
    return np.frombuffer(digests, np.uint64).reshape(-1, 2), sketched, malformed


def _shingle_block(task: tuple[Block, Method, np.ndarray]) -> list[np.ndarray]:
    """Distinct shingles of those documents of a block that are wanted."""
    block, how, wanted = task
    texts = [document.text for document, want in zip(_documents(block, how, len(wanted)), wanted, strict=True) if want]
    hashes, offsets = shingle_hashes(texts, how.shingle_size, how.shingles)
    return [shingle_set(hashes[begin:end]) for begin, end in pairwise(offsets)]


def _documents(block: Block, how: Method, count: int) -> list[Document]:
    """The documents of a block that held `count` of them when it was first read."""
    documents = [item for item in parse(block, how.key) if isinstance(item, Document)]
    if len(documents) != count:
        raise RunError(f"{block.file} has changed while it was read; run the same command again")
    return documents


def _first_with_the_same(digests: np.ndarray) -> np.ndarray:
    """The first document with the same digest as each: uint64 [documents, 2] → int64 [documents]."""
    order = np.lexsort(digests.T)  # stable: within a group by number
    begins = np.ones(len(order), bool)
    begins[1:] = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    same = np.empty(len(order), np.int64)
    same[order] = order[begins][np.cumsum(begins) - 1]
    return same


# --- Writing ----------------------------------------------------------------------------------------------------------

KEPT, NAMED, SHOWN = 1, 2, 4  # what is asked of a document: its line for the output, where it came from, its text


@dataclass
class Part:
    """What one block has given."""

    lines: bytes
    """The documents that stay, as lines of JSON."""
    sizes: np.ndarray
    """Bytes of text in UTF-8, int64 [documents]."""
    sources: dict[int, str]
    """Of the documents that are NAMED, by their number in the block."""
    texts: dict[int, str]
    """Of the documents that are SHOWN, by their number in the block."""


def write_parts(corpus: Corpus, how: Method, found: Duplicates, asked: np.ndarray, workers: Workers) -> Iterator[Part]:
    """Read the corpus again, for what is `asked` of each document: uint8 [documents] of KEPT, NAMED and SHOWN."""
    blocks = found.again(corpus, "writing", asked)
    yield from workers.map(_write_block, ((block, how, part) for block, part in blocks))


def _write_block(task: tuple[Block, Method, np.ndarray]) -> Part:
    block, how, asked = task
    documents = _documents(block, how, len(asked))
    return Part(
        lines=b"".join(document_line(one, how.key) for one, ask in zip(documents, asked, strict=True) if ask & KEPT),
        sizes=np.fromiter((len(one.text.encode()) for one in documents), np.int64, len(documents)),
        sources={number: documents[number].source for number in np.flatnonzero(asked & NAMED).tolist()},
        texts={number: documents[number].text for number in np.flatnonzero(asked & SHOWN).tolist()},
    )
