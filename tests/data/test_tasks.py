"""The bytes of an output depend neither on the number of tasks, nor on Slurm, nor on tasks that were killed."""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mjax.commands import cli
from mjax.commands.clean import CleanArguments, clean
from mjax.commands.dedup import DedupArguments, dedup
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.corpus.documents import TextFiles, parse_block
from mjax.data.corpus.tasks import Job
from mjax.errors import RunError, UsageError
from mjax.utils import files
from tests.conftest import ROOT

COMMANDS = {
    "dedup": (dedup, DedupArguments, {}),
    "clean": (clean, CleanArguments, {"min_tokens": 12, "decontaminate": (Path("evaluation.txt"),)}),
    "prepare": (prepare, PrepareArguments, {"tokenizer": "bytes"}),
}
OUTPUTS = {"dedup": "out.jsonl", "clean": "out.jsonl", "prepare": "out"}
FAILING = {"dedup": "write", "clean": "clean", "prepare": "merge"}
WORDS = [f"word{number}" for number in range(300)]


def text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(8, 30)))


def write_corpus(folder: Path, documents: int) -> tuple[Path, ...]:
    """Files of all kinds with equal and similar documents, in `folder`; a space and a bracket are in a name."""
    draw, texts = random.Random(1), []
    for _ in range(documents):
        old = draw.choice(texts) if texts and draw.random() < 0.4 else text(draw)
        texts.append(old + draw.choice(["", "", " more", " of it"]))
    rows, part = [{"text": each, "n": number} for number, each in enumerate(texts)], documents // 4
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "a [1] b.jsonl").write_text("".join(lines[: 2 * part]) + "\n" + lines[0].strip())
    with gzip.open(folder / "c.jsonl.gz", "wt") as stream:
        stream.writelines(lines[2 * part : 3 * part])
    (folder / "d.txt").write_text(texts[3])
    (folder / "e.jsonl").write_text("")
    parquet.write_table(pyarrow.Table.from_pylist(rows[3 * part :]), folder / "f.parquet", row_group_size=7)
    (folder / "evaluation.txt").write_text(texts[5])
    return tuple(folder / name for name in ("a [1] b.jsonl", "c.jsonl.gz", "d.txt", "e.jsonl", "f.parquet"))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, 200)
    return ("a [1] b.jsonl", "c.jsonl.gz", "d.txt", "e.jsonl", "f.parquet")


def run(command, inputs, **options):
    function, arguments, more = COMMANDS[command]
    output = OUTPUTS[command] if command == "prepare" else Path(OUTPUTS[command])
    return function(arguments(inputs=tuple(map(Path, inputs)), output=output, **{**more, **options}))


def hashes(folder=Path("."), stem="out"):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob(f"{stem}*") if file.is_file()
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_bytes_do_not_depend_on_tasks(corpus, command, monkeypatch):
    """Nor on workers, nor on what is in memory at a time."""
    run(command, corpus, tasks=1)
    alone = hashes()
    assert len(alone) == 3
    monkeypatch.setattr("mjax.data.corpus.documents.BLOCK_BYTES", 2000)
    monkeypatch.setattr("mjax.data.corpus.near_duplicates.BATCH_PAIRS", 2)
    monkeypatch.setattr("mjax.commands.dedup.PART", 7)
    for tasks in (2, 3, 16):
        run(command, corpus, tasks=tasks, overwrite=True)
        assert hashes() == alone
    run(command, corpus, tasks=3, workers=2, overwrite=True)
    assert hashes() == alone
    assert not list(Path().glob("*.tmp"))


