"""Who is alive and who is behind: heartbeats between the processes of a run.

When one process of many dies, the others fail with a message of the transport or wait in a collective for ever, and
neither says whom for. So every process keeps one connection to process 0, beside the collectives:

    process i ── {"step": 120, "doing": "saving"} ──▶ process 0     twice a second
    process i ◀── {"step": 120, "doing": "saving"} ── process 0

- **A connection that closes without a goodbye is a death.** The system closes what a process held, however it ended.
- **Silence for `heartbeat` seconds is a loss**: of a host, of the network, or a process that was stopped.
- **An error in one process** is told to the others before that process goes.

Process 0 names the process to all others; each prints the same sentence and ends with exit code 1, wherever its main
thread is stuck. Silence is measured by the clock of the one who waits, so the clocks of the hosts need not agree.
JAX's own heartbeat stays as a second net under this one; it ends a process with a stack of C++.

Process 0 also watches the steps. When none has been finished for long, it says which processes are behind, where they
are and since when. That is a report: only a lost process ends a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax

from mjax.errors import UsageError
from mjax.launch import Distributed
from mjax.parallel.processes import bytes_from_first

BEAT = 0.5  # seconds between two messages
GRACE = 5.0  # seconds in which a failed collective may turn out to be the death of another process
SUSPECT = 3.0  # seconds of silence that prove a loss once something has failed here
FAREWELL = 3.0  # seconds that process 0 stays to let the others go first
STALL = 5.0  # seconds for one message to go through
STEP, COMPILING = "running the step", "compiling"
CONTINUES = "what was saved is intact, the same command continues from it"


@dataclass
class Place:
    """Where a process is: `step` is the last it began, `doing` what it does there, `since` a time of this clock."""

    name: str
    step: int = 0
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def move(self, step: int, doing: str) -> None:
        """Note the place; the time starts anew if it is another one."""
        if (step, doing) != (self.step, self.doing):
            self.step, self.doing, self.since = step, doing, time.monotonic()


class Watchdog:
    """Watches over the processes of a run while its context is open; with a single process it does nothing.

    Attributes:
      say: called with a line of text by process 0; the loop puts its display here.
    """

    def __init__(
        self,
        where: Distributed,
        explain: Callable[[BaseException], int] = lambda error: 1,
        *,
        index: int = 0,
        count: int = 1,
        share: Callable[[bytes], bytes] = bytes,
        leave: Callable[[int], None] = os._exit,
    ):
        """`watching` fills the arguments from JAX.

        Args:
          where: heartbeat and limit, seconds.
          explain: prints an error and returns the exit code for it.
          index: of this process.
          count: of all processes.
          share: returns process 0's bytes in every process.
          leave: ends this process at once with an exit code.
        """
        self.where, self.index, self.count = where, index, count
        self._explain, self._share, self._leave = explain, share, leave
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self.place = Place(f"process {index} on {socket.gethostname()} (pid {os.getpid()})")
        self._seconds: deque[float] = deque(maxlen=99)  # of the last steps
        self._began = time.monotonic()  # the step that this process is at
        self._farewell: dict | None = None  # what to tell the others at the end; set by the main thread
        self._failing = False  # the main thread has an error, which a lost process may have caused
        self._certain = False  # … which is this process's own
        self._thread: threading.Thread | None = None

    # --- For the main thread ------------------------------------------------------------------------------------------

    def at(self, step: int, doing: str = STEP) -> None:
        """This process now is at `step`, doing that."""
        if step != self.place.step:
            now = time.monotonic()
            self._seconds.append(now - self._began)
            self._began = now
        self.place.move(step, doing)

    def __enter__(self) -> Watchdog:
        if self.count > 1:
            self._selector = selectors.DefaultSelector()
            try:
                run = self._listen() if self.index == 0 else self._connect()
            except Exception as error:
                self._leave(self._explain(error))
                raise
            self._thread = threading.Thread(target=run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if self._thread is None:
            return
        if error is not None:
            self._fail(error)
        self._farewell = self._farewell or {"bye": True}
        self._thread.join()

    @contextlib.contextmanager
    def or_end(self) -> Iterator[None]:
        """With several processes, an error inside ends this one here, after the others have been told.

        Going up through the callers would wait for saves and collectives that need the others.
        """
        try:
            yield
        except BaseException as error:
            if self._thread is not None:
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others, explain the error and leave; if it was caused by a lost process, the thread leaves first."""
        self._certain = isinstance(error, UsageError | KeyboardInterrupt)
        self._failing = True
        self._thread.join(BEAT if self._certain else GRACE)
        lines = str(error).strip().splitlines()
        self._farewell = {"failed": lines[0] if lines else type(error).__name__}
        self._thread.join()
        self._leave(self._explain(error))

    # --- Meeting ------------------------------------------------------------------------------------------------------

    def _listen(self) -> Callable[[], None]:
        """In process 0: wait for all others, then watch over them."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        server = socket.create_server(
            ("", 0), family=family, backlog=self.count, dualstack_ipv6=socket.has_dualstack_ipv6()
        )
        token = secrets.token_hex(16)
        port = server.getsockname()[1]
        there = {"hosts": self._addresses(), "port": port, "token": token, "name": self.place.name}
        self._share(json.dumps(there).encode())
        self._peers: dict[int, tuple[_Line, Place]] = {}
        deadline = time.monotonic() + self.where.start_timeout
        while len(self._peers) < self.count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = _Line(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, self.count) if i not in self._peers)
                raise UsageError(
                    f"processes {missing} did not reach process 0 at port {port} of {' or '.join(there['hosts'])} "
                    f"within {self.where.start_timeout} s; open the port range between the hosts"
                ) from None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger, such as a port scan
                hello = line.receive()[0]
                if secrets.compare_digest(hello["token"], token):
                    line.send(token=token)
                    self._peers[hello["index"]] = line, Place(hello["name"])
                    self._selector.register(line, selectors.EVENT_READ, hello["index"])
                    continue
            line.close()
        server.close()
        return self._lead

    def _connect(self) -> Callable[[], None]:
        """In the others: connect to process 0."""
        there = json.loads(self._share(b""))
        self._first = Place(there["name"], heard=math.inf)  # until it has met all others
        deadline = time.monotonic() + self.where.start_timeout
        while time.monotonic() < deadline:
            for host in there["hosts"]:
                with contextlib.suppress(OSError, ValueError, KeyError, IndexError):  # another address of it may do
                    line = _Line(socket.create_connection((host, there["port"]), timeout=STALL))
                    line.send(token=there["token"], index=self.index, name=self.place.name)
                    if line.receive()[0]["token"] == there["token"]:
                        self._line = line
                        self._selector.register(line, selectors.EVENT_READ)
                        return self._follow
            time.sleep(BEAT)
        raise UsageError(
            f"process {self.index} on {socket.gethostname()} cannot reach process 0 at port {there['port']} of "
            f"{' or '.join(there['hosts'])}; name a host that it can reach in --distributed.coordinator"
        )

    def _addresses(self) -> list[str]:
        """Where the others may reach process 0, best first."""
        hosts = [self.where.coordinator.rsplit(":", 1)[0].strip("[]")] if self.where.coordinator else []
        hosts.append(socket.gethostname())
        with contextlib.suppress(OSError):
            hosts += [info[4][0] for info in socket.getaddrinfo(hosts[-1], None, type=socket.SOCK_STREAM)]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the address of the default route
            hosts.append(probe.getsockname()[0])
        return list(dict.fromkeys(hosts))[:8]

    # --- The thread of process 0 --------------------------------------------------------------------------------------

    def _lead(self) -> None:
        beat, self._silent = 0.0, set()
        self._slowest, self._progress, self._reported = -1, time.monotonic(), 0.0
        while self._farewell is None:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                sentence = self._hear(key.data)
                if sentence and not self._certain:
                    return self._end(sentence)
            now = time.monotonic()
            if now < beat:
                continue
            beat = now + BEAT
            self._tell_all({"step": self.place.step, "doing": self.place.doing})
            self.place.heard = now
            for index, (_, peer) in self._peers.items():
                if self._gone(peer, index, now):
                    return self._end(_silence(peer, now))
            self._report(now)
        if "failed" in self._farewell:
            return self._end(_error(self.place, self._farewell["failed"]))
        return self._tell_all(self._farewell)

    def _hear(self, index: int) -> str:
        """Read what process `index` has sent; returns the sentence that ends the run, or nothing."""
        line, peer = self._peers[index]
        try:
            messages = line.receive()
        except (OSError, ValueError):
            self._forget(index)
            return _death(peer)
        now = peer.heard = time.monotonic()
        for message in messages:
            if "bye" in message:
                self._forget(index)
                break
            if "failed" in message:  # by itself, or because of one that has fallen silent
                silent = (other for _, other in self._peers.values() if now - other.heard > SUSPECT)
                return next((_silence(other, now) for other in silent), _error(peer, message["failed"]))
            peer.move(message["step"], message["doing"])
        return ""

    def _forget(self, index: int) -> None:
        line, _ = self._peers.pop(index)
        self._selector.unregister(line)
        line.close()

    def _tell_all(self, message: dict) -> None:
        for line, _ in self._peers.values():
            with contextlib.suppress(OSError):  # found when it is read
                line.send(**message)

    def _end(self, sentence: str) -> None:
        """Tell the others, let them go first, and leave unless the main thread does."""
        speaks = self._farewell is None
        self._tell_all({"end": sentence})
        deadline = time.monotonic() + FAREWELL
        while self._peers and time.monotonic() < deadline:
            for key, _ in self._selector.select(BEAT):
                try:
                    key.fileobj.receive()
                except (OSError, ValueError):
                    self._forget(key.data)
        if speaks:
            self._leave_with(sentence)

    # --- The thread of the others -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while self._farewell is None:
            with contextlib.suppress(OSError):
                self._line.send(step=self.place.step, doing=self.place.doing)
            if self._selector.select(BEAT):
                if self._obey():
                    return
            elif self._gone(self._first, None, time.monotonic()):
                return self._leave_with(_silence(self._first, time.monotonic()))
        with contextlib.suppress(OSError):
            self._line.send(**self._farewell)
            while "failed" in self._farewell and not any("end" in message for message in self._line.receive()):
                pass  # process 0 tells the others first
        self._line.close()

    def _obey(self) -> bool:
        """Read what process 0 has sent; whether that was its last word."""
        try:
            messages = self._line.receive()
        except (OSError, ValueError):
            self._leave_with(_death(self._first))
            return True
        self._first.heard = time.monotonic()
        for message in messages:
            if "step" in message:
                self._first.move(message["step"], message["doing"])
                continue
            if "end" in message and not self._certain:
                self._leave_with(message["end"])
            self._line.close()
            return True
        return False

    # --- Both ---------------------------------------------------------------------------------------------------------

    def _gone(self, place: Place, index: int | None, now: float) -> bool:
        """Whether the process of connection `index` has been silent for too long.

        It has not while there is something of it to read: then it was this process that stood still.
        """
        patience = min(SUSPECT, self.where.heartbeat) if self._failing else self.where.heartbeat
        return now - place.heard > patience and all(key.data != index for key, _ in self._selector.select(0))

    def _leave_with(self, sentence: str) -> None:
        # Written directly: the main thread may hold the lock of sys.stderr. A terminal gets its cursor back.
        start = "\n\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(2, f"{start}mjax: error: {sentence}; {CONTINUES}\n".encode())
        self._leave(1)

    # --- Reports ------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        """Say who is silent, and who is behind when no step has been finished for long."""
        for index, (_, peer) in self._peers.items():
            silent = now - peer.heard > self.where.heartbeat / 2
            if silent and index not in self._silent:
                self.say(f"{_silence(peer, now)}; at {self.where.heartbeat:g} s the run ends")
            if not silent and index in self._silent:
                self.say(f"{peer.name} is heard again")
            (self._silent.add if silent else self._silent.discard)(index)

        places = [self.place, *(peer for _, peer in self._peers.values())]
        slowest = min(place.step for place in places)
        if slowest != self._slowest:
            if self._reported:
                self.say(f"going on: step {slowest} after {now - self._progress:.0f} s")
            self._slowest, self._progress, self._reported = slowest, now, 0.0
        waited = now - self._progress
        if 0 < self._limit(places) <= waited and waited >= 2 * self._reported:
            self._reported = waited
            self.say(f"no step has been finished for {waited:.0f} s: {self._standing(now)}")

    def _limit(self, places: list[Place]) -> float:
        """Seconds without a step after which to speak; 0: never."""
        limit = self.where.watchdog
        if limit is None:
            limit = max(60.0, 10.0 * statistics.median(self._seconds or [0.0]))
        # Compiling takes as long as it takes, and so do evaluating and saving as long as all are at it.
        compiling = any(place.doing == COMPILING for place in places)
        same = len({(place.step, place.doing) for place in places}) == 1 and self.place.doing != STEP
        return 10.0 * limit if compiling or same else limit

    def _standing(self, now: float) -> str:
        """Where everyone is: those behind by name, the largest group of the foremost by number."""
        groups = defaultdict(list)
        for place in [self.place, *(peer for _, peer in self._peers.values())]:
            groups[place.step, place.doing].append(place)
        *behind, (where, foremost) = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
        parts = [
            f"{place.name} is at step {place.step}, {place.doing} for {now - place.since:.0f} s{_unheard(place, now)}"
            for _, places in behind
            for place in places
        ]
        parts += [
            f"{place.name} is at the same step{_unheard(place, now)}" for place in foremost if _unheard(place, now)
        ]
        if len(parts) > 8:
            parts[8:] = [f"{len(parts) - 8} more are behind"]
        who = "all others are" if parts else f"all {len(foremost)} processes are"
        return "; ".join([*parts, f"{who} at step {where[0]}, {where[1]}"])


def _death(place: Place) -> str:
    return f"{place.name} died, last heard of at step {place.step}"


def _silence(place: Place, now: float) -> str:
    return f"{place.name} has not been heard of for {now - place.heard:.0f} s, since step {place.step}"


def _error(place: Place, what: str) -> str:
    return f"{place.name} ended at step {place.step} with an error: {what}"


def _unheard(place: Place, now: float) -> str:
    silence = now - place.heard
    return f", not heard of for {silence:.0f} s" if silence > SUSPECT else ""


class _Line:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(STALL)
        self.connection, self._rest = connection, b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """The messages that have come, at least one unless a part of one has.

        Raises:
          OSError: the other end is gone.
        """
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def watching(where: Distributed, explain: Callable[[BaseException], int]) -> Watchdog:
    """The watchdog of this process of the run; `explain` prints an error and returns the exit code for it."""
    return Watchdog(
        where, explain, index=jax.process_index(), count=jax.process_count(), share=bytes_from_first, leave=os._exit
    )
