"""The records of a run: one line per step in metrics.jsonl, pictures, and scalars for TensorBoard, W&B and Trackio."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import importlib
import io
import json
import math
import os
import platform
import secrets
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mjax.config.marks import Metric
from mjax.config.plain_values import MAX_INT
from mjax.errors import PrintLine, UsageError, without_secrets
from mjax.pictures.runs import Curve, curve_names, draw_experts, draw_loss
from mjax.run.callbacks import Callback
from mjax.utils.files import free_name, make_folder, open_new, open_nofollow, to_disk, write_whole

if TYPE_CHECKING:
    import numpy as np

    from mjax.config.run import LogConfig
    from mjax.planner.scaling import Forecast
    from mjax.run.loop import Run

FLUSH_INTERVAL = 10.0  # seconds until TensorBoard scalars are on disk, at most
OPTIONAL_FIELDS = ("val_loss", "labels", "unhealthy", "checkpoint_blocked_seconds")  # fields that a record may lack
NOT_NUMBERS = {"skipped", "nonfinite", "unhealthy"}  # fields of a record that are not numbers
REDRAW_INTERVAL = 10.0  # seconds between two drawings of the pictures, at least
END_STEPS = 100  # steps at the end of a run, among which skipped ones are counted
BLOCK_BYTES = 2**16  # bytes read at a time from the end of metrics.jsonl
VALIDATION = b'"val_loss"'
MAX_FLOAT = sys.float_info.max
TRACKERS = {"wandb": "W&B", "trackio": "Trackio"}  # names by package, which is also the flag
TRACKING_ID = "tracking_id.txt"


@dataclass
class Record:
    """One line of metrics.jsonl.

    Attributes:
      step: steps taken, including this one.
      loss: mean cross entropy of the batch before the update, nats per token; null if it is not finite.
      grad_norm: global norm before clipping; null if it is not finite.
      learning_rate: of this step, as applied.
      loss_scale: multiple of the loss in fp16; 1 otherwise.
      skipped: true if the update was skipped.
      tokens: tokens read since the beginning of training.
      seconds: wall time of the step.
      tokens_per_second: over all devices.
      tflops: model TFLOP/s of one device (`mjax/planner/layer.py` has the formula).
      mfu: tflops over the device's peak; null if the peak is unknown.
      nonfinite: the first gradient, weight or moment that was not finite, and how many; null if all were finite.
      unhealthy: problem of the step, as on the screen; absent otherwise.
      val_loss: mean cross entropy on the validation batches after this step, if it was measured; null in the record if
        it is not finite.
      labels: number of unmasked labels in the batch, if some are masked; absent otherwise.
      checkpoint_blocked_seconds: for how long the checkpoint before this step blocked the loop; absent without one.
      metrics, val_metrics: other means of the model, such as the parts of a BERT's loss; separate keys in the record,
        with the prefix val_ in an evaluation.
      arrays: for a mixture its expert_shares [l, E], the share of each expert in the assignments of its layer. They are
        too long for every line: experts.json has the newest ones.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    nonfinite: str | None = None
    unhealthy: str | None = None
    val_loss: float | None = None
    labels: int | None = None
    checkpoint_blocked_seconds: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    val_metrics: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the arrays; those in `OPTIONAL_FIELDS` only if set."""
        values = {name: value for name, value in vars(self).items() if value is not None or name not in OPTIONAL_FIELDS}
        if self.val_loss is not None:
            values["val_loss"] = finite_or_none(self.val_loss)
        validation = {f"val_{name}": finite_or_none(value) for name, value in values.pop("val_metrics").items()}
        del values["arrays"]
        return values | values.pop("metrics") | validation


def finite_or_none(x: float) -> float | None:
    """JSON has no NaN."""
    return x if math.isfinite(x) else None


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; damaged lines are skipped."""
    return [record for _, record in read_lines(file, [])]


