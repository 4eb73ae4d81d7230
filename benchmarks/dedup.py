"""Near-duplicates: recall, false removals, and speed compared with datasketch.

    python benchmarks/mixture.py FOLDER                                     # about 100 MB of text, once
    python benchmarks/dedup.py FOLDER/linux_doc.jsonl FOLDER/mixture.jsonl

Recall, on the first documents of the first file: the reference is the Jaccard similarity of all pairs, computed from
sets of word tuples as a sparse matrix product. A pair at or above the threshold is a candidate if the bands bring it
together, and found if it ends in one cluster. A removal is false if its similarity to the reported document is below
the threshold; clusters are correct if they are the connected components of the reference's pairs.

Speed, on the second file: `mjax dedup` compared with a MinHashLSH script after datasketch's documentation, with the
same permutations, bands, rows, shingles and number of processes. The script drops a document if the index has one that
shares a band; it compares nothing and reports nothing. Both write the remaining documents. They run in turn.

With --datatrove FOLDER, datatrove's own MinHash takes part in both: its script as in its examples, with its default
bands (14 of 8 hashes), one task per process, on a part of the speed file. Its default hash fails with current
versions of xxhash, so it uses sha1. It needs spacy, orjson and tokenizers; FOLDER is an environment that has these.

The exit code is 1 if recall is below 98%, a removal is false, or mjax is not three times as fast.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import check_counts, check_peers, in_one_sentence
from mjax.data.corpus.documents import TextFiles
from mjax.data.corpus.near_duplicates import NUM_HASHES, choose_bands, estimate_similarity, min_estimate, minhash

ROOT = Path(__file__).resolve().parent.parent
WORDS = 5
LEAST_RECALL, LEAST_SPEED = 0.98, 3.0


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recall_file", type=Path, help="a .jsonl file with near-duplicates")
    parser.add_argument("speed_file", type=Path, help="a .jsonl file of 100 MB or so")
    parser.add_argument("--documents", type=int, default=6000, help="of the first file (default: 6000)")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.5, 0.7], help="(default: 0.5 0.7)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument("--rounds", type=int, default=3, help="times each program runs (default: 3)")
    parser.add_argument("--datatrove", metavar="FOLDER", type=Path, help="an environment with datatrove")
    arguments = parser.parse_args()
    check_counts(arguments, "documents", "workers", "rounds")
    TextFiles([arguments.recall_file, arguments.speed_file])  # refuses a file that is not there
    for threshold in arguments.thresholds:
        choose_bands(threshold)  # rejects an invalid one
    check_peers("datasketch", "scipy")
    with tempfile.TemporaryDirectory() as folder:
        good = show_recall(arguments, Path(folder))
        fast = show_speed(arguments, Path(folder))
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("rensa", "datasketch", "scipy", "numpy"))
    print(f"\n{packages}, Python {platform.python_version()}")
    print(f"{arguments.workers} processes on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    return int(not (good and fast))


def mjax_dedup(file: Path, output: Path, threshold: float, workers: int) -> dict:
    """Run the command and return its report."""
    command = [sys.executable, "-m", "mjax", "dedup", str(file), "--output", str(output), "--overwrite", "--json"]
    command += ["--threshold", str(threshold), "--workers", str(workers)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def show(title: str, rows: list[dict[str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    Console(width=120).print(table)


# --- Recall -----------------------------------------------------------------------------------------------------------


def show_recall(arguments: argparse.Namespace, folder: Path) -> bool:
    lines = arguments.recall_file.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = lines[: arguments.documents]
    sample = folder / "sample.jsonl"
    sample.write_text("".join(lines), encoding="utf-8")
    texts = [json.loads(line)["text"] for line in lines]
    pairs, similarities = all_pairs(texts)
    rows, good = [], True
    for threshold in arguments.thresholds:
        bands = choose_bands(threshold)
        report = mjax_dedup(sample, folder / "out.jsonl", threshold, arguments.workers)
        removed = [json.loads(line) for line in (folder / "out.removed.jsonl").read_text().splitlines()]
        number = lambda source: int(source.rpartition(":")[2]) - 1  # noqa: E731
        cluster = np.arange(len(texts))
        for one in removed:
            cluster[number(one["source"])] = number(one["kept"])
        true = pairs[similarities >= threshold]
        known = {tuple(sorted(pair)) for pair in true.tolist()}
        false = sum(tuple(sorted((number(one["source"]), number(one["similar_to"])))) not in known for one in removed)
        signatures, keys = minhash(texts, WORDS, "words", bands)
        together = (keys[:, true[:, 0]] == keys[:, true[:, 1]]).any(axis=0)
        together &= estimate_similarity(*signatures[true.T]) >= min_estimate(threshold)
        found = cluster[true[:, 0]] == cluster[true[:, 1]]
        good &= together.mean() >= LEAST_RECALL and found.mean() >= LEAST_RECALL and not false
        rows.append(
            {
                "threshold": f"{threshold:g}",
                "bands × rows": f"{bands.count} × {bands.rows}",
                "true pairs": f"{len(true):,}",
                "candidates": f"{together.mean():.2%}",
                "found": f"{found.mean():.2%}",
                "compared": f"{report['near_duplicates']['pairs_compared']:,}",
                "removed": f"{len(removed):,}",
                "false removals": str(false),
                "clusters true": "yes" if np.array_equal(cluster, components(true, len(texts))) else "no",
            }
        )
    show(f"{len(texts):,} documents of {arguments.recall_file.name}, {WORDS}-word shingles", rows)
    if arguments.datatrove:
        cluster = np.array(datatrove_dedup(arguments, sample, folder / "recall"))
        rows = []
        for threshold in arguments.thresholds:
            true = pairs[similarities >= threshold]
            found = f"{(cluster[true[:, 0]] == cluster[true[:, 1]]).mean():.2%}"
            removed = np.flatnonzero(cluster != np.arange(len(texts)))
            alone = int((~np.isin(removed, true)).sum())
            rows.append({"threshold": f"{threshold:g}", "true pairs": f"{len(true):,}", "found": found})
            rows[-1] |= {"removed": f"{len(removed):,}", "removed without a similar one": f"{alone:,}"}
        show("datatrove's MinHash on the same documents", rows)
    return good


def all_pairs(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that share a shingle, int64 [pairs, 2], and their Jaccard similarity, float64 [pairs]."""
    from scipy import sparse

    vocabulary: dict[tuple[str, ...], int] = {}
    columns = [[vocabulary.setdefault(run, len(vocabulary)) for run in shingles(text)] for text in texts]
    sizes = np.array([len(column) for column in columns])
    where = np.repeat(np.arange(len(texts)), sizes), np.concatenate(columns)
    matrix = sparse.csr_matrix((np.ones(len(where[0]), np.int32), where))
    common = sparse.triu(matrix @ matrix.T, 1).tocoo()
    return (
        np.stack((common.row, common.col), axis=1).astype(np.int64),
        common.data / (sizes[common.row] + sizes[common.col] - common.data),
    )


