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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from mjax.cluster import processes
from mjax.cluster.launch import COMPILING, STEP, Distributed
from mjax.cluster.processes import bytes_from_first
from mjax.errors import UnhealthyError, UsageError, exit_code

BEAT = 0.5  # seconds between two messages
GRACE = 5.0  # seconds in which a failed collective may turn out to be caused by the death of another process
SUSPECT = 3.0  # seconds of silence that prove a loss once something has failed in this process
FAREWELL = 3.0  # seconds that process 0 waits for the others to exit first
CONTINUES = "what was saved is intact, the same command continues from it"


class Watchdog:
    """Watches the processes of a run while its context is open; a single process only for a hang limit.

    Attributes:
      say: called by process 0 with one line of text; the loop puts its display here.
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
          count: number of processes.
          share: returns process 0's bytes in every process.
          leave: ends this process at once with an exit code.
        """
        self.where, self.index, self.count = where, index, count
        self._explain, self._share, self._leave = explain, share, leave
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self.place = Place(f"process {index} on {socket.gethostname()} (pid {os.getpid()})")
        self._seconds: deque[float] = deque(maxlen=99)  # of the last steps
        self._began = time.monotonic()  # start of the current step of this process
        self._heard: queue.SimpleQueue = queue.SimpleQueue()  # replies for `ask_first`
        self._farewell: dict | None = None  # what to tell the others at the end; set by the main thread
        self._failing = False  # the main thread has an error, which a lost process may have caused
        self._certain = False  # the error is this process's own
        self._thread: threading.Thread | None = None

    # --- For the main thread ------------------------------------------------------------------------------------------

    def at(self, step: int, doing: str = STEP) -> None:
        """Record that this process is at `step`, doing that."""
        if step != self.place.step:
            now = time.monotonic()
            self._seconds.append(now - self._began)
            self._began = now
        self.place.move(step, doing)

    def ask_first(self, mine: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """The result of process 0's `judge` for the values of all processes, in order; the same in all. JSON both
        ways."""
        if self._thread is None:
            return judge([mine])
        if self.index > 0:
            self._line.send(mine=mine)
            return self._heard.get()
        given = {0: mine}
        while len(given) < self.count:  # a process that dies meanwhile ends the run
            index, theirs = self._heard.get()
            given[index] = theirs
        answer = judge([given[index] for index in range(self.count)])
        self._tell_all({"answer": answer})
        return answer

    def __enter__(self) -> Watchdog:
        if self.count > 1 or self.where.hang_limit is not None:
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
        if error is not None and self.count > 1:
            self._fail(error)
        self._farewell = self._farewell or {"bye": True}
        self._thread.join()

    @contextlib.contextmanager
    def or_end(self) -> Iterator[None]:
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
        self._thread.join(BEAT if self._certain else GRACE)
        lines = str(error).strip().splitlines()
        self._farewell = {"failed": lines[0] if lines else type(error).__name__, "code": exit_code(error)}
        self._thread.join()
        self._leave(self._explain(error))

    # --- Connecting ---------------------------------------------------------------------------------------------------

    def _listen(self) -> Callable[[], None]:
        """In process 0: wait for all others, then watch them."""
        met = processes.listen(self.where, self.count, self.place.name, self._share) if self.count > 1 else {}
        self._peers = {index: (line, Place(name)) for index, (line, name) in met.items()}
        for index, (line, _) in self._peers.items():
            self._selector.register(line, selectors.EVENT_READ, index)
        return self._lead

    def _connect(self) -> Callable[[], None]:
        """In the others: connect to process 0."""
        self._line, name = processes.connect(self.where, self.index, self.place.name, self._share)
        self._first = Place(name, heard=math.inf)  # until process 0 has met all others
        self._selector.register(self._line, selectors.EVENT_READ)
        return self._follow

    # --- The thread of process 0 --------------------------------------------------------------------------------------

    def _lead(self) -> None:
        beat, self._silent = 0.0, set()
        self._slowest, self._progress, self._reported = -1, time.monotonic(), 0.0
        while self._farewell is None:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                end = self._hear(key.data)
                if end and not self._certain:
                    return self._end(*end)
            now = time.monotonic()
            if now < beat:
                continue
            beat = now + BEAT
            self._tell_all({"step": self.place.step, "doing": self.place.doing})
            self.place.heard = now
            for index, (_, peer) in self._peers.items():
                if self._gone(peer, index, now):
                    return self._end(peer.silence(now))
            if end := self._report(now):
                return self._end(end)
        if "failed" in self._farewell:
            return self._end(*self.place.error(self._farewell))
        return self._tell_all(self._farewell)

    def _hear(self, index: int) -> tuple | None:
        """Read messages of process `index`; returns the sentence that ends the run, with its exit code, or None."""
        line, peer = self._peers[index]
        try:
            messages = line.receive()
        except (OSError, ValueError):
            self._forget(index)
            return (peer.death(),)
        now = peer.heard = time.monotonic()
        for message in messages:
            if "bye" in message:
                self._forget(index)
                break
            if "failed" in message:  # by itself, or because another one has fallen silent
                silent = (other for _, other in self._peers.values() if now - other.heard > SUSPECT)
                return next(((other.silence(now),) for other in silent), peer.error(message))
            if "mine" in message:
                self._heard.put((index, message["mine"]))
                continue
            peer.move(message["step"], message["doing"])
        return None

    def _forget(self, index: int) -> None:
        line, _ = self._peers.pop(index)
        self._selector.unregister(line)
        line.close()

    def _tell_all(self, message: dict) -> None:
        for line, _ in list(self._peers.values()):
            with contextlib.suppress(OSError):  # noticed when it is read
                line.send(**message)

    def _end(self, sentence: str, code: int = 1) -> None:
        """Tell the others, let them exit first, and exit unless the main thread does."""
        speaks = self._farewell is None
        self._tell_all({"end": sentence, "code": code})
        deadline = time.monotonic() + FAREWELL
        while self._peers and time.monotonic() < deadline:
            for key, _ in self._selector.select(BEAT):
                try:
                    key.fileobj.receive()
                except (OSError, ValueError):
                    self._forget(key.data)
        if speaks:
            self._leave_with(sentence, code)

    # --- The thread of the others -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while self._farewell is None:
            with contextlib.suppress(OSError):
                self._line.send(step=self.place.step, doing=self.place.doing)
            if self._selector.select(BEAT):
                if self._obey():
                    return
            elif self._gone(self._first, None, time.monotonic()):
                return self._leave_with(self._first.silence(time.monotonic()))
        with contextlib.suppress(OSError):
            self._line.send(**self._farewell)
            while "failed" in self._farewell and not any("end" in message for message in self._line.receive()):
                pass  # process 0 tells the others first
        self._line.close()

    def _obey(self) -> bool:
        """Read messages of process 0; whether that was its last one."""
        try:
            messages = self._line.receive()
        except (OSError, ValueError):
            self._leave_with(self._first.death())
            return True
        self._first.heard = time.monotonic()
        for message in messages:
            if "step" in message:
                self._first.move(message["step"], message["doing"])
                continue
            if "answer" in message:
                self._heard.put(message["answer"])
                continue
            if "end" in message and not self._certain:
                self._leave_with(message["end"], message["code"])
            self._line.close()
            return True
        return False

    # --- Both ---------------------------------------------------------------------------------------------------------

    def _gone(self, place: Place, index: int | None, now: float) -> bool:
        """Whether the process of connection `index` has been silent for too long.

        Not while there is data to read from it: then it was this process that was stopped.
        """
        patience = min(SUSPECT, self.where.heartbeat) if self._failing else self.where.heartbeat
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
        for index, (_, peer) in self._peers.items():
            silent = now - peer.heard > self.where.heartbeat / 2
            if silent and index not in self._silent:
                self.say(f"{peer.silence(now)}; at {self.where.heartbeat:g} s the run ends")
            if not silent and index in self._silent:
                self.say(f"{peer.name} is heard again")
            (self._silent.add if silent else self._silent.discard)(index)

        places = [self.place, *(peer for _, peer in self._peers.values())]
        slowest = min(place.step for place in places)
        if slowest != self._slowest:
            if self._reported:
                self.say(f"continuing: step {slowest} after {now - self._progress:.0f} s")
            self._slowest, self._progress, self._reported = slowest, now, 0.0
        waited, patience = now - self._progress, self._patience(places)
        limit = self.where.hang_limit
        ends = limit is not None and waited >= limit * patience
        speaks = 0 < self._limit() * patience <= waited and waited >= 2 * self._reported
        if not (ends or speaks):
            return ""
        self._reported = waited
        standing = f"no step has been finished for {waited:.0f} s: {self._standing(now)}"
        if ends:
            return f"{standing}; --distributed.hang-limit is {limit:g} s"
        self.say(standing)
        return ""

    def _limit(self) -> float:
        """Seconds without a step after which to report; 0: never."""
        if self.where.watchdog is not None:
            return self.where.watchdog
        return max(60.0, 10.0 * statistics.median(self._seconds or [0.0]))

    def _patience(self, places: list[Place]) -> float:
        """Factor for the limits: compiling may take long, and so may evaluating and saving while all processes do
        it."""
        compiling = any(place.doing == COMPILING for place in places)
        same = len({(place.step, place.doing) for place in places}) == 1 and self.place.doing != STEP
        return 10.0 if compiling or same else 1.0

    def _standing(self, now: float) -> str:
        """Position of every process: those behind by name, the largest group of the foremost by number."""
        groups = defaultdict(list)
        for place in [self.place, *(peer for _, peer in self._peers.values())]:
            groups[place.step, place.doing].append(place)
        *behind, (where, foremost) = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
        parts = [
            f"{place.name} is at step {place.step}, {place.doing} for {now - place.since:.0f} s"
            f"{place.unheard(now, SUSPECT)}"
            for _, places in behind
            for place in places
        ]
        parts += [
            f"{place.name} is at the same step{place.unheard(now, SUSPECT)}"
            for place in foremost
            if place.unheard(now, SUSPECT)
        ]
        if len(parts) > 8:
            parts[8:] = [f"{len(parts) - 8} more are behind"]
        who = "all others are" if parts else f"all {len(foremost)} processes are"
        return "; ".join([*parts, f"{who} at step {where[0]}, {where[1]}"])


def watching(where: Distributed, explain: Callable[[BaseException], int]) -> Watchdog:
    """The watchdog of this process of the run; `explain` prints an error and returns its exit code."""
    return Watchdog(
        where, explain, index=jax.process_index(), count=jax.process_count(), share=bytes_from_first, leave=os._exit
    )


# --- The position of a process of a run, and the messages about a process that is lost --------------------------------


@dataclass
class Place:
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

    def death(self) -> str:
        """Message about a process that closed its connection without a goodbye."""
        return f"{self.name} died, last heard of at step {self.step}"

    def silence(self, now: float) -> str:
        """Message about a silent process."""
        return f"{self.name} has not been heard of for {now - self.heard:.0f} s, since step {self.step}"

    def error(self, farewell: dict) -> tuple[str, int]:
        """Message about a process that ended with an error, and the exit code for it."""
        return f"{self.name} ended at step {self.step} with an error: {farewell['failed']}", farewell["code"]

    def unheard(self, now: float, suspect: float) -> str:
        """Suffix of its position, if it has been silent for more than `suspect` seconds."""
        silent = now - self.heard
        return f", not heard of for {silent:.0f} s" if silent > suspect else ""
