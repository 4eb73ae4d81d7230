"""Heartbeats between watchdogs that share this process: one thread per process of a run, and no JAX between them."""

import threading
import time

import pytest

from mjax.errors import RunError, UsageError
from mjax.launch import Distributed
from mjax.training import watchdog
from mjax.training.watchdog import COMPILING, Watchdog


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name, seconds in {"BEAT": 0.02, "GRACE": 0.5, "SUSPECT": 0.2, "FAREWELL": 0.5}.items():
        monkeypatch.setattr(watchdog, name, seconds)


class Run:
    """Watchdogs of `count` processes; what they say and with which codes they leave."""

    def __init__(self, count=3, heartbeat=5.0, limit=0.0):
        self.message, self.there = b"", threading.Event()
        self.left, self.said, self.explained = {}, [], {}
        where = Distributed(coordinator="127.0.0.1:1", heartbeat=heartbeat, watchdog=limit, start_timeout=5)
        self.all = [
            Watchdog(
                where,
                lambda error, index=index: self.explained.setdefault(index, str(error)) and 7,
                index=index,
                count=count,
                share=self._share,
                leave=lambda code, index=index: self.left.setdefault(index, code),
            )
            for index in range(count)
        ]
        self.all[0].say = self.said.append

    def _share(self, message):
        if message:
            self.message = message
            self.there.set()
        assert self.there.wait(5)
        return self.message

    def __enter__(self):
        entering = [threading.Thread(target=one.__enter__) for one in self.all]
        for thread in entering:
            thread.start()
        for thread in entering:
            thread.join()
        return self

    def __exit__(self, *_):
        leaving = [threading.Thread(target=one.__exit__, args=(None, None, None)) for one in self.all]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()

    def freeze(self, index):
        """Let a process fall silent, its connection open."""
        self.all[index]._obey = lambda: threading.Event().wait(2.0)

    def wait_for(self, condition):
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, (self.left, self.said)
            time.sleep(0.01)


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
        for one in run.all:
            one.at(12)
        time.sleep(0.1)
        run.all[2]._line.connection.shutdown(2)
        run.wait_for(lambda: run.left.keys() >= {0, 1})
    sentence = f"{run.all[2].place.name} died, last heard of at step 12; what was saved is intact"
    assert capfd.readouterr().err.count(sentence) == 2
    assert (run.left[0], run.left[1]) == (1, 1)


def test_the_death_of_process_0_is_named_too(capfd):
    with Run() as run:
        run.all[0].at(5)
        time.sleep(0.1)
        run.all[0]._end = lambda sentence: None  # it says nothing any more
        for line, _ in list(run.all[0]._peers.values()):
            line.connection.shutdown(2)
        run.wait_for(lambda: run.left.keys() >= {1, 2})
    assert capfd.readouterr().err.count(f"{run.all[0].place.name} died, last heard of at step 5") == 2


def test_silence_is_announced_at_half_and_ends_the_run_at_the_whole_heartbeat(capfd):
    with Run(heartbeat=0.6) as run:
        began = time.monotonic()
        run.freeze(1)
        run.wait_for(lambda: run.left.keys() >= {0, 2})
        assert 0.5 < time.monotonic() - began < 2
    assert f"{run.all[1].place.name} has not been heard of for" in capfd.readouterr().err
    assert len(run.said) == 1
    assert "at 0.6 s the run ends" in run.said[0]


def test_one_that_falls_silent_for_a_moment_is_heard_again():
    with Run(heartbeat=5.0) as run:
        name = run.all[1].place.name
        run.all[0]._peers[1][1].heard -= 3
        run.all[0]._report(time.monotonic())
        run.wait_for(lambda: f"{name} is heard again" in run.said)
    assert run.left == {}


def test_an_error_is_told_to_the_others_and_its_own_process_explains_it(capfd):
    with Run() as run:
        with pytest.raises(RunError), run.all[1].or_end():
            raise RunError("the disk is full")
        run.wait_for(lambda: run.left.keys() >= {0, 1, 2})
    assert run.left == {0: 1, 1: 7, 2: 1}
    assert run.explained == {1: "the disk is full"}
    assert capfd.readouterr().err.count(f"{run.all[1].place.name} ended at step 0 with an error: the disk is full") == 2


def test_a_collective_that_fails_because_of_a_silent_process_names_that_one(capfd):
    with Run(heartbeat=60.0) as run:
        run.freeze(1)
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
    with Run(limit=0.2) as run:
        run.all[0].at(7)
        run.all[1].at(6, "waiting for its batch")
        run.all[2].at(7)
        run.wait_for(lambda: run.said)
        run.all[1].at(7)
        run.wait_for(lambda: len(run.said) > 1 and "going on: step 7 after" in run.said[-1])
    assert run.said[0].startswith("no step has been finished for 0 s: ")
    assert f"{run.all[1].place.name} is at step 6, waiting for its batch for 0 s; " in run.said[0]
    assert run.said[0].endswith("all others are at step 7, running the step")


@pytest.mark.parametrize("doing", [COMPILING, "saving"])
def test_nobody_is_reported_while_all_compile_or_save(doing):
    with Run(limit=0.2) as run:
        for one in run.all:
            one.at(7, doing)
        time.sleep(0.8)
    assert run.said == []


def test_a_stranger_on_the_port_is_sent_away():
    run = Run(count=2)

    def scan():
        import json
        import socket

        there = json.loads(run._share(b""))
        for noise in (b"GET / HTTP/1.0\r\n\r\n", b'{"token": "guess", "index": 1, "name": "x"}\n'):
            with socket.create_connection(("127.0.0.1", there["port"])) as stranger:
                stranger.sendall(noise)
                assert stranger.recv(100) == b""
        scanned.set()

    scanned, connect = threading.Event(), run.all[1]._connect
    run.all[1]._connect = lambda: scanned.wait(5) and connect()
    threading.Thread(target=scan).start()
    with run:
        assert run.all[0]._peers[1][1].name == run.all[1].place.name
        assert scanned.is_set()
    assert run.left == {}


def test_one_process_has_no_thread():
    with Watchdog(Distributed()) as alone:
        alone.at(1)
        assert alone._thread is None
