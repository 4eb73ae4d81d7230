"""Heartbeats between watchdogs that share this process, and what they do about those that are missing or behind."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from mjax.errors import RunError, UsageError
from mjax.launch import Distributed
from mjax.training import watchdog
from mjax.training.watchdog import COMPILING, STEP, Watchdog
from tests.training.watchdogs import Run

pytestmark = pytest.mark.usefixtures("fast_watchdogs")


def test_processes_that_end_well_say_nothing(capfd):
    with Run() as run:
        for step in (1, 2, 3):
            for one in run.all:
                one.at(step)
            time.sleep(0.05)
    assert run.left == {}
    assert run.said == []
    assert capfd.readouterr().err == ""


def test_a_connection_that_closes_is_a_death_and_all_others_leave_with_its_name(capfd):
    with Run() as run:
        run.arranged(*[(12, STEP)] * 3)
        run.all[2]._line.connection.shutdown(2)
        run.wait_for(lambda: run.left.keys() >= {0, 1})
    sentence = f"{run.all[2].place.name} died, last heard of at step 12; what was saved is intact"
    assert capfd.readouterr().err.count(sentence) == 2
    assert (run.left[0], run.left[1]) == (1, 1)


def test_the_death_of_process_0_is_named_too(capfd):
    with Run() as run:
        run.all[0].at(5)
        run.wait_for(lambda: all(one._first.step == 5 for one in run.all[1:]))
        run.all[0]._end = lambda sentence: None  # it says nothing any more
        for line, _ in list(run.all[0]._peers.values()):
            line.connection.shutdown(2)
        run.wait_for(lambda: run.left.keys() >= {1, 2})
    assert capfd.readouterr().err.count(f"{run.all[0].place.name} died, last heard of at step 5") == 2


def test_silence_is_announced_at_half_and_ends_the_run_at_the_whole_heartbeat(capfd):
    with Run(heartbeat=600) as run:
        run.freeze(1, seconds=310)
        run.wait_for(lambda: run.said)
        assert run.left == {}
        run.peers[1].heard -= 300
        run.wait_for(lambda: run.left.keys() >= {0, 2})
    assert f"{run.all[1].place.name} has not been heard of for 61" in capfd.readouterr().err
    assert len(run.said) == 1
    assert f"{run.all[1].place.name} has not been heard of for 31" in run.said[0]
    assert "at 600 s the run ends" in run.said[0]


def test_one_that_falls_silent_for_a_moment_is_heard_again():
    with Run(heartbeat=600) as run:

        def silent():
            run.peers[1].heard = time.monotonic() - 310
            return run.said  # unless a heartbeat came before the report

        run.wait_for(silent)
        run.wait_for(lambda: f"{run.all[1].place.name} is heard again" in run.said)
    assert run.left == {}


def test_an_error_is_told_to_the_others_and_its_own_process_explains_it(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "SUSPECT", 60.0)  # a thread of a busy machine stands still for longer than 0.2 s
    with Run() as run:
        with pytest.raises(RunError), run.all[1].or_end():
            raise RunError("the disk is full")
        run.wait_for(lambda: run.left.keys() >= {0, 1, 2})
    assert run.left == {0: 1, 1: 7, 2: 1}
    assert run.explained == {1: "the disk is full"}
    assert capfd.readouterr().err.count(f"{run.all[1].place.name} ended at step 0 with an error: the disk is full") == 2


def test_a_collective_that_fails_because_of_a_silent_process_names_that_one(capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "SUSPECT", 100.0)  # the others are not silent, however busy the machine is
    with Run(heartbeat=600) as run:
        run.freeze(1, seconds=200)
        with pytest.raises(RuntimeError), run.all[2].or_end():
            raise RuntimeError("Gloo: connection closed by peer")
        run.wait_for(lambda: 0 in run.left)
    error = capfd.readouterr().err
    assert f"{run.all[1].place.name} has not been heard of" in error
    assert "Gloo" not in error


def test_a_usage_error_that_all_processes_find_stays_one(capfd):
    with Run() as run:

        def refuse(one):
            with pytest.raises(UsageError), one.or_end():
                raise UsageError("the mesh does not fit")

        threads = [threading.Thread(target=refuse, args=(one,)) for one in run.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert run.left == {0: 7, 1: 7, 2: 7}
    assert set(run.explained.values()) == {"the mesh does not fit"}
    assert capfd.readouterr().err == ""


def test_those_behind_are_reported_with_their_place_and_again_when_they_go_on():
    with Run() as run:
        run.arranged((7, STEP), (6, "waiting for its batch"), (7, STEP), watchdog=0.1)
        run.wait_for(lambda: run.said)
        run.all[1].at(7)
        run.wait_for(lambda: len(run.said) > 1 and "continuing: step 7 after" in run.said[-1])
    behind = re.escape(f"{run.all[1].place.name} is at step 6, waiting for its batch for ")
    assert re.fullmatch(
        rf"no step has been finished for \d+ s: {behind}\d+ s; all others are at step 7, running the step", run.said[0]
    )


@pytest.mark.parametrize("doing", [COMPILING, "saving"])
def test_nobody_is_reported_while_all_compile_or_save(doing):
    with Run(heartbeat=1e6) as run:
        run.arranged(*[(7, doing)] * 3, watchdog=600)
        run.wait_for(lambda: run.all[0]._slowest == 7)
        assert run.all[0]._report(time.monotonic() + 5000) == ""
        assert run.said == []
        run.all[0]._report(time.monotonic() + 7000)
        assert "no step has been finished for " in run.said[0]


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(150, 250))
STRANGERS = {
    "a web browser": b"GET / HTTP/1.0\r\n\r\n",
    "a guess": b'{"token": "guess", "index": 1, "name": "x"}\n',
    "TLS": TLS_HELLO,
    "TLS with the end of a line": TLS_HELLO + b"\n",
    "JSON too deep": b"[" * 60000 + b"\n",
    "JSON that is no object": b"[1]\n7\n",
    "a token that is no text": b'{"token": [1]}\n',
    "an empty line": b"\n",
}


def test_strangers_on_the_port_are_sent_away_and_one_that_is_silent_holds_up_nobody():
    run = Run(count=2)

    def scan():
        there = json.loads(run._share(b""))
        address = "127.0.0.1", there["port"]
        silent.append(socket.create_connection(address))
        for name, noise in STRANGERS.items():
            with socket.create_connection(address, timeout=60) as stranger:
                stranger.sendall(noise)
                with contextlib.suppress(ConnectionResetError):  # it was sent away before all was read
                    assert stranger.recv(100) == b"", name
        scanned.set()

    silent, scanned, connect = [], threading.Event(), run.all[1]._connect
    run.all[1]._connect = lambda: scanned.wait(60) and connect()
    threading.Thread(target=scan).start()
    with run:
        assert scanned.is_set()
        assert run.all[0]._peers[1][1].name == run.all[1].place.name
    silent[0].close()
    assert run.left == {}


def test_all_get_what_process_0_makes_of_what_each_gives():
    with Run() as run:
        for _ in range(2):  # more than goes into one packet
            answers = run.ask(
                lambda one, index: one.ask_first(f"{index} " * 20000, lambda given: [x[0] for x in given])
            )
            assert answers == [["0", "1", "2"]] * 3


def test_a_usage_error_of_one_process_ends_the_others_with_its_exit_code_and_words(capfd):
    with Run() as run:
        with pytest.raises(UsageError), run.all[2].or_end():
            raise UsageError("data/x.idx does not exist")
        run.wait_for(lambda: run.left.keys() >= {0, 1, 2})
    assert run.left == {0: 2, 1: 2, 2: 7}
    sentence = f"{run.all[2].place.name} ended at step 0 with an error: data/x.idx does not exist\n"
    assert capfd.readouterr().err.count(sentence) == 2


def test_a_hang_limit_ends_the_run_and_says_who_is_behind(capfd):
    with Run() as run:
        run.arranged((7, STEP), (6, "waiting for its batch"), (7, STEP), hang_limit=0.1)
        run.wait_for(lambda: run.left.keys() >= {0, 1, 2})
    error = capfd.readouterr().err
    behind = re.escape(f"{run.all[1].place.name} is at step 6, waiting for its batch for ")
    assert re.search(
        rf"{behind}\d+ s; all others are at step 7, running the step; --distributed.hang-limit is 0", error
    )
    assert set(run.left.values()) == {1}


def test_a_hang_limit_holds_for_a_single_process_too(capfd):
    with Run(count=1, hang_limit=600) as run:
        run.arranged((3, STEP), hang_limit=0.1)
        run.wait_for(lambda: run.left)
    assert run.left == {0: 1}
    assert "all 1 processes are at step 3, running the step; --distributed.hang-limit is" in capfd.readouterr().err


def test_one_process_has_no_thread():
    with Watchdog(Distributed()) as alone:
        alone.at(1)
        assert alone._thread is None