def read_lines(file: Path, damaged: list[int]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a metrics.jsonl with its record; the numbers of damaged lines are added to `damaged`.

    A last line without its end is not counted: a crash truncates it.

    Raises:
      UsageError: the file cannot be read.
    """
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if record := _record(line):
                yield line.rstrip(b"\n") + b"\n", record
            elif line.endswith(b"\n"):
                damaged.append(number)


@dataclass
class MetricsEnd:
    """The end of a metrics.jsonl.

    Attributes:
      last: the last record; empty if there is none.
      loss, val_loss: the last ones that are finite.
      steps, skipped: number of the last steps, at most `END_STEPS`, and how many of them were skipped.
      problem: of the last line; empty without one.
    """

    last: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    val_loss: float | None = None
    steps: int = 0
    skipped: int = 0
    problem: str = ""


def read_end(file: Path, tail: int) -> MetricsEnd:
    """The end of a metrics.jsonl, from its last `tail` bytes at most.

    Raises:
      UsageError: the file cannot be read.
    """
    end = MetricsEnd()
    for number, line in enumerate(_lines_from_end(file, tail)):
        if end.steps == END_STEPS and None not in (end.loss, end.val_loss):
            break
        if end.steps == END_STEPS and end.loss is not None and VALIDATION not in line:
            continue  # parsing all would take milliseconds
        record = _record(line)
        if record is None:
            if number and not end.last:  # the last line may be torn
                end.problem = "the last line of metrics.jsonl is damaged"
            continue
        if not end.last:
            end.last = record
            if "tokens" not in record:
                end.problem = end.problem or "the last line of metrics.jsonl has no tokens"
        end.loss = record.get("loss") if end.loss is None else end.loss
        end.val_loss = record.get("val_loss") if end.val_loss is None else end.val_loss
        if end.steps < END_STEPS:
            end.steps, end.skipped = end.steps + 1, end.skipped + bool(record.get("skipped"))
    return end


def _lines_from_end(file: Path, tail: int) -> Iterator[bytes]:
    """Lines in the last `tail` bytes of a file, the last one first."""
    rest = b""
    with _open(file) as stream:
        position = stream.seek(0, os.SEEK_END)
        first = max(position - tail, 0)
        while position > first:
            begin = max(position - BLOCK_BYTES, first)
            stream.seek(begin)
            block, position = stream.read(position - begin) + rest, begin
            rest, *lines = block.split(b"\n") if position else (b"", *block.split(b"\n"))
            yield from reversed(lines)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """The content of a file; none if it does not exist."""
    try:
        with file.open("rb") if file.exists() else io.BytesIO() as stream:
            yield stream
    except OSError as error:  # a folder, a failing disk
        raise UsageError(f"{file} cannot be read ({error.strerror}); move it away to begin a new one") from None


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):  # blank, torn, zeros after a power failure, not UTF-8
        return None
    return record if isinstance(record, dict) and _is_valid(record) else None


def _is_valid(record: dict[str, Any]) -> bool:
    """True if the values of a record have their types."""
    counts = record.get("step"), record.get("tokens", 0)
    numbers = (value for name, value in record.items() if name not in NOT_NUMBERS and value is not None)
    return (
        all(type(count) is int and 0 <= count < MAX_INT for count in counts)
        and type(record.get("skipped", False)) is bool
        and all(type(number) in (int, float) and abs(number) <= MAX_FLOAT for number in numbers)  # NaN is not
    )


class MetricsLog(Callback):
    """Appends to metrics.jsonl, TensorBoard, W&B and Trackio, and draws loss.png, and of a mixture experts.png.

    A failure of one does not end the run: the first is reported. All but metrics.jsonl and pictures are then off until
    the next start.

    Args:
      folder: of the run.
      step: the step the run continues from; later lines belong to an abandoned continuation and are dropped.
      log: names the other trackers; None: no others.
      print_line: called with one line about each damage or failure.
      metrics: the model's metrics (`ModelConfig.metrics`), which loss.png shows.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        log: LogConfig | None = None,
        print_line: PrintLine = print,
        metrics: Sequence[Metric] = (),
    ):
        self.folder, self.metrics, self._names = folder, metrics, curve_names(metrics)
        self.forecast: Mapping[float, Forecast] = {}  # of the validation loss, by step
        self._print_line, self._failed = print_line, set[str]()
        self._begin_after(step)
        self._drawing: Future | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pictures")  # one picture at a time
        self._drawn, self._written, self._ends = -math.inf, False, False
        self._trackers: dict[str, _EventFile | _Tracker] = {}
        if log is not None and log.tensorboard:
            with self._warn_once("TensorBoard"):
                self._trackers["TensorBoard"] = _EventFile(folder / "tensorboard", step + 1)
        for package, name in TRACKERS.items():
            if project := getattr(log, package, None):
                with self._warn_once(name):
                    self._trackers[name] = _Tracker(package, project, folder)

    def on_start(self, run: Run) -> None:
        """After a rollback, drop the lines of the steps that are taken again. TensorBoard and W&B show them twice."""
        if self._written:
            self._file.close()
            self._begin_after(run.step)

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Record the step if it is due; redraw the pictures while the loop waits, but the last ones after its save."""
        evaluated = metrics.val_loss is not None or metrics.val_metrics
        if step % run.config.log.interval == 0 or metrics.unhealthy or evaluated:
            self.write(metrics)
        self._ends = run.ends
        if run.step == step and not run.ends:
            self.draw(last=False)

    def write(self, record: Record) -> None:
        """Record one step."""
        self._written = True
        values = record.as_dict()
        self._add(values)
        if "expert_shares" in record.arrays:
            self._shares = record.step, record.arrays["expert_shares"]
        with self._warn_once("metrics.jsonl"):
            self._append(json.dumps(values).encode() + b"\n")
        scalars = {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "step"}
        for name, tracker in self._trackers.items():
            if name not in self._failed:
                with self._warn_once(name):
                    tracker.write(scalars, record.step)

    def write_samples(self, step: int, prompts: Sequence[str], continuations: Sequence[str]) -> None:
        """Add how the model continues prompts after a step to samples.jsonl."""
        with self._warn_once("samples.jsonl"):
            file = self.folder / "samples.jsonl"
            with open_nofollow(file, "a", encoding="utf-8") as stream:
                for prompt, continuation in zip(prompts, continuations, strict=True):
                    record = {"step": step, "prompt": prompt, "continuation": continuation}
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            to_disk(file)

    def _begin_after(self, step: int) -> None:
        """Keep the lines up to `step`, and add further ones to them."""
        file, damaged = self.folder / "metrics.jsonl", []
        self.curves: dict[str, Curve] = {}
        self._shares: tuple[int, np.ndarray] | None = None  # of experts, and the step that they are of
        if file.is_symlink():  # its damaged lines would be copied into the folder
            raise UsageError(f"{file} is a link, through which mjax does not write; remove it")
        with open_new(file) as whole:
            for line, record in read_lines(file, damaged):
                if record["step"] <= step:
                    whole.write(line)
                    self._add(record)
            if damaged:
                copied = free_name(file, "damaged")
                shutil.copyfile(file, copied)
                to_disk(copied)
                lines = f"{len(damaged)} lines, the first at" if len(damaged) > 1 else "line"
                problem = f"skipped {lines} {damaged[0]}{',' * (len(damaged) > 1)} that cannot be read"
                self._print_line(f"{file}: {problem}; copied the file to {copied.name}")
        self._file, self._is_torn = open_nofollow(file, "ab", buffering=0), False

    def _add(self, record: Mapping[str, Any]) -> None:
        """Add a record to the curves that the pictures show."""
        for name in self._names:
            if (value := record.get(name)) is not None:
                self.curves.setdefault(name, Curve()).add(record["step"], value)

    def draw(self, last: bool = True) -> None:
        """Redraw the pictures: the last ones now, others in the background.

        The others are skipped while a drawing is in progress or less than `REDRAW_INTERVAL` seconds old.
        """
        busy = self._drawing is not None and not self._drawing.done()
        if not last and (busy or time.monotonic() - self._drawn <= REDRAW_INTERVAL):
            return
        curves = copy.deepcopy(self.curves)
        self._drawing, self._drawn = self._executor.submit(self._draw, curves, self._shares), time.monotonic()
        if last:
            self._drawing.result()

    def _draw(self, curves: Mapping[str, Curve], shares: tuple[int, np.ndarray] | None) -> None:
        with self._warn_once("loss.png"):
            draw_loss(curves, self.folder / "loss.png", self.folder.name, self.metrics, self.forecast)
        if shares is None:
            return
        with self._warn_once("experts.json"):
            rows = [[round(share, 6) for share in layer] for layer in shares[1].tolist()]
            write_whole(self.folder / "experts.json", json.dumps({"step": shares[0], "shares": rows}) + "\n")
        with self._warn_once("experts.png"):
            draw_experts(curves, *shares, self.folder / "experts.png", self.folder.name)

    def close(self) -> None:
        """Finish all files and pictures."""
        if self._ends:
            self.draw()
            self._ends = False
        self._executor.shutdown()
        with self._warn_once("metrics.jsonl"):
            self._file.close()
        for name, tracker in self._trackers.items():
            with self._warn_once(name):
                tracker.close()

    @contextlib.contextmanager
    def _warn_once(self, name: str) -> Iterator[None]:
        """Run a block that writes `name`, such as a file, and continue if it fails; the first failure is reported."""
        try:
            yield
        except Exception as error:  # whatever goes wrong in matplotlib or wandb
            if name not in self._failed:
                self._failed.add(name)
                self._print_line(f"{name} cannot be written ({str(error) or type(error).__name__}): training continues")

    def _append(self, line: bytes) -> None:
        line = b"\n" * self._is_torn + line  # a full disk truncated a line: the next one starts on a new line
        written = self._file.write(line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _EventFile:
    """TensorBoard's event file.

    It is a sequence of records, each with its length and checksums. A record is a protocol buffer, `Event` of
    tensorboard/compat/proto/event.proto. The package tensorboardX writes the same, but imports torch and boto3 where
    they are installed, which takes seconds.
    """

    def __init__(self, folder: Path, first: int):
        """Create a file in `folder`; TensorBoard hides the steps from `first` on of older files."""
        make_folder(folder)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._file, self._flushed = (folder / name).open("xb"), time.monotonic()
        self._add(0, _field(3, b"brain.Event:2"))  # file_version
        self._add(first, _field(7, b"\x08\x01"))  # session_log: its status is START

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the scalars of a step; they are in the file within `FLUSH_INTERVAL` seconds."""
        import numpy as np

        with np.errstate(over="ignore"):
            values = np.array([*scalars.values()]).astype("<f4").tobytes()
        numbers = (values[first : first + 4] for first in range(0, len(values), 4))
        pairs = zip(scalars, numbers, strict=True)  # tag and simple_value
        summary = (_field(1, _field(1, name.encode()) + b"\x15" + number) for name, number in pairs)
        self._add(step, _field(5, b"".join(summary)))
        if time.monotonic() - self._flushed > FLUSH_INTERVAL:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _add(self, step: int, content: bytes) -> None:
        event = struct.pack("<Bd", 0x09, time.time()) + b"\x10" + _varint(step) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


