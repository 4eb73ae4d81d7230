"""Runs in an object store: what a killed upload leaves, a store that fails, and a run that moves to another machine.

The store is moto's S3 server, on the loopback. Another machine is another folder of caches.
"""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest

from mjax.checkpoint import mirror as mirrors
from mjax.checkpoint.folders import check_files, read_manifest, steps_in, write_manifest
from mjax.checkpoint.mirror import COMMIT, Mirror, bring, fetch, local_run
from mjax.commands import cli
from mjax.errors import RunError
from mjax.run import loop
from mjax.run.metrics import read_metrics
from mjax.utils import stores
from mjax.utils.files import write_whole
from mjax.utils.stores import Store, mirror_of
from tests.object_store import bucket
from tests.test_processes import Group
from tests.test_train_command import losses, run_here

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("quick_runs")]
pytest.importorskip("s3fs")
ADDRESS = "s3://bucket/runs/odd name (é)"


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Runs of equal configs share their program."""
    monkeypatch.setattr(loop, "build_program", functools.cache(loop.build_program))


@pytest.fixture
def server(monkeypatch, tmp_path):
    with bucket(monkeypatch, tmp_path / "here") as server:
        yield server


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Call it to be on another machine."""
    machines = iter(range(100))
    return lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{next(machines)}"))


def checkpoint(folder, step):
    """A checkpoint as one of Orbax looks to the store, of bytes that depend on the step."""
    made = folder / "checkpoints" / f"{step}.writing"
    for name, size in {"_CHECKPOINT_METADATA": 20, "model/d/a": 90_000, "model/d/b": 70_000, COMMIT: 30}.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(np.random.default_rng([step, size]).bytes(size))
    write_manifest(made, step, {})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    made.rename(folder / "checkpoints" / str(step))


def upload(address, environment, steps=(10, 20, 30)):
    """A run that saves these checkpoints and keeps the last one."""
    os.environ.update(environment)
    folder = local_run(address)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", "{}")
    with Mirror(folder, address, lambda line: None) as mirror:
        for step in steps:
            checkpoint(folder, step)
            mirror.saved(step)
            mirror._pending[-1].result()
            for old in steps_in(folder / "checkpoints")[:-1]:
                shutil.rmtree(folder / "checkpoints" / str(old))


def sound(address):
    """The checkpoints that a machine sees, each of which is whole; the metrics reach the newest."""
    folder = local_run(address)
    steps = steps_in(folder / "checkpoints")
    for step in steps:
        at = folder / "checkpoints" / str(step)
        files = read_manifest(at)["files"]
        bring(at, files, files, print)
        check_files(at, files, None)
    assert not steps or read_metrics(folder / "metrics.jsonl")[-1]["step"] >= steps[-1]
    return steps


