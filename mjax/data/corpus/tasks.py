"""Commands as stages of tasks, on this machine's cores or by datatrove's executors (local, Slurm, Ray).

A `Job` names its stages. Each task of a stage reads a share of the input, or the files of earlier stages, and writes
files of its own into the working folder. Its marker, written last, holds what it returns:

    OUTPUT.tmp/plan.json           the command and its inputs: only the same command continues the work
    OUTPUT.tmp/STAGE.RANK.done     a task is finished; a task without it runs again from its beginning
    OUTPUT.tmp/NAME.RANK           files of a task

    OUTPUT.tmp/STAGE.bytes         input that each task of a stage has read, for who watches

So an interruption costs the tasks that were running, and the bytes of the output depend neither on the number of tasks
nor on the executor. The number of tasks is part of the plan: another number starts over.

Markers are JSON, and arrays are files of numbers: nothing that is read here can run anything. Nobody else may write to
the folder. The one pickle is datatrove's: its jobs on Slurm read OUTPUT.logs/STAGE/executor.pik, and that folder is as
private.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TextIO

import numpy as np

from mjax import __version__
from mjax.data.corpus import Corpus, MalformedLines, TextArguments
from mjax.data.corpus.blocks import Block
from mjax.data.corpus.workers import INTERRUPTS, WORTH_A_WORKER, Workers, useful_workers
from mjax.errors import CONTINUES, RunError, UsageError, without_secrets
from mjax.utils.files import make_private, remove, take_lock, to_disk, write_whole
from mjax.utils.progress import Pace, watched
from mjax.utils.remote import beside

MANY = 256  # tasks by default, for less than LARGE bytes each
LARGE = 2**30


def useful_tasks(asked: int | None, size: int) -> int:
    """`asked` tasks, or a number by the bytes of input alone, so that another machine continues the work."""
    return asked or max(1, min(size // WORTH_A_WORKER, MANY), size // LARGE)


class Job:
    """A command as stages; a stage is a method that takes the rank of a task and returns what its marker keeps: JSON.

    Attributes:
      arguments, corpus: of the command.
      output: what is written, for messages and the names of the working folder and the logs.
      tasks: of each stage but those in `single`, which are one task.
      stages: names of methods in order, `finish` the last; with several tasks, `lines` comes before all.
      folder, logs: of the work: beside the output, or in the current folder for one in a store.
      copies: whether `finish` is copying files to a store, and leaves them in `folder` if it fails.
      readers: stages that read the input.
      settings: files besides the input that the result depends on, such as a tokenizer's.
    """

    single: ClassVar[tuple[str, ...]] = ("finish",)
    readers: ClassVar[tuple[str, ...]] = ("lines",)
    settings: Sequence[Path] = ()
    copies = False
    _counter: tuple[int, int] | None = None

    def __init__(self, arguments: TextArguments, corpus: Corpus, output: str | Path, stages: Sequence[str]):
        self.arguments: Any = arguments
        self.corpus, self.output = corpus, str(output)
        self.folder, self.logs = Path(f"{beside(output)}.tmp"), Path(f"{beside(output)}.logs")
        self.tasks = useful_tasks(arguments.tasks, corpus.size)
        self.pace = Pace()
        self.stages = [*["lines"] * (self.tasks > 1), *stages]

    def begin(self) -> None:
        """Do what comes before all tasks, here; repeated when a killed run continues."""

    def finish(self, rank: int) -> Any:
        """The last stage: put the output in place; it can be repeated."""
        raise NotImplementedError

    def complete(self) -> None:
        """Call before the last files get their names: an interruption comes too late."""
        if not self.copies:
            INTERRUPTS.too_late = f"{self.output} is complete; removing {self.folder}\n"

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

    def counted(self, stage: str) -> int:
        """Return the bytes that `advance` has counted in all tasks of a stage."""
        file = self.folder / f"{stage}.bytes"
        return int(np.fromfile(file, "<i8").sum()) if file.exists() else 0

    def malformed(self, parts: Sequence[dict[str, Any]] = ()) -> MalformedLines:
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

    def mapped(self, name: str, rank: int, dtype: Any) -> np.ndarray:
        """The numbers in a file of a task, mapped from disk."""
        return _mapped(self.part(name, rank), dtype)

    def values(self, name: str, dtype: Any = np.int64, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """The numbers in a file that tasks filled together, mapped from disk."""
        return _mapped(self.folder / name, dtype, mode)

    def new_values(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """A file of `count` zeros, to be changed."""
        with (self.folder / name).open("wb") as stream:
            stream.truncate(count * np.dtype(dtype).itemsize)
        return self.values(name, dtype, "r+")

    def put_part(self, name: str, rank: int, file: Path, offset: int) -> None:
        """Copy a task's file to its place in `file`, which tasks fill together."""
        with self.part(name, rank).open("rb") as source, _at(file, offset) as target:
            shutil.copyfileobj(source, target, 2**22)

    def put_values(self, name: str, first: int, values: np.ndarray) -> None:
        """Write some of the numbers in a file that tasks fill together, from number `first` on."""
        with _at(self.folder / name, first * values.itemsize) as target:
            values.tofile(target)

    def offset(self, name: str, rank: int) -> int:
        """Bytes of the files `name` of the tasks before this one."""
        return sum(self.part(name, earlier).stat().st_size for earlier in range(rank))

    def results(self, stage: str) -> list[Any]:
        """Return values of the tasks of an earlier stage, by rank."""
        return _results(self.folder, stage, self.tasks_of(stage))

    # --- Running ------------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """Worker processes; 0: little text is done by this one, which answers Ctrl-C when a call of a library ends."""
        workers = min(useful_workers(self.arguments.workers, self.corpus.size), self.tasks)
        return workers if workers > 1 or self.corpus.size >= WORTH_A_WORKER else 0

    def tasks_of(self, stage: str) -> int:
        """Number of tasks of a stage."""
        return 1 if stage in self.single else self.tasks

    def left(self, stage: str) -> list[int]:
        """Ranks of the tasks of a stage that have not finished."""
        done = set(os.listdir(self.folder)) if self.folder.is_dir() else set()
        return [rank for rank in range(self.tasks_of(stage)) if f"{stage}.{rank:05}.done" not in done]

    def run_task(self, stage: str, rank: int) -> None:
        """Do a task that has not been done, and mark it."""
        marker, failed = _marker(self.folder, stage, rank), self.part(f"{stage}.failed", rank)
        if marker.exists():
            return
        failed.unlink(missing_ok=True)
        for earlier in self.stages[: self.stages.index(stage)][-1:]:
            if left := self.left(earlier):
                raise RunError(f"task {left[0]} of stage {earlier} has not finished; repeat the command")
        try:
            with self.counting(stage, rank):
                value = getattr(self, stage)(rank)
                self.advance(stage not in self.readers)
        except Exception as error:
            with contextlib.suppress(OSError):  # of a full disk
                failed.write_text(str(error) if isinstance(error, UsageError | RunError) else repr(error))
            raise
        write_whole(marker, json.dumps(value, default=asdict))

    def plan(self) -> str:
        """Everything that must be the same for a run to continue the work of another."""
        how = replace(self.arguments, executor=None, workers=None, overwrite=False, json=False, sbatch=())
        files = (file for file in (*self.corpus.files, *self.settings) if file.is_file())
        files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        values = {"arguments": repr(how), "inputs": files, "names": self.corpus.names, "tasks": self.tasks}
        values |= {"mjax_version": __version__, "sha256": hashlib.sha256(repr(values).encode()).hexdigest()}
        return without_secrets(json.dumps(values, indent=2))

    def close(self) -> None:
        """Remove the working folder, the plan first: nothing continues what is half removed."""
        remove(self.folder / "plan.json")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _at(file: Path, offset: int) -> Iterator[BinaryIO]:
    """A file to write from `offset` on, on the disk at the end."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "wb") as target:
        target.seek(offset)
        yield target
    to_disk(file)


def _mapped(file: Path, dtype: Any, mode: Literal["r", "r+"] = "r") -> np.ndarray:
    return np.memmap(file, dtype, mode).view(np.ndarray) if file.stat().st_size else np.empty(0, dtype)


@functools.lru_cache(maxsize=16)
def _results(folder: Path, stage: str, count: int) -> list[Any]:
    return [json.loads(_marker(folder, stage, rank).read_bytes()) for rank in range(count)]


def _marker(folder: Path, stage: str, rank: int) -> Path:
    return folder / f"{stage}.{rank:05}.done"


def run(job: Job) -> Any:
    """Run all stages on the executor of --executor, print a summary and return the result; None if Slurm has them.

    Raises:
      UsageError: as the tasks, or datatrove is missing, or another process writes the same output, or another user may
        have written the working folder.
      RunError: a worker was killed, a task failed, or the disk is full; the same command continues.
      KeyboardInterrupt: Ctrl-C, SIGTERM or a closed terminal; the same command continues.
    """
    kind = job.arguments.executor
    pipeline = _pipelines(job) if kind else None
    with INTERRUPTS, _working_folder(job):
        if kind == "slurm":
            _submit(job, pipeline)
            return None
        job.begin()
        if pipeline is None:
            _run_here(job)
        for stage in job.stages:
            if job.left(stage):
                _run_there(job, stage, pipeline)
        result = job.result()
        job.close()
    job.show(result)
    return result


def _run_here(job: Job) -> None:
    """Run the tasks in worker processes of this one, which runs stages of one task itself."""
    with Workers(job.processes, _same, (job,)) as workers:
        for stage in job.stages:
            ranks, task = job.left(stage), functools.partial(_task, stage)
            results = (task(job, rank) for rank in ranks) if stage in job.single else workers.map(task, ranks)
            with _watched(job, stage), contextlib.closing(results):
                for _ in results:
                    pass


def _watched(job: Job, stage: str) -> contextlib.AbstractContextManager[None]:
    """Show how far a stage is: by the input it reads, or by tasks."""
    verb = f"{stage} ({job.stages.index(stage) + 1} of {len(job.stages)})"
    if stage in job.readers:
        return watched(verb, job.corpus.size, lambda: job.counted(stage), job.pace)
    return watched(verb, job.tasks_of(stage), lambda: job.counted(stage), job.pace, "tasks")


def _run_there(job: Job, stage: str, pipeline: Callable[..., Any]) -> None:
    """Run the tasks of a stage on an executor, and name the first that failed."""
    reason = "it was killed"
    with _watched(job, stage):
        try:
            pipeline(stage).run()
        except Exception as error:  # the reasons of tasks are in files
            reason = repr(error)
    if left := job.left(stage):
        reasons = {rank: job.part(f"{stage}.failed", rank) for rank in left}
        failed = next((rank for rank, file in reasons.items() if file.exists()), left[0])
        reason = reasons[failed].read_text() if reasons[failed].exists() else reason
        raise RunError(
            f"task {failed} of {job.tasks_of(stage)} of stage {stage} failed: {reason} "
            f"(logs: {job.folder}/logs/{stage})"
        )


def _same(job: Job) -> Job:
    return job


def _task(stage: str, job: Job, rank: int) -> None:
    job.run_task(stage, rank)


@contextmanager
def _working_folder(job: Job) -> Iterator[None]:
    """The folder of `job`, with what the same command left in it; what another left is removed."""
    plan, file = job.plan(), job.folder / "plan.json"
    _results.cache_clear()
    try:
        _check_private(job, job.folder)
        with file.open() if file.is_file() else contextlib.nullcontext() as older:
            if older is not None:
                _lock(job, older)
            if older is None or older.read() != plan:
                if older is not None:
                    print(
                        f"{job.folder} has the work of another command or another --tasks; starting over",
                        file=sys.stderr,
                    )
                job.close()
                _check_private(job, job.folder)
                write_whole(file, plan)
    except OSError as error:
        raise RunError(f"{job.output} cannot be written: {error}") from error
    with file.open() as stream:
        _lock(job, stream)
        try:
            _remove_damaged(job)
            yield
        except UsageError:
            if job.arguments.executor is None and not job.copies:
                job.close()  # the command or its input has to change, and with it the plan
            raise
        except BaseException as error:
            if isinstance(error, OSError):  # NumPy's about a full disk has no number
                reason = error if error.errno else f"the disk may be full ({error})"
                error = RunError(f"writing {job.output} stopped: {reason}")
            error.add_note(f"{CONTINUES} from {job.folder}")
            raise error


def _lock(job: Job, plan: TextIO) -> None:
    if not take_lock(plan, print):
        raise UsageError(f"another process is writing {job.output}; wait for it, or choose another --output")


def _check_private(job: Job, folder: Path) -> None:
    """Make a folder of a job, or make sure that nobody else has written what is in it."""
    if problem := make_private(folder):
        raise UsageError(f"{problem}, or choose another --output than {job.output}")


def _remove_damaged(job: Job) -> None:
    """Remove the marker of a damaged result, with those of its stage and of all later ones, which may rely on it."""
    for index, stage in enumerate(job.stages):
        for marker in sorted(job.folder.glob(f"{stage}.*.done")):
            try:
                json.loads(marker.read_bytes())
            except ValueError:
                print(f"{marker} is damaged: {stage} and the stages after it run again", file=sys.stderr)
                for again in job.stages[index:]:
                    for file in (job.folder / f"{again}.bytes", *job.folder.glob(f"{again}.*.done")):
                        remove(file)
                return


# --- datatrove --------------------------------------------------------------------------------------------------------


class Step:
    """A stage as a step of datatrove's pipelines: a callable with data, rank and number of tasks."""

    def __init__(self, job: Job, stage: str):
        self.job, self.stage = job, stage

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        if self.job.arguments.executor != "slurm":
            with contextlib.suppress(Exception):  # written down for `_run_there`; datatrove would print pages
                self.job.run_task(self.stage, rank)
            return
        self.job.run_task(self.stage, rank)  # a failure cancels the stages that follow
        if self.stage == self.job.stages[-1]:
            self.job.show(self.job.result())
            self.job.close()


