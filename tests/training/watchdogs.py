"""Watchdogs that share this process: one thread per process of a run, and no JAX between them."""

import dataclasses
import math
import threading
import time

from mjax.cluster.launch import Distributed
from mjax.cluster.watchdog import Watchdog


class Run:
    """Watchdogs of `count` processes; what they say and with which codes they leave."""

    def __init__(self, count=3, heartbeat=60.0, hang_limit=None):
        self.message, self.there, self.over = b"", threading.Event(), threading.Event()
        self.left, self.said, self.explained = {}, [], {}
        where = Distributed(coordinator="127.0.0.1:1", hang_limit=hang_limit)
        self.all = [
            Watchdog(
                where,
                lambda error, index=index: self.explained.setdefault(index, str(error)) and 7,
                index=index,
                count=count,
                broadcast=self._share,
                exit_process=lambda code, index=index: self.left.setdefault(index, code),
            )
            for index in range(count)
        ]
        self.all[0].print_line = self.said.append
        for one in self.all:
            one.heartbeat_timeout, one.straggler_timeout = heartbeat, math.inf

    def _share(self, message):
        if message:
            self.message = message
            self.there.set()
        assert self.there.wait(60)
        return self.message

    def __enter__(self):
        self.ask(lambda one, index: one.__enter__())
        return self

    def __exit__(self, *_):
        self.over.set()
        self.ask(lambda one, index: one.__exit__(None, None, None))

    @property
    def peers(self):
        """All but process 0, as it knows them."""
        return {index: peer for index, (_, peer) in list(self.all[0]._peers.items())}

    def freeze(self, index, seconds):
        """Let a process fall silent, its connection open: process 0 heard its last word so many `seconds` ago."""
        frozen, first = threading.Event(), self.all[0].status

        def stand_still(_):
            frozen.set()
            self.over.wait(60)

        self.all[index]._on_message = stand_still
        assert frozen.wait(60)
        for _ in range(2):  # process 0 reads what was sent before
            beat = first.last_heartbeat
            self.wait_for(lambda beat=beat: first.last_heartbeat != beat)
        self.peers[index].last_heartbeat = time.monotonic() - seconds

    def arranged(self, *places, patience=math.inf, **where):
        """Tell process 0 where everyone is; then it watches with other settings."""
        for one, (step, doing) in zip(self.all, places, strict=True):
            one.record_step(step, doing)
        known = {index: place for index, place in enumerate(places) if index}
        self.wait_for(lambda: {index: (peer.step, peer.activity) for index, peer in self.peers.items()} == known)
        self.all[0].straggler_timeout = patience
        self.all[0].distributed = dataclasses.replace(self.all[0].distributed, **where)

    def ask(self, question):
        """Return or raise `question(watchdog, index)` in every process at the same time."""
        answers = {}

        def put(index, one):
            try:
                answers[index] = question(one, index)
            except Exception as error:
                answers[index] = error

        threads = [threading.Thread(target=put, args=found) for found in enumerate(self.all)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [answers[index] for index in range(len(self.all))]

    def wait_for(self, condition):
        deadline = time.monotonic() + 60  # for a test that hangs; one that passes waits no longer than it must
        while not condition():
            assert time.monotonic() < deadline, (self.left, self.said)
            time.sleep(0.01)
