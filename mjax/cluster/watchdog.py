"""Heartbeats between the processes of a run: which are alive, and which are behind.

When one process of many dies, the others fail with a message of the transport or wait in a collective forever, and
neither names the process. So every process keeps one connection to process 0, beside the collectives:

    process i ── {"step": 120, "doing": "saving"} ──▶ process 0     twice a second
    process i ◀── {"step": 120, "doing": "saving"} ── process 0

- **A connection that closes without a goodbye is a death.** The system closes a process's connections however it ends.
- **Silence for `heartbeat` seconds is a loss**: of a host, of the network, or of a process that was stopped.
- **An error in one process** is told to the others before that process exits.

Process 0 names the process to all others; each prints the same sentence and ends with exit code 1, wherever its main
thread is stuck. Silence is measured by the clock of the waiting process, so the clocks of the hosts need not agree.
JAX's own heartbeat remains as a fallback; it ends a process with a C++ stack trace.

Process 0 also watches the steps. If none has finished for long, it reports which processes are behind, where they are
and since when. It only reports, unless `--distributed.hang-limit` says after how long the run is to end.

The same connections carry what the processes compare before the first step (mjax/run/agreement.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from mjax.cluster import processes
from mjax.cluster.launch import COMPILING, STEP, Distributed
from mjax.cluster.processes import bytes_from_first
from mjax.errors import UnhealthyError, UsageError, exit_code, first_line, shorten_list

HEARTBEAT_INTERVAL = 0.5  # seconds between two messages
FAILURE_GRACE = 5.0  # seconds in which a failed collective may turn out to be caused by the death of another process
SUSPECT = 3.0  # seconds of silence that prove a loss once something has failed in this process
PATIENCE = 60.0  # seconds without a finished step, at least, after which process 0 reports who is behind
SHUTDOWN_TIMEOUT = 3.0  # seconds that process 0 waits for the others to exit first
CONTINUES = "what was saved is intact, the same command continues from it"


class Watchdog:
    """Watches the processes of a run while its context is open; a single process only for a hang limit.

    Attributes:
      print_line: called by process 0 with one line of text; the loop puts its display here.
      heartbeat: seconds of silence after which a process is lost.
      patience: seconds without a finished step, at least, after which process 0 reports who is behind.
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
          where: limit, seconds.
          explain: prints an error and returns the exit code for it.
          index: of this process.
          count: number of processes.
          share: returns process 0's bytes in every process.
          leave: ends this process at once with an exit code.
        """
        self.where, self.index, self.count = where, index, count
        self._explain, self._share, self._leave = explain, share, leave
        self.print_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self.place = ProcessStatus(f"process {index} on {socket.gethostname()} (pid {os.getpid()})")
        self.heartbeat: float = processes.HEARTBEAT
        self.patience = PATIENCE
        self._seconds: deque[float] = deque(maxlen=99)  # of the last steps
        self._began = time.monotonic()  # start of the current step of this process
        self._heard: queue.SimpleQueue = (
            queue.SimpleQueue()
        )  # values for `decide_on_first`, with the index of the sender
        self._peers: dict[
            int, tuple[processes.JsonConnection, ProcessStatus]
        ] = {}  # process 0; in process 0 all others
        self._silent: set[int] = set()
        self._slowest, self._progress, self._reported = -1, time.monotonic(), 0.0
        self._last_message: dict | None = None  # what to tell the others at the end; set by the main thread
        self._failing = False  # the main thread has an error, which a lost process may have caused
        self._certain = False  # the error is this process's own
        self._thread: threading.Thread | None = None

    # --- For the main thread ------------------------------------------------------------------------------------------

    def record_step(self, step: int, doing: str = STEP) -> None:
        """Record that this process is at `step`, doing that."""
        if step != self.place.step:
            now = time.monotonic()
            self._seconds.append(now - self._began)
            self._began = now
        self.place.move(step, doing)

    def decide_on_first(self, value: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """The result of process 0's `judge` for the values of all processes, in order; the same in all. JSON both
        ways."""
        if self._thread is None:
            return judge([value])
        if self.index > 0:
            self._broadcast(value=value)
            return self._heard.get()[1]
        given = {0: value}
        while len(given) < self.count:  # a process that dies meanwhile ends the run
            given |= [self._heard.get()]
        answer = judge([given[index] for index in range(self.count)])
        self._broadcast(value=answer)
        return answer

    def __enter__(self) -> Watchdog:
        if self.count > 1 or self.where.hang_limit is not None:
            self._selector = selectors.DefaultSelector()
            try:
                self._connect()
            except Exception as error:
                self._leave(self._explain(error))
                raise
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if self._thread is None:
            return
        if error is not None and self.count > 1:
            self._fail(error)
        self._last_message = self._last_message or {"bye": True}
        self._thread.join()

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """End this process at an error inside, after telling the other processes.

        Propagating it through the callers would wait for saves and collectives that need the others.
        """
        try:
            yield
        except BaseException as error:
            if self._thread is not None and self.count > 1:
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others, explain the error and exit; if a lost process caused it, the thread exits first."""
        self._certain = isinstance(error, UsageError | UnhealthyError | KeyboardInterrupt)
        self._failing = True
        self._thread.join(HEARTBEAT_INTERVAL if self._certain else FAILURE_GRACE)
        self._last_message = {"failed": first_line(error), "code": exit_code(error)}
        self._thread.join()
        self._leave(self._explain(error))

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Meet all others in process 0; in the others process 0, which is not silent until it has met all."""
        met: dict[int, tuple[processes.JsonConnection, str]] = {}
        if self.index:
            met = processes.connect(self.where, self.index, self.place.name, self._share)
        elif self.count > 1:
            met = processes.listen(self.where, self.count, self.place.name, self._share)
        for index, (line, name) in met.items():
            self._peers[index] = line, ProcessStatus(name, heard=math.inf if self.index else time.monotonic())
            self._selector.register(line, selectors.EVENT_READ, index)

    def _watch(self) -> None:
        """Send and hear heartbeats until this process, another one or the run ends."""
        beat, alone = 0.0, not self._peers
        while self._last_message is None:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                end = self._on_heartbeat(key.data)
                if end and not self._certain:
                    return self._end(*end)
            if not (self._peers or alone or self.index == 0):
                return None  # process 0 has ended
            if (now := time.monotonic()) < beat:
                continue
            beat = now + HEARTBEAT_INTERVAL
            self._broadcast(step=self.place.step, doing=self.place.doing)
            self.place.heard = now
            for index, (_, peer) in self._peers.items():
                if self._gone(peer, index, now):
                    return self._end(peer.silence(now))
            if self.index == 0 and (end := self._report(now)):
                return self._end(end)
        if "failed" not in self._last_message:
            return self._broadcast(**self._last_message)
        if self.index == 0:
            return self._end(*self.place.error(self._last_message))
        self._broadcast(**self._last_message)
        return self._wait_for_end(self.heartbeat)  # process 0 tells the others first

    def _on_heartbeat(self, index: int) -> tuple | None:
        """Read messages of process `index`; returns the sentence that ends the run, with its exit code, or None."""
        line, peer = self._peers[index]
        try:
            messages = line.receive()
        except (OSError, ValueError):
            self._forget(index)
            return (f"{peer.name} died, last heard of at step {peer.step}",)  # without a goodbye
        now = peer.heard = time.monotonic()
        for message in messages:
            match message:
                case {"step": step, "doing": doing}:
                    peer.move(step, doing)
                case {"value": value}:
                    self._heard.put((index, value))
                case {"end": sentence, "code": code}:  # by process 0
                    self._forget(index)
                    return sentence, code
                case {"failed": _}:  # by itself, or because another one has fallen silent
                    silent = (other for _, other in self._peers.values() if now - other.heard > SUSPECT)
                    return next(((other.silence(now),) for other in silent), peer.error(message))
                case _:  # goodbye
                    self._forget(index)
                    break
        return None

    def _forget(self, index: int) -> None:
        line, _ = self._peers.pop(index)
        self._selector.unregister(line)
        line.close()

    def _broadcast(self, **message: Any) -> None:
        for line, _ in list(self._peers.values()):
            with contextlib.suppress(OSError):  # noticed when it is read
                line.send(**message)

    def _end(self, sentence: str, code: int = 1) -> None:
        """End the run: process 0 tells the others and lets them exit first. Exit unless the main thread does."""
        speaks = self._last_message is None
        if self.index == 0:
            self._broadcast(end=sentence, code=code)
            self._wait_for_end(SHUTDOWN_TIMEOUT)
        if speaks:
            self._leave_with(sentence, code)

    def _wait_for_end(self, seconds: float) -> None:
        """Wait until the peers have ended."""
        deadline = time.monotonic() + seconds
        while self._peers and time.monotonic() < deadline:
            for key, _ in self._selector.select(HEARTBEAT_INTERVAL):
                try:
                    if any("end" in message for message in key.fileobj.receive()):
                        self._forget(key.data)
                except (OSError, ValueError):
                    self._forget(key.data)

    def _gone(self, place: ProcessStatus, index: int, now: float) -> bool:
        """Whether the process of connection `index` has been silent for too long.

        Not while there is data to read from it: then it was this process that was stopped.
        """
        patience = min(SUSPECT, self.heartbeat) if self._failing else self.heartbeat
        return now - place.heard > patience and all(key.data != index for key, _ in self._selector.select(0))

    def _leave_with(self, sentence: str, code: int = 1) -> None:
        # Written directly: the main thread may hold the lock of sys.stderr. A terminal gets its cursor back.
        start = "\n\x1b[?25h" if sys.stderr.isatty() else ""
        advice = f"; {CONTINUES}" if code == 1 else ""  # other sentences give their own advice
        with contextlib.suppress(OSError):  # even if the output is not read, the process ends
            os.write(2, f"{start}mjax: error: {sentence}{advice}\n".encode())
        self._leave(code)

    # --- Reports ------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> str:
        """Report which processes are silent, and which are behind if no step has finished for long; returns the
        sentence that ends the run, or nothing."""
        peers = {index: peer for index, (_, peer) in self._peers.items()}
        silent = {index for index, peer in peers.items() if now - peer.heard > self.heartbeat / 2}
        for index in silent - self._silent:
            self.print_line(f"{peers[index].silence(now)}; at {self.heartbeat:g} s the run ends")
        for index in (self._silent - silent) & peers.keys():
            self.print_line(f"{peers[index].name} is heard again")
        self._silent = silent

        places = [self.place, *peers.values()]
        slowest = min(place.step for place in places)
        if slowest != self._slowest:
            if self._reported:
                self.print_line(f"continuing: step {slowest} after {now - self._progress:.0f} s")
            self._slowest, self._progress, self._reported = slowest, now, 0.0
        waited, patience, limit = now - self._progress, self._patience(places), self.where.hang_limit
        ends = limit is not None and waited >= limit * patience
        if not (ends or (self._limit() * patience <= waited and waited >= 2 * self._reported)):
            return ""
        self._reported = waited
        standing = f"no step has been finished for {waited:.0f} s: {_standing(places, now)}"
        if ends:
            return f"{standing}; --distributed.hang-limit is {limit:g} s"
        self.print_line(standing)
        return ""

    def _limit(self) -> float:
        """Seconds without a step after which to report."""
        return max(self.patience, 10.0 * statistics.median(self._seconds or [0.0]))

    def _patience(self, places: list[ProcessStatus]) -> float:
        """Factor for the limits: compiling may take long, and so may evaluating and saving while all processes do
        it."""
        compiling = any(place.doing == COMPILING for place in places)
        same = len({(place.step, place.doing) for place in places}) == 1 and self.place.doing != STEP
        return 10.0 if compiling or same else 1.0


def _standing(places: list[ProcessStatus], now: float) -> str:
    """Position of every process: those behind or silent by name, the largest group of the foremost together."""
    groups = Counter((place.step, place.doing) for place in places)
    step, doing = max(groups, key=lambda position: (position[0], groups[position]))
    behind = [place for place in places if (place.step, place.doing) != (step, doing) or place.unheard(now)]
    parts = [
        f"{place.name} is at step {place.step}, {place.doing} for {now - place.since:.0f} s{place.unheard(now)}"
        for place in sorted(behind, key=lambda place: place.step)
    ]
    who = "all others are" if parts else f"all {len(places)} processes are"
    return "; ".join([*shorten_list(parts, 8, "more are behind"), f"{who} at step {step}, {doing}"])


def watching(where: Distributed, explain: Callable[[BaseException], int]) -> Watchdog:
    """The watchdog of this process of the run; `explain` prints an error and returns its exit code."""
    return Watchdog(where, explain, index=jax.process_index(), count=jax.process_count(), share=bytes_from_first)


# --- The position of a process of a run, and the messages about a process that is lost --------------------------------


@dataclass
class ProcessStatus:
    """Position of a process: `step` is the last it began, `doing` what it does there, `since` a time of this clock."""

    name: str
    step: int = 0
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def move(self, step: int, doing: str) -> None:
        """Record the position; the time restarts if it changes."""
        if (step, doing) != (self.step, self.doing):
            self.step, self.doing, self.since = step, doing, time.monotonic()

    def silence(self, now: float) -> str:
        """Message about a silent process."""
        return f"{self.name} has not been heard of for {now - self.heard:.0f} s, since step {self.step}"

    def error(self, last_message: dict) -> tuple[str, int]:
        """Message about a process that ended with an error, and the exit code for it."""
        return f"{self.name} ended at step {self.step} with an error: {last_message['failed']}", last_message["code"]

    def unheard(self, now: float) -> str:
        """Suffix of its position, if it has been silent for more than `SUSPECT` seconds."""
        silent = now - self.heard
        return f", not heard of for {silent:.0f} s" if silent > SUSPECT else ""
