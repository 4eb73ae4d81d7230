"""Commands as stages of tasks, on this machine's cores or as jobs of Slurm.

A `Job` lists its stages. Each task of a stage reads a share of the input, or the files of earlier stages, and writes
its files into the working folder. Its marker, written last, contains its return value:

    OUTPUT.tmp/plan.json           the command and its inputs: only the same command continues the work
    OUTPUT.tmp/STAGE.RANK.done     a task is finished; a task without it runs again from its beginning
    OUTPUT.tmp/NAME.RANK           files of a task

    OUTPUT.tmp/STAGE.bytes         input that each task of a stage has read, for the progress bar

So an interruption costs the tasks that were running, and the bytes of the output do not depend on the number of tasks.
The number of tasks is part of the plan: another number starts over.

Markers are JSON, and arrays are files of numbers, which contain nothing executable. No other user may write to the
folder.

With `--sbatch`, each stage is an array job of Slurm that repeats the command with the stage in the environment, and
runs the tasks of this stage only.

**Filters.** Output files of `mjax dedup` and `mjax clean`: the retained documents, and a record of the removed ones.

    OUTPUT.jsonl           the retained documents, in input order
    OUTPUT.removed.jsonl   a line for each removed document: its source and the reason
    OUTPUT.report.json     documents and bytes that each step removed, with examples

All three are written into the folder OUTPUT.jsonl.tmp and renamed, or copied to a store, when everything is done,
OUTPUT.jsonl last: if it exists, it is complete. After an interruption the same command continues. The same input
results in the same bytes, whatever the number of tasks and workers.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TextIO

import numpy as np
from rich import filesize
from rich.console import Console

from mjax import __version__
from mjax.data.corpus.documents import Block, Document, MalformedLines, TextFiles
from mjax.errors import CONTINUES, RunError, UsageError, without_secrets
from mjax.utils.files import lock_folder, parse_json, to_disk, write_whole
from mjax.utils.progress import Pace, facts, show_progress
from mjax.utils.remote import RemoteFile, local_neighbor, locate, put, remove

MIN_WORKER_BYTES = 2**22  # of input; a smaller one is processed before another process has started
MAX_TASKS = 256  # by default, for less than LARGE_TASK_BYTES each
LARGE_TASK_BYTES = 2**30
STAGE_VARIABLE, START_TIME_VARIABLE = "MJAX_STAGE", "MJAX_BEGAN"
"""Environment of an array job: its stage, and the start time of the command."""
RETAINED = "kept"  # name of the documents of the output, in the report and in files of tasks
MAX_EXAMPLES = 10  # of each step, in the report
EXCERPT_CHARACTERS = 200  # of a text in an example
SBATCH_DEFAULTS = {"time": "24:00:00", "mem-per-cpu": "4G"}


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Job:
    """A command as stages; a stage is a method of the rank of a task that returns JSON values for its marker.

    Attributes:
      arguments, corpus: of the command.
      output: path of the output, for messages and the names of the working folder and the logs.
      tasks: number in each stage except `single_task_stages`, which have one.
      stages: names of methods in order, the last `finish`; with several tasks, the first is `lines`.
      folder: working folder, next to the output, or in the current folder for an output in a store.
      start_time: of the command, in seconds since 1970.
      copies_to_store: True while `finish` copies files to a store, and leaves them in `folder` if it fails.
      reading_stages: stages that read the input.
      settings: other files that the result depends on, such as a tokenizer's.
    """

    single_task_stages: ClassVar[tuple[str, ...]] = ("finish",)
    reading_stages: ClassVar[tuple[str, ...]] = ("lines",)
    settings: Sequence[Path] = ()
    copies_to_store = False
    _counter: tuple[int, int] | None = None

    def __init__(self, arguments: Any, corpus: TextFiles, output: str | Path, stages: Sequence[str]):
        self.arguments: Any = arguments
        self.corpus, self.output = corpus, str(output)
        self.folder = Path(f"{local_neighbor(output)}.tmp")
        # The default depends only on the input, so that another machine can continue the work.
        default = max(1, min(corpus.size // MIN_WORKER_BYTES, MAX_TASKS), corpus.size // LARGE_TASK_BYTES)
        self.tasks = arguments.tasks or default
        self.pace, self.start_time = Pace(), float(os.environ.get(START_TIME_VARIABLE, time.time()))
        self.stages = [*["lines"] * (self.tasks > 1), *stages]
        self._results: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Work in this process before all tasks; repeated when a killed run continues."""

    def finish(self, rank: int) -> Any:
        """The last stage: rename the output to its final name; it can be repeated."""
        raise NotImplementedError

    def put_outputs(self, files: dict[str, Path]) -> None:
        """Rename files of the folder to their final paths in this order, which an interruption does not stop."""
        if not self.copies_to_store:
            INTERRUPTS.completion_notice = f"{self.output} is complete; removing {self.folder}\n"
        for name, file in files.items():
            if (self.folder / name).exists():  # else it was renamed before the run was killed
                put(self.folder / name, file)

    def result(self) -> Any:
        """The result of the command, from the marker of the last stage."""
        return self.results(self.stages[-1])[0]

    def show(self, result: Any) -> None:
        """Print a summary of the result."""
        raise NotImplementedError

    # --- In a task ----------------------------------------------------------------------------------------------------

    def lines(self, rank: int) -> dict[str, int]:
        """Line ends in each file that is cut, by its number: shares begin to count where earlier ones end."""
        return self.corpus.count_lines(rank, self.tasks, self.advance)

    def blocks(self, rank: int) -> Iterator[Block]:
        """The blocks of a task's share of the input."""
        lines = self.results("lines") if "lines" in self.stages else []
        for block in self.corpus.read_share(rank, self.tasks, lines):
            yield block
            self.advance(block.size)

    @contextmanager
    def count_input(self, stage: str, rank: int) -> Iterator[None]:
        """Open the counter of the bytes that a task reads, for `advance`."""
        descriptor = os.open(self.folder / f"{stage}.bytes", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            self._counter, self._read = (descriptor, rank), 0
            self.advance(0)
            yield
        finally:
            self._counter = None
            os.close(descriptor)

    def advance(self, size: int) -> None:
        """Add to the count of input bytes that the running task has read, or of its results if it reads none."""
        self._read += size
        descriptor, rank = self._counter
        os.pwrite(descriptor, self._read.to_bytes(8, "little"), 8 * rank)

    def count_bytes(self, stage: str) -> int:
        """The counts of `advance`, summed over all tasks of a stage."""
        file = self.folder / f"{stage}.bytes"
        return int(np.fromfile(file, "<i8").sum()) if file.exists() else 0

    def sum_malformed(self, parts: Sequence[dict[str, Any]] = ()) -> MalformedLines:
        """Sum the malformed lines of all `parts`, which come from markers, under the policy of the command."""
        total = MalformedLines(self.arguments.malformed)
        for part in parts:
            total.merge(MalformedLines(**part))
        return total

    def task_file(self, name: str, rank: int) -> Path:
        """Path of a task's file."""
        return self.folder / f"{name}.{rank:05}"

    @contextmanager
    def open_files(self, rank: int, *names: str) -> Iterator[list[BinaryIO]]:
        """Open files of a task for writing, synced to the disk at the end."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.task_file(name, rank).open("wb")) for name in names]
        for name in names:
            to_disk(self.task_file(name, rank))

    def map_file(self, name: str, rank: int, dtype: Any) -> np.ndarray:
        """The numbers in a task's file, mapped from disk."""
        return self.values(self.task_file(name, rank).name, dtype)

    def values(self, name: str, dtype: Any = np.int64, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """The numbers in a file of the folder, such as one that all tasks write, mapped from disk."""
        file = self.folder / name
        return np.memmap(file, dtype, mode).view(np.ndarray) if file.stat().st_size else np.empty(0, dtype)

    def new_values(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """Create a file of `count` zeros, mapped for writing."""
        with (self.folder / name).open("wb") as stream:
            stream.truncate(count * np.dtype(dtype).itemsize)
        return self.values(name, dtype, "r+")

    def copy_file(self, name: str, rank: int, file: Path, offset: int) -> None:
        """Copy a task's file into `file`, which all tasks write, at byte `offset`."""
        with self.task_file(name, rank).open("rb") as source, _open_at(file, offset) as target:
            shutil.copyfileobj(source, target, 2**22)

    def write_values(self, name: str, first: int, values: np.ndarray) -> None:
        """Write numbers into a file that all tasks write, at index `first`."""
        with _open_at(self.folder / name, first * values.itemsize) as target:
            values.tofile(target)

    def task_offset(self, name: str, rank: int) -> int:
        """Bytes of the files `name` of all tasks before this one."""
        return sum(self.task_file(name, earlier).stat().st_size for earlier in range(rank))

    def results(self, stage: str) -> list[Any]:
        """Return values of the tasks of an earlier stage, by rank."""
        if stage not in self._results:
            markers = (self.marker(stage, rank) for rank in range(self.count_tasks(stage)))
            fix = f"remove {self.folder} and repeat the command"
            self._results[stage] = [parse_json(marker.read_bytes(), str(marker), fix) for marker in markers]
        return self._results[stage]

    # --- Running ------------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """Number of worker processes; 0 for a small input, which this process reads."""
        useful = self.corpus.size // MIN_WORKER_BYTES
        workers = min(self.arguments.workers or max(1, min(count_cores(), useful)), self.tasks)
        return workers if workers > 1 or useful else 0

    def count_tasks(self, stage: str) -> int:
        """Number of tasks of a stage."""
        return 1 if stage in self.single_task_stages else self.tasks

    def ranks_to_run(self, stage: str) -> list[int]:
        """Ranks of the tasks of a stage that have not finished."""
        return [rank for rank in range(self.count_tasks(stage)) if not self.marker(stage, rank).exists()]

    def marker(self, stage: str, rank: int) -> Path:
        """Path of the file that marks a task as done, with its return value."""
        return self.folder / f"{stage}.{rank:05}.done"

    def run_task(self, stage: str, rank: int) -> None:
        """Run a task without a marker, and write its marker."""
        if self.marker(stage, rank).exists():
            return
        with self.count_input(stage, rank):
            value = getattr(self, stage)(rank)
            self.advance(stage not in self.reading_stages)
        write_whole(self.marker(stage, rank), json.dumps(value, default=asdict))

    def plan(self) -> str:
        """JSON of everything that has to be equal for a command to continue the work."""
        arguments = replace(self.arguments, workers=None, overwrite=False, json=False, sbatch=())
        files = (file for file in (*self.corpus.inputs, *self.settings) if file.is_file())
        files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        values = {"arguments": repr(arguments), "inputs": files, "names": self.corpus.names, "tasks": self.tasks}
        values |= {"mjax_version": __version__, "gigatoken": os.environ.get("MJAX_GIGATOKEN")}
        values |= {"sha256": hashlib.sha256(repr(values).encode()).hexdigest()}
        return without_secrets(json.dumps(values, indent=2))

    def close(self) -> None:
        """Remove the working folder, the plan first, so that no command continues in half of it."""
        remove(self.folder / "plan.json")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _open_at(file: Path, offset: int) -> Iterator[BinaryIO]:
    """Open a file for writing at a byte, synced to the disk at the end."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "wb") as target:
        target.seek(offset)
        yield target
    to_disk(file)


def run_job(job: Job) -> Any:
    """Run all stages, print a summary and return the result; None if Slurm runs them.

    Raises:
      UsageError: as in the tasks, or another process writes the same output, or another user may have written into the
        working folder, or there is no Slurm.
      RunError: a worker was killed, a task failed, or the disk is full; the same command continues.
      KeyboardInterrupt: Ctrl-C, SIGTERM or a closed terminal; the same command continues.
    """
    if stage := os.environ.get(STAGE_VARIABLE):
        job.run_task(stage, int(os.environ["SLURM_ARRAY_TASK_ID"]))
        if stage == job.stages[-1]:
            job.show(job.result())
            job.close()
        return None
    with INTERRUPTS, _working_folder(job):
        job.begin()
        if job.arguments.sbatch:
            _submit(job)
            return None
        with _workers(job) as pool:
            for stage in job.stages:
                with _show_progress(job, stage):
                    _run_stage(job, stage, pool)
        result = job.result()
        job.close()
    job.show(result)
    return result


def _show_progress(job: Job, stage: str) -> contextlib.AbstractContextManager[None]:
    """Show the progress of a stage, by the bytes it reads or by tasks."""
    verb = f"{stage} ({job.stages.index(stage) + 1} of {len(job.stages)})"
    if stage in job.reading_stages:
        return show_progress(verb, job.corpus.size, lambda: job.count_bytes(stage), job.pace)
    return show_progress(verb, job.count_tasks(stage), lambda: job.count_bytes(stage), job.pace, "tasks")


@contextmanager
def _working_folder(job: Job) -> Iterator[None]:
    """Lock the folder of `job` and continue the work of the same command in it, or empty it."""
    try:
        stream = lock_folder(job.folder, job.output)
        _start_over(job, stream)
    except OSError as error:
        raise RunError(f"{job.output} cannot be written: {error}") from error
    with stream:
        try:
            yield
        except UsageError:
            if not (job.arguments.sbatch or job.copies_to_store):
                job.close()  # the user has to change the command or its input, and so the plan
            raise
        except BaseException as error:
            if isinstance(error, OSError):  # NumPy's error on a full disk has no errno
                reason = error if error.errno else f"the disk may be full ({error})"
                error = RunError(f"writing {job.output} stopped: {reason}")
            error.add_note(f"{CONTINUES} from {job.folder}")
            raise error


def _start_over(job: Job, stream: TextIO) -> None:
    """Empty the folder of a job, unless it has the work of the same command."""
    stream.seek(0)
    plan, older = job.plan(), stream.read()
    if older == plan:
        return
    if older:  # else the folder was half removed
        print(f"{job.folder} has the work of another command or another --tasks; starting over", file=sys.stderr)
    stream.truncate(0)
    for file in job.folder.iterdir():
        if file.name != "plan.json":
            remove(file)
    stream.write(plan)
    stream.flush()


def _submit(job: Job) -> None:
    """Submit each stage to Slurm as an array job that repeats this command, after the stage before."""
    name, logs = f"mjax-{job.output}", Path(f"{local_neighbor(job.output)}.logs")
    if not shutil.which("sbatch") or Path(sys.argv[0]).name not in ("mjax", "__main__.py"):
        raise UsageError("--sbatch submits a command typed where sbatch is; type it on a login node of Slurm")
    if queued := run_command("squeue", "--me", "--noheader", "--format=%A", f"--name={name}").split():
        raise UsageError(f"jobs of {job.output} are in the queue: {', '.join(queued)}; wait, or scancel them first")
    logs.mkdir(exist_ok=True)
    options = SBATCH_DEFAULTS | dict(option.partition("=")[::2] for option in job.arguments.sbatch)
    options |= {"job-name": name, "parsable": "", "kill-on-invalid-dep": "yes"}
    at_once = f"%{job.arguments.workers}" if job.arguments.workers else ""
    ids: list[str] = []
    for stage in job.stages:
        options |= {"array": f"0-{job.count_tasks(stage) - 1}{at_once}", "output": f"{logs}/{stage}.%a.out"}
        flags = [f"--{key}={value}" if value else f"--{key}" for key, value in options.items()]
        environment = f"{STAGE_VARIABLE}={stage}", f"{START_TIME_VARIABLE}={job.start_time}"
        command = shlex.join([*environment, sys.executable, "-m", "mjax", *sys.argv[1:]])
        output = run_command("sbatch", *flags, script=f"#!/bin/sh\nexec env {command}\n")
        ids.append(output.strip().partition(";")[0])
        options["dependency"] = f"afterok:{ids[-1]}"
    print(
        f"Submitted {len(ids)} stages of up to {job.tasks} tasks: {', '.join(job.stages)} (jobs {', '.join(ids)})\n"
        f"State: squeue -j {','.join(ids)}; tasks done: ls {job.folder}/*.done | wc -l; logs: {logs}\n"
        f"The last job writes {job.output} and removes {job.folder}. After a failure the jobs that "
        "follow are canceled; repeat the command: it submits the tasks that are missing."
    )


def run_command(*command: str, script: str = "") -> str:
    """The output of a command of Slurm, which gets `script` on its stdin.

    Raises:
      RunError: it failed.
    """
    result = subprocess.run(command, input=script, capture_output=True, text=True)
    if result.returncode:
        raise RunError(f"{command[0]} failed: {result.stderr.strip()}")
    return result.stdout


# --- Processes and signals --------------------------------------------------------------------------------------------


@contextmanager
def _workers(job: Job) -> Iterator[ProcessPoolExecutor | None]:
    """Start worker processes with a copy of `job`; None: this process does the work.

    They are spawned, not forked, because this process may already have threads and a GPU. An exception or the end of
    this process kills them.
    """
    if not job.processes:
        yield None
        return
    children, context = multiprocessing.active_children(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(job.processes, context, initializer=_init_worker, initargs=(job,))
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in children:
                process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run_stage(job: Job, stage: str, pool: ProcessPoolExecutor | None) -> None:
    """Run the unfinished tasks of a stage; the last stage runs in this process.

    Raises:
      RunError: a worker was killed. Exceptions of tasks are raised here too.
    """
    if pool is None or stage == job.stages[-1]:
        for rank in job.ranks_to_run(stage):
            job.run_task(stage, rank)
        return
    with INTERRUPTS.delay():  # workers start with Ctrl-C blocked: only this process handles it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_run_in_worker, stage, rank) for rank in job.ranks_to_run(stage)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for future in futures:
            while not wait([future], timeout=0.5).done:  # a signal to another thread would not wake `result`
                pass
            future.result()
    except BrokenProcessPool:
        subject, fix = "the worker process", "more --tasks"
        if job.processes > 1:
            subject, fix = f"one of {job.processes} worker processes", "fewer --workers"
        raise RunError(f"{subject} was killed, most likely for lack of memory; use {fix}") from None


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interrupts:
    """`STOP_SIGNALS` raise KeyboardInterrupt in the block, unless `is_delayed`.

    Attributes:
      completion_notice: if set, signals print it and raise nothing, because the output is complete.
    """

    completion_notice, is_delayed, _is_pending = "", False, False

    def __enter__(self) -> None:
        self.completion_notice, self.is_delayed, self._is_pending = "", False, False
        self._previous_handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_) -> None:
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def _on_signal(self, *_) -> None:
        self._is_pending = self.is_delayed
        if self.completion_notice:
            os.write(2, self.completion_notice.encode())  # a signal may interrupt `print`
        elif not self.is_delayed:
            raise KeyboardInterrupt

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Handle signals after the block."""
        self.is_delayed = True
        try:
            yield
        finally:
            self.is_delayed = False
        if self._is_pending:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


_worker_job: Any = None  # of a worker process


def _init_worker(job: Job) -> None:
    global _worker_job
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_job = job


def _run_in_worker(stage: str, rank: int) -> None:
    _worker_job.run_task(stage, rank)


def _exit_with_parent() -> None:
    """Exit when the parent process ends, even if it was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


# --- Output files of `mjax dedup` and `mjax clean` --------------------------------------------------------------------


@dataclass
class Tally:
    """Numbers of documents and of bytes of UTF-8 text in a step, with examples."""

    name: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, /, **example: Any) -> None:
        """Count one document; `example` of the first few is stored."""
        self.documents += 1
        self.bytes += len(text.encode())
        if example and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)

    def merge(self, later: "Tally") -> None:
        """Add the counts of later documents, from another worker."""
        self.documents += later.documents
        self.bytes += later.bytes
        self.examples += later.examples[: MAX_EXAMPLES - len(self.examples)]


def check_outputs(arguments: Any, inputs: Sequence[Path]) -> None:
    """Check `--output`.

    Raises:
      UsageError: it does not end in .jsonl, exists (without `--overwrite`), or is one of `inputs`.
    """
    output = locate(arguments.output)
    if output.suffix != ".jsonl":
        raise UsageError(f"--output {output} is not a .jsonl file; give one such as {output.with_suffix('.jsonl')}")
    if isinstance(output, RemoteFile):
        output.check_writable()
    read = {file.resolve() for file in inputs}
    for file in output_files(output).values():
        if file.resolve() in read:
            raise UsageError(f"--output {output} would overwrite the input {file}; choose another --output")
    if output.exists() and not arguments.overwrite:
        raise UsageError(f"{output} exists; choose another --output, or add --overwrite to replace it")


def output_files(output: Path) -> dict[str, Path]:
    """Final paths of the files by their names in the working folder, in the order in which they are renamed."""
    removed = output.with_suffix(".removed.jsonl")
    return {"report": output.with_suffix(".report.json"), "removed": removed, RETAINED: output}


class FilterJob(Job):
    """A job that writes the three files of a filter; the stages before `merge` write RETAINED and "removed"."""

    def __init__(self, arguments: Any, corpus: TextFiles, stages: Sequence[str]):
        arguments = replace(arguments, output=locate(arguments.output))
        super().__init__(arguments, corpus, arguments.output, stages)

    def merge(self, rank: int) -> None:
        """Copy the two files of a task into the outputs."""
        for name in (RETAINED, "removed"):
            self.copy_file(name, rank, self.folder / name, self.task_offset(name, rank))

    def tallies(self, parts: Sequence[dict[str, Any]]) -> dict[str, Tally]:
        """Sum the tallies of all tasks, which come from markers."""
        sums = {name: Tally(name) for name in parts[0]}
        for part in parts:
            for name, tally in part.items():
                sums[name].merge(Tally(**tally))
        return sums

    def put_files(self, report: dict[str, Any], malformed: MalformedLines) -> dict[str, Any]:
        """Rename the files to their final paths; returns `report` with malformed lines, output and version."""
        lines = {"documents": malformed.count, "examples": malformed.examples}
        report |= {"malformed": lines, "output": self.arguments.output, "mjax_version": __version__}
        text = report_to_json(report)
        if (self.folder / RETAINED).exists():  # else a run that was killed just before its end has renamed all
            (self.folder / "report").write_bytes(text.encode())
        self.copies_to_store = isinstance(self.arguments.output, RemoteFile)
        self.put_outputs(output_files(self.arguments.output))
        return json.loads(text)

    def remarks(self, report: dict[str, Any]) -> Iterable[str]:
        """Sentences below the table."""
        raise NotImplementedError

    def show(self, report: dict[str, Any]) -> None:
        """Print the report as JSON, or as a table with remarks and the names of the files."""
        if self.arguments.json:
            print(report_to_json(report), end="")
            return
        output = self.arguments.output
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{output} is ready after {time.time() - self.start_time:.1f} s", markup=False)
        console.print(facts(_step_rows(report), "right"))
        lines, malformed = [f"\n{text}" for text in self.remarks(report)], report["malformed"]
        if count := malformed["documents"]:
            examples = (f"  {line}" for line in malformed["examples"])
            lines += [f"\n{count:,} malformed lines were skipped, the first ones:", *examples]
        files = output_files(output)
        lines += [f"\nRemoved documents, line by line: {files['removed']}", f"Counts and examples: {files['report']}"]
        console.print("\n".join(lines), markup=False)


def document_line(document: Document, key: str, **changes: Any) -> bytes:
    """One line of JSON for a document, with all its fields and `changes`."""
    return json_line({**(document.fields or {}), key: document.text, **changes})


def json_line(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; values without a JSON type, such as a date of a Parquet file, become text."""
    line = json.dumps(values, ensure_ascii=False, default=str)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field, which JSON can only escape: \\ud83d
        return f"{json.dumps(values, default=str)}\n".encode()


def report_to_json(report: dict[str, Any]) -> str:
    """JSON of the report, for its file and --json."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=_to_json_value)
    return text.encode(errors="replace").decode() + "\n"


def _to_json_value(value: Any) -> Any:
    return asdict(value) if isinstance(value, Tally) else str(value)


# --- On the terminal --------------------------------------------------------------------------------------------------


def excerpt(text: str, start: int = 0) -> str:
    """Shorten a text for an example to EXCERPT_CHARACTERS from `start` on."""
    end = start + EXCERPT_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def diff_excerpts(first: str, second: str) -> tuple[str, str]:
    """Excerpts of two texts from shortly before their first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    same = next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))
    start = 0 if same < EXCERPT_CHARACTERS // 2 else same - EXCERPT_CHARACTERS // 4
    return excerpt(first, start), excerpt(second, start)


def _step_rows(report: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Rows of documents and bytes: read, changed or removed by each step, and retained."""
    rows = [(report["read"], ""), *((step, "") for step in report.get("changed", ()))]
    rows += [*((step, "− ") for step in report["removed"]), (report[RETAINED], "= ")]
    for tally, sign in rows:
        share = tally["documents"] / max(report["read"]["documents"], 1)
        documents = f"{tally['documents']:,} documents"
        yield sign + tally["name"], documents, filesize.decimal(tally["bytes"]), f"{share:.1%}"
