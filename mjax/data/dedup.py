"""`mjax dedup`: of documents that are the same, or nearly the same, only the first stays.

Exact duplicates have the same text, byte for byte. Near-duplicates have a Jaccard similarity of their shingles at or
above a threshold (0.7 in arXiv 1909.08053, section 4): shingles.py says what that is, minhash.py how candidates are
found, near_duplicates.py how they are compared. Similar pairs are joined into clusters, and of each cluster the
document that comes first in the input stays. So a document that went is at least as similar as the threshold to some
other document of its cluster, which need not be the one that stayed.

The corpus is read three times, and memory holds about 100 bytes a document, however long it is, and the names of those
that are removed:

    1. every text    → its digest, its signature, its bands           files of 600 to 950 bytes a document
    2. candidates    → their shingles                                 a file of 8 bytes a word
    3. every text    → kept or removed

The files lie beside the output while it is made.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from mjax.data.blocks import MOST_BYTES
from mjax.data.corpus import Corpus, TextFiles, find_files
from mjax.data.duplicates import KEPT, NAMED, SHOWN, Duplicates, Method, find_duplicates, write_parts
from mjax.data.minhash import HASHES, choose_bands
from mjax.data.outputs import EXAMPLES, CleanedFiles, Tally, json_line, report_text, show, where_they_differ
from mjax.data.shingles import Unit
from mjax.data.workers import Workers, useful_workers
from mjax.errors import UsageError

EXACT, NEAR = "exact duplicate", "near-duplicate"


@dataclass(frozen=True)
class DedupArguments:
    """Remove exact and near-duplicate documents: of each group of similar ones the first stays."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.jsonl")]
    """Where to write what stays; FILE.removed.jsonl lists what went, and FILE.report.json says how much and why."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES …")] = ()
    """Text as `mjax prepare` reads it: .txt, .jsonl, both also .gz or .zst, .parquet, folders and patterns. Their order
    decides which document is first."""
    key: str = "text"
    """Field of a JSON line or Parquet row that holds the text."""
    malformed: Literal["stop", "skip"] = "stop"
    """What to do with a line that is not JSON or has no text."""
    max_document_bytes: int = MOST_BYTES
    """Largest document that is read, in bytes: a .txt file or a line of .jsonl, unpacked. A larger one is malformed."""
    exact: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only remove documents whose text is the same, byte for byte."""
    threshold: float = 0.7
    """Jaccard similarity of shingles from which documents are near-duplicates, 0.3 to 1."""
    shingles: Unit = "words"
    """What a shingle is made of: words in lower case without punctuation, or characters as they are (for languages that
    put no spaces between words)."""
    shingle_size: int = 5
    """Words or characters a shingle. Megatron's tools took 5 characters."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Processes that hash and compare; as many as there are cores when not given, fewer where there is little text. The
    result is the same with any number."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing output."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the report as JSON instead of a table."""


def dedup(arguments: DedupArguments) -> dict[str, Any]:
    """Remove duplicates, print a summary and return the report.

    Raises:
      UsageError: arguments that cannot work, an input that cannot be read, or an output that exists.
      RunError: the output cannot be written, a worker was killed, or the input changed while it was read.
    """
    started = time.perf_counter()
    if not arguments.inputs:
        raise UsageError("there is nothing to deduplicate; give files such as corpus.jsonl")
    if arguments.shingle_size < 1:
        raise UsageError(f"--shingle-size {arguments.shingle_size} makes no shingle; use 1 or more, such as 5")
    inputs = find_files(arguments.inputs)
    corpus = TextFiles(inputs, arguments.key, arguments.malformed, most=arguments.max_document_bytes)
    bands = choose_bands(arguments.threshold)
    how = Method(arguments.key, arguments.exact, arguments.threshold, arguments.shingles, arguments.shingle_size, bands)
    files = CleanedFiles(arguments.output, inputs, arguments.overwrite)
    with files, Workers(useful_workers(arguments.workers, corpus.size)) as workers:
        found = find_duplicates(corpus, how, files.folder, workers)
        report = {"command": "dedup", "inputs": corpus.names, **_write(corpus, how, files, found, workers)}
        report = files.finish(report, corpus)
    if arguments.json:
        print(report_text(report), end="")
    else:
        show(arguments.output, report, time.perf_counter() - started, _remarks(arguments, report))
    return report


