"""The lock of a run in an object store: one process trains there, whatever clocks and process numbers say.

`.lock` is created by a conditional write. It contains a random token, and a counter that its owner increases every few
seconds. Another process may replace the owner only if the counter has not changed for `LEASE_SECONDS` of that process's
clock. It does so by a conditional write, too, of an object that is named after the content of the lock. The owner reads
its lock back at each heartbeat. A token of another process, or a missing lock, means that the run was taken over.
"""

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
LEASE_SECONDS = 60.0  # without a heartbeat, after which a lock may be taken over
POLL_INTERVAL = 2.0  # seconds between two reads of the lock of another process


class StoreLock:
    """The lock of the run at an address.

    Attributes:
      token: of this process.
      taken_by: the process that has taken the run over, if there is one.
      renewed: when this process last wrote its lock, by the monotonic clock.
      released: set when this process has ended.
    """

    def __init__(self, store: Store, address: str):
        self.store, self.address, self.lock = store, address, f"{address}/{LOCK}"
        self.token = secrets.token_hex(8)
        self.taken_by: str | None = None
        self.renewed, self.released = time.monotonic(), threading.Event()
        self._heartbeats, self._tokens = 0, {self.token}  # also of the previous owner
        self._write_lock = threading.Lock()

    def acquire(self) -> None:
        """Take the lock when no process holds it.

        Raises:
          UsageError: another process trains there.
        """
        attempt = 0
        while parse_json(content := self.store.read(self.lock)).get("token") != self.token:
            if content is None:
                if self._create(self.lock) and self.store.create(self.lock, self._state()):  # although it is there
                    self.store.print_once(
                        f"{self.address} is in a store without conditional writes: two processes that start in the "
                        "same second may both train until one of them reads the lock of the other"
                    )
                    time.sleep(2 * POLL_INTERVAL)
            elif not wait_for_release(self.store, self.address, content):
                # One process may take over an expired lock, and the next one if that does not renew it either.
                attempt += 1
                if self._create(f"{self.lock}-{zlib.crc32(content):08x}-{attempt}"):
                    self._tokens.add(parse_json(content).get("token", self.token))
                    self.store.write(self.lock, self._state())

    def renew(self) -> None:
        """Increase the counter of the lock.

        Raises:
          RunError: another process has it.
        """
        with self._write_lock:
            content = self.store.read(self.lock)
            if parse_json(content).get("token") not in self._tokens and not self.released.is_set():
                self.taken_by = _describe_owner(content)
                raise RunError(f"it is trained by {self.taken_by} now")
            if not self.released.is_set():
                self._heartbeats += 1
                self.store.write(self.lock, self._state())
                self.renewed = time.monotonic()

    def release(self) -> None:
        """Remove the lock, and the marks of takeovers, if this process still has it."""
        with self._write_lock:
            self.released.set()
            if parse_json(self.store.read(self.lock)).get("token") == self.token:
                names = [name for name in self.store.files(self.address) if name.startswith(f"{LOCK}-")]
                self.store.remove([f"{self.address}/{name}" for name in (LOCK, *names)])

    def _create(self, address: str) -> bool:
        """Write the state of this process if there is no object; True if the object is this process's."""
        created = self.store.create(address, self._state())
        return created or parse_json(self.store.read(address)).get("token") == self.token  # the answer was lost

    def _state(self) -> bytes:
        state = {"host": socket.gethostname(), "process": os.getpid(), "beat": self._heartbeats, "token": self.token}
        return json.dumps(state).encode()


def wait_for_release(store: Store, address: str, content: bytes) -> bool:
    """Return True when a lock is released, False when it has not changed for `LEASE_SECONDS`.

    Raises:
      UsageError: it changes: another process trains there.
    """
    start, owner = time.monotonic(), _describe_owner(content)
    while (seconds := time.monotonic() - start) < LEASE_SECONDS:
        line = f"{address} was trained by {owner}: waiting {LEASE_SECONDS - seconds:.0f} s to see whether it still is"
        store.print_once(line, (content, seconds // 10))
        time.sleep(POLL_INTERVAL)
        now = store.read(f"{address}/{LOCK}")
        if now is None:
            return True
        if now != content:
            raise UsageError(f"{address} is in use by {_describe_owner(now)}; wait for it, or choose another --name")
    return False


def parse_json(content: bytes | None) -> dict[str, Any]:
    """The values of a lock or an index; {} if it is missing, or is another file."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(values := json.loads(content), dict):
            return values
    return {}


def _describe_owner(content: bytes | None) -> str:
    if content is None:
        return "nobody (its lock is gone: another process has ended it, or it was removed)"
    lock = parse_json(content)
    owner = f"process {lock['process']} on {lock.get('host')}" if "process" in lock else "an unknown process"
    return one_sentence(owner)
