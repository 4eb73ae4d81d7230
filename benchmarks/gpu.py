"""A day with one GPU in one command: does mjax run there, is it right, how fast is it, and what does it wait for.

    python benchmarks/gpu.py --output gpu_day                                    all parts, within an hour
    python benchmarks/gpu.py --output gpu_day --parts about first checks         some of them, in this order
    python benchmarks/gpu.py --output dry_run --tiny --parts first resume        toy sizes on a CPU, to try the command

**It has not been run on a GPU yet**, only with --tiny. Every part is one or more commands, each in a separate process
with a separate limit. One that fails or runs over its limit is ended and named, and the others still run. Parts that do
not fit into --seconds are listed as left out. Everything is in OUTPUT, after every command:

    results.md      the tables, for benchmarks/log
    results.json    the same, with commands, limits and seconds
    day.log         all that was printed
    clocks.csv      clock, power, heat and memory of the GPU every half second, from nvidia-smi
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.command import in_one_sentence
from benchmarks.day import Day, Ended, markdown
from benchmarks.train_step import Row
from benchmarks.train_step import table as table_of_steps
from mjax.cluster.huge_pages import has_nvidia_gpu
from mjax.errors import UsageError, check_folder

PYTHON = sys.executable
NO_DROPOUT = ("--model.attention-dropout", "0", "--model.hidden-dropout", "0")
TINY = (
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.sequence", "16"),
    *("--model.vocabulary", "250", "--train.global-batch", "4", "--train.micro-batch", "2"),
    *("--precision.compute", "fp32", "--model.attention", "auto"),
)
CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used,clocks_throttle_reasons.active"

PartName = Literal[
    "about", "doctor", "first", "tests", "checks", "step", "profile", "variants", "resume", "bits", "fp16", "kernels",
    "calibrate", "predicted", "larger",
]  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Measure mjax on the GPU of this machine, part by part, whatever fails on the way."""

    output: Path
    """Folder for the results, which is created. A second command in it writes results-2.md and results-2.json."""
    parts: tuple[PartName, ...] = PartName.__args__
    """Parts to run. about: the machine. doctor: `mjax doctor`. first: MFU of gpt_1b. tests: the suite's GPU tests.
    checks: attention, a step against float64, fp16, bits (tests/test_gpu.py). step: gpt_1b against PyTorch. profile:
    kernel times. variants: one change at a time. resume: a run killed and continued. bits: a run twice. fp16: a run.
    kernels: matmuls, attention and memory alone. calibrate: rates for `mjax plan`. predicted: measured and predicted
    step times. larger: gpt_2b against PyTorch."""
    seconds: float = 3600.0
    """Time limit for the whole command. Parts that do not fit are listed."""
    tiny: bool = False
    """Toy sizes, to try the command on a CPU. The measurements are meaningless."""


# --- Parts: the machine -----------------------------------------------------------------------------------------------


