"""Speed and memory of a training step, compared with PyTorch in the same run.

    python benchmarks/train_step.py                                    the CPU reference case
    python benchmarks/train_step.py --config gpt_1b --peers eager      any config, any flag of `train.py`

The peers are transformers' GPT2LMHeadModel with the config's shapes, padded vocabulary, precision, dropout, clipping
and micro-batches, run by torch eagerly and through torch.compile. Each contender has a separate process, so its peak
memory is measured separately. On a CPU the contenders alternate, round by round, and are compared within a round: other
load on the machine affects all of them equally. On a GPU they run one after the other, since each would reserve most of
the memory.

A config's data-parallel replicas are cut to one, with its share of the global batch; --mesh.data restores them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.command import Figure, check_counts, collect, in_one_sentence
from mjax.cluster.huge_pages import has_nvidia_gpu
from mjax.config import Config, load_config, to_dict
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.planner.layer import model_flops, peak_tflops

HERE = Path(__file__).resolve().parent
NAMES = {"mjax": "mjax", "eager": "PyTorch eager", "compile": "PyTorch compiled"}


@dataclass(frozen=True)
class Arguments:
    """Measure the training step of a config and of its peers. Any field of the config can be changed by a flag."""

    config: str = "cpu_reference"
    """Config name in configs/ or benchmarks/, or a path to a .py file that defines `config`."""
    peers: str = "eager,compile"
    """PyTorch peers, separated by commas: eager, compile, or none."""
    rounds: int = 5
    """Times each contender is measured."""
    steps: int = 5
    """Steps in a round, timed together, after one warm-up step."""
    threads: int | None = None
    """CPU threads per contender (by default as many as this process may use)."""
    json: bool = False
    """Print JSON instead of the table."""
    markdown: bool = False
    """Print the table in Markdown."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass
class Row:
    """Measurements of one contender; None if it did not run or the value is unknown.

    Attributes:
      ms: milliseconds per step, the median over the rounds; `ms_min` and `ms_max` are the extremes.
      against_mjax: its time over mjax's, the median over the rounds; above 1 it is slower.
      tflops: model TFLOP/s per device.
      memory_gib: peak of the process on a CPU, of the device's allocator on a GPU.
      first_step_seconds: from the start of the process to the end of its first step, compilation included.
      failed: the reason if it failed.
    """

    name: str
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    against_mjax: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    first_step_seconds: float | None = None
    first_loss: float | None = None
    failed: str | None = None


# --- A contender, seen from here --------------------------------------------------------------------------------------


class Process:
    """A contender in its process, and the times it has reported."""

    def __init__(self, contender: str, config: Config, platform: str, threads: int):
        self.row, self.seconds, self.about = Row(NAMES[contender]), [], {}
        self.folder = tempfile.TemporaryDirectory()  # the log, and a cache that is empty: every contender compiles
        self.log = Path(self.folder.name) / "log"
        environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": self.folder.name, "OMP_NUM_THREADS": str(threads)}
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # of a GPU's memory; JAX would take 0.75
        start = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "contender.py"), contender],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.about = self.ask(config=to_dict(config), platform=platform, threads=threads)
        if self.row.failed is None:
            self.row.first_step_seconds = time.perf_counter() - start
            self.row.first_loss = self.about["loss"]

    def ask(self, **request) -> dict[str, Any]:
        """Send a request and wait for its answer; a contender that fails is marked in its row and gets no more
        requests."""
        if self.row.failed is not None:
            return {}
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '{"failed": null}')
        except BrokenPipeError:
            answer = {"failed": None}
        if "failed" in answer:
            self.row.failed = answer["failed"] or self._last_words()
        return answer

    def measure(self, steps: int) -> None:
        """Run one round."""
        answer = self.ask(steps=steps)
        if self.row.failed is None:
            self.seconds.append(answer["seconds"] / steps)

    def stop(self) -> None:
        """End the process and record its peak memory."""
        answer = self.ask(stop=True)
        if "peak_bytes" in answer:
            self.row.memory_gib = answer["peak_bytes"] / 2**30
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()

    def _last_words(self) -> str:
        code = self.process.wait()
        lines = self.log.read_text().strip().splitlines()
        return f"ended with code {code}" + (f": {lines[-1]}" if lines else "")


