"""The lock of a run in an object store: one process trains there, whatever clocks and process numbers say.

`.lock` is created by a conditional write. It holds a random token, and a counter that its holder counts up every few
seconds. Another process takes it over only after the counter has stood still for `ALIVE` seconds of its own clock,
again by a conditional write: it creates an object that is named after the lock as it stood. The holder reads its lock
back at each beat. A token of another process, or no lock at all, means that the run is not its own any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import zlib
from typing import Any

from mjax.errors import RunError, UsageError, one_sentence
from mjax.utils.stores import Store

LOCK = ".lock"
ALIVE = 60.0  # seconds without a beat after which a lock may be taken over
POLL = 2.0  # seconds between two looks at another's lock


class StoreLock:
    """The lock of the run at an address.

    Attributes:
      token: of this process.
      lost: the process that trains there now, if it is another one.
      beaten: when this process last wrote its lock, by the monotonic clock.
      released: set when this process has ended.
    """

    def __init__(self, store: Store, address: str):
        self.store, self.address, self.lock = store, address, f"{address}/{LOCK}"
        self.token = secrets.token_hex(8)
        self.lost: str | None = None
        self.beaten, self.released = time.monotonic(), threading.Event()
        self._beats, self._tokens = 0, {self.token}  # also of the process that this one succeeds
        self._writing = threading.Lock()

    def claim(self) -> None:
        """Take the lock once nobody holds it.

        Raises:
          UsageError: another process trains there.
        """
        attempt = 0
        while parse(held := self.store.read(self.lock)).get("token") != self.token:
            if held is None:
                if self._create(self.lock) and self.store.create(self.lock, self._state()):  # although it is there
                    self.store.print_once(
                        f"{self.address} is in a store without conditional writes: two processes that start in the "
                        "same second may both train until one of them reads the lock of the other"
                    )
                    time.sleep(2 * POLL)
            elif not watch(self.store, self.address, held):
                # One process may succeed a lock that stands still, and the next one if that does not write it either.
                attempt += 1
                if self._create(f"{self.lock}-{zlib.crc32(held):08x}-{attempt}"):
                    self._tokens.add(parse(held).get("token", self.token))
                    self.store.write(self.lock, self._state())

    def beat(self) -> None:
        """Count the lock up.

        Raises:
          RunError: it is another's.
        """
        with self._writing:
            held = self.store.read(self.lock)
            if parse(held).get("token") not in self._tokens and not self.released.is_set():
                self.lost = _holder(held)
                raise RunError(f"it is trained by {self.lost} now")
            if not self.released.is_set():
                self._beats += 1
                self.store.write(self.lock, self._state())
                self.beaten = time.monotonic()

    def release(self) -> None:
        """Remove the lock, and those that it has succeeded, if it is still this process's."""
        with self._writing:
            self.released.set()
            if parse(self.store.read(self.lock)).get("token") == self.token:
                names = [name for name in self.store.files(self.address) if name.startswith(f"{LOCK}-")]
                self.store.remove([f"{self.address}/{name}" for name in (LOCK, *names)])

    def _create(self, address: str) -> bool:
        """Write the state of this process if there is no object; True if there is the one that this process wrote."""
        written = self.store.create(address, self._state())
        return written or parse(self.store.read(address)).get("token") == self.token  # the answer was lost

    def _state(self) -> bytes:
        about = {"host": socket.gethostname(), "process": os.getpid(), "beat": self._beats, "token": self.token}
        return json.dumps(about).encode()


def watch(store: Store, address: str, held: bytes) -> bool:
    """Return when a lock is released, then True, or has stood still for `ALIVE` seconds of this process's clock.

    Raises:
      UsageError: it moves: another process trains there.
    """
    since = time.monotonic()
    while (passed := time.monotonic() - since) < ALIVE:
        line = f"{address} was trained by {_holder(held)}: looking for {ALIVE - passed:.0f} s whether it still is"
        store.print_once(line, (held, passed // 10))
        time.sleep(POLL)
        now = store.read(f"{address}/{LOCK}")
        if now is None:
            return True
        if now != held:
            raise UsageError(f"{address} is in use by {_holder(now)}; wait for it, or choose another --name")
    return False


def parse(content: bytes | None) -> dict[str, Any]:
    """The values of a lock or an index; {} if there is none, or none of ours."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(values := json.loads(content), dict):
            return values
    return {}


def _holder(content: bytes | None) -> str:
    if content is None:
        return "nobody (its lock is gone: another process has ended it, or it was removed)"
    lock = parse(content)
    who = f"process {lock['process']} on {lock.get('host')}" if "process" in lock else "an unknown process"
    return one_sentence(who)
