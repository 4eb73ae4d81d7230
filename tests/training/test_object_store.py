"""Runs in an object store: what a killed upload leaves, a store that fails, and a run that moves to another machine.

The store is moto's S3 server, on the loopback. Another machine is another folder of caches.
"""

import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest

from mjax.checkpoint import mirror as mirrors
from mjax.checkpoint import store_lock
from mjax.checkpoint.folders import check_files, read_manifest, steps_in, write_manifest
from mjax.checkpoint.mirror import COMMIT, Mirror, fetch, fetch_files, fetch_runs, local_run, run_to_train
from mjax.commands import cli
from mjax.errors import RunError, UsageError
from mjax.run import loop
from mjax.run.metrics import read_metrics
from mjax.utils import stores
from mjax.utils.files import write_whole
from mjax.utils.stores import Store, explain_failure, mirror_address, version
from tests.object_store import bucket
from tests.test_train_command import command, losses, run_here

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("quick_runs")]
s3fs = pytest.importorskip("s3fs")
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
        file.write(json.dumps({"step": step, "tokens": step}) + "\n")
    made.rename(folder / "checkpoints" / str(step))


def save(mirror, *steps):
    for step in steps:
        checkpoint(mirror.folder, step)
        mirror.enqueue(step)


def copy(mirror, *steps):
    save(mirror, *steps)
    wait_until(lambda: not mirror._pending)


def copied(folder, *steps):
    with Mirror(folder, ADDRESS, print) as mirror:
        copy(mirror, *steps)


def upload(address, environment, steps=(10, 20, 30)):
    """A run that saves these checkpoints and keeps the last one."""
    os.environ.update(environment)
    folder = run_to_train(address)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", "{}")
    with Mirror(folder, address, lambda line: None) as mirror:
        for step in steps:
            copy(mirror, step)
            for old in steps_in(folder / "checkpoints")[:-1]:
                shutil.rmtree(folder / "checkpoints" / str(old))


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def marked(address):
    """The complete checkpoints in the store."""
    return mirrors._complete_steps(Store(address).files(address), address, print)


def sound(address):
    """The checkpoints that a machine sees, all of them whole; the metrics reach the newest."""
    folder = local_run(address)
    steps = steps_in(folder / "checkpoints")
    for step in steps:
        at = folder / "checkpoints" / str(step)
        files = read_manifest(at)["files"]
        fetch_files(at, files, files, print)
        check_files(at, files, None)
    assert not steps or read_metrics(folder / "metrics.jsonl")[-1]["step"] >= steps[-1]
    return steps


def test_uploads_killed_at_any_instant_leave_whole_checkpoints(server, elsewhere, quick):
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
        complete = marked(address)
        unmarked += len(mirrors._group_by_step(Store(address).files(address))) - len(complete)
        elsewhere()
        assert sound(address) == complete
        seen |= set(complete)
    assert seen == {10, 20, 30}
    assert unmarked > 3  # half-written ones were there
    elsewhere()
    upload(address, {}, steps=(40,))  # removes what the last one has left
    assert set(mirrors._group_by_step(Store(address).files(address))) == {40}