def test_uploads_killed_at_any_instant_leave_whole_checkpoints(server, elsewhere):
    """Twenty instants, spread over the uploads of three checkpoints and the removal of two: SIGKILL
    before or after a request takes effect."""
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["s3fs", __name__])
    seen, unmarked = set(), 0

    def killed_at(write):
        elsewhere()
        environment = {**server.environment(), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        process = spawn.Process(target=upload, args=(address, environment))
        process.start()
        server.kill_at(write, process.pid)
        process.join(60)
        return process.exitcode

    address = f"{ADDRESS}-whole"
    assert killed_at(0) == 0
    for write in np.linspace(1, server.writes - 1, 20).astype(int).tolist():
        address = f"{ADDRESS}-{write}"
        assert killed_at(write) == -signal.SIGKILL
        found = Store.of(address).files(address)
        marked = [step for step, files in mirrors._steps(found).items() if COMMIT in files]
        unmarked += len(mirrors._steps(found)) - len(marked)
        elsewhere()
        assert sound(address) == marked
        seen |= set(marked)
    assert seen == {10, 20, 30}
    assert unmarked > 3  # half-written ones were there
    elsewhere()
    upload(address, {}, steps=(40,))  # removes what the last one has left
    assert set(mirrors._steps(Store.of(address).files(address))) == {40}


def test_store_that_fails_does_not_stop_training(server, monkeypatch):
    """It answers 503 for a while and is slow then: attempts are reported, checkpoints that were replaced meanwhile are
    left out, and the newest arrives."""
    said = []
    monkeypatch.setattr(stores, "LONGEST_PAUSE", 0.2)
    folder = mirror_of(ADDRESS)
    folder.mkdir(parents=True)
    with Mirror(folder, ADDRESS, said.append) as mirror:
        server.rule = lambda environ: "checkpoints" in environ["PATH_INFO"]
        for step in (10, 20, 30):
            checkpoint(folder, step)
            begun = time.monotonic()
            mirror.saved(step)
            assert time.monotonic() - begun < 0.1
            time.sleep(0.5)
        shutil.rmtree(folder / "checkpoints" / "20")
        time.sleep(3)
        server.rule, server.delay = None, 0.2
    assert any("s3://bucket/runs" in line and "reduce your request rate" in line for line in said)
    assert sum("checkpoint 20 was not copied" in line for line in said) == 1
    assert "checkpoint 30 copied" in " ".join(said)
    assert set(mirrors._steps(Store.of(ADDRESS).files(ADDRESS))) == {10, 30}


def test_run_that_could_not_be_copied_is_copied_by_the_next(server, monkeypatch, elsewhere):
    monkeypatch.setattr(stores, "PATIENCE", 0.5)
    upload(ADDRESS, {}, steps=(10,))
    folder = mirror_of(ADDRESS)
    mirror = Mirror(folder, ADDRESS, print).__enter__()
    checkpoint(folder, 20)
    server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT"
    mirror.saved(20)
    with pytest.raises(RunError, match="does not have all of this run"):
        mirror.finish()
    server.rule = None
    fetch(folder, print)  # keeps it
    with Mirror(folder, ADDRESS, print):
        pass
    elsewhere()
    assert sound(ADDRESS) == [10, 20]


def test_newer_checkpoints_of_another_machine_win(server, elsewhere, tmp_path, monkeypatch):
    """The first machine has 10 and, not copied, 20; another has gone on from 10 to 15."""
    upload(ADDRESS, {}, steps=(10,))
    checkpoint(mirror_of(ADDRESS), 12)
    elsewhere()
    upload(ADDRESS, {}, steps=(15,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert sound(ADDRESS) == [15]


def test_metrics_are_copied_by_parts(server, monkeypatch, elsewhere):
    monkeypatch.setattr(mirrors, "PART_BYTES", 1000)
    folder = mirror_of(ADDRESS)
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 401)]

    def copied(mirror, count):
        write_whole(folder / "metrics.jsonl", "".join(lines[:count]))
        before = len(server.requests)
        mirror._copy_files()
        return [path[-14:] for method, path, _ in server.requests[before:] if method == "PUT"]

    with Mirror(folder, ADDRESS, print) as mirror:
        assert copied(mirror, 200) == ["00000000.jsonl", "00000001.jsonl", "00000002.jsonl"]
        assert copied(mirror, 210) == ["00000002.jsonl", "00000003.jsonl"][: 1 + (sum(map(len, lines[:210])) > 3000)]
        assert copied(mirror, 20) == ["00000000.jsonl"]  # the run went back
        copied(mirror, 400)
    elsewhere()
    fetch(mirror_of(ADDRESS), print)
    assert (mirror_of(ADDRESS) / "metrics.jsonl").read_text() == "".join(lines)


def test_run_continues_on_another_machine(server, elsewhere, tmp_path, capsys):
    """Losses, rotation, the good checkpoint and the list of runs are those of a run on a disk."""
    runs = "s3://bucket/runs"
    run_here(tmp_path, "--runs", runs, "--train.steps", "8", "--optimizer.decay-steps", "12")
    elsewhere()
    run_here(tmp_path, "--runs", runs, "--optimizer.decay-steps", "12")
    output = capsys.readouterr().out
    assert "s3://bucket/runs/run, continued after step 8" in output
    assert "stores/s3" not in output
    run_here(tmp_path, "--optimizer.decay-steps", "12")
    assert losses(mirror_of(runs)) == losses(tmp_path)
    elsewhere()
    assert cli.main(["runs", "--runs", runs, "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["name"], row["step"], row["state"]) == ("run", 12, "done")
    checkpoints = mirror_of(runs) / "run" / "checkpoints"
    assert steps_in(checkpoints) == steps_in(tmp_path / "run" / "checkpoints")
    assert (checkpoints / "good.json").read_bytes() == (tmp_path / "run" / "checkpoints" / "good.json").read_bytes()
    assert cli.main(["runs", "remove", "run", "--runs", runs, "--yes"]) == 0
    assert "removed s3://bucket/runs/run" in capsys.readouterr().out
    assert Store.of(runs).files(runs) == {}


@pytest.mark.all
def test_run_of_two_processes_killed_in_an_upload_goes_on_elsewhere(server, elsewhere, tmp_path, capsys):
    """It continues from the newest marked checkpoint, on another mesh, bit for bit as from the files of the killed run.
    It is exported from there."""
    runs, here = "s3://bucket/runs", mirror_of("s3://bucket/runs/run")
    with Group(tmp_path / "logs", "--runs", runs, "--checkpoint.keep-last", "9", count=2) as group:
        server.kill_at(9, group.processes[0].pid, "/checkpoints/12/")
        assert group.processes[0].wait(200) == -signal.SIGKILL, group.logs[0].read_text()[-3000:]
    marked = [step for step, files in mirrors._steps(Store.of(runs).files(f"{runs}/run")).items() if COMMIT in files]
    assert marked
    assert 12 not in marked
    elsewhere()
    run_here(tmp_path / "ignored", "--runs", runs, "--checkpoint.keep-last", "9")
    assert f"continued after step {marked[-1]}" in capsys.readouterr().out
    moved = losses(mirror_of(runs))

    shutil.copytree(here, tmp_path / "copied" / "run")
    for step in (4, 8, 12):
        if step != marked[-1]:
            shutil.rmtree(tmp_path / "copied" / "run" / "checkpoints" / str(step))
    run_here(tmp_path / "copied", "--checkpoint.keep-last", "9")
    assert losses(tmp_path / "copied") == moved
    elsewhere()
    for source, name in ((f"{runs}/run", "a"), (tmp_path / "copied" / "run", "b")):
        assert cli.main(["convert", "to-hf", "--run", str(source), str(tmp_path / name)]) == 0
    exported = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert exported[0] == exported[1]


def test_second_process_in_a_store_is_refused(server, monkeypatch):
    monkeypatch.setattr(
        time, "sleep", lambda seconds: Store("s3").write(f"{ADDRESS}/.lock", json.dumps(beat(2)).encode())
    )

    def beat(number):
        return {"host": "elsewhere", "process": 7, "beat": number, "token": "t"}

    Store("s3").write(f"{ADDRESS}/.lock", json.dumps(beat(1)).encode())
    with pytest.raises(ValueError, match="is in use by process 7 on elsewhere"):
        Mirror(mirror_of(ADDRESS), ADDRESS, print)
