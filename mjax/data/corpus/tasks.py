"""Commands as stages of tasks, on this machine's cores or as jobs of Slurm.

A `Job` names its stages. Each task of a stage reads a share of the input, or the files of earlier stages, and writes
files of its own into the working folder. Its marker, written last, holds what it returns:

    OUTPUT.tmp/plan.json           the command and its inputs: only the same command continues the work
    OUTPUT.tmp/STAGE.RANK.done     a task is finished; a task without it runs again from its beginning
    OUTPUT.tmp/NAME.RANK           files of a task

    OUTPUT.tmp/STAGE.bytes         input that each task of a stage has read, for who watches

So an interruption costs the tasks that were running, and the bytes of the output do not depend on the number of tasks.
The number of tasks is part of the plan: another number starts over.

Markers are JSON, and arrays are files of numbers: nothing that is read here can run anything. Nobody else may write to
the folder.

With `--sbatch`, each stage is an array job of Slurm that repeats the command with the stage in the environment, and its
tasks do nothing else.

**Filters.** Output files of `mjax dedup` and `mjax clean`: the retained documents, and a record of the removed ones.

    OUTPUT.jsonl           the retained documents, in input order
    OUTPUT.removed.jsonl   a line for each document removed: where it came from and why
    OUTPUT.report.json     documents and bytes that each step removed, with examples

All three are written into the folder OUTPUT.jsonl.tmp and renamed, or copied to a store, when everything is done,
OUTPUT.jsonl last: if it exists, it is complete. After an interruption the same command continues. The same input
gives the same bytes, whatever the number of tasks and workers.
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
from mjax.data.corpus import Document, MalformedLines, TextFiles
from mjax.data.corpus.documents import Block
from mjax.errors import CONTINUES, RunError, UsageError, without_secrets
from mjax.utils.files import lock_folder, parse_json, to_disk, write_whole
from mjax.utils.progress import Pace, facts, show_progress
from mjax.utils.remote import RemoteFile, local_neighbor, locate, put, remove

MIN_WORKER_BYTES = 2**22  # bytes of input; less is done before another process has started
MAX_TASKS = 256  # tasks by default, for less than LARGE bytes each
LARGE = 2**30
STAGE, BEGAN = "MJAX_STAGE", "MJAX_BEGAN"
"""Set in an array job: its stage, and the second at which the command was typed."""
RETAINED = "kept"
"""Name of the documents of the output, in the report and as a part of a job."""
EXAMPLES = 10  # of each step, in the report
SHOWN = 200  # characters of a text in an example
SBATCH = {"time": "24:00:00", "mem-per-cpu": "4G"}
"""Options of sbatch by default."""


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Job:
    """A command as stages; a stage is a method that takes the rank of a task and returns what its marker keeps: JSON.

    Attributes:
      arguments, corpus: of the command.
      output: what is written, for messages and the names of the working folder and the logs.
      tasks: of each stage but those in `single`, which are one task.
      stages: names of methods in order, `finish` the last; with several tasks, `lines` comes before all.
      folder: of the work: beside the output, or in the current folder for one in a store.
      began: when the command was typed, in seconds since 1970.
      copies: whether `finish` is copying files to a store, and leaves them in `folder` if it fails.
      readers: stages that read the input.
      settings: files besides the input that the result depends on, such as a tokenizer's.
    """

    single: ClassVar[tuple[str, ...]] = ("finish",)
    readers: ClassVar[tuple[str, ...]] = ("lines",)
    settings: Sequence[Path] = ()
    copies = False
    _counter: tuple[int, int] | None = None

    def __init__(self, arguments: Any, corpus: TextFiles, output: str | Path, stages: Sequence[str]):
        self.arguments: Any = arguments
        self.corpus, self.output = corpus, str(output)
        self.folder = Path(f"{local_neighbor(output)}.tmp")
        # By the bytes of input alone, so that another machine continues the work.
        self.tasks = arguments.tasks or max(1, min(corpus.size // MIN_WORKER_BYTES, MAX_TASKS), corpus.size // LARGE)
        self.pace, self.began = Pace(), float(os.environ.get(BEGAN, time.time()))
        self.stages = [*["lines"] * (self.tasks > 1), *stages]
        self._results: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Do what comes before all tasks, here; repeated when a killed run continues."""

    def finish(self, rank: int) -> Any:
        """The last stage: put the output in place; it can be repeated."""
        raise NotImplementedError

    def put_outputs(self, files: dict[str, Path]) -> None:
        """Give files of the folder, by name, their final names in this order; an interruption comes too late then."""
        if not self.copies:
            INTERRUPTS.too_late = f"{self.output} is complete; removing {self.folder}\n"
        for name, file in files.items():
            if (self.folder / name).exists():  # else it was put before the run was killed
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
        return self.corpus.lines(rank, self.tasks, self.advance)

    def blocks(self, rank: int) -> Iterator[Block]:
        """The blocks of a task's share of the input."""
        lines = self.results("lines") if "lines" in self.stages else []
        for block in self.corpus.share(rank, self.tasks, lines):
            yield block
            self.advance(block.size)

    @contextmanager
    def counting(self, stage: str, rank: int) -> Iterator[None]:
        """Let `advance` count the bytes that a task reads."""
        descriptor = os.open(self.folder / f"{stage}.bytes", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            self._counter, self._read = (descriptor, rank), 0
            self.advance(0)
            yield
        finally:
            self._counter = None
            os.close(descriptor)

    def advance(self, size: int) -> None:
        """Add to the bytes of input that the running task has read, or to its results if it reads none."""
        self._read += size
        descriptor, rank = self._counter
        os.pwrite(descriptor, self._read.to_bytes(8, "little"), 8 * rank)

    def count_bytes(self, stage: str) -> int:
        """Return the bytes that `advance` has counted in all tasks of a stage."""
        file = self.folder / f"{stage}.bytes"
        return int(np.fromfile(file, "<i8").sum()) if file.exists() else 0

    def sum_malformed(self, parts: Sequence[dict[str, Any]] = ()) -> MalformedLines:
        """The malformed lines of all `parts`, which come from markers, under the policy of the command."""
        together = MalformedLines(self.arguments.malformed)
        for part in parts:
            together.merge(MalformedLines(**part))
        return together

    def part(self, name: str, rank: int) -> Path:
        """A file of a task."""
        return self.folder / f"{name}.{rank:05}"

    @contextmanager
    def writing(self, rank: int, *names: str) -> Iterator[list[BinaryIO]]:
        """Files of a task to write, on the disk at the end."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.part(name, rank).open("wb")) for name in names]
        for name in names:
            to_disk(self.part(name, rank))

    def map_file(self, name: str, rank: int, dtype: Any) -> np.ndarray:
        """The numbers in a file of a task, mapped from disk."""
        return _map_file(self.part(name, rank), dtype)

    def values(self, name: str, dtype: Any = np.int64, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """The numbers in a file that tasks filled together, mapped from disk."""
        return _map_file(self.folder / name, dtype, mode)

    def new_values(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """A file of `count` zeros, to be changed."""
        with (self.folder / name).open("wb") as stream:
            stream.truncate(count * np.dtype(dtype).itemsize)
        return self.values(name, dtype, "r+")

    def put_part(self, name: str, rank: int, file: Path, offset: int) -> None:
        """Copy a task's file to its place in `file`, which tasks fill together."""
        with self.part(name, rank).open("rb") as source, _open_at(file, offset) as target:
            shutil.copyfileobj(source, target, 2**22)

    def put_values(self, name: str, first: int, values: np.ndarray) -> None:
        """Write some of the numbers in a file that tasks fill together, from number `first` on."""
        with _open_at(self.folder / name, first * values.itemsize) as target:
            values.tofile(target)

    def offset(self, name: str, rank: int) -> int:
        """Bytes of the files `name` of the tasks before this one."""
        return sum(self.part(name, earlier).stat().st_size for earlier in range(rank))

    def results(self, stage: str) -> list[Any]:
        """Return values of the tasks of an earlier stage, by rank."""
        if stage not in self._results:
            markers = (self.marker(stage, rank) for rank in range(self.divide_tasks(stage)))
            fix = f"remove {self.folder} and repeat the command"
            self._results[stage] = [parse_json(marker.read_bytes(), str(marker), fix) for marker in markers]
        return self._results[stage]

    # --- Running ------------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """Worker processes; 0: little text is done by this one, which answers Ctrl-C when a call of a library ends."""
        worth = self.corpus.size // MIN_WORKER_BYTES
        workers = min(self.arguments.workers or max(1, min(all_cores(), worth)), self.tasks)
        return workers if workers > 1 or worth else 0

    def divide_tasks(self, stage: str) -> int:
        """Number of tasks of a stage."""
        return 1 if stage in self.single else self.tasks

    def left(self, stage: str) -> list[int]:
        """Ranks of the tasks of a stage that have not finished."""
        return [rank for rank in range(self.divide_tasks(stage)) if not self.marker(stage, rank).exists()]

    def marker(self, stage: str, rank: int) -> Path:
        """The file that says that a task is done, with what it returned."""
        return self.folder / f"{stage}.{rank:05}.done"

    def run_task(self, stage: str, rank: int) -> None:
        """Do a task that has not been done, and mark it."""
        if self.marker(stage, rank).exists():
            return
        with self.counting(stage, rank):
            value = getattr(self, stage)(rank)
            self.advance(stage not in self.readers)
        write_whole(self.marker(stage, rank), json.dumps(value, default=asdict))

    def plan(self) -> str:
        """Everything that must be the same for a run to continue the work of another."""
        how = replace(self.arguments, workers=None, overwrite=False, json=False, sbatch=())
        files = (file for file in (*self.corpus.inputs, *self.settings) if file.is_file())
        files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        values = {"arguments": repr(how), "inputs": files, "names": self.corpus.names, "tasks": self.tasks}
        values |= {"mjax_version": __version__, "gigatoken": os.environ.get("MJAX_GIGATOKEN")}
        values |= {"sha256": hashlib.sha256(repr(values).encode()).hexdigest()}
        return without_secrets(json.dumps(values, indent=2))

    def close(self) -> None:
        """Remove the working folder, the plan first: nothing continues what is half removed."""
        remove(self.folder / "plan.json")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _open_at(file: Path, offset: int) -> Iterator[BinaryIO]:
    """A file to write from `offset` on, on the disk at the end."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "wb") as target:
        target.seek(offset)
        yield target
    to_disk(file)


def _map_file(file: Path, dtype: Any, mode: Literal["r", "r+"] = "r") -> np.ndarray:
    return np.memmap(file, dtype, mode).view(np.ndarray) if file.stat().st_size else np.empty(0, dtype)


def run(job: Job) -> Any:
    """Run all stages, print a summary and return the result; None if Slurm runs them.

    Raises:
      UsageError: as the tasks, or another process writes the same output, or another user may have written the working
        folder, or there is no Slurm.
      RunError: a worker was killed, a task failed, or the disk is full; the same command continues.
      KeyboardInterrupt: Ctrl-C, SIGTERM or a closed terminal; the same command continues.
    """
    if stage := os.environ.get(STAGE):
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
    """Show how far a stage is: by the input it reads, or by tasks."""
    verb = f"{stage} ({job.stages.index(stage) + 1} of {len(job.stages)})"
    if stage in job.readers:
        return show_progress(verb, job.corpus.size, lambda: job.count_bytes(stage), job.pace)
    return show_progress(verb, job.divide_tasks(stage), lambda: job.count_bytes(stage), job.pace, "tasks")


@contextmanager
def _working_folder(job: Job) -> Iterator[None]:
    """The folder of `job`, with what the same command left in it; what another left is removed."""
    try:
        stream = lock_folder(job.folder, job.output)
        _start_over(job, stream)
    except OSError as error:
        raise RunError(f"{job.output} cannot be written: {error}") from error
    with stream:
        try:
            yield
        except UsageError:
            if not (job.arguments.sbatch or job.copies):
                job.close()  # the command or its input has to change, and with it the plan
            raise
        except BaseException as error:
            if isinstance(error, OSError):  # NumPy's about a full disk has no number
                reason = error if error.errno else f"the disk may be full ({error})"
                error = RunError(f"writing {job.output} stopped: {reason}")
            error.add_note(f"{CONTINUES} from {job.folder}")
            raise error


def _start_over(job: Job, stream: TextIO) -> None:
    """Empty the folder of a job, unless the same command has left its work there."""
    stream.seek(0)
    plan, older = job.plan(), stream.read()
    if older == plan:
        return
    if older:  # else what is there was half removed
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
    if queued := _answer("squeue", "--me", "--noheader", "--format=%A", f"--name={name}").split():
        raise UsageError(f"jobs of {job.output} are in the queue: {', '.join(queued)}; wait, or scancel them first")
    logs.mkdir(exist_ok=True)
    options = SBATCH | dict(option.partition("=")[::2] for option in job.arguments.sbatch)
    options |= {"job-name": name, "parsable": "", "kill-on-invalid-dep": "yes"}
    at_once = f"%{job.arguments.workers}" if job.arguments.workers else ""
    ids: list[str] = []
    for stage in job.stages:
        options |= {"array": f"0-{job.divide_tasks(stage) - 1}{at_once}", "output": f"{logs}/{stage}.%a.out"}
        flags = [f"--{key}={value}" if value else f"--{key}" for key, value in options.items()]
        command = [f"{STAGE}={stage}", f"{BEGAN}={job.began}", sys.executable, "-m", "mjax", *sys.argv[1:]]
        answer = _answer("sbatch", *flags, script=f"#!/bin/sh\nexec env {shlex.join(command)}\n")
        ids.append(answer.strip().partition(";")[0])
        options["dependency"] = f"afterok:{ids[-1]}"
    print(
        f"Submitted {len(ids)} stages of up to {job.tasks} tasks: {', '.join(job.stages)} (jobs {', '.join(ids)})\n"
        f"State: squeue -j {','.join(ids)}; tasks done: ls {job.folder}/*.done | wc -l; logs: {logs}\n"
        f"The last job writes {job.output} and removes {job.folder}. After a failure the jobs that "
        "follow are canceled; repeat the command: it submits the tasks that are missing."
    )


def _answer(*command: str, script: str = "") -> str:
    answer = subprocess.run(command, input=script, capture_output=True, text=True)
    if answer.returncode:
        raise RunError(f"{command[0]} failed: {answer.stderr.strip()}")
    return answer.stdout


# --- Processes and signals --------------------------------------------------------------------------------------------


@contextmanager
def _workers(job: Job) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that have `job`; None: this one does the work.

    They are fresh processes, not copies of this one, which may already have threads and a GPU. An exception kills them,
    whatever they do, as the end of this process does.
    """
    if not job.processes:
        yield None
        return
    others, context = multiprocessing.active_children(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(job.processes, context, initializer=_start, initargs=(job,))
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run_stage(job: Job, stage: str, pool: ProcessPoolExecutor | None) -> None:
    """Do what is left of a stage, the last one in this process.

    Raises:
      RunError: a worker was killed. Exceptions of tasks are raised here too.
    """
    if pool is None or stage == job.stages[-1]:
        for rank in job.left(stage):
            job.run_task(stage, rank)
        return
    with INTERRUPTS.delay():  # processes start here, with Ctrl-C blocked: it is answered by this process alone
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_call, stage, rank) for rank in job.left(stage)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for future in futures:
            while not wait([future], timeout=0.5).done:  # a signal to another thread would let `result` sleep on
                pass
            future.result()
    except BrokenProcessPool:
        which, fix = "the worker process", "more --tasks"
        if job.processes > 1:
            which, fix = f"one of {job.processes} worker processes", "fewer --workers"
        raise RunError(f"{which} was killed, most likely for lack of memory; use {fix}") from None


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interrupts:
    """`STOPS` raise KeyboardInterrupt in the block, unless they are `delayed`.

    Attributes:
      too_late: if set, they print this instead: the output is complete.
    """

    def __init__(self):
        self.too_late, self.delayed, self._came = "", False, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        self.too_late, self.delayed, self._came = "", False, False
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._answer)

    def __exit__(self, *_) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _answer(self, *_) -> None:
        self._came = self.delayed
        if self.too_late:
            os.write(2, self.too_late.encode())  # `print` may be what is interrupted
        elif not self.delayed:
            raise KeyboardInterrupt

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Let the block end first."""
        self.delayed = True
        try:
            yield
        finally:
            self.delayed = False
        if self._came:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


_job: Any = None  # of a worker process


def _start(job: Job) -> None:
    global _job
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _job = job


def _call(stage: str, rank: int) -> None:
    _job.run_task(stage, rank)


def _leave_with_parent() -> None:
    """End this process when its parent ends, even if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