def _pipelines(job: Job) -> Callable[..., Any]:
    """A function that makes datatrove's executor of a stage; its further arguments are for the executor.

    Raises:
      UsageError: a package is missing, or --sbatch does not name a partition.
    """
    kind = job.arguments.executor
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")  # what tasks say is in the logs
    try:
        import datatrove.executor as executors

        if kind == "ray":
            import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--executor {kind} needs the package {error.name}, which is not installed; type: python -m pip install "
            f"{'ray' if error.name == 'ray' else repr('mjax[data]')}"
        ) from None
    # datatrove's own markers are not used: they would survive a change of the command.
    common = {"skip_completed": False, "workers": job.arguments.workers or -1}
    logs = job.folder / "logs"
    if kind == "slurm":
        options = dict(option.partition("=")[::2] for option in job.arguments.sbatch)
        if not options.get("partition") or not shutil.which("sbatch"):
            raise UsageError(
                "--executor slurm submits with sbatch; run it where sbatch is, with --sbatch partition=NAME "
                "[time=HH:MM:SS account=NAME …]"
            )

        class Slurm(executors.SlurmPipelineExecutor):
            def launch_merge_stats(self) -> None:
                """Start no job for datatrove's statistics, which are empty here."""

        executor, logs = Slurm, job.logs.resolve()
        common |= {"partition": options.pop("partition"), "time": options.pop("time", "24:00:00"), "qos": None}
        common |= {"mem_per_cpu_gb": 4, "sbatch_args": options}
        path = f"{Path(sys.executable).parent}:$PATH"
        common["env_command"] = f'export PATH="{path}" PYTHONPATH="{os.pathsep.join(filter(None, sys.path))}"'
    elif kind == "ray":
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        executor = executors.RayPipelineExecutor
        common["mem_per_cpu_gb"] = 0
    else:

        class Local(executors.LocalPipelineExecutor):
            def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
                """Run as any rank but 0, which would copy its log to the terminal."""
                return executors.LocalPipelineExecutor._run_for_rank(self, rank, 1, node_rank)

        executor = Local

    def make(stage: str, **options: Any) -> Any:
        options = {**common, **options, "tasks": job.tasks_of(stage), "logging_dir": str(logs / stage)}
        if kind == "slurm":
            options["job_name"] = f"mjax-{stage}"
        return executor([Step(job, stage)], **options)

    return make