def test_shares_number_their_lines(tmp_path):
    """Cut anywhere, a file gives every line once, with its number."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\nno\n{"text": "' + 40 * "b" + '"}\n\n\n{"text": "c"}')
    for most in (10**6, 30):

        def all_of(blocks):
            documents, malformed = zip(*(parse_block(block, "text") for block in blocks), strict=True)
            return list(chain(*documents)), list(chain(*malformed))

        corpus = TextFiles([file], malformed="skip", max_bytes=most)
        whole = all_of(corpus.blocks())
        for tasks in range(2, corpus.size + 3):
            lines = [corpus.count_lines(rank, tasks) for rank in range(tasks)]
            blocks = [block for rank in range(tasks) for block in corpus.read_share(rank, tasks, lines)]
            assert all_of(blocks) == whole


def test_killed_work_continues_or_starts_over(corpus, monkeypatch, capsys):
    """The same command does what is missing; another input or number of tasks starts over."""
    done = []

    def counted(job, stage, rank):
        done.append((stage, rank))
        if done[0] == ("lines", 0) and (stage, rank) == ("clean", 1):
            raise RunError("a worker process was killed")  # as `_run_stage` says it
        return plain(job, stage, rank)

    plain = Job.run_task
    run("clean", corpus, tasks=1)
    expected = hashes()
    monkeypatch.setattr(Job, "run_task", counted)
    for change in (None, "tasks", "input"):
        done.clear()
        with pytest.raises(RunError, match="was killed"):
            run("clean", corpus, tasks=4, overwrite=True)
        done[:] = [("", 0)]
        if change == "input":
            Path("d.txt").write_text(Path("d.txt").read_text() + " ")
        run("clean", corpus, tasks=3 if change == "tasks" else 4, overwrite=True)
        assert (("clean", 0) in done) == (change is not None)
        assert ("starting over" in capsys.readouterr().err) == (change is not None)
        assert (hashes() == expected) == (change != "input")


def stop_at(monkeypatch, stage, rank, error):
    """Let a task raise `error` instead of doing its work."""

    def run_task(job, this_stage, this_rank):
        if (this_stage, this_rank) == (stage, rank):
            raise error
        return plain(job, this_stage, this_rank)

    plain = Job.run_task
    monkeypatch.setattr(Job, "run_task", run_task)


def run_until(stage, rank, monkeypatch, command, corpus, **options):
    """Run a command until a worker process is killed."""
    with monkeypatch.context() as patch:
        stop_at(patch, stage, rank, RunError("a worker was killed"))
        with pytest.raises(RunError, match="was killed"):
            run(command, corpus, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_progress_counts_the_input_as_it_is_read(corpus, monkeypatch, command):
    """Within a task, and all of it once; stages that read nothing count their tasks."""
    monkeypatch.setattr("mjax.data.corpus.documents.BLOCK_BYTES", 500)
    size, counts = sum(Path(file).stat().st_size for file in corpus), {}

    @contextlib.contextmanager
    def watch(verb, total, count, pace, unit="bytes"):
        counts[verb] = []

        def advance(job, read, plain=Job.advance):
            plain(job, read)
            counts[verb].append(count())

        with monkeypatch.context() as patch:
            patch.setattr(Job, "advance", advance)
            yield
        assert max(counts[verb]) == count() == total == (size if unit == "bytes" else total)

    monkeypatch.setattr("mjax.data.corpus.tasks.show_progress", watch)
    run(command, corpus, tasks=3)
    several = [verb for verb, values in counts.items() if len(set(values)) > 10]
    assert len(several) == {"dedup": 3, "clean": 2, "prepare": 1}[command]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 75, "mjax: stopping; the same command continues from out"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, r"No space left on device; the same command continues"),
        (RunError("a worker was killed"), 1, "mjax: error: a worker was killed; the same command continues from out"),
    ],
    ids=["Ctrl-C", "full disk", "killed worker"],
)
def test_interruption_keeps_finished_tasks(corpus, monkeypatch, capsys, command, error, code, sentence):
    run(command, corpus, tasks=1)
    expected, stage = hashes(), {"dedup": "write", "clean": "clean", "prepare": "encode"}[command]
    line = [*typed(command, corpus, "--tasks", "4", "--overwrite")[3:]]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        stop_at(patch, stage, 2, error)
        assert cli.main(line) == code
    assert re.search(sentence, capsys.readouterr().err)
    working = Path(f"{OUTPUTS[command]}.tmp")
    assert working.stat().st_mode & 0o777 == 0o700
    assert len(list(working.glob(f"{stage}.*.done"))) == 2
    assert not list(working.rglob("*.pkl"))
    stop_at(monkeypatch, "lines", 0, AssertionError("a finished task runs again"))
    assert cli.main(line) == 0
    assert hashes() == expected
    assert not working.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_interruption_is_too_late_for_complete_output(corpus, monkeypatch, capfd, command):
    """The same command could not continue: it would refuse to replace the output."""
    run(command, corpus, tasks=1)
    expected = hashes()

    def put_and_interrupt(file, path):
        files.put(file, path)
        if file.name in ("kept", "idx"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("mjax.data.corpus.tasks.put", put_and_interrupt)
    run(command, corpus, tasks=1, overwrite=True)
    assert f"{OUTPUTS[command]} is complete; removing {OUTPUTS[command]}.tmp" in capfd.readouterr().err
    assert hashes() == expected
    assert not list(Path().glob("*.tmp"))


def test_changed_filter_starts_over(corpus, monkeypatch, capsys):
    """Work with a --filter is not continued by another function of that name, nor work of a tokenizer by another."""
    Path("own.py").write_text("def keep(text):\n    return 1 / 0\n")
    line = typed("clean", corpus, "--filter", "own.py:keep", "--tasks", "3")[3:]
    assert cli.main(line) == 1
    assert "failed on" in capsys.readouterr().err
    Path("own.py").write_text("def keep(text):\n    return True\n")
    assert cli.main(line) == 0
    assert "starting over" in capsys.readouterr().err


def test_gigatoken_switch_starts_over(corpus, monkeypatch, capsys):
    run_until("encode", 1, monkeypatch, "prepare", corpus, tasks=2)
    monkeypatch.setenv("MJAX_GIGATOKEN", "0")
    run("prepare", corpus, tasks=2)
    assert "starting over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("link", r"out.jsonl.tmp is a link or a file, not a folder; type rm out.jsonl.tmp, or choose another name"),
        ("user", r"out.jsonl.tmp belongs to another user \(number 12345\); ask them to remove it, or choose another"),
        ("group", r"others can write into out.jsonl.tmp; type chmod go-w out.jsonl.tmp if it is yours, or choose"),
    ],
)
def test_working_folder_of_others_is_rejected(corpus, monkeypatch, change, sentence):
    folder = Path("out.jsonl.tmp")
    run_until("clean", 1, monkeypatch, "clean", corpus, tasks=2)
    if change == "link":
        folder.rename("elsewhere")
        folder.symlink_to("elsewhere")
    elif change == "user":
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        plain = Path.lstat
        mine = [*[*plain(folder)][:4], 12345, 0, 0, 0, 0, 0]
        monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(mine) if path == folder else plain(path))
    else:
        folder.chmod(0o770)
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError, match=sentence):
        run("clean", corpus, tasks=2)
    assert sorted(Path().rglob("*")) == before


def test_work_of_a_living_process_is_not_removed(corpus, monkeypatch):
    """Nor by another command for the same output, which would start over."""
    run_until("clean", 1, monkeypatch, "clean", corpus, tasks=2)
    before = sorted(Path().rglob("*"))
    with Path("out.jsonl.tmp/plan.json").open() as plan:
        assert files.take_lock(plan, pytest.fail)
        for tasks in (2, 3):
            with pytest.raises(UsageError, match=r"another process is writing out.jsonl; wait for it, or choose"):
                run("clean", corpus, tasks=tasks)
    assert sorted(Path().rglob("*")) == before
    run("clean", corpus, tasks=2)


@pytest.mark.parametrize("content", [b"", b'[{"read": {"name"', pickle.dumps([1])], ids=["empty", "torn", "a pickle"])
def test_damaged_marker_starts_over(corpus, monkeypatch, content):
    run("dedup", corpus, tasks=1)
    expected = hashes()
    run_until("explain", 1, monkeypatch, "dedup", corpus, tasks=3, overwrite=True)
    Path("out.jsonl.tmp/choose.00000.done").write_bytes(content)
    with pytest.raises(UsageError, match=r"choose\.00000\.done .*; remove out\.jsonl\.tmp and repeat the command"):
        run("dedup", corpus, tasks=3, overwrite=True)
    run("dedup", corpus, tasks=3, overwrite=True)
    assert hashes() == expected


SBATCH = """#!{python}
import os, subprocess, sys
state, script = {state!r}, sys.stdin.read()
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
assert options["partition"] == "cpu" and options["account"] == "me" and options["time"] == "24:00:00"
number = len(os.listdir(state)) + 1
before = options.get("dependency", "").removeprefix("afterok:")
good = not before or open(f"{{state}}/{{before}}").read() == "ok"
first, last = options["array"].partition("%")[0].split("-")
for task in range(int(first), int(last) + 1):
    with open(options["output"].replace("%a", str(task)), "w") as out:
        environment = os.environ | {{"SLURM_ARRAY_TASK_ID": str(task)}}
        run = subprocess.run(["/bin/sh", "-c", script], env=environment, stdout=out, stderr=out) if good else None
        good = good and not run.returncode