# --- Writing ----------------------------------------------------------------------------------------------------------


def _write(corpus: Corpus, how: Method, files: CleanedFiles, found: Duplicates, workers: Workers) -> dict[str, Any]:
    """Write what stays, what went and why; returns the steps of the report."""
    numbers = np.arange(len(found.same))
    instead, similar, similarity = found.instead, found.same.copy(), np.ones(len(numbers))
    stays, exact = instead == numbers, found.same != numbers
    near = ~(stays | exact)
    if found.clusters is not None:
        similar[near], similarity[near] = found.clusters.similar[near], found.clusters.similarity[near]
    removed = np.flatnonzero(~stays)
    # The least similar near-duplicates: who agrees with these removals agrees with all.
    doubtful = np.flatnonzero(near)[np.argsort(similarity[near], kind="stable")]
    examples = {EXACT: np.flatnonzero(exact)[:EXAMPLES], NEAR: doubtful[:EXAMPLES]}

    asked = np.where(stays, KEPT, 0).astype(np.uint8)
    asked[np.concatenate((removed, instead[removed], similar[removed]))] |= NAMED
    for shown in examples.values():
        asked[np.concatenate((shown, similar[shown]))] |= SHOWN
    sizes, sources, texts, first = [np.empty(0, np.int64)], {}, {}, 0
    for part in write_parts(corpus, how, found, asked, workers):
        files.keep(part.lines)
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
        files.remove(json_line(story(number)))
    size = np.concatenate(sizes)

    def tally(name: str, which: np.ndarray) -> Tally:
        shown = [example(number) for number in examples.get(name, np.empty(0, int)).tolist()]
        return Tally(name, int(which.sum()), int(size[which].sum()), shown)

    steps = {"read": tally("read", stays | ~stays), "removed": [tally(EXACT, exact)], "kept": tally("kept", stays)}
    if found.clusters is not None:
        steps["removed"].append(tally(NEAR, near))
        steps["near_duplicates"] = _near_report(how, found, similarity[near])
    return steps


def _near_report(how: Method, found: Duplicates, similarities: np.ndarray) -> dict[str, Any]:
    """How near-duplicates were looked for and found."""
    sizes = np.unique(found.clusters.first[found.same == np.arange(len(found.same))], return_counts=True)[1]
    edges = np.linspace(how.threshold, 1, 7)
    return {
        "threshold": how.threshold,
        "shingles": f"{how.shingle_size} {how.shingles}",
        "hashes": HASHES,
        "bands": how.bands.count,
        "rows": how.bands.rows,
        "expected_recall": {f"{edge:.3g}": round(how.bands.recall(edge), 5) for edge in edges},
        "candidates": found.candidates,
        "pairs_compared": found.clusters.compared,
        "pairs_confirmed": found.clusters.confirmed,
        "clusters": int((sizes > 1).sum()),
        "largest_cluster": int(sizes.max(initial=0)),
        "removed_by_jaccard": {
            f"{low:.3g} to {high:.3g}": int(count)
            for low, high, count in zip(edges, edges[1:], np.histogram(similarities, edges)[0], strict=False)
        },
    }


def _remarks(arguments: DedupArguments, report: dict[str, Any]) -> Iterator[str]:
    """What there is to say beside the table."""
    if near := report.get("near_duplicates"):
        recall = near["expected_recall"][f"{arguments.threshold:.3g}"]
        yield (
            f"{near['clusters']:,} clusters of near-duplicates, the largest of {near['largest_cluster']:,}; "
            f"{near['pairs_compared']:,} pairs compared, {near['pairs_confirmed']:,} of them similar.\n"
            f"{near['bands']} bands of {near['rows']} hashes are expected to find {recall:.1%} of the pairs at "
            f"{near['threshold']:g}, and more of those above."
        )