def _submit(job: Job, pipeline: Callable[..., Any]) -> None:
    """Submit all stages to Slurm, each after the one before, and say where to look."""
    submitted = job.logs / "jobs.json"  # outlives the working folder, which a fast last job removes
    if submitted.exists() and shutil.which("squeue"):
        ids = json.loads(submitted.read_text())
        answer = subprocess.run(["squeue", "-h", "-j", ",".join(ids)], capture_output=True, text=True)
        if answer.stdout.strip():
            raise UsageError(f"jobs of {job.output} are in the queue: {', '.join(ids)}; wait, or scancel them first")
    _check_private(job, job.logs)
    job.begin()
    job.folder, previous, ids = job.folder.resolve(), None, []
    for stage in job.stages:
        executor = pipeline(stage, depends=previous)
        executor.run()
        ids.append(str(executor.job_id))
        previous = executor
    write_whole(submitted, json.dumps(ids))
    print(
        f"Submitted {len(ids)} stages of up to {job.tasks} tasks: {', '.join(job.stages)} (jobs {', '.join(ids)})\n"
        f"State: squeue -j {','.join(ids)}; tasks done: ls {job.folder}/*.done | wc -l; logs: {job.logs}\n"
        f"The last job writes {job.output} and removes {job.folder}. After a failure, scancel what is left and repeat "
        "the command: it submits the tasks that are missing."
    )
