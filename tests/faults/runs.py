"""The small run of the fault campaign: its folder, its processes, and its comparison with the undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mjax.checkpoint.folders import Unusable, read_manifest
from mjax.data.indexed import IndexedDatasetWriter
from mjax.errors import RunError
from mjax.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVES, EVALUATES = 60, 5, 4
PATIENCE = 240  # seconds for a process that takes ten
CONFIG = f"""
from mjax.config import *
from mjax.config import GPTConfig

config = Config(
    model=GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=257, vocabulary_multiple=64),
    data=DataConfig(path=("{{data}}",), split="80,20,0"),
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps={STEPS}, global_batch=8, micro_batch=4, eval_interval={EVALUATES}, eval_batches=1),
    checkpoint=CheckpointConfig(interval={SAVES}, keep_last=3),
    log=LogConfig(tensorboard=False, sample_tokens=0),
)
"""


@dataclass
class Outcome:
    """The outcome of one try.

    Attributes:
      note: what was done, for the table; such as 'while saving'.
      lost: committed steps that had to be repeated.
      silent: whether it ended as if successful, with other numbers.
      traceback, hang: whether a process ended with one; had to be killed.
      words: observations that break a promise.
    """

    note: str
    lost: int = 0
    silent: bool = False
    traceback: bool = False
    hang: bool = False
    words: str = ""

    @property
    def sound(self) -> bool:
        """True if every promise was kept."""
        return not (self.lost or self.silent or self.traceback or self.hang or self.words)


@dataclass
class Ended:
    """A process that has ended: its exit code, None if it had to be killed, and its output."""

    code: int | None
    output: str

    def judge(self, outcome: Outcome, *codes: int) -> bool:
        """Note broken promises; return whether the exit code is one of `codes`."""
        last = self.output.strip().splitlines()[-1:] or ["nothing was printed"]
        outcome.hang |= self.code is None
        outcome.traceback |= "Traceback (most recent call last)" in self.output
        if self.code not in codes:
            outcome.words += f"exit code {self.code}, not {' or '.join(map(str, codes))}: {last[0]}; "
        elif outcome.traceback:
            outcome.words += f"traceback: {last[0]}; "
        return self.code in codes


@dataclass(frozen=True)
class Place:
    """A folder with the config, the data and the reference run of all tries.

    Attributes:
      folder: parent of the tries' folders.
      config: of the small run.
      seconds: time of the reference run until its first step.
      losses: of the reference run, {step: (loss, validation loss or None)}.
      checkpoints: of the reference run, all of them, {step: contents of its arrays}.
    """

    folder: Path
    config: Path
    seconds: float
    losses: dict[int, tuple]
    checkpoints: dict[int, dict[str, bytes]]

    @classmethod
    def prepare(cls, folder: Path) -> Place:
        """Write the data and run the undisturbed reference."""
        random = np.random.default_rng(0)
        with IndexedDatasetWriter(folder / "data", 257) as writer:
            for _ in range(60):  # counting, which is learned at once: broken weights show in the loss
                writer.add_document((random.integers(0, 257) + np.arange(50)) % 257)
        config = folder / "config.py"
        config.write_text(CONFIG.format(data=folder / "data"))
        cls(folder, config, 0.0, {}, {}).start("warm-up").wait()  # fills the cache of compiled programs
        began = time.monotonic()
        process = cls(folder, config, 0.0, {}, {}).start("reference", "--checkpoint.keep-last", "1000")
        process.until(lambda: bool(losses_of(folder / "reference")))
        place = cls(folder, config, time.monotonic() - began, {}, {})
        ended = process.wait()
        if ended.code != 0:
            raise RunError(f"the undisturbed run ended with exit code {ended.code}: {ended.output[-2000:]}")
        place.losses.update(losses_of(folder / "reference"))
        for step in committed(folder / "reference"):
            place.checkpoints[step] = arrays_of(folder / "reference", step)
        return place

    def start(self, name: str, *flags: str, **changes: str) -> Process:
        """`train.py` on the run folder `name`, with these flags and changes to the environment."""
        run = self.folder / name
        argv = [sys.executable, str(ROOT / "train.py"), "--config", str(self.config), *flags]
        argv += ["--runs", str(run.parent), "--name", run.name]
        return Process(argv, self.environment() | changes, self.folder / f"{name.replace('/', '_')}.log")

    def environment(self) -> dict[str, str]:
        """Environment for a process on one CPU device, with a cache of compiled programs."""
        kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
        return kept | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            "PYTHONUNBUFFERED": "1",
        }

    def compare(self, name: str, outcome: Outcome, stopped_at: int | None = None) -> None:
        """Compare a finished run with the reference: every loss and every array of the last checkpoint.

        Args:
          stopped_at: the step at which the run got a stop request. It saves there and does not evaluate.
        """
        run = self.folder / name
        if committed(run)[-1:] != [STEPS]:
            outcome.words += f"the last checkpoint is {committed(run)[-1:]}, not {STEPS}; "
            return
        expected = dict(self.losses)
        if stopped_at in expected:
            expected[stopped_at] = expected[stopped_at][0], None
        if losses_of(run) not in (self.losses, expected):
            outcome.silent = True
            outcome.words += "other losses; "
        elif arrays_of(run, STEPS) != self.checkpoints[STEPS]:
            outcome.silent = True
            outcome.words += "other weights; "

    def forget(self, *names: str) -> None:
        """Remove the files of a try."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)


class Process:
    """A running process whose output goes to a file."""

    def __init__(self, argv: list[str], environment: dict[str, str], log: Path):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(argv, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        self.process.send_signal(number)

    def running(self) -> bool:
        """True if it has not ended."""
        return self.process.poll() is None

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for a condition; return whether it came true before the process ended or the time was over."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.running() or time.monotonic() > end:
                return condition()
            time.sleep(0.002)
        return True

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end; kill it if it does not end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        return Ended(code, self.output())


def committed(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run whose folder has their number."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and _has_manifest(entry))


def _has_manifest(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except Unusable:
        return False
    return True


def saving(run: Path) -> bool:
    """True while a checkpoint is being written."""
    folder = run / "checkpoints"
    return folder.is_dir() and any(".writing" in entry.name for entry in folder.iterdir())


def losses_of(run: Path) -> dict[int, tuple]:
    """{step: (loss, validation loss or None)} of metrics.jsonl."""
    return {record["step"]: (record["loss"], record.get("val_loss")) for record in read_metrics(run / "metrics.jsonl")}


def arrays_of(run: Path, step: int) -> dict[str, bytes]:
    """The bytes of every array of a checkpoint, as Orbax reads them."""
    import jax
    from orbax.checkpoint import v1 as ocp

    folder = run / "checkpoints" / str(step)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted: dict[str, dict] = {}
    for name, (dtype, shape) in read_manifest(folder)["arrays"].items():
        wanted.setdefault(name.split(".")[0], {})[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    found = ocp.load_checkpointables(folder, wanted)
    return {name: np.asarray(array).tobytes() for part in found.values() for name, array in part.items()}


def resumed_from(output: str) -> int:
    """The step after which a process says it resumed; 0 if it started from scratch."""
    found = re.search(r"continued after step (\d+)", output)
    return int(found[1]) if found else 0