# --- The measurement --------------------------------------------------------------------------------------------------


def measure(arguments: Arguments, platform: str, threads: int) -> list[Process]:
    """Run every contender; mjax is the first."""
    contenders = ["mjax", *_peers(arguments.peers)]
    start = partial(Process, config=arguments.settings, platform=platform, threads=threads)
    if platform == "cpu":
        processes = [start(name) for name in contenders]
        for _ in range(arguments.rounds):
            for process in processes:
                process.measure(arguments.steps)
        for process in processes:
            process.stop()
        return processes
    processes = []
    for name in contenders:
        processes.append(start(name))
        for _ in range(arguments.rounds):
            processes[-1].measure(arguments.steps)
        processes[-1].stop()
    return processes


def _peers(wish: str) -> list[str]:
    names = [] if wish == "none" else wish.split(",")
    for name in names:
        if name not in ("eager", "compile"):
            raise UsageError(f"--peers {wish} names {name!r}; use eager, compile, eager,compile or none")
    return names


def evaluate(processes: list[Process], config: Config) -> list[Row]:
    """The rows of the table."""
    ours = processes[0]
    for process in processes:
        if process.row.failed is not None:
            continue
        row, seconds = process.row, process.seconds
        row.ms, row.ms_min, row.ms_max = (1e3 * pick(seconds) for pick in (median, min, max))
        row.tokens_per_second = config.train.global_batch * config.model.sequence / median(seconds)
        row.tflops = model_flops(config) / median(seconds) / config.mesh.devices / 1e12
        peak = peak_tflops(process.about["device"], config.precision.compute)
        row.mfu = row.tflops / peak if peak else None
        if ours.row.failed is None:
            row.against_mjax = median(theirs / mine for theirs, mine in zip(seconds, ours.seconds, strict=True))
    return [process.row for process in processes]