# --- Output files of `mjax dedup` and `mjax clean` --------------------------------------------------------------------


@dataclass
class Tally:
    """Documents and bytes of UTF-8 text that a step has counted, with examples."""

    name: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, /, **example: Any) -> None:
        """Count one document; the first few keep an `example`."""
        self.documents += 1
        self.bytes += len(text.encode())
        if example and len(self.examples) < EXAMPLES:
            self.examples.append(example)

    def merge(self, later: "Tally") -> None:
        """Add the counts of the documents that follow, from another worker."""
        self.documents += later.documents
        self.bytes += later.bytes
        self.examples += later.examples[: EXAMPLES - len(self.examples)]


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
    """The files of a run by their names in the working folder, in the order in which they are put in place."""
    removed = output.with_suffix(".removed.jsonl")
    return {"report": output.with_suffix(".report.json"), "removed": removed, RETAINED: output}


class FilterJob(Job):
    """A job that writes the three files of a run; a stage before `merge` writes the parts RETAINED and `removed`."""

    def __init__(self, arguments: Any, corpus: TextFiles, stages: Sequence[str]):
        arguments = replace(arguments, output=locate(arguments.output))
        super().__init__(arguments, corpus, arguments.output, stages)

    def merge(self, rank: int) -> None:
        """Copy a task's parts to their places."""
        for name in (RETAINED, "removed"):
            self.put_part(name, rank, self.folder / name, self.offset(name, rank))

    def tallies(self, parts: Sequence[dict[str, Any]]) -> dict[str, Tally]:
        """The sums of tallies of all tasks, which come from markers."""
        sums = {name: Tally(name) for name in parts[0]}
        for part in parts:
            for name, tally in part.items():
                sums[name].merge(Tally(**tally))
        return sums

    def put_files(self, story: dict[str, Any], malformed: MalformedLines) -> dict[str, Any]:
        """Give the files their names; returns the report: `story`, malformed lines, output and version."""
        lines = {"documents": malformed.count, "examples": malformed.examples}
        text = report_text({**story, "malformed": lines, "output": self.arguments.output, "mjax_version": __version__})
        if (self.folder / RETAINED).exists():  # else a run that was killed just before its end has put all
            (self.folder / "report").write_bytes(text.encode())
        self.copies = isinstance(self.arguments.output, RemoteFile)
        self.put_outputs(output_files(self.arguments.output))
        return json.loads(text)

    def remarks(self, report: dict[str, Any]) -> Iterable[str]:
        """Sentences below the table."""
        raise NotImplementedError

    def show(self, report: dict[str, Any]) -> None:
        """Print the report as JSON, or as a table with remarks and the names of the files."""
        if self.arguments.json:
            print(report_text(report), end="")
            return
        output = self.arguments.output
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{output} is ready after {time.time() - self.began:.1f} s", markup=False)
        console.print(facts(_steps(report), "right"))
        for remark in self.remarks(report):
            console.print(f"\n{remark}", markup=False)
        malformed = report["malformed"]
        if malformed["documents"]:
            console.print(f"\n{malformed['documents']:,} malformed lines were skipped, the first ones:")
            for line in malformed["examples"]:
                console.print(f"  {line}", markup=False)
        files = output_files(output)
        console.print(f"\nRemoved documents, line by line: {files['removed']}", markup=False)
        console.print(f"Counts and examples: {files['report']}", markup=False)


