"""Heartbeats between watchdogs that share this process, and what they do about those that are missing or behind."""

import contextlib
import json
import re
import socket
import time

import pytest

from mjax.cluster import watchdog
from mjax.cluster.launch import COMPILING, STEP, Distributed
from mjax.cluster.watchdog import Watchdog
from mjax.errors import RunError, UsageError
from tests.training.watchdogs import Run

pytestmark = pytest.mark.usefixtures("fast_watchdogs")


def name(run, index):
    return run.all[index].status.name


def test_processes_that_end_well_say_nothing(capfd):
    with Run() as run:
        for step in (1, 2, 3):
            for one in run.all:
                one.record_step(step)
            time.sleep(0.05)
    assert (run.left, run.said, capfd.readouterr().err) == ({}, [], "")
    with Watchdog(Distributed()) as alone:
        alone.record_step(1)
        assert alone._thread is None


def test_processes_get_the_answer_of_the_first():
    with Run() as run:
        for _ in range(2):  # more than goes into one packet
            answers = run.ask(
                lambda one, index: one.decide_on_first(
                    f"{index} " * 20000, lambda values: [value[0] for value in values]
                )
            )
            assert answers == [["0", "1", "2"]] * 3


# --- Death, silence and errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dying", [0, 2])
def test_closed_connection_is_a_named_death(dying, capfd):
    others = {0, 1, 2} - {dying}
    with Run() as run:
        run.arranged(*[(12, STEP)] * 3)
        run.wait_for(lambda: all(one._peers[0][1].step == 12 for one in run.all[1:]))
        run.all[0]._end_run = run.all[0]._end_run if dying else lambda sentence: None  # it says nothing any more
        for line, _ in list(run.all[dying]._peers.values()):
            line.connection.shutdown(2)
        run.wait_for(lambda: run.left.keys() >= others)
    assert capfd.readouterr().err.count(f"{name(run, dying)} died, its last heartbeat was at step 12") == 2
    assert {run.left[index] for index in others} == {1}


def test_silence_is_announced_then_ends_the_run(capfd):
    with Run(heartbeat=600) as run:

        def silent():
            run.peers[2].last_heartbeat = time.monotonic() - 310
            return run.said  # unless a heartbeat came before the report

        run.wait_for(silent)  # for a moment
        run.wait_for(lambda: f"{name(run, 2)} sends heartbeats again" in run.said)
        run.freeze(1, seconds=310)
        run.wait_for(lambda: any(name(run, 1) in line for line in run.said))
        assert run.left == {}
        run.peers[1].last_heartbeat -= 300
        run.wait_for(lambda: run.left.keys() >= {0, 2})
    assert f"{name(run, 1)} has sent no heartbeat for 61" in capfd.readouterr().err
    [line] = [line for line in run.said if name(run, 1) in line]
    assert re.search("has sent no heartbeat for 31.* at 600 s the run ends", line)


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [(RunError("the disk is full"), 1, "; what was saved"), (UsageError("data/x.idx does not exist"), 2, "\n")],
    ids=["run", "usage"],
)
def test_error_of_one_process_ends_the_others(error, code, advice, capfd, monkeypatch):
    monkeypatch.setattr(
        watchdog, "SUSPECT_TIMEOUT", 60.0
    )  # a thread of a busy machine stands still for longer than 0.2 s
    with Run() as run:
        with pytest.raises(type(error)), run.all[1].abort_on_error():
            raise error
        run.wait_for(lambda: run.left.keys() >= {0, 1, 2})
    assert run.left == {0: code, 1: 7, 2: code}
    assert run.explained == {1: str(error)}
    assert capfd.readouterr().err.count(f"{name(run, 1)} ended at step 0 with an error: {error}{advice}") == 2


@pytest.mark.parametrize("failing", [0, 2])
def test_failed_collective_names_the_silent_process(failing, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "SUSPECT_TIMEOUT", 100.0)  # the others are not silent, however busy the machine is
    with Run(heartbeat=600) as run:
        run.freeze(1, seconds=200)
        with pytest.raises(RuntimeError), run.all[failing].abort_on_error():
            raise RuntimeError("Gloo: connection closed by peer")
        run.wait_for(lambda: 0 in run.left)
    error = capfd.readouterr().err
    assert f"{name(run, 1)} has sent no heartbeat" in error
    assert "Gloo" not in error


def test_usage_error_of_all_processes_stays_one(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "SUSPECT_TIMEOUT", 60.0)

    def refuse(one, index):
        if index == 0:
            one._is_local_error = True  # it is about to report the same, and the others report it first
            time.sleep(0.3)
        with one.abort_on_error():
            raise UsageError("the mesh does not fit")

    with Run() as run:
        run.ask(refuse)
    assert run.left == {0: 7, 1: 7, 2: 7}
    assert set(run.explained.values()) == {"the mesh does not fit"}
    assert capfd.readouterr().err == ""


# --- Those behind -----------------------------------------------------------------------------------------------------


def test_processes_behind_are_reported_until_they_continue():
    with Run() as run:
        run.arranged((7, STEP), (6, "waiting for its batch"), (7, STEP), patience=0.1)
        run.wait_for(lambda: run.said)
        run.all[1].record_step(7)
        run.wait_for(lambda: len(run.said) > 1 and "continuing: step 7 after" in run.said[-1])
    assert f"{name(run, 1)} is at step 6, waiting for its batch for " in run.said[0]
    assert "; all others are at step 7, running the step" in run.said[0]


@pytest.mark.parametrize("doing", [("saving",) * 3, (STEP, COMPILING, STEP)], ids=["save", "one compiles"])
def test_compiling_and_saving_have_ten_times_as_long(doing):
    with Run(heartbeat=1e6) as run:
        run.arranged(*[(7, what) for what in doing], patience=600)
        run.wait_for(lambda: run.all[0]._slowest == 7)
        assert run.all[0]._report(time.monotonic() + 5000) == ""
        run.all[0]._report(time.monotonic() + 7000)
    [line] = run.said
    assert "no step has been finished for " in line


@pytest.mark.parametrize("count", [1, 3])
def test_hang_limit_ends_the_run(count, capfd):
    with Run(count=count, hang_limit=600) as run:
        run.arranged(*[(7, STEP)] * count, hang_limit=0.1)
        run.wait_for(lambda: run.left == dict.fromkeys(range(count), 1))
    assert "; --distributed.hang-limit is 0" in capfd.readouterr().err


# --- Strangers --------------------------------------------------------------------------------------------------------

STRANGERS = [
    b"GET / HTTP/1.0\r\n\r\n",
    b'{"token": "guess", "index": 1, "name": "x"}\n',
    bytes.fromhex("16030100c8010000c40303") + bytes(range(150, 250)) + b"\n",  # TLS
    b"[" * 60000 + b"\n",
    b"[1]\n7\n",
    b'{"token": [1]}\n',
]


def test_strangers_on_the_port_are_sent_away():
    """A silent stranger does not delay the others."""
    run = Run(count=2)
    connect = run.all[1]._connect

    def scan_then_connect():
        address = "127.0.0.1", json.loads(run._share(b""))["port"]
        silent.append(socket.create_connection(address))
        for noise in STRANGERS:
            with socket.create_connection(address, timeout=60) as stranger:
                stranger.sendall(noise)
                with contextlib.suppress(ConnectionResetError):  # it was sent away before all was read
                    assert stranger.recv(100) == b"", noise
        return connect()

    silent, run.all[1]._connect = [], scan_then_connect
    with run:
        assert run.all[0]._peers[1][1].name == name(run, 1)
    silent[0].close()
    assert run.left == {}