def _varint(number: int) -> bytes:
    """A number as protocol buffers write it, seven bits a byte."""
    *parts, last = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(part | 0x80 for part in parts), last])


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


@functools.cache
def _crc_table() -> list[int]:
    """CRC-32C of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [entry >> 1 ^ (0x82F63B78 if entry & 1 else 0) for entry in table]
    return table


def _masked_crc(content: bytes) -> bytes:
    """CRC-32C as TensorFlow stores it: rotated, and a constant added."""
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class _Tracker:
    """The run in a project of Weights & Biases, or of Trackio, whose interface is the same without ids.

    An id in the run folder distinguishes runs of the same name, and a continued run keeps it.
    """

    def __init__(self, package: str, project: str, folder: Path):
        self._package, module = package, importlib.import_module(package)
        file = folder / TRACKING_ID
        if not file.is_file():
            write_whole(file, (os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)) + "\n")
        name, number = folder.name, file.read_text().strip()
        config = json.loads(without_secrets((folder / "config.json").read_text()))
        if package == "trackio":
            importlib.import_module("matplotlib.figure")  # half loaded by another thread, Trackio drops values
            self._run = module.init(project=project, name=f"{name}-{number}", resume="allow", config=config)
            return
        self._run = module.init(project=project, name=name, id=number, resume="allow", dir=str(folder), config=config)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the scalars of a step. Steps repeat after a rollback, and W&B drops its internal steps that do."""
        if self._package == "wandb":
            self._run.log({"step": step, **scalars})
        else:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


def check_trackers(log: LogConfig) -> None:
    """Reject `--log.wandb` and `--log.trackio` if the package is missing, before anything is started.

    Raises:
      UsageError: it is not installed.
    """
    for package in TRACKERS:
        if getattr(log, package):
            try:
                callable(importlib.import_module(package).init)
            except (ImportError, AttributeError) as error:  # W&B's folder of another run is an empty module
                remedy = f"pip install {package}, or leave the flag out"
                raise UsageError(f"--log.{package} needs the {package} package ({error}): {remedy}") from None
