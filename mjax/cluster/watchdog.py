"""Heartbeats between the processes of a run: which are alive, and which are behind.

When one process of many dies, the others fail with a message of the transport or wait in a collective forever, and
neither names the process. So every process has one connection to process 0, independent of the collectives:

    process i ── {"step": 120, "activity": "saving"} ──▶ process 0     twice a second
    process i ◀── {"step": 120, "activity": "saving"} ── process 0

- **A connection that closes without a final message is a death.** The system closes a process's connections however it
  ends.
- **No heartbeat for `heartbeat_timeout` seconds is a loss**: of a host, of the network, or of a process that was
  stopped.
- **An error in one process** is broadcast before that process exits.

Process 0 broadcasts the name of the process. Each process prints the same sentence and ends with exit code 1, wherever
its main thread is stuck. The clock of the waiting process measures the time without a heartbeat, so the clocks of the
hosts need not agree. JAX's heartbeat remains as a fallback; it ends a process with a C++ stack trace.

Process 0 also watches the steps. If none has finished for long, it reports the stragglers, where they are and since
when. It only reports, unless `--distributed.hang-limit` says after how long the run is to end.

The same connections carry the facts that processes compare before the first step (mjax/run/agreement.py).
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
from mjax.cluster.processes import broadcast_bytes
from mjax.errors import PrintLine, UnhealthyError, UsageError, exit_code, first_line, shorten_list

HEARTBEAT_INTERVAL = 0.5  # seconds between two messages
FAILURE_GRACE = 5.0  # seconds in which a failed collective may turn out to be caused by the death of another process
SUSPECT_TIMEOUT = 3.0  # seconds without a heartbeat that prove a loss once something has failed in this process
STRAGGLER_TIMEOUT = 60.0  # seconds without a finished step, at least, after which process 0 reports the stragglers
SHUTDOWN_TIMEOUT = 3.0  # seconds that process 0 waits for the others to exit first
RESUMABLE = "what was saved is intact, the same command continues from it"


class Watchdog:
    """Watches the processes of a run while its context is open; a single process only for a hang limit.

    Attributes:
      print_line: called by process 0 with one line of text; the loop puts its display here.
      heartbeat_timeout: seconds without a heartbeat after which a process is lost.
      straggler_timeout: seconds without a finished step, at least, after which process 0 reports the stragglers.
    """

    def __init__(
        self,
        distributed: Distributed,
        explain: Callable[[BaseException], int] = lambda error: 1,
        *,
        index: int = 0,
        count: int = 1,
        broadcast: Callable[[bytes], bytes] = bytes,
        exit_process: Callable[[int], None] = os._exit,
    ):
        """`make_watchdog` fills the arguments from JAX.

        Args:
          distributed: addresses and limits.
          explain: prints an error and returns the exit code for it.
          index: of this process.
          count: number of processes.
          broadcast: returns process 0's bytes in every process.
          exit_process: ends this process immediately with an exit code.
        """
        self.distributed, self.index, self.count = distributed, index, count
        self._explain, self._from_first, self._exit_process = explain, broadcast, exit_process
        self.print_line: PrintLine = lambda line: print(line, file=sys.stderr, flush=True)
        self.status = ProcessStatus(f"process {index} on {socket.gethostname()} (pid {os.getpid()})")
        self.heartbeat_timeout: float = processes.HEARTBEAT_TIMEOUT
        self.straggler_timeout = STRAGGLER_TIMEOUT
        self._step_seconds: deque[float] = deque(maxlen=99)  # of the last steps
        self._step_start = time.monotonic()
        self._values: queue.SimpleQueue = queue.SimpleQueue()  # for `decide_on_first`, with the index of the sender
        # By index: of process 0; in process 0 of all others.
        self._peers: dict[int, tuple[processes.JsonConnection, ProcessStatus]] = {}
        self._silent: set[int] = set()
        self._slowest, self._progress, self._reported = -1, time.monotonic(), 0.0
        self._final_message: dict | None = None  # set by the main thread
        self._has_error = False  # in the main thread; a lost process may have caused it
        self._is_local_error = False  # no other process has caused it
        self._thread: threading.Thread | None = None

    # --- For the main thread ------------------------------------------------------------------------------------------

    def record_step(self, step: int, activity: str = STEP) -> None:
        """Record that this process has begun `activity` at `step`."""
        if step != self.status.step:
            now = time.monotonic()
            self._step_seconds.append(now - self._step_start)
            self._step_start = now
        self.status.update(step, activity)

    def decide_on_first(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return, in every process, what `decide` of process 0 returns for the values of all processes, in order.

        Values and result are JSON.
        """
        if self._thread is None:
            return decide([value])
        if self.index > 0:
            self._broadcast(value=value)
            return self._values.get()[1]
        values = {0: value}
        while len(values) < self.count:  # a process that dies meanwhile ends the run
            values |= [self._values.get()]
        result = decide([values[index] for index in range(self.count)])
        self._broadcast(value=result)
        return result

    def __enter__(self) -> Watchdog:
        if self.count > 1 or self.distributed.hang_limit is not None:
            self._selector = selectors.DefaultSelector()
            try:
                self._connect()
            except Exception as error:
                self._exit_process(self._explain(error))
                raise
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if self._thread is None:
            return
        if error is not None and self.count > 1:
            self._abort(error)
        self._final_message = self._final_message or {"done": True}
        self._thread.join()

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Broadcast an error inside, and end this process.

        Propagating it through the callers would wait for saves and collectives that need the others.
        """
        try:
            yield
        except BaseException as error:
            if self._thread is not None and self.count > 1:
                self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        """Broadcast the error, explain it and exit; if a lost process caused it, the thread exits first."""
        self._is_local_error = isinstance(error, UsageError | UnhealthyError | KeyboardInterrupt)
        self._has_error = True
        self._thread.join(HEARTBEAT_INTERVAL if self._is_local_error else FAILURE_GRACE)
        self._final_message = {"error": first_line(error), "code": exit_code(error)}
        self._thread.join()
        self._exit_process(self._explain(error))

    # --- The thread ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect process 0 and all others. The timeout for process 0 starts when it has connected to all."""
        peers: processes.Peers = {}
        if self.index:
            peers = processes.connect(self.distributed, self.index, self.status.name, self._from_first)
        elif self.count > 1:
            peers = processes.listen(self.distributed, self.count, self.status.name, self._from_first)
        for index, (connection, name) in peers.items():
            status = ProcessStatus(name, last_heartbeat=math.inf if self.index else time.monotonic())
            self._peers[index] = connection, status
            self._selector.register(connection, selectors.EVENT_READ, index)

    def _watch(self) -> None:
        """Send and receive heartbeats until this process, another one or the run ends."""
        next_heartbeat = 0.0
        while self._final_message is None:
            for key, _ in self._selector.select(max(0.0, next_heartbeat - time.monotonic())):
                end = self._on_message(key.data)
                if end and not self._is_local_error:
                    return self._end_run(*end)
            if self.index > 0 and not self._peers:
                return None  # process 0 has ended
            if (now := time.monotonic()) < next_heartbeat:
                continue
            next_heartbeat = now + HEARTBEAT_INTERVAL
            self._broadcast(step=self.status.step, activity=self.status.activity)
            self.status.last_heartbeat = now
            for index, (_, peer) in self._peers.items():
                if self._is_lost(peer, index, now):
                    return self._end_run(peer.describe_loss(now))
            if self.index == 0 and (end := self._report(now)):
                return self._end_run(end)
        if "error" not in self._final_message:
            return self._broadcast(**self._final_message)
        if self.index == 0:
            return self._end_run(*self.status.describe_error(self._final_message))
        self._broadcast(**self._final_message)
        return self._wait_for_end(self.heartbeat_timeout)  # process 0 informs the others first

    def _on_message(self, index: int) -> tuple | None:
        """Read messages of process `index`; returns the sentence that ends the run, with its exit code, or None."""
        connection, peer = self._peers[index]
        try:
            messages = connection.receive()
        except (OSError, ValueError):
            self._disconnect(index)
            return (f"{peer.name} died, its last heartbeat was at step {peer.step}",)
        now = peer.last_heartbeat = time.monotonic()
        for message in messages:
            match message:
                case {"step": step, "activity": activity}:
                    peer.update(step, activity)
                case {"value": value}:
                    self._values.put((index, value))
                case {"end": sentence, "code": code}:  # by process 0
                    self._disconnect(index)
                    return sentence, code
                case {"error": _}:  # alone, or because another one is lost
                    lost = (p for _, p in self._peers.values() if now - p.last_heartbeat > SUSPECT_TIMEOUT)
                    return next(((p.describe_loss(now),) for p in lost), peer.describe_error(message))
                case _:  # it is done
                    self._disconnect(index)
                    break
        return None

    def _disconnect(self, index: int) -> None:
        connection, _ = self._peers.pop(index)
        self._selector.unregister(connection)
        connection.close()

    def _broadcast(self, **message: Any) -> None:
        for connection, _ in list(self._peers.values()):
            with contextlib.suppress(OSError):  # noticed when it is read
                connection.send(**message)

    def _end_run(self, sentence: str, code: int = 1) -> None:
        """End the run: process 0 informs the others and lets them exit first. Exit unless the main thread does."""
        exits = self._final_message is None
        if self.index == 0:
            self._broadcast(end=sentence, code=code)
            self._wait_for_end(SHUTDOWN_TIMEOUT)
        if exits:
            # Written directly: the main thread may hold the lock of sys.stderr. A terminal gets its cursor back.
            start = "\n\x1b[?25h" if sys.stderr.isatty() else ""
            advice = f"; {RESUMABLE}" if code == 1 else ""  # other sentences contain their advice
            with contextlib.suppress(OSError):  # even if the output is not read, the process ends
                os.write(2, f"{start}mjax: error: {sentence}{advice}\n".encode())
            self._exit_process(code)

    def _wait_for_end(self, seconds: float) -> None:
        """Wait until the peers have ended."""
        deadline = time.monotonic() + seconds
        while self._peers and time.monotonic() < deadline:
            for key, _ in self._selector.select(HEARTBEAT_INTERVAL):
                try:
                    if any("end" in message for message in key.fileobj.receive()):
                        self._disconnect(key.data)
                except (OSError, ValueError):
                    self._disconnect(key.data)

    def _is_lost(self, peer: ProcessStatus, index: int, now: float) -> bool:
        """Return True if process `index` has sent no heartbeat for too long.

        Not while there is data to read from it: then it was this process that was stopped.
        """
        timeout = min(SUSPECT_TIMEOUT, self.heartbeat_timeout) if self._has_error else self.heartbeat_timeout
        return now - peer.last_heartbeat > timeout and all(key.data != index for key, _ in self._selector.select(0))

    # --- Reports ------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> str:
        """Report which processes are silent, and the stragglers if no step has finished for long.

        Returns:
          The sentence that ends the run, or nothing.
        """
        peers = {index: peer for index, (_, peer) in self._peers.items()}
        silent = {index for index, peer in peers.items() if now - peer.last_heartbeat > self.heartbeat_timeout / 2}
        for index in silent - self._silent:
            self.print_line(f"{peers[index].describe_loss(now)}; at {self.heartbeat_timeout:g} s the run ends")
        for index in (self._silent - silent) & peers.keys():
            self.print_line(f"{peers[index].name} sends heartbeats again")
        self._silent = silent

        statuses = [self.status, *peers.values()]
        slowest = min(status.step for status in statuses)
        if slowest != self._slowest:
            if self._reported:
                self.print_line(f"continuing: step {slowest} after {now - self._progress:.0f} s")
            self._slowest, self._progress, self._reported = slowest, now, 0.0
        # Compiling may take long, and so may evaluating and saving while all processes do it.
        compiling = any(status.activity == COMPILING for status in statuses)
        same = len({(status.step, status.activity) for status in statuses}) == 1 and self.status.activity != STEP
        factor, seconds, limit = 10.0 if compiling or same else 1.0, now - self._progress, self.distributed.hang_limit
        timeout = max(self.straggler_timeout, 10.0 * statistics.median(self._step_seconds or [0.0]))
        ends = limit is not None and seconds >= limit * factor
        if not (ends or (timeout * factor <= seconds and seconds >= 2 * self._reported)):
            return ""
        self._reported = seconds
        report = f"no step has been finished for {seconds:.0f} s: {_describe_positions(statuses, now)}"
        if ends:
            return f"{report}; --distributed.hang-limit is {limit:g} s"
        self.print_line(report)
        return ""