def components(pairs: np.ndarray, documents: int) -> np.ndarray:
    """The first document of the connected component of each."""
    from scipy import sparse

    graph = sparse.coo_matrix((np.ones(len(pairs)), pairs.T), (documents, documents))
    label = sparse.csgraph.connected_components(graph, directed=False)[1]
    return np.unique(label, return_index=True)[1][label]


def shingles(text: str) -> set[tuple[str, ...]]:
    """The shingles of a text, in a second, simple implementation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(max(len(words) - WORDS + 1, 1))} if words else set()


# --- Speed ------------------------------------------------------------------------------------------------------------


def show_speed(arguments: argparse.Namespace, folder: Path) -> bool:
    threshold = arguments.thresholds[-1]
    file, seconds, kept = arguments.speed_file, {"mjax": [], "datasketch": []}, {}
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        report = mjax_dedup(file, folder / "mjax.jsonl", threshold, arguments.workers)
        seconds["mjax"].append(time.perf_counter() - start)
        kept["mjax"] = report["kept"]["documents"]
        start = time.perf_counter()
        kept["datasketch"] = datasketch_dedup(file, folder / "datasketch.jsonl", threshold, arguments.workers)
        seconds["datasketch"].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        {
            "program": name,
            "seconds": f"{medians[name]:.1f}",
            "fastest": f"{min(times):.1f}",
            "slowest": f"{max(times):.1f}",
            "MB/s": f"{file.stat().st_size / 1e6 / medians[name]:.1f}",
            "against datasketch": f"{medians['datasketch'] / medians[name]:.2f} ×",
            "documents kept": f"{kept[name]:,}",
        }
        for name, times in seconds.items()
    ]
    if arguments.datatrove:
        part = folder / "part.jsonl"
        part.write_bytes(b"".join(file.open("rb").readlines()[:5000]))
        times = {}
        for name in ("mjax", "datatrove"):
            start = time.perf_counter()
            if name == "mjax":
                mjax_dedup(part, folder / "mjax.jsonl", threshold, arguments.workers)
            else:
                datatrove_dedup(arguments, part, folder / "speed")
            times[name] = time.perf_counter() - start
        megabytes = part.stat().st_size / 1e6
        speeds = [{"program": n, "seconds": f"{s:.1f}", "MB/s": f"{megabytes / s:.2f}"} for n, s in times.items()]
        show(f"the first 5,000 documents, {megabytes:.1f} MB", speeds)
    documents, size = report["read"]["documents"], file.stat().st_size / 1e6
    show(f"{file.name}: {documents:,} documents, {size:.0f} MB, threshold {threshold:g}, {NUM_HASHES} hashes", rows)
    return medians["datasketch"] / medians["mjax"] >= LEAST_SPEED


def datasketch_dedup(file: Path, output: Path, threshold: float, workers: int) -> int:
    """A MinHashLSH script; returns the number of remaining documents."""
    from datasketch import MinHash, MinHashLSH

    bands = choose_bands(threshold)
    index = MinHashLSH(num_perm=NUM_HASHES, params=(bands.count, bands.rows))
    kept, seen = 0, set()
    with (
        multiprocessing.get_context("spawn").Pool(workers) as pool,
        file.open("rb") as lines,
        output.open("wb") as stream,
    ):
        for number, (line, digest, values, scheme) in enumerate(pool.imap(datasketch_hash, lines, chunksize=64)):
            signature = MinHash(num_perm=NUM_HASHES, hashvalues=values, scheme=scheme)
            if digest in seen or index.query(signature):
                continue
            seen.add(digest)
            index.insert(number, signature, check_duplication=False)
            stream.write(line)
            kept += 1
    return kept


def datasketch_hash(line: bytes) -> tuple[bytes, bytes, np.ndarray, str]:
    """A line, the digest of its text, its MinHash and the MinHash's parameters."""
    from datasketch import MinHash

    text = json.loads(line)["text"]
    signature = MinHash(num_perm=NUM_HASHES)
    signature.update_batch([" ".join(run).encode() for run in shingles(text)])
    return line, hashlib.blake2b(text.encode(), digest_size=16).digest(), signature.hashvalues, signature.scheme