@pytest.fixture
def quick(monkeypatch):
    """Beats, pauses and patience of fractions of a second."""
    monkeypatch.setattr(mirrors, "INTERVAL", 0.1)
    monkeypatch.setattr(mirrors, "LISTING_LAG", 1.0)
    monkeypatch.setattr(store_lock, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(store_lock, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(stores, "MAX_PAUSE", 0.3)
    monkeypatch.setattr(stores, "PATIENCE", 1.5)


@pytest.fixture
def run(server, quick):
    """The folder of a run that this machine writes."""
    folder = mirror_address(ADDRESS)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


REFUSALS = {
    "503": True,
    "403": (403, "AccessDenied", "Access Denied"),
    "expired token": (400, "ExpiredToken", "The provided token has expired."),
    "clock": (403, "RequestTimeTooSkewed", "The request time is too far from the current time."),
    "reset": "reset",
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_checkpoint_is_due_until_the_store_has_it(server, run, refusal, monkeypatch):
    """Whatever the store answers: one line a minute at most reports it, and the next attempt continues, also without
    a new connection."""
    said = []
    if refusal == "reset":
        monkeypatch.setattr(Store, "reconnect", Mock(side_effect=OSError("no metadata server")))
    with Mirror(run, ADDRESS, said.append) as mirror:
        server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT" and REFUSALS[refusal]
        begun = time.monotonic()
        save(mirror, 10)
        assert time.monotonic() - begun < 0.1
        wait_until(lambda: any("lacks checkpoint 10" in line for line in said))
        server.rule = lambda environ: "/checkpoints/10/" in environ["PATH_INFO"] and REFUSALS[refusal]
        save(mirror, 20)
        wait_until(lambda: 20 in marked(ADDRESS) if server.rule is None else "checkpoint 20 copied" in " ".join(said))
        time.sleep(1)
        server.rule = None
    assert marked(ADDRESS) == [10, 20]
    lines = [line for line in said if "lacks checkpoint 10" in line]
    assert all(ADDRESS in line for line in lines)
    assert len(lines) == len(set(lines))
    assert len(said) < 12, said


def test_replaced_checkpoint_is_left_out_with_a_line(server, run):
    said = []
    with Mirror(run, ADDRESS, said.append) as mirror:
        server.rule = lambda environ: "checkpoints" in environ["PATH_INFO"]
        save(mirror, 10, 20, 30)
        wait_until(lambda: len(mirror._failed) >= 3)
        shutil.rmtree(run / "checkpoints" / "20")
        server.rule = None
    assert sum("checkpoint 20 was not copied" in line for line in said) == 1
    assert marked(ADDRESS) == [10, 30]


def test_listing_that_lags_marks_nothing_early(server, run):
    """The mark goes when the store lists all files, and what is not listed is not removed here."""
    server.lag = 0.5
    with Mirror(run, ADDRESS, lambda line: None) as mirror:
        copy(mirror, 10)
        server.lag = 100.0
        assert marked(ADDRESS) == []
    assert fetch(run, print) == run
    assert run_to_train(ADDRESS) == run
    assert steps_in(run / "checkpoints") == [10]
    assert (run / "checkpoints" / "10" / "model" / "d" / "a").is_file()


def test_run_that_could_not_be_copied_is_copied_by_the_next(server, run, elsewhere, capsys):
    """The end waits as long as it says, and names what is missing; rotation here may have been faster meanwhile."""
    with Mirror(run, ADDRESS, print) as mirror:
        copy(mirror, 10)
    mirror = Mirror(run, ADDRESS, print).__enter__()
    server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT" and (403, "AccessDenied", "Access Denied")
    save(mirror, 20, 30)
    shutil.rmtree(run / "checkpoints" / "10")
    begun = time.monotonic()
    with pytest.raises(
        RunError, match=r"lacks checkpoint 30, checkpoint 20, .*copies it with: python train.py --run s3://"
    ):
        mirror.finish()
    assert time.monotonic() - begun >= stores.PATIENCE
    assert "waiting until the run is copied" in capsys.readouterr().out
    server.rule = None
    assert local_run(ADDRESS) == run_to_train(ADDRESS) == run
    assert "checkpoint 30 of s3://bucket/runs/odd name (é) is on this machine only" in capsys.readouterr().err
    assert steps_in(run / "checkpoints") == [20, 30]
    with Mirror(run, ADDRESS, print):
        pass
    elsewhere()
    assert sound(ADDRESS) == [20, 30]


def test_folder_that_is_behind_is_set_aside_not_removed(server, elsewhere, tmp_path, monkeypatch, capsys, quick):
    """The first machine has 10 and, not copied, 12; another has gone on from 10 to 15.

    A folder that is all in the store is replaced.
    """
    here = tmp_path / "here"
    upload(ADDRESS, {}, steps=(10,))
    checkpoint(mirror_address(ADDRESS), 12)
    elsewhere()
    upload(ADDRESS, {}, steps=(15,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    folder = mirror_address(ADDRESS)
    assert sound(ADDRESS) == [15]
    assert local_run(ADDRESS) != folder
    assert steps_in(folder / "checkpoints") == [10, 12]  # no command that reads has touched it
    assert run_to_train(ADDRESS) == folder
    aside = folder.with_name(f"{folder.name}.not-copied")
    assert f"files of it are now {stores.with_addresses(str(aside))}" in capsys.readouterr().err
    assert steps_in(aside / "checkpoints") == [10, 12]
    upload(ADDRESS, {}, steps=(20,))
    elsewhere()
    upload(ADDRESS, {}, steps=(25,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    assert run_to_train(ADDRESS) == folder
    assert len(list(folder.parent.glob("*.not-copied*"))) == 1
    assert sound(ADDRESS) == [25]


def test_rotation_leaves_what_this_machine_has_never_had(server, run):
    """Such as a checkpoint that another user has copied there."""
    with Mirror(run, ADDRESS, print) as mirror:
        copy(mirror, 10)
        store = Store(ADDRESS)
        files = store.files(f"{ADDRESS}/checkpoints/10")
        for name in sorted(files, key=lambda name: name != COMMIT):  # one without a mark is removed
            content = store.read(f"{ADDRESS}/checkpoints/10/{name}")
            store.write(f"{ADDRESS}/checkpoints/5/{name}", content)
        save(mirror, 20)
        shutil.rmtree(run / "checkpoints" / "10")
    assert marked(ADDRESS) == [5, 20]


# --- Keys from outside ------------------------------------------------------------------------------------------------


def test_keys_of_a_store_stay_below_its_folder(server, elsewhere, tmp_path, capsys, quick):
    """Absolute paths, .., folder markers, keys below a file, and a mark without its manifest: none is written, and none
    makes the run unusable."""
    upload("s3://bucket/runs/one", {}, steps=(10,))
    victim, store = tmp_path / "victim", Store(ADDRESS)
    victim.write_text("mine")
    ups = "/".join([".."] * 20)
    keys = [
        f"one/{victim}", f"one/{ups}{victim}", "one/config.json/below", "one/", "one/checkpoints/", "one/a\tb",
        "one/checkpoints/20/commit_success.txt", "one/checkpoints/10/../../../x", f"one/{'n' * 300}", "",
        "../two/config.json",
    ]  # fmt: skip
    for key in keys:
        store.fs.call_s3("put_object", Bucket="bucket", Key=f"runs/{key}", Body=b"theirs")
    elsewhere()
    assert cli.main(["runs", "--runs", "s3://bucket/runs"]) == 0
    output = capsys.readouterr()
    assert "one" in output.out
    assert "s3://bucket/runs/one: skipped " in output.err
    assert "checkpoints/20 is not used: it has a commit_success.txt and no manifest.json" in output.err
    assert sound("s3://bucket/runs/one") == [10]
    assert victim.read_text() == "mine"
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.read_bytes() == b"theirs"]
    assert not written
    upload("s3://bucket/runs/one", {}, steps=(30,))
    assert marked("s3://bucket/runs/one") == [30]


def test_credentials_appear_nowhere(server, tmp_path, monkeypatch, capfd, quick):
    """A run, what it prints and its folder, with a store that refuses now and then."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "marker-of-a-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "marker-of-a-token\nwith a line that no header takes")
    stores._file_system.cache_clear()
    assert cli.main(["runs", "--runs", "s3://bucket/runs"]) != 0
    monkeypatch.setenv("AWS_SESSION_TOKEN", "marker-of-a-token")
    stores._file_system.cache_clear()
    server.rule = lambda environ: "/checkpoints/4/" in environ["PATH_INFO"] and (403, "ExpiredToken", "expired")
    monkeypatch.setattr(loop, "check_devices", lambda *_: None)
    assert cli.main(["train", *command(tmp_path, "--runs", "s3://bucket/runs", "--train.steps", "4")[2:]]) == 1
    printed = "".join(capfd.readouterr())
    assert "lacks checkpoint 4" in printed
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 5
    for text in (printed, *(file.read_bytes().decode(errors="replace") for file in files)):
        assert "marker-of" not in text


def test_run_continues_on_another_machine(server, elsewhere, tmp_path, capsys):
    """Losses, rotation, the good checkpoint, the list of runs and an export are the same as with a run on a disk."""
    runs = "s3://bucket/runs"
    run_here(tmp_path, "--runs", runs, "--train.steps", "8", "--optimizer.decay-steps", "12")
    elsewhere()
    run_here(tmp_path, "--runs", runs, "--optimizer.decay-steps", "12")
    output = capsys.readouterr().out
    assert "s3://bucket/runs/run, continued after step 8" in output
    assert "stores/s3" not in output
    run_here(tmp_path, "--optimizer.decay-steps", "12")
    assert losses(mirror_address(runs)) == losses(tmp_path)
    elsewhere()
    assert cli.main(["runs", "--runs", runs, "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["name"], row["step"], row["state"]) == ("run", 12, "done")
    checkpoints = local_run(f"{runs}/run") / "checkpoints"
    assert steps_in(checkpoints) == steps_in(tmp_path / "run" / "checkpoints")
    assert (checkpoints / "good.json").read_bytes() == (tmp_path / "run" / "checkpoints" / "good.json").read_bytes()
    for source, name in ((f"{runs}/run", "a"), (tmp_path / "run", "b")):
        assert cli.main(["convert", "to-hf", str(source), str(tmp_path / name)]) == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert cli.main(["runs", "remove", "run", "--runs", runs, "--yes"]) == 0
    assert "removed s3://bucket/runs/run" in capsys.readouterr().out
    assert Store(runs).files(runs) == {}


# --- One process trains -----------------------------------------------------------------------------------------------


def beat(number, token="t"):
    return json.dumps({"host": "elsewhere", "process": 7, "beat": number, "token": token}).encode()


@pytest.mark.parametrize("ahead", [-120, 0, 120])
def test_lock_that_moves_is_refused(server, run, monkeypatch, ahead):
    """Whatever the clock says, and although host and process are the same."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + ahead)
    with Mirror(run, ADDRESS, print), pytest.raises(UsageError, match=f"is in use by process {os.getpid()} on "):
        Mirror(run, ADDRESS, print)
    Mirror(run, ADDRESS, print).lock.release()


STRANGE = json.dumps({"process": "\x1b[2Jx\nmjax: error: type rm -rf ~"}).encode()


@pytest.mark.parametrize(
    "held", [beat(3), b"", b"not JSON", b'["a list"]', b'{"process": 7}', b"[" * 100_000, STRANGE], ids=range(7)
)
def test_lock_that_stands_still_is_taken_over(server, run, held):
    Store(ADDRESS).write(f"{ADDRESS}/.lock", held)
    said, begun = [], time.monotonic()
    with Mirror(run, ADDRESS, said.append):
        assert time.monotonic() - begun >= store_lock.LEASE_SECONDS
    assert re.search(r"was trained by (process (7|.*rm -rf ~) on \w+|an unknown process): waiting 1 s", said[0])
    assert said[0].isprintable()
    assert not [name for name in Store(ADDRESS).files(ADDRESS) if name.startswith(".lock")]


@pytest.mark.parametrize("held", [None, beat(3)])
def test_one_of_many_that_start_together_trains(server, quick, tmp_path, held):
    """Eight machines, also if all of them wait for the same lock."""
    if held:
        Store(ADDRESS).write(f"{ADDRESS}/.lock", held)

    def claim(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            mirror = Mirror(folder, ADDRESS, lambda line: None)
        except UsageError:
            return None
        return mirror.__enter__()

    with ThreadPoolExecutor(8) as pool:
        holders = [mirror for mirror in pool.map(claim, range(8)) if mirror is not None]
    assert len(holders) == 1
    holders[0].finish()


def test_run_that_loses_its_lock_saves_and_ends(server, tmp_path, capsys, quick, monkeypatch):
    """Exit code 1, after a checkpoint here."""
    write = Store.write

    def lose(store, address, content):
        stolen = address.endswith(".lock") and json.loads(content)["beat"] > 1
        write(store, address, beat(9) if stolen else content)

    monkeypatch.setattr(Store, "write", lose)
    monkeypatch.setattr(loop, "check_devices", lambda *_: None)
    flags = command(tmp_path, "--runs", "s3://bucket/runs", "--train.steps", "100000", "--checkpoint.interval", "0")
    assert cli.main(["train", *flags[2:]]) == 1
    output = capsys.readouterr()
    assert "trained by process 7 on elsewhere now, so this process has stopped" in output.err
    assert "it saved is on this machine as s3://bucket/runs/run.not-copied, which --run and --init take" in output.err
    (step,) = steps_in(mirror_address("s3://bucket/runs/run.not-copied") / "checkpoints")
    assert f"stopped by the loss of its lock after step {step}, which is saved" in output.out
    assert marked("s3://bucket/runs/run") == []


def test_store_without_conditional_writes_is_named(server, run):
    said, server.conditions = [], False
    with Mirror(run, ADDRESS, said.append), pytest.raises(UsageError, match="is in use"):
        Mirror(run, ADDRESS, said.append)
    assert sum("is in a store without conditional writes" in line for line in said) == 1


def test_only_known_runs_of_a_store_are_listed_from_here(server, run, elsewhere):
    upload("s3://bucket/runs/two", {}, steps=(10,))
    assert [folder.name for folder in fetch_runs(mirror_address("s3://bucket/runs"))] == [run.name, "two"]
    elsewhere()
    assert [folder.name for folder in fetch_runs(mirror_address("s3://bucket/runs"))] == ["two"]


def test_list_of_a_store_asks_once_for_each_run(server, quick, elsewhere):
    """And fetches no tokenizer and no picture, which reading the run brings."""
    for name in ("a", "b", "c"):
        folder = mirror_address(f"s3://bucket/runs/{name}")
        (folder / "tokenizer").mkdir(parents=True)
        for file in ("tokenizer/vocab.txt", "loss.png"):
            (folder / file).write_text("x")
        upload(f"s3://bucket/runs/{name}", {}, steps=(10, 20))
    elsewhere()
    for expected in (3, 0):
        server.requests.clear()
        folders = fetch_runs(mirror_address("s3://bucket/runs"))
        asked = [path for method, path, _ in server.requests if method in ("GET", "HEAD")]
        assert len([path for path in asked if path == "/bucket"]) == 1 + 3
        assert sum(path.endswith("config.json") for path in asked) == expected
        assert not [path for path in asked if "tokenizer" in path or "png" in path]
    assert [steps_in(folder / "checkpoints") for folder in folders] == [[20]] * 3
    assert (local_run("s3://bucket/runs/a") / "tokenizer" / "vocab.txt").is_file()
    fetch_runs(mirror_address("s3://bucket/runs"))
    assert (folders[0] / "tokenizer" / "vocab.txt").is_file()


# --- Two things at the same time -------------------------------------------------------------------------------------


def names(part=""):
    return sorted(name for name in Store(ADDRESS).files(ADDRESS) if part in name)


def manifest(step):
    return Store(ADDRESS).read(f"{ADDRESS}/checkpoints/{step}/manifest.json")


@pytest.fixture
def pair(run, tmp_path, monkeypatch):
    """A process that is paused, and the one that has succeeded it; beats come only on request."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(mirrors, "INTERVAL", 1000.0)
    paused = Mirror(run, ADDRESS, print).__enter__()
    return paused, Mirror(other, ADDRESS, print).__enter__()


def large_checkpoint(folder, files):
    made = folder / "checkpoints" / "10.writing"
    (made / "model").mkdir(parents=True)
    for name in ("_CHECKPOINT_METADATA", COMMIT, *(f"model/f{number:03}" for number in range(files))):
        (made / name).write_bytes(b"x" * 100)
    write_manifest(made, 10, {})
    made.rename(folder / "checkpoints" / "10")


# --- What is lost here ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["checkpoints", "checkpoints/20"])
def test_files_lost_here_stay_in_the_store(server, run, lost):
    """Such as by a user who cleans ~/.cache."""
    copied(run, 10, 20)
    shutil.rmtree(run / lost)
    folder = run_to_train(ADDRESS)
    assert steps_in(folder / "checkpoints") == [10, 20]
    with Mirror(folder, ADDRESS, print):
        pass
    assert marked(ADDRESS) == [10, 20]


def test_files_of_an_emptied_store_are_copied_again(server, run):
    (run / "base.json").write_text("{}")
    copied(run, 10)
    store = Store(ADDRESS)
    store.remove([f"{ADDRESS}/{name}" for name in store.files(ADDRESS)])
    assert run_to_train(ADDRESS) == run
    with Mirror(run, ADDRESS, print):
        pass
    assert marked(ADDRESS) == [10]
    assert {"base.json", "config.json"} <= store.files(ADDRESS).keys()


def test_run_of_another_with_the_same_name_is_set_apart(server, run, elsewhere, tmp_path, monkeypatch):
    """The bucket was emptied, and another machine has begun: what was in the store once is the last copy."""
    copied(run, 10, 20)
    store = Store(ADDRESS)
    store.remove([f"{ADDRESS}/{name}" for name in store.files(ADDRESS)])
    elsewhere()
    upload(ADDRESS, {}, steps=(5,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert steps_in(run_to_train(ADDRESS) / "checkpoints") == [5]
    assert steps_in(run.with_name(f"{run.name}.not-copied") / "checkpoints") == [10, 20]


# --- Paused processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True], ids=["successor trains", "successor has ended"])
def test_woken_process_leaves_what_its_successor_saved(server, pair, ended):
    """It marks, writes over and removes nothing any more, also if no lock is there, and says who trains."""
    paused, successor = pair
    copy(successor, 20)
    if ended:
        successor.finish()
    before = manifest(20), Store(ADDRESS).read(f"{ADDRESS}/metrics.jsonl")
    save(paused, 20)
    who = "nobody" if ended else f"process {os.getpid()} on "
    with pytest.raises(RunError, match=f"is trained by {who}.* now, so this process has stopped"):
        paused.finish()
    assert (paused.taken_by is not None, marked(ADDRESS)) == (True, [20])
    assert before == (manifest(20), Store(ADDRESS).read(f"{ADDRESS}/metrics.jsonl"))
    successor.finish()


def test_lock_lost_in_an_upload_leaves_no_mark(server, run, monkeypatch):
    check = Mirror._wait_until_listed

    def lose(mirror, *arguments):
        Store(ADDRESS).write(f"{ADDRESS}/.lock", beat(9))
        return check(mirror, *arguments)

    monkeypatch.setattr(Mirror, "_wait_until_listed", lose)
    monkeypatch.setattr(mirrors, "INTERVAL", 1000.0)
    mirror = Mirror(run, ADDRESS, print).__enter__()
    save(mirror, 10)
    with pytest.raises(RunError, match="trained by process 7 on elsewhere now, so this process has stopped"):
        mirror.finish()
    assert marked(ADDRESS) == []


def test_successor_survives_a_late_beat(server, run, tmp_path, monkeypatch):
    """The process was paused between reading its lock and writing it."""
    other, write, successor = tmp_path / "other", Store.write, []
    other.mkdir()
    monkeypatch.setattr(mirrors, "INTERVAL", 1000.0)
    paused = Mirror(run, ADDRESS, print).__enter__()

    def write_late(store, address, content):
        if store is paused.store and not successor:
            successor.append(None)
            successor[0] = Mirror(other, ADDRESS, print).__enter__()
        return write(store, address, content)

    monkeypatch.setattr(Store, "write", write_late)
    paused.lock.renew()
    successor[0].lock.renew()
    with pytest.raises(RunError, match="is trained by"):
        paused.lock.renew()
    assert not successor[0].taken_by
    successor[0].finish()


def test_lost_process_sends_no_more(server, run):
    mirror = Mirror(run, ADDRESS, print).__enter__()
    large_checkpoint(run, 100)
    server.delay = 0.2
    mirror.enqueue(10)
    wait_until(lambda: names("model/f"))
    wait_until(lambda: mirror.taken_by or Store(ADDRESS).write(f"{ADDRESS}/.lock", beat(9)))
    sent = len(names("model/f"))
    with pytest.raises(RunError, match="has stopped"):
        mirror.finish()
    server.delay = 0.0
    assert len(names("model/f")) <= sent + 2 * stores.TOGETHER


# --- Rotation and renames ---------------------------------------------------------------------------------------------


def test_abandoned_checkpoint_survives_rotation_and_machines(server, run, elsewhere):
    """Checkpoint 20 was abandoned, saved again, and rotated away."""
    with Mirror(run, ADDRESS, print) as mirror:
        copy(mirror, 10, 20)
        old = manifest(20)
        (run / "checkpoints" / "20").rename(run / "checkpoints" / "20.abandoned")
        wait_until(lambda: names("20.abandoned") and not names("/20/"))
        copy(mirror, 20)
        copy(mirror, 30)
        shutil.rmtree(run / "checkpoints" / "20")
    assert names("/20/") == []
    before = names("20.abandoned")
    elsewhere()
    upload(ADDRESS, {}, steps=(40,))
    assert (names("20.abandoned"), manifest("20.abandoned")) == (before, old)


def test_checkpoint_that_is_being_removed_is_not_copied(server, run):
    with Mirror(run, ADDRESS, print) as mirror:
        copy(mirror, 10, 20)
        (run / "checkpoints" / "10").rename(run / "checkpoints" / "10.deleting")
        wait_until(lambda: not names("/10/"))
        shutil.rmtree(run / "checkpoints" / "10.deleting")
    assert names("10.deleting") == []


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_one_refusal_late_in_the_last_upload_is_tried_again(server, run, monkeypatch):
    """The time of an upload does not count as patience."""
    mirror = Mirror(run, ADDRESS, print).__enter__()
    large_checkpoint(run, 60)
    server.delay, left = 0.3, iter(range(4))
    server.rule = lambda environ: "/model/f055" in environ["PATH_INFO"] and next(left, None) is not None
    mirror.enqueue(10)
    mirror.finish()
    server.delay = 0.0
    assert marked(ADDRESS) == [10]


def test_file_that_the_store_refuses_delays_no_checkpoint(server, run):
    (run / "notes.txt").write_text("x")
    server.rule = lambda environ: "notes" in environ["PATH_INFO"] and (400, "InvalidArgument", "no")
    mirror = Mirror(run, ADDRESS, print).__enter__()
    copy(mirror, 10)
    with pytest.raises(RunError, match="lacks its metrics and settings"):
        mirror.finish()
    server.rule = None
    assert marked(ADDRESS) == [10]


def test_rotation_elsewhere_does_not_end_a_list(server, elsewhere, monkeypatch, quick):
    """A checkpoint is removed between the listing and the reading of its manifest."""
    upload(ADDRESS, {}, steps=(10, 20))
    elsewhere()
    get, once = Store.get, iter([1])

    def get_late(store, pairs):
        if next(once, None):
            store.remove([address for address, _ in pairs if "/20/" in address])
        return get(store, pairs)

    monkeypatch.setattr(Store, "get", get_late)
    assert cli.main(["runs", "--runs", "s3://bucket/runs"]) == 0


def test_removal_of_a_run_is_continued(server, quick, elsewhere, capsys):
    """Also if the address follows a flag."""
    upload("s3://bucket/runs/two", {}, steps=(10,))
    elsewhere()
    server.rule = lambda environ: environ["REQUEST_METHOD"] == "DELETE" and "model" in environ["PATH_INFO"] and (
        403, "AccessDenied", "no",
    )  # fmt: skip
    command = ["runs", "remove", "--yes", "s3://bucket/runs/two"]
    assert cli.main(command) == 2
    server.rule = None
    assert cli.main(command) == 0
    assert Store("s3://x").files("s3://bucket/runs/two") == {}


def test_bucket_may_be_listed_below_a_folder_only(server, quick):
    server.rule = lambda environ: "list-type" in environ["QUERY_STRING"] and "prefix=runs%2F" not in environ[
        "QUERY_STRING"
    ] and (403, "AccessDenied", "no")  # fmt: skip
    upload("s3://bucket/runs/new", {}, steps=(10,))
    server.rule = None
    assert marked("s3://bucket/runs/new") == [10]


def test_longest_run_name_is_stored(server, quick):
    upload(f"s3://bucket/runs/{'é' * 120}", {}, steps=(10,))
    assert marked(f"s3://bucket/runs/{'é' * 120}") == [10]


def test_short_answer_for_a_range_is_asked_again(server, quick, monkeypatch):
    store, fetch_range, short = Store("s3://x"), s3fs.core.S3File._fetch_range, iter([10])
    store.write("s3://bucket/a.bin", b"x" * 1000)
    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", lambda *span: fetch_range(*span)[: next(short, None)])
    wanted = version(store.get_info("s3://bucket/a.bin"))
    assert store.read_range("s3://bucket/a.bin", wanted, 0, 1000) == b"x" * 1000


def test_names_in_a_failure_give_other_advice():
    """A run may be called LASSO; a store without credentials is not tried for minutes."""
    assert explain_failure(OSError(5, "Could not connect to http://x/bucket/runs/LASSO/Credentials"))[1] is None
    for reason in ("Anonymous caller does not have storage.objects.list access, 401", "Forbidden: https://x/y"):
        assert "check the credentials" in explain_failure(OSError(reason))[1]


def test_many_processes_of_a_machine_fetch_together(server, run, elsewhere):
    copied(run, 10, 20)
    elsewhere()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run_to_train, ADDRESS) for _ in range(4)]
        jobs += [pool.submit(fetch_runs, mirror_address("s3://bucket/runs")) for _ in range(4)]
        for job in jobs:
            job.result()
    folder = mirror_address(ADDRESS)
    assert steps_in(folder / "checkpoints") == [10, 20]
    assert not list(folder.parent.glob("*not-copied*"))
    assert local_run(ADDRESS) == folder
