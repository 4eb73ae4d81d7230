"""Watchdogs that share this process: one thread per process of a run, and no JAX between them."""

import threading
import time

from mjax.launch import Distributed
from mjax.training.watchdog import Watchdog


class Run:
    """Watchdogs of `count` processes; what they say and with which codes they leave."""

    def __init__(self, count=3, heartbeat=60.0, limit=0.0, hang_limit=None):
        self.message, self.there = b"", threading.Event()
        self.left, self.said, self.explained = {}, [], {}
        where = Distributed(
            coordinator="127.0.0.1:1", heartbeat=heartbeat, watchdog=limit, start_timeout=60, hang_limit=hang_limit
        )
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
        assert self.there.wait(60)
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

    def ask(self, question):
        """What `question(watchdog, index)` returns or raises in every process, all at once."""
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