DATATROVE = """
import json, struct, sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

folder, workers = sys.argv[1], int(sys.argv[2])
config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
reading = lambda: JsonlReader(f"{folder}/in", glob_pattern="*.jsonl")
stages = {
    "signatures": ([reading(), MinhashDedupSignature(f"{folder}/signatures", config)], workers),
    "buckets": ([MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)], config.num_buckets),
    "cluster": ([MinhashDedupCluster(f"{folder}/buckets", f"{folder}/ids", config=config, save_cluster_id=True)], 1),
    "filter": ([reading(), MinhashDedupFilter(f"{folder}/ids"), JsonlWriter(f"{folder}/out")], workers),
}
if __name__ == "__main__":
    for name, (steps, tasks) in stages.items():
        LocalPipelineExecutor(steps, tasks=tasks, workers=workers, logging_dir=f"{folder}/logs/{name}").run()
    for rank in range(workers):
        file = Path(f"{folder}/ids/{rank:06d}.clusters")
        pairs = list(struct.iter_unpack("<II", file.read_bytes())) if file.exists() else []
        print(json.dumps([rank, pairs]))
"""


def datatrove_dedup(arguments: argparse.Namespace, file: Path, folder: Path) -> list[int]:
    """datatrove's script on one file per process; returns the first document of the cluster of each."""
    lines, workers = file.read_bytes().splitlines(keepends=True), arguments.workers
    (folder / "in").mkdir(parents=True)
    for rank in range(workers):
        (folder / "in" / f"{rank}.jsonl").write_bytes(b"".join(lines[rank::workers]))
    (folder / "run.py").write_text(DATATROVE)
    command = [arguments.datatrove / "bin" / "python", folder / "run.py", folder, str(workers)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    cluster, firsts = list(range(len(lines))), {}
    members = []
    for line in result.stdout.splitlines()[-workers:]:
        rank, pairs = json.loads(line)
        members += [(rank + row * workers, group) for row, group in pairs]
    for number, group in sorted(members):
        cluster[number] = firsts.setdefault(group, number)
    return cluster


if __name__ == "__main__":
    sys.exit(main())
