"""`mjax prepare`, with gigatoken and without, compared with Megatron's preprocess_data on the same text.

    python benchmarks/prepare.py FILE.jsonl [--megabytes 20] [--workers 1 2] [--rounds 3]
    taskset -c 0 python benchmarks/prepare.py FILE.jsonl --megabytes 110 --workers 1 --no-pool \\
        --tokenizer gpt2:encoder.json,vocab.bpe

`--tokenizer llama3` trains 48,000 byte pairs with Llama 3's pattern.

benchmarks/mixture.py writes a FILE. The peer is the loop in Megatron-LM's tools/preprocess_data.py (json.loads,
tokenize, flatten, add_document), which is in no package, around megatron-core's own IndexedDatasetBuilder. "loop" runs
it in one process. "pool" works like the script: multiprocessing.Pool.imap with chunks of 32 documents; one worker makes
two processes. Both use mjax's tokenizer without gigatoken, one text per call as in the script.

Contenders alternate, after one round of warm-up, and the fastest round of each counts. The start of worker processes is
included, the start of the interpreter is not. CPU seconds are of all processes. CPU seconds of the first process, which
reads and writes, show how many workers it could feed. All datasets must be byte for byte the same.

Needs megatron-core and torch: run it in the environment of `make test-ci`.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import check_counts, check_peers, in_one_sentence
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.corpus.documents import TextFiles
from mjax.data.gigatoken import ENVIRONMENT_VARIABLE
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError

_tokenizer = None


# --- Megatron's way ---------------------------------------------------------------------------------------------------


def initialise(spec: str) -> None:
    global _tokenizer
    os.environ[ENVIRONMENT_VARIABLE] = "0"
    _tokenizer = load_tokenizer(spec)


def encode(line: str) -> tuple[list[int], list[int], int]:
    """tools/preprocess_data.py, Encoder.encode with --append-eod."""
    document, lengths = [], []
    for sentence in [json.loads(line)["text"]]:
        ids = _tokenizer.encode(sentence)
        if len(ids) > 0:
            document.extend(ids)
            lengths.append(len(ids))
    if len(document) > 0:
        document.append(_tokenizer.eod)
        lengths[-1] += 1
    return document, lengths, len(line)


def megatron(file: Path, spec: str, prefix: str, workers: int | None) -> None:
    """The script's loop in this process, or, with `workers`, in its pool."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    initialise(spec)
    dtype = DType.optimal_dtype(_tokenizer.vocabulary)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with file.open(encoding="utf-8") as stream:
        if workers is None:
            for line in stream:
                document, lengths, _ = encode(line)
                builder.add_document(document, lengths)
        else:
            with multiprocessing.Pool(workers, initializer=initialise, initargs=(spec,)) as pool:
                for document, lengths, _ in pool.imap(encode, stream, 32):
                    builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")


# --- The comparison ---------------------------------------------------------------------------------------------------


def mjax(file: Path, spec: str, prefix: str, workers: int, switch: str) -> None:
    os.environ[ENVIRONMENT_VARIABLE] = switch
    prepare(PrepareArguments(output=prefix, inputs=(file,), tokenizer=spec, workers=workers, overwrite=True, json=True))


def contenders(file: Path, spec: str, folder: Path, workers: list[int], pool: bool) -> dict[str, Callable[[], None]]:
    runs = {"megatron loop": lambda: megatron(file, spec, str(folder / "loop"), None)}
    os.environ[ENVIRONMENT_VARIABLE] = "1"
    encoders = {load_tokenizer(spec).encoder: "1"}
    if "gigatoken" in encoders:
        encoders = {"tokenizers": "0", **encoders}
    for count in workers:
        if pool:
            runs[f"megatron pool, workers {count}"] = lambda n=count: megatron(file, spec, str(folder / f"pool{n}"), n)
        for name, switch in encoders.items():
            prefix = str(folder / f"mjax{count}-{name}")
            runs[f"mjax, {name}, workers {count}"] = lambda n=count, p=prefix, s=switch: mjax(file, spec, p, n, s)
    return runs