open(f"{{state}}/{{number}}", "w").write("ok" if good else "failed")
print(f"{{number}};cluster")
"""
SQUEUE = "#!/bin/sh\ncat {state}.queue 2>/dev/null || true\n"


def install_slurm(folder: Path) -> dict[str, str]:
    """Stand-ins for sbatch and squeue, whose jobs run at once; returns an environment with them."""
    (folder / "jobs").mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE}.items():
        (folder / name).write_text(text.format(python=sys.executable, state=str(folder / "jobs")))
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_impossible_submission_is_rejected(corpus, tmp_path, monkeypatch):
    how = {"tasks": 2, "sbatch": ("partition=cpu", "account=me")}
    with pytest.raises(UsageError, match=r"--sbatch submits a command typed where sbatch is; type it on a login node"):
        run("clean", corpus, **how)
    monkeypatch.setenv("PATH", install_slurm(tmp_path / "bin")["PATH"])
    monkeypatch.setattr(sys, "argv", ["mjax", "clean"])
    (tmp_path / "bin" / "jobs.queue").write_text("7\n8\n")
    with pytest.raises(UsageError, match=r"jobs of out.jsonl are in the queue: 7, 8; wait, or scancel them first"):
        run("clean", corpus, **how)
    assert not list((tmp_path / "bin" / "jobs").iterdir())


def typed(command, inputs, *flags):
    more = {
        "clean": ["--min-tokens", "12", "--decontaminate", "evaluation.txt"],
        "prepare": ["--tokenizer", "bytes"],
    }.get(command, [])
    return [sys.executable, "-m", "mjax", command, *inputs, "--output", OUTPUTS[command], *more, *flags]


SLURM = [(command, tasks) for command in COMMANDS for tasks in (1, 3, 16)]


@pytest.mark.parametrize(
    ("command", "tasks"),
    [pytest.param("prepare", 2, marks=pytest.mark.ci), *(pytest.param(*row, marks=pytest.mark.all) for row in SLURM)],
)
def test_slurm_gives_the_same_bytes(corpus, tmp_path, command, tasks):
    """Repeated after a task that failed, it submits what is missing."""
    run(command, corpus, tasks=1)
    expected = hashes()
    environment = {**install_slurm(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    flags = ["--tasks", str(tasks), "--sbatch", "partition=cpu", "account=me", "--workers", "2", "--overwrite"]
    line = typed(command, corpus, *flags)
    failing = tmp_path / "failing" / "sitecustomize.py"
    failing.parent.mkdir()
    failing.write_text(f"import os, sys\nif os.environ.get('MJAX_STAGE') == {FAILING[command]!r}: sys.exit('no')\n")
    before = {**environment, "PYTHONPATH": f"{failing.parent}:{ROOT}"}
    for variables in (before, environment):
        result = subprocess.run(line, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert Path(f"{OUTPUTS[command]}.tmp").exists() == (variables is before)
    assert hashes() == expected
    assert "State: squeue -j " in result.stdout
    logs = Path(f"{OUTPUTS[command]}.logs")
    assert f"{OUTPUTS[command]} is ready" in (logs / "finish.0.out").read_text()
    assert len([*logs.glob(f"{FAILING[command]}.*.out")]) == tasks