def notes(arguments: Arguments, processes: list[Process], platform: str, threads: int) -> list[str]:
    """The conditions of the measurement."""
    config = arguments.settings
    model, train, compute = config.model, config.train, config.precision.compute
    versions: dict[str, str] = {}
    for process in processes:
        versions |= process.about.get("versions", {})
    device = processes[0].about.get("device", platform)
    turns = "contenders take turns each round" if platform == "cpu" else "contenders run one after the other"
    autocast = {"bf16": "PyTorch autocasts", "fp16": "PyTorch autocasts, with a gradient scaler"}
    lines = [
        f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads, sequence {model.sequence}, vocabulary "
        f"{model.padded_vocabulary} (padded), {count_parameters(model):,} parameters",
        f"{train.global_batch} sequences a step in micro-batches of {train.micro_batch}, dropout "
        f"{model.hidden_dropout:g} and {model.attention_dropout:g} (attention), recompute {train.recompute}"
        + (" (PyTorch: whole layers)" if train.recompute == "selective" and len(processes) > 1 else ""),
        f"{compute}"
        + (f" over float32 weights ({autocast[compute]})" if compute in autocast and len(processes) > 1 else "")
        + f"; clipping {config.optimizer.clip_norm:g}, AdamW (PyTorch: fused), sdpa attention in PyTorch",
        f"data {config.mesh.data} × model {config.mesh.model}"
        + (", sequence parallel" if config.mesh.splits_tokens else "")
        + f" on {device}"
        + (f", {threads} threads" if platform == "cpu" else ""),
        f"{arguments.rounds} rounds of {arguments.steps} steps; {turns}; memory is the peak of "
        + ("the process" if platform == "cpu" else "the allocator")
        + "; first step counts from the start of the process",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    if peak_tflops(device, compute) is None:
        lines.append(
            f"no MFU: no {compute} peak is known for {device}; mjax/cluster/hardware.py describes how to add it"
        )
    return lines


# --- The table --------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("", lambda row: row.name),
    ("ms a step", lambda row: f"{row.ms:,.1f}"),
    ("min–max", lambda row: f"{row.ms_min:,.1f}–{row.ms_max:,.1f}"),
    ("× mjax", lambda row: _figure(row.against_mjax, "{:.2f}")),
    ("tokens/s", lambda row: f"{row.tokens_per_second:,.0f}"),
    ("TFLOP/s", lambda row: f"{row.tflops:,.3g}"),
    ("MFU", lambda row: _figure(row.mfu, "{:.1%}")),
    ("memory GiB", lambda row: f"{row.memory_gib:,.2f}"),
    ("first step s", lambda row: f"{row.first_step_seconds:,.1f}"),
    ("first loss", lambda row: f"{row.first_loss:.4f}"),
)


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def table(rows: list[Row], markdown: bool) -> str:
    """The rows as aligned text, or as a Markdown table, followed by the reasons of failed contenders."""
    cells = [[title for title, _ in COLUMNS]]
    for row in rows:
        shown = [read(row) for _, read in COLUMNS] if row.failed is None else [row.name, "failed"]
        cells.append(shown + ["–"] * (len(COLUMNS) - len(shown)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        words = [
            line[0].ljust(widths[0]),
            *(word.rjust(width) for word, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append(f"| {' | '.join(words)} |" if markdown else "  ".join(words))
    if markdown:
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines.insert(1, f"| {' | '.join(rule)} |")
    lines += [f"{'' if markdown else '  '}{row.name} failed: {row.failed}" for row in rows if row.failed is not None]
    return "\n".join(lines)


# --- The command ------------------------------------------------------------------------------------------------------


@in_one_sentence
def main() -> int:
    """Measure and print; 0 when mjax has results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=Arguments.config)
    name = parser.parse_known_args()[0].config
    arguments = tyro.cli(Arguments, prog="train_step.py", default=Arguments(config=name, settings=_one_replica(name)))
    check_counts(arguments, "rounds", "steps", "threads")
    validate(arguments.settings, name)
    gpu = has_nvidia_gpu() and os.environ.get("JAX_PLATFORMS", "") != "cpu"
    platform, threads = "gpu" if gpu else "cpu", arguments.threads or len(os.sched_getaffinity(0))
    processes = measure(arguments, platform, threads)
    rows, remarks = evaluate(processes, arguments.settings), notes(arguments, processes, platform, threads)
    if arguments.json:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "rows": [asdict(row) for row in rows],
            "notes": remarks,
            "config": to_dict(arguments.settings),
        }
        print(json.dumps(record, indent=2))
    else:
        print(table(rows, arguments.markdown), *(f"- {remark}" for remark in remarks), sep="\n")
    collect(*figures(arguments, rows))
    return int(rows[0].failed is not None)


def figures(arguments: Arguments, rows: list[Row]) -> list[Figure]:
    """The speed relative to torch.compile, and the memory, of the CPU reference case."""
    ours, others = rows[0], {row.name: row for row in rows}
    compiled = others.get(NAMES["compile"])
    if arguments.config != Arguments.config or ours.failed or compiled is None or compiled.failed:
        return []
    kind, number = ("with", "step_dropout") if arguments.settings.model.hidden_dropout else ("without", "step")
    return [
        Figure(f"CPU step {kind} dropout", compiled.against_mjax, "× torch.compile's speed", 1.0, True, number),
        Figure(f"memory of a CPU step {kind} dropout", ours.memory_gib, "GiB", 1.15),
    ]


def _one_replica(name: str) -> Config:
    """The config `name`, cut to one replica along `data` and its share of the global batch, with mock tokens."""
    found = HERE / f"{name}.py"
    config = load_config(str(found) if found.is_file() else name)
    share = config.train.global_batch // config.mesh.data
    return replace(
        config,
        mesh=replace(config.mesh, data=1, schedule="1f1b", virtual_stages=1, zero=0),
        data=replace(config.data, mock=True),
        train=replace(config.train, global_batch=share),
    )


if __name__ == "__main__":
    sys.exit(main())