def llama3(file: Path, folder: Path) -> str:
    """Train byte pairs with the pattern of Llama 3, whose own vocabulary is in no package."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    split = pre_tokenizers.Split(tokenizers.Regex(pattern + r"|\s+(?!\S)|\s+"), "isolated")
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder, special = decoders.ByteLevel(), ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=48_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = (document.text for document in TextFiles([cut(file, 30, folder, "training.jsonl")]))
    made.train_from_iterator(texts, trainer)
    made.save(str(folder / "llama3.json"))
    return f"hf:{folder}/llama3.json"


def cut(file: Path, megabytes: float, folder: Path, name: str = "part.jsonl") -> Path:
    """The first lines of `file`, `megabytes` of them.

    Raises:
      UsageError: not one fits.
    """
    part = folder / name
    with file.open("rb") as source, part.open("wb") as target:
        for line in source:
            if target.tell() + len(line) > megabytes * 1e6:
                break
            target.write(line)
    if not part.stat().st_size:
        raise UsageError(f"--megabytes {megabytes:g} is less than the first line of {file}; give more")
    return part


class Times(NamedTuple):
    """Seconds of one run."""

    wall: float
    cpu: float
    first_process: float


def quietly(run: Callable[[], None]) -> Times:
    """The times of a run, whose output is thrown away."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        began, wall = os.times(), time.perf_counter()
        run()
        ended, wall = os.times(), time.perf_counter() - wall
    first = ended.user - began.user + ended.system - began.system
    workers = ended.children_user - began.children_user + ended.children_system - began.children_system
    return Times(wall, first + workers, first)


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .jsonl file, such as benchmarks/mixture.py writes")
    parser.add_argument(
        "--tokenizer", default=None, help="as for mjax prepare, or llama3; trained on the text when not given"
    )
    parser.add_argument("--megabytes", type=float, default=20.0, help="how much of the file is used (default: 20)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    parser.add_argument("--no-pool", action="store_true", help="leave Megatron's pool of processes out")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    arguments = parser.parse_args()
    check_counts(arguments, "workers", "rounds")
    TextFiles([arguments.file])  # refuses a file that is not there
    check_peers("megatron", "torch")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = cut(arguments.file, arguments.megabytes, folder)
        spec = arguments.tokenizer
        if spec is None:
            training = PrepareArguments(output=str(folder / "t"), inputs=(part,), vocabulary=32000)
            quietly(lambda: prepare(training))
            spec = f"sentencepiece:{folder}/t.tokenizer/tokenizer.model"
        if spec == "llama3":
            spec = llama3(arguments.file, folder)
        runs = contenders(part, spec, folder, arguments.workers, not arguments.no_pool)
        times: dict[str, list[Times]] = {run: [] for run in runs}
        for counts in [False] + [True] * arguments.rounds:
            for run, start in runs.items():
                measured = quietly(start)
                if counts:
                    times[run].append(measured)
        same = all(
            filecmp.cmp(folder / f"loop.{ending}", file, shallow=False)
            for ending in ("bin", "idx")
            for kind in ("pool", "mjax")
            for file in folder.glob(f"{kind}*.{ending}")
        )
        report(times, part.stat().st_size, arguments.tokenizer or "sentencepiece, 32,000 pieces trained on the text")
    print("all datasets have equal bytes" if same else "THE DATASETS DIFFER")
    return 0 if same else 1


def report(times: dict[str, list[Times]], size: int, tokenizer: str) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "sentencepiece", "tokenizers"))
    if any("gigatoken" in name for name in times):
        versions += f", gigatoken {version('gigatoken')}"
    print(f"{size / 1e6:.1f} MB of JSON lines; {tokenizer}; {len(os.sched_getaffinity(0))} cores; {versions}")
    print(f"{'':<29} {'s':>7} {'MB/s':>6} {'speed':>6} {'CPU s':>7} {'of the first':>12}   s of all rounds")
    peer = min(times["megatron loop"])
    for name, rounds in times.items():
        best = min(rounds)
        figures = f"{best.wall:>7.2f} {size / best.wall / 1e6:>6.2f} {peer.wall / best.wall:>5.2f}x"
        every = " ".join(f"{each.wall:.2f}" for each in rounds)
        print(f"{name:<29} {figures} {best.cpu:>7.2f} {best.first_process:>12.2f}   {every}")


if __name__ == "__main__":
    sys.exit(main())
