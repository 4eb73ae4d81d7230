"""Runs in an object store where two things meet: a loss here and a start, a pause and a successor, a rotation and a
rename, an emptied bucket and a new run of the same name."""

import json
import shutil

import pytest

from mjax.checkpoint import mirror as mirrors
from mjax.checkpoint.folders import steps_in, write_manifest
from mjax.checkpoint.mirror import COMMIT, Mirror, fetch_all, local_run, run_to_train
from mjax.commands import cli
from mjax.errors import RunError
from mjax.utils import stores
from mjax.utils.stores import Store, explain_failure, mirror_of, version
from tests.training.test_object_store import (  # noqa: F401
    ADDRESS,
    beat,
    checkpoint,
    elsewhere,
    marked,
    quick,
    run,
    server,
    upload,
    wait_until,
)

# ruff: noqa: F811
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("quick_runs")]
pytest.importorskip("s3fs")


def names(part=""):
    return sorted(name for name in Store(ADDRESS).files(ADDRESS) if part in name)


def copy(mirror, *steps):
    for step in steps:
        checkpoint(mirror.folder, step)
        mirror.saved(step)
    wait_until(lambda: not mirror._due)


def copied(folder, *steps):
    with Mirror(folder, ADDRESS, print) as mirror:
        copy(mirror, *steps)


def manifest(step):
    return Store(ADDRESS).read(f"{ADDRESS}/checkpoints/{step}/manifest.json")


@pytest.fixture
def pair(run, tmp_path, monkeypatch):
    """A process that is paused, and the one that has succeeded it; no beat comes by itself."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(mirrors, "EVERY", 1000.0)
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
    """Such as by somebody who cleans ~/.cache."""
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


def test_woken_process_leaves_the_same_step_of_its_successor(server, pair):
    paused, successor = pair
    copy(successor, 20)
    good = manifest(20)
    checkpoint(paused.folder, 20)
    paused.saved(20)
    with pytest.raises(RunError, match="has stopped"):
        paused.finish()
    assert marked(ADDRESS) == [20]
    assert manifest(20) == good
    successor.finish()


def test_woken_process_stops_after_its_successor_has_ended(server, pair):
    """Its lock is gone: neither checkpoints nor metrics are written over."""
    paused, successor = pair
    copy(successor, 20)
    successor.finish()
    before = manifest(20), Store(ADDRESS).read(f"{ADDRESS}/metrics.jsonl")
    checkpoint(paused.folder, 20)
    paused.saved(20)
    with pytest.raises(RunError, match="has stopped"):
        paused.finish()
    assert before == (manifest(20), Store(ADDRESS).read(f"{ADDRESS}/metrics.jsonl"))


def test_successor_survives_a_late_beat(server, run, tmp_path, monkeypatch):
    """The process was paused between reading its lock and writing it."""
    other, write, successor = tmp_path / "other", Store.write, []
    other.mkdir()
    monkeypatch.setattr(mirrors, "EVERY", 1000.0)
    paused = Mirror(run, ADDRESS, print).__enter__()

    def write_late(store, address, content):
        if store is paused.store and not successor:
            successor.append(None)
            successor[0] = Mirror(other, ADDRESS, print).__enter__()
        return write(store, address, content)

    monkeypatch.setattr(Store, "write", write_late)
    paused.lock.beat()
    successor[0].lock.beat()
    with pytest.raises(RunError, match="is trained by"):
        paused.lock.beat()
    assert not successor[0].lost
    successor[0].finish()


def test_lost_process_sends_no_more(server, run):
    mirror = Mirror(run, ADDRESS, print).__enter__()
    large_checkpoint(run, 100)
    server.delay = 0.2
    mirror.saved(10)
    wait_until(lambda: names("model/f"))
    wait_until(lambda: mirror.lost or Store(ADDRESS).write(f"{ADDRESS}/.lock", beat(9)))
    sent = len(names("model/f"))
    with pytest.raises(RunError, match="has stopped"):
        mirror.finish()
    server.delay = 0.0
    assert len(names("model/f")) <= sent + 2 * stores.TOGETHER


@pytest.mark.parametrize(
    "held", [b"[" * 100_000, json.dumps({"process": "\x1b[2Jx\nmjax: error: type rm -rf ~"}).encode()]
)
def test_lock_of_a_stranger_is_printable(server, run, held):
    Store(ADDRESS).write(f"{ADDRESS}/.lock", held)
    said = []
    with Mirror(run, ADDRESS, said.append):
        pass
    assert said[0].isprintable()


# --- Rotation and renames ---------------------------------------------------------------------------------------------


def test_abandoned_checkpoint_survives_the_next_machine(server, run, elsewhere):
    with Mirror(run, ADDRESS, print) as mirror:
        copy(mirror, 10, 20)
        (run / "checkpoints" / "20").rename(run / "checkpoints" / "20.abandoned")
    before = names("20.abandoned")
    assert before
    elsewhere()
    upload(ADDRESS, {}, steps=(30,))
    assert names("20.abandoned") == before


def test_rotation_leaves_an_older_abandoned_one(server, run):
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
    assert manifest("20.abandoned") == old


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
    mirror.saved(10)
    mirror.finish()
    server.delay = 0.0
    assert marked(ADDRESS) == [10]


def test_copies_continue_without_a_new_connection(server, run, monkeypatch):
    def refuse(store):
        raise OSError("no metadata server")

    monkeypatch.setattr(Store, "reconnect", refuse)
    with Mirror(run, ADDRESS, print) as mirror:
        server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT"
        checkpoint(run, 10)
        mirror.saved(10)
        wait_until(lambda: mirror._failed)
        server.rule = None
        copy(mirror, 20)
    assert marked(ADDRESS) == [10, 20]


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
    import s3fs

    store, fetch_range, short = Store("s3://x"), s3fs.core.S3File._fetch_range, iter([10])
    store.write("s3://bucket/a.bin", b"x" * 1000)
    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", lambda *span: fetch_range(*span)[: next(short, None)])
    wanted = version(store.about("s3://bucket/a.bin"))
    assert store.read_range("s3://bucket/a.bin", wanted, 0, 1000) == b"x" * 1000


def test_names_in_a_failure_give_other_advice():
    """A run may be called LASSO; a store without credentials is not tried for minutes."""
    assert explain_failure(OSError(5, "Could not connect to http://x/bucket/runs/LASSO/Credentials"))[1] is None
    for reason in ("Anonymous caller does not have storage.objects.list access, 401", "Forbidden: https://x/y"):
        assert "check the credentials" in explain_failure(OSError(reason))[1]


def test_many_processes_of_a_machine_fetch_together(server, run, elsewhere):
    from concurrent.futures import ThreadPoolExecutor

    copied(run, 10, 20)
    elsewhere()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run_to_train, ADDRESS) for _ in range(4)]
        jobs += [pool.submit(fetch_all, mirror_of("s3://bucket/runs")) for _ in range(4)]
        for job in jobs:
            job.result()
    folder = mirror_of(ADDRESS)
    assert steps_in(folder / "checkpoints") == [10, 20]
    assert not list(folder.parent.glob("*not-copied*"))
    assert local_run(ADDRESS) == folder