def _describe_positions(statuses: list[ProcessStatus], now: float) -> str:
    """Position of every process: those behind or silent by name, the largest group of the foremost together."""
    groups = Counter((status.step, status.activity) for status in statuses)
    step, activity = max(groups, key=lambda position: (position[0], groups[position]))
    parts = []
    for status in sorted(statuses, key=lambda status: status.step):
        silence = now - status.last_heartbeat
        suffix = f", no heartbeat for {silence:.0f} s" if silence > SUSPECT_TIMEOUT else ""
        if suffix or (status.step, status.activity) != (step, activity):
            position = f"at step {status.step}, {status.activity} for {now - status.since:.0f} s"
            parts.append(f"{status.name} is {position}{suffix}")
    foremost = "all others are" if parts else f"all {len(statuses)} processes are"
    return "; ".join([*shorten_list(parts, 8, "more are behind"), f"{foremost} at step {step}, {activity}"])


def make_watchdog(distributed: Distributed, explain: Callable[[BaseException], int]) -> Watchdog:
    """Return the watchdog of this process of the run; `explain` prints an error and returns its exit code."""
    index, count = jax.process_index(), jax.process_count()
    return Watchdog(distributed, explain, index=index, count=count, broadcast=broadcast_bytes)


# --- The position of a process of a run, and the messages about a process that is lost --------------------------------


@dataclass
class ProcessStatus:
    """Position of a process: the last `step` it began, its `activity` there, `since` a time of this process's clock."""

    name: str
    step: int = 0
    activity: str = "starting"
    since: float = field(default_factory=time.monotonic)
    last_heartbeat: float = field(default_factory=time.monotonic)

    def update(self, step: int, activity: str) -> None:
        """Record the position; the time restarts if it changes."""
        if (step, activity) != (self.step, self.activity):
            self.step, self.activity, self.since = step, activity, time.monotonic()

    def describe_loss(self, now: float) -> str:
        """Return the message about a process without heartbeats."""
        return f"{self.name} has sent no heartbeat for {now - self.last_heartbeat:.0f} s, since step {self.step}"

    def describe_error(self, message: dict) -> tuple[str, int]:
        """Return the message about a process that ended with an error, and the exit code for it."""
        return f"{self.name} ended at step {self.step} with an error: {message['error']}", message["code"]
