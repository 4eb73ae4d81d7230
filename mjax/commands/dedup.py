"""`mjax dedup`: keep only the first of documents that are the same, or nearly the same.

Exact duplicates have the same text, byte for byte. Near-duplicates have a Jaccard similarity of their shingles at or
above a threshold (0.7 in arXiv 1909.08053, section 4): near_duplicates.py defines it, finds candidates and compares
them. Similar pairs are joined into clusters, and the first document of each cluster stays. So a removed document is
at least as similar as the threshold to some other document of its cluster, not necessarily the one that stays.

The corpus is read three times, by tasks that share it (tasks.py). Between the readings tasks share the digests and the
bands by ranges of their values, sorted in the first reading, so that equal ones meet in one task:

    read               every text    → its digest, its signature, its bands     files of 600 to 950 bytes a document
    group, gather      ranges of digests    → `same`, the first of equal texts
    share              ranges of a band     → documents that share it
    shingle, collect   candidates    → their shingles                           a file of 8 bytes a word
    compare, join      buckets       → pairs that are similar, joined to clusters; for a few bands, then for the others
    choose             the parts to keep of each document
    write, explain     every text    → the output, and the removed documents with the reason

Values of all documents are files that are mapped into memory. A task holds its share, and a part of all else at a time.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property, partialmethod
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from mjax.commands.arguments import DedupArguments
from mjax.data.corpus import near_duplicates, tasks
from mjax.data.corpus.documents import Document, MalformedLines, TextFiles, parse_block
from mjax.data.corpus.near_duplicates import EDGE, NUM_HASHES, ROUNDS, Bands, Shingles, group_starts, shingle_hashes
from mjax.data.corpus.tasks import MAX_EXAMPLES, RETAINED, FilterJob, Tally, check_outputs, diff_excerpts
from mjax.errors import RunError

EXACT, NEAR = "exact duplicate", "near-duplicate"
IN_OUTPUT, IN_REPORT = 1, 2  # why a document is read again
PART = 2**22  # documents, pairs or values that a task holds at a time


def dedup(arguments: DedupArguments) -> dict[str, Any] | None:
    """Remove duplicates, print a summary and return the report; None if the work was submitted to a cluster.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or the input changed while it was read.
    """
    corpus, bands = arguments.open(), near_duplicates.choose_bands(arguments.threshold)
    check_outputs(arguments, corpus.files)
    return tasks.run_job(DedupJob(arguments, corpus, bands))


class DedupJob(FilterJob):
    """The stages of `mjax dedup`. Values of all documents, by number:

    same       int64   the first document with the same text, which may be itself
    first      int64   of distinct documents, the first of its cluster
    similar    int64   the most similar document
    jaccard    float64 its similarity to that one; 0: none is at or above the threshold
    needed     uint8   IN_OUTPUT, IN_REPORT
    """

    single_task_stages = ("join", "join_others", "choose", "finish")
    reading_stages = ("lines", "read", "shingle", "write")

    def __init__(self, arguments: DedupArguments, corpus: TextFiles, bands: Bands):
        near = ["share", "shingle", "collect", "compare", "join", "compare_others", "join_others"]
        stages = ["read", "group", "gather", *near * (not arguments.exact), "choose", "write", "explain"]
        super().__init__(arguments, corpus, [*stages, "merge", "finish"])
        self.bands, self.shingling = bands, (arguments.shingle_size, arguments.shingles)

    # --- The first reading: digests and sketches ----------------------------------------------------------------------

    def read(self, rank: int) -> tuple[list[int], MalformedLines]:
        """Write sorted digests and bands of a share, and signatures; returns the documents in each block."""
        malformed, counts, digests, keys, places = self.sum_malformed(), [], [], [], []
        with self.open_files(rank, "signatures") as (stream,):
            for block in self.blocks(rank):
                documents, lines = parse_block(block, self.corpus.key)
                malformed.add(lines)
                counts.append(len(documents))
                file = self.corpus.names.index(block.file)
                places += ((file, int(one.source.rpartition(":")[2]) if block.first else 0) for one in documents)
                texts = [document.text for document in documents]
                digests += (hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
                if texts and not self.arguments.exact:
                    signatures, band_keys = near_duplicates.minhash(texts, *self.shingling, self.bands)
                    signatures.tofile(stream)
                    keys.append(band_keys)
        values = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        with self.open_files(rank, "digests", "keys", "documents", "places") as (halves, sorted_keys, numbers, where):
            np.array(places, np.int64).tofile(where)
            order = np.lexsort(values.T[::-1])
            for column in (values[order, 0], values[order, 1], order):
                column.tofile(halves)
            for band in range(self.bands.count if keys else 0):
                band_keys = np.concatenate([part[band] for part in keys])
                order = np.argsort(band_keys, kind="stable")
                band_keys[order].tofile(sorted_keys)
                order.astype(np.uint32).tofile(numbers)
        return counts, malformed

    @cached_property
    def firsts(self) -> np.ndarray:
        """The number of each task's first document, and of all documents; int64 [tasks + 1]."""
        return np.cumsum([0, *(sum(documents) for documents, _ in self.results("read"))])

    # --- Equal texts --------------------------------------------------------------------------------------------------

    def group(self, rank: int) -> None:
        """Write the documents whose text an earlier one has, and the first that has it, for a range of digests."""
        parts = []
        for task in range(self.tasks):
            high, low, order = self.map_file("digests", task, np.uint64).reshape(3, -1)
            inside = _range(high, rank, self.tasks)
            parts.append((high[inside], low[inside], order[inside] + np.uint64(self.firsts[task])))
        high, low, numbers = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((numbers, low, high))
        high, low, numbers = high[order], low[order], numbers[order].astype(np.int64)
        is_first = group_starts(high, low)
        first = numbers[is_first][np.cumsum(is_first) - 1]
        later = np.flatnonzero(~is_first)
        later = later[np.argsort(numbers[later])]
        with self.open_files(rank, "equal") as (stream,):
            np.stack((numbers[later], first[later])).tofile(stream)

    def gather(self, rank: int) -> None:
        """Put `same`, the signatures and the places of a share into the files of all."""
        begin, end = self.firsts[rank : rank + 2].tolist()
        same = np.arange(begin, end)
        for task in range(self.tasks):
            numbers, first = self.map_file("equal", task, np.int64).reshape(2, -1)
            inside = slice(*np.searchsorted(numbers, (begin, end)))
            same[numbers[inside] - begin] = first[inside]
        self.write_values("same", begin, same)
        self.copy_file("signatures", rank, self.folder / "all-signatures", begin * NUM_HASHES)
        self.copy_file("places", rank, self.folder / "all-places", begin * 16)

    # --- Similar texts ------------------------------------------------------------------------------------------------

    def share(self, rank: int) -> list[list[int]]:
        """Write the buckets of a part of the bands; returns the members of each part, by round."""
        same, members, candidates = self.values("same"), [], np.empty(0, np.int64)
        with self.open_files(rank, "members", "buckets") as (documents, buckets):
            for bands in ROUNDS:
                members.append([])
                for keys, numbers in self._parts(rank, bands):
                    distinct = same[numbers] == numbers
                    band = near_duplicates.make_buckets(keys[distinct], numbers[distinct])
                    band.documents.tofile(documents)
                    band.buckets.tofile(buckets)
                    members[-1].append(len(band.documents))
                    candidates = np.union1d(candidates, band.documents)
        with self.open_files(rank, "candidates") as (stream,):
            candidates.tofile(stream)
        return members

    def _parts(self, rank: int, bands: slice) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and numbers of all documents in the parts of `bands` that are this task's: ranges of keys of a band."""
        bands = range(self.bands.count)[bands]
        ranges = max(-(-self.tasks // max(len(bands), 1)), -(-int(self.firsts[-1]) // PART))
        for part in range(rank, ranges * len(bands), self.tasks):
            parts = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
            for task in range(self.tasks):
                shape = (-1, int(self.firsts[task + 1] - self.firsts[task]))
                if shape[1]:
                    keys = self.map_file("keys", task, np.uint64).reshape(shape)[bands[part % len(bands)]]
                    documents = self.map_file("documents", task, np.uint32).reshape(shape)[bands[part % len(bands)]]
                    inside = _range(keys, part // len(bands), ranges)
                    parts.append((keys[inside], documents[inside] + self.firsts[task]))
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))

    def _read_again(self, rank: int, values: np.ndarray) -> Iterator[tuple[np.ndarray, list[Document]]]:
        """Read a share again: the documents of its blocks, each with its part of `values` [documents of the share]."""
        first = 0
        for block, count in zip_longest(self.blocks(rank), self.results("read")[rank][0]):
            documents = parse_block(block, self.corpus.key)[0] if block else []
            if block is None or len(documents) != count:
                name = block.file if block else self.corpus.names[-1]
                raise RunError(f"{name} changed while it was read; run the same command again")
            yield values[first : first + count], documents
            first += count

    def shingle(self, rank: int) -> int:
        """Write the distinct shingles of the candidates in a share, and where each ends; returns the candidates."""
        begin, end = self.firsts[rank : rank + 2].tolist()
        wanted, sizes = np.zeros(end - begin, bool), np.zeros(end - begin, np.int64)
        for task in range(self.tasks):
            numbers = self.map_file("candidates", task, np.int64)
            wanted[numbers[slice(*np.searchsorted(numbers, (begin, end)))] - begin] = True
        rows = iter(np.flatnonzero(wanted).tolist())
        with self.open_files(rank, "shingles", "ends") as (stream, ends):
            for want, documents in self._read_again(rank, wanted):
                texts = [document.text for document, wants in zip(documents, want, strict=True) if wants]
                if texts:
                    hashes, offsets = shingle_hashes(texts, *self.shingling)
                    for start, stop in pairwise(offsets):
                        distinct = np.unique(hashes[start:stop])
                        distinct.tofile(stream)
                        sizes[next(rows)] = len(distinct)
            np.cumsum(sizes).tofile(ends)
        return int(wanted.sum())

    def collect(self, rank: int) -> None:
        """Copy the shingles of a share to their place in the file of all."""
        offset = self.task_offset("shingles", rank)
        self.copy_file("shingles", rank, self.folder / "all-shingles", offset)
        self.write_values("all-ends", int(self.firsts[rank]) + 1, self.map_file("ends", rank, np.int64) + offset // 8)

    def compare(self, rank: int, turn: int = 0) -> int:
        """Write the similar pairs of the buckets of a round; returns the number of pairs compared."""
        clusters = self.values("first") if turn else None
        signatures = self.values("all-signatures", np.uint8).reshape(-1, NUM_HASHES)
        shingles = Shingles(self.values("all-shingles", np.uint64), self.values("all-ends"))
        documents, buckets = (self.map_file(name, rank, np.int64) for name in ("members", "buckets"))
        counts, compared, threshold = self.results("share")[rank], 0, self.arguments.threshold
        ends = np.cumsum([sum(map(sum, counts[:turn])), *counts[turn]])
        with self.open_files(rank, f"edges-{turn}") as (stream,):
            for begin, end in pairwise(ends):
                members = near_duplicates.Buckets(np.array(documents[begin:end]), np.array(buckets[begin:end]))
                known = members.documents if clusters is None else clusters[members.documents]
                edges, pairs = near_duplicates.find_similar_pairs(members, known, signatures, shingles, threshold)
                edges.tofile(stream)
                compared += pairs
        return compared

    compare_others = partialmethod(compare, turn=1)

    def join(self, rank: int, turn: int = 0) -> None:
        """Join the similar pairs of a round to clusters; after the last, find the most similar to each document."""
        clusters = self.values("first", mode="r+") if turn else self.new_values("first", np.int64, int(self.firsts[-1]))
        if not turn:
            for part in self._all_documents():
                clusters[part] = np.arange(part.start, part.stop)
        for edges in self._edges(turn):
            near_duplicates.unite(clusters, edges["one"], edges["other"])
        for part in self._all_documents():
            near_duplicates.find_roots(clusters, np.arange(part.start, part.stop))
        if turn:
            self._find_most_similar()

    join_others = partialmethod(join, turn=1)

    def _edges(self, turn: int) -> Iterator[np.ndarray]:
        for rank in range(self.tasks):
            edges = self.map_file(f"edges-{turn}", rank, EDGE)
            yield from (np.array(edges[start : start + PART]) for start in range(0, len(edges), PART))

    def _find_most_similar(self) -> None:
        similar = self.new_values("similar", np.int64, int(self.firsts[-1]))
        jaccard = self.new_values("jaccard", np.float64, int(self.firsts[-1]))
        for edges in (part for turn in range(len(ROUNDS)) for part in self._edges(turn)):
            best = near_duplicates.nearest_documents(edges)
            document, other, value = (best[name] for name in ("one", "other", "jaccard"))
            better = (value > jaccard[document]) | ((value == jaccard[document]) & (other < similar[document]))
            similar[document[better]], jaccard[document[better]] = other[better], value[better]

    def _all_documents(self) -> Iterator[slice]:
        """The documents in parts of at most PART."""
        total = int(self.firsts[-1])
        for start in range(0, total, PART):
            yield slice(start, min(start + PART, total))

    # --- Writing: the third reading -----------------------------------------------------------------------------------

    def fate(self, part: slice) -> "Fate":
        """Return the verdict on some documents, by number."""
        same = np.array(self.values("same")[part])
        numbers = np.arange(part.start, part.stop)
        exact = same != numbers
        if self.arguments.exact:
            return Fate(numbers, same, same, np.ones(len(same)), exact, np.zeros(len(same), bool))
        instead, jaccard = self.values("first")[same], self.values("jaccard", np.float64)[part]
        near = (instead != numbers) & ~exact
        similar = np.where(near, self.values("similar")[part], same)
        return Fate(numbers, instead, similar, np.where(near, jaccard, 1.0), exact, near)

    def choose(self, rank: int) -> dict[str, Any]:
        """Decide which parts of each document to keep; returns counts of near-duplicates, and the documents to show."""
        total, edges = int(self.firsts[-1]), np.linspace(self.arguments.threshold, 1, 7)
        needed, sizes = self.new_values("needed", np.uint8, total), self.new_values("sizes", np.uint32, total)
        shown, by_jaccard = {EXACT: [], NEAR: []}, np.zeros(6, np.int64)
        for part in self._all_documents():
            fate = self.fate(part)
            needed[fate.numbers] |= np.where(fate.retained, IN_OUTPUT, 0).astype(np.uint8)
            np.add.at(sizes, fate.instead[~fate.exact], 1)
            by_jaccard += np.histogram(fate.jaccard[fate.near], edges)[0]
            # Examples are the least similar near-duplicates, the most doubtful removals.
            for name, which in ((EXACT, fate.exact), (NEAR, fate.near)):
                some = np.flatnonzero(which)
                some = some[np.argsort(fate.jaccard[some], kind="stable")[:MAX_EXAMPLES]]
                columns = (column[some].tolist() for column in (fate.jaccard, fate.numbers, fate.similar))
                shown[name] = sorted([*shown[name], *zip(*columns, strict=True)])[:MAX_EXAMPLES]
        for _, number, similar in chain(*shown.values()):
            needed[[number, similar]] |= IN_REPORT
        examples = {name: [number for _, number, _ in rows] for name, rows in shown.items()}
        largest, clusters = 0, 0
        for part in self._all_documents():
            clusters += int((sizes[part] > 1).sum())
            largest = max(largest, int(sizes[part].max()))
        return {"examples": examples, "clusters": clusters, "largest": largest, "by_jaccard": by_jaccard.tolist()}

    def write(self, rank: int) -> tuple[dict[str, Tally], dict[int, str]]:
        """Write the retained documents of a share.

        Returns:
          Counts of the share, and the texts of the documents that are IN_REPORT, by number.
        """
        part = slice(*self.firsts[rank : rank + 2].tolist())
        fate, tallies, texts = self.fate(part), {name: Tally(name) for name in ("read", EXACT, NEAR, RETAINED)}, {}
        reasons = np.select([fate.exact, fate.near], [EXACT, NEAR], RETAINED).tolist()
        needed, row = self.values("needed", np.uint8)[part], 0
        with self.open_files(rank, RETAINED) as (stream,):
            for wanted, documents in self._read_again(rank, needed):
                for document, need in zip(documents, wanted.tolist(), strict=True):
                    tallies["read"].add(document.text)
                    tallies[reasons[row]].add(document.text)
                    if need & IN_OUTPUT:
                        stream.write(tasks.document_line(document, self.corpus.key))
                    if need & IN_REPORT:
                        texts[part.start + row] = document.text
                    row += 1
        return tallies, texts

    @cached_property
    def places(self) -> np.ndarray:
        """The file and the line of each document, 0 in a text file; int64 [documents, 2]."""
        return self.values("all-places").reshape(-1, 2)

    def _source(self, number: int) -> str:
        file, line = self.places[number].tolist()
        return f"{self.corpus.names[file]}:{line}" if line else self.corpus.names[file]

    def story(self, fate: "Fate", row: int) -> dict[str, Any]:
        """A removed document in the record."""
        return {
            "source": self._source(int(fate.numbers[row])),
            "reason": EXACT if fate.exact[row] else NEAR,
            RETAINED: self._source(int(fate.instead[row])),
            "similar_to": self._source(int(fate.similar[row])),
            "jaccard": round(float(fate.jaccard[row]), 4),
        }

    def explain(self, rank: int) -> None:
        """Write the record of the documents of a share that are removed."""
        fate = self.fate(slice(*self.firsts[rank : rank + 2].tolist()))
        with self.open_files(rank, "removed") as (stream,):
            stream.writelines(tasks.json_line(self.story(fate, row)) for row in np.flatnonzero(~fate.retained).tolist())

    def finish(self, rank: int) -> dict[str, Any]:
        """Write the report, and give the files their names."""
        choice, texts = self.results("choose")[0], {}
        tallies = self.tallies([counts for counts, _ in self.results("write")])
        for _, shown in self.results("write"):
            texts |= {int(number): text for number, text in shown.items()}
        for name, tally in tallies.items():
            for number in choice["examples"].get(name, ()):
                fate = self.fate(slice(number, number + 1))
                text, other = diff_excerpts(texts[number], texts[int(fate.similar[0])])
                tally.examples.append({**self.story(fate, 0), "text": text, "similar_text": other})
        steps = [tallies[EXACT], *[tallies[NEAR]] * (not self.arguments.exact)]
        report = {"command": "dedup", "inputs": self.corpus.names, "read": tallies["read"]}
        report |= {"removed": steps, RETAINED: tallies[RETAINED]}
        if not self.arguments.exact:
            report["near_duplicates"] = self._near_report(choice)
        return self.put_files(report, self.sum_malformed([malformed for _, malformed in self.results("read")]))

    def _near_report(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The report's section about near-duplicates: method and counts."""
        arguments, bands = self.arguments, self.bands
        edges = np.linspace(arguments.threshold, 1, 7)
        turns = ("compare", "compare_others")
        ranges = (f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges))
        return {
            "threshold": arguments.threshold,
            "shingles": f"{arguments.shingle_size} {arguments.shingles}",
            "hashes": NUM_HASHES,
            "bands": bands.count,
            "rows": bands.rows,
            "expected_recall": {f"{edge:.3g}": round(bands.recall(edge), 5) for edge in edges},
            "candidates": sum(self.results("shingle")),
            "pairs_compared": sum(compared for turn in turns for compared in self.results(turn)),
            "pairs_confirmed": sum(len(edges) for turn in range(len(turns)) for edges in self._edges(turn)),
            "clusters": choice["clusters"],
            "largest_cluster": choice["largest"],
            "removed_by_jaccard": dict(zip(ranges, choice["by_jaccard"], strict=True)),
        }

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


class Fate(NamedTuple):
    """The fate of some documents.

    Attributes:
      numbers, instead, similar: the documents, the one that stays instead of each, and the most similar one, int64.
      jaccard: its similarity, float64.
      exact, near: whether each is removed, and why; bool.
    """

    numbers: np.ndarray
    instead: np.ndarray
    similar: np.ndarray
    jaccard: np.ndarray
    exact: np.ndarray
    near: np.ndarray

    @property
    def retained(self) -> np.ndarray:
        return ~(self.exact | self.near)


def _range(keys: np.ndarray, part: int, parts: int) -> slice:
    """The place of the `part`-th of `parts` equal ranges of all uint64 in the sorted `keys`."""
    begin, end = (np.uint64(min(number * 2**64 // parts, 2**64 - 1)) for number in (part, part + 1))
    return slice(int(np.searchsorted(keys, begin)), int(np.searchsorted(keys, end)) if part + 1 < parts else len(keys))