def document_line(document: Document, key: str, **changes: Any) -> bytes:
    """A line of JSON for a document, with all its fields; `changes` replace or add some."""
    return json_line({**(document.fields or {}), key: document.text, **changes})


def json_line(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; values that JSON lacks, such as a date of a Parquet file, become text."""
    line = json.dumps(values, ensure_ascii=False, default=str)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field, which JSON can only escape: \\ud83d
        return f"{json.dumps(values, default=str)}\n".encode()


def report_text(report: dict[str, Any]) -> str:
    """The report as the file holds it and --json prints it."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=_plain)
    return text.encode(errors="replace").decode() + "\n"


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Tally) else str(value)


# --- On the terminal --------------------------------------------------------------------------------------------------


def excerpt(text: str, start: int = 0) -> str:
    """Shorten a text for an example: some characters from `start` on."""
    end = start + SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts from shortly before their first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
    start = 0 if same < SHOWN // 2 else same - SHOWN // 4
    return excerpt(one, start), excerpt(other, start)


def _steps(report: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Documents and bytes: read, changed or removed by each step, retained."""
    rows = [(report["read"], ""), *((step, "") for step in report.get("changed", ()))]
    rows += [*((step, "− ") for step in report["removed"]), (report[RETAINED], "= ")]
    for tally, sign in rows:
        share = tally["documents"] / max(report["read"]["documents"], 1)
        documents = f"{tally['documents']:,} documents"
        yield sign + tally["name"], documents, filesize.decimal(tally["bytes"]), f"{share:.1%}"