def about(day: Day) -> None:
    """Describe this machine."""
    if shutil.which("nvidia-smi"):
        day.run("nvidia-smi", ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,MEMORY"], 30)
    day.run("packages", [PYTHON, "-c", "from mjax.utils.packages import list_versions; print(list_versions())"], 60)


def doctor(day: Day) -> None:
    """`mjax doctor`."""
    config, limit = ("gpt_demo", "20") if day.tiny else ("gpt_1b", "200")
    day.run("doctor", [PYTHON, "-m", "mjax", "doctor", "--config", config, "--timeout", limit], 300)


def _pytest(day: Day, name: str, limit: float, *chosen: str) -> None:
    platform = {"MJAX_TEST_PLATFORM": "cpu" if day.tiny else "cuda,cpu"}
    day.run(name, [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], limit, platform)


def tests(day: Day) -> None:
    """Run the tests that the suite skips without a GPU."""
    _pytest(day, "tests", 240, "-m", "gpu", *(() if day.tiny else ("tests/doctor",)), "tests/models/test_attention.py")


def checks(day: Day) -> None:
    """Attention with gradients, a step against float64, fp16, bits."""
    _pytest(day, "checks", 400, "tests/test_gpu.py")


# --- Parts: steps -----------------------------------------------------------------------------------------------------


def _step(day: Day, name: str, config: str, limit: float, *flags: str, peers: str = "none", xla: str = "") -> list[Row]:
    """The rows of benchmarks/train_step.py, none if it did not end well."""
    command = [PYTHON, "benchmarks/train_step.py", "--config", config, "--mesh.model", "1", *NO_DROPOUT, "--json"]
    command += ["--peers", peers, "--rounds", "3", "--steps", "10", "--train.recompute", "none", *flags]
    if day.tiny:
        command += [*TINY, "--rounds", "1", "--steps", "1", "--threads", "1"]
    given = f"{os.environ.get('XLA_FLAGS', '')} {xla}".strip()
    ended = day.run(name, command, limit, {"XLA_FLAGS": given} if xla else None)
    begin = ended.output.find("\n{\n") + 1 if not ended.output.startswith("{\n") else 0
    try:
        found, _ = json.JSONDecoder().raw_decode(ended.output[begin:])
        return [Row(**row) for row in found["rows"]]
    except (ValueError, KeyError, TypeError):  # it printed no record: its verdict says why
        return []


def _sequences(batch: int, micro_batch: int) -> tuple[str, ...]:
    return "--train.global-batch", str(batch), "--train.micro-batch", str(micro_batch)


def _beside(day: Day, config: str, limit: float, batch: int, micro_batch: int, peers: str) -> None:
    title = f"{config}, {batch} sequences in micro-batches of {micro_batch}"
    rows = _step(day, title, config, limit, *_sequences(batch, micro_batch), peers=peers)
    if rows:
        day.table(title, [asdict(row) for row in rows], table_of_steps(rows, markdown=True))


def first(day: Day) -> None:
    """The one number."""
    _beside(day, "gpt_1b", 300, 8, 8, "none")


def step(day: Day) -> None:
    """Compare gpt_1b with PyTorch, which a dry run leaves out."""
    peers = "none" if day.tiny else "eager,compile"
    _beside(day, "gpt_1b", 500, 8, 8, peers)
    if not day.tiny:
        _beside(day, "gpt_345m", 400, 16, 16, peers)


def larger(day: Day) -> None:
    """Compare gpt_2b with PyTorch."""
    _beside(day, "gpt_2b", 500, 8, 4, "none" if day.tiny else "eager,compile")


# Name, flags, XLA's options; the most informative first.
VARIANTS = (
    ("as it is", (), ""),
    ("layers in a loop", ("--train.unroll", "off"), ""),
    ("layers without a loop", ("--train.unroll", "on"), ""),
    ("micro-batch 16", _sequences(16, 16), ""),
    ("micro-batch 16, 4 a step", _sequences(64, 16), ""),
    ("recompute selective", ("--train.recompute", "selective"), ""),
    ("micro-batch 24, selective", (*_sequences(24, 24), "--train.recompute", "selective"), ""),
    ("no Triton products", (), "--xla_gpu_enable_triton_gemm=false"),
    ("no CUDA graphs", (), "--xla_gpu_enable_command_buffer="),
    ("hidden dropout 0.1", ("--model.hidden-dropout", "0.1"), ""),
    ("fp16", ("--precision.compute", "fp16"), ""),
)


def variants(day: Day) -> None:
    """Change one setting at a time, each compiled in a separate process."""
    rows = []
    for name, flags, xla in VARIANTS[1:3] if day.tiny else VARIANTS:
        found = _step(day, f"variant: {name}", "gpt_1b", 200, *_sequences(8, 8), *flags, xla=xla)
        rows.append({"variant": name, "result": day.ended[-1].verdict})
        for row in found:
            mfu = None if row.mfu is None else f"{row.mfu:.1%}"
            rows[-1] |= {"ms": row.ms and round(row.ms, 1), "TFLOP/s": row.tflops and round(row.tflops, 3), "MFU": mfu}
            rows[-1] |= {"GiB": row.memory_gib and round(row.memory_gib, 2), "failed": row.failed}
    day.table("Variants of gpt_1b", rows)


# --- Parts: runs ------------------------------------------------------------------------------------------------------


def _train(day: Day, name: str, steps: int, limit: float, *flags: str, config: str = "gpt_345m", **options) -> Ended:
    command = [PYTHON, "train.py", "--config", config, "--name", name, "--runs", str(day.folder / "runs")]
    command += ["--data.mock", "--mesh.data", "1", "--mesh.model", "1", *NO_DROPOUT, *_sequences(16, 16)]
    command += ["--train.steps", str(steps), "--optimizer.warmup-steps", str(steps // 10), "--train.eval-interval", "0"]
    command += ["--log.sample-tokens", "0", "--train.recompute", "none", *(TINY if day.tiny else ())]
    return day.run(name, [*command, *flags], limit, **options)


def _records(day: Day, name: str) -> dict[int, dict]:
    """The records of a run by step; the last of each."""
    file = day.folder / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["step"]: record for record in map(json.loads, filter(lambda line: line.endswith("}"), lines))}


def _compared(day: Day, title: str, one: str, other: str) -> None:
    """A table of two runs that should be equal: the first step whose loss or gradient differs."""
    a, b = ({n: (r["loss"], r["grad_norm"]) for n, r in _records(day, run).items()} for run in (one, other))
    both = sorted(a.keys() & b.keys())
    differs = next((n for n in both if a[n] != b[n]), None)
    words = (
        "no step in both" if not both else "equal bit for bit" if differs is None else f"differ from step {differs} on"
    )
    day.table(title, [{"runs": f"{one}, {other}", "steps in both": len(both), "losses": words}])


def resume(day: Day) -> None:
    """A run that is killed and continued has the losses of one that is not."""
    steps = 12 if day.tiny else 200
    flags = ("--checkpoint.interval", str(steps // 4), *(() if day.tiny else ("--deterministic",)))
    saved = day.folder / "runs" / "killed" / "checkpoints" / str(steps // 4)
    for old in ("whole", "killed"):
        shutil.rmtree(day.folder / "runs" / old, ignore_errors=True)
    _train(day, "whole", steps, 240, *flags)
    _train(day, "killed", steps, 240, *flags, kill_when=saved.exists)
    _train(day, "killed", steps, 240, *flags)
    _compared(day, "A run killed and continued", "whole", "killed")


def bits(day: Day) -> None:
    """The same run twice, without --deterministic."""
    for name in ("once", "again"):
        shutil.rmtree(day.folder / "runs" / name, ignore_errors=True)
        _train(day, name, 8 if day.tiny else 100, 240, "--checkpoint.interval", "0")
    _compared(day, "The same run twice", "once", "again")


def fp16(day: Day) -> None:
    """Skipped steps and the loss scale of a run in fp16."""
    shutil.rmtree(day.folder / "runs" / "half", ignore_errors=True)
    _train(day, "half", 8 if day.tiny else 200, 240, "--checkpoint.interval", "0", "--precision.compute", "fp16")
    found = list(_records(day, "half").values())
    if found:
        a, b = found[0], found[-1]
        row = {"steps": len(found), "skipped": sum(r["skipped"] for r in found), "scale": b["loss_scale"]}
        day.table("A run in fp16", [row | {"first loss": a["loss"], "last loss": b["loss"]}])


def profile(day: Day) -> None:
    """Print the table of `--profile`: the time of a step by kind of work."""
    shutil.rmtree(day.folder / "runs" / "profiled", ignore_errors=True)
    chosen = () if day.tiny else _sequences(8, 8)
    flags = ("--profile", "6:9", "--checkpoint.interval", "0", *chosen)
    _train(day, "profiled", 10, 300, *flags, config="gpt_1b")
    for file in sorted((day.folder / "runs" / "profiled" / "profile").glob("*/table.txt")):
        day.table("Three steps of gpt_1b", [{"file": str(file)}], f"```text\n{file.read_text().strip()}\n```")


# --- Parts: rates -----------------------------------------------------------------------------------------------------


def kernels(day: Day) -> None:
    """The roof: what no change outside these kernels can beat."""
    file = day.folder / "kernels.json"
    file.unlink(missing_ok=True)
    command = [PYTHON, "benchmarks/gpu_kernels.py", "--output", str(file), *(("--tiny",) if day.tiny else ())]
    day.run("kernels", command, 300)
    if file.exists():
        found = json.loads(file.read_text())
        day.table(found["title"], found["rows"], f"{markdown(found['rows'])}\n\n{found['roof']}")


def calibrate(day: Day) -> None:
    """Rates for `mjax plan --calibration`."""
    sizes = ["--shrink", "512", "--rounds", "1", "--gpu", "h100", "--kinds", "launch", "copy"] if day.tiny else []
    output = str(day.folder / "calibration.json")
    day.run("calibrate", [PYTHON, "benchmarks/calibrate.py", "--output", output, *sizes], 300)


def predicted(day: Day) -> None:
    """Compare five steps with the plan; the largest error goes into the file of rates."""
    rates = day.folder / "calibration.json"
    flags = ["--calibration", str(rates), "--write", str(rates)] if rates.exists() and not day.tiny else []
    if day.tiny:
        flags = ["--gpu", "h100", "--configs", "tests/tiny_config.py", "--rounds", "1", "--steps", "1"]
    day.run("predicted", [PYTHON, "benchmarks/predicted.py", *flags], 600)


# --- The command ------------------------------------------------------------------------------------------------------

FUNCTIONS = (
    about, doctor, first, tests, checks, step, profile, variants, resume, bits, fp16, kernels, calibrate, predicted,
    larger,
)  # fmt: skip
PARTS: dict[str, Callable[[Day], None]] = {function.__name__: function for function in FUNCTIONS}


@contextmanager
def _watched(folder: Path, tiny: bool) -> Iterator[None]:
    """clocks.csv while the parts run; only asks, and sets nothing."""
    if tiny or shutil.which("nvidia-smi") is None:
        yield
        return
    with (folder / "clocks.csv").open("a") as file:
        command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv", "-lms", "500"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@in_one_sentence
def main() -> int:
    """Run the parts; 1 if a command did not do what it was started for."""
    arguments = tyro.cli(Arguments, prog="gpu.py")
    if not arguments.seconds > 0:
        raise UsageError(f"--seconds is {arguments.seconds:g}; it must be above 0")
    if arguments.output.is_file():
        raise UsageError(f"--output {arguments.output} is a file; name a folder")
    check_folder("--output", arguments.output)
    if not arguments.tiny and not has_nvidia_gpu():
        raise UsageError("there is no NVIDIA GPU here; add --tiny to try the command on a CPU")
    day = Day(arguments.output, arguments.seconds, arguments.tiny)
    with _watched(day.folder, arguments.tiny):
        for part in arguments.parts:
            day.part = part
            try:
                PARTS[part](day)
            except Exception as error:  # a part never ends the day
                day.ended.append(Ended(part, part, "", 0.0, f"{type(error).__name__}: {error}"))
                day.say(f"-- {part}: {day.ended[-1].verdict}")
    day.write()
    day.say(markdown([{"command": e.name, "result": e.verdict, "seconds": e.seconds} for e in day.ended]))
    day.say(f"written to {arguments.output / day.results}.md and .json")
    return int(not all(ended.fine for ended in day.ended))


if __name__ == "__main__":
    sys.exit(main())
