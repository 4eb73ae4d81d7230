"""A function in a separate process with limits on time and memory, for programs and tables of other people.

The child imports the module of the function. It ends with its parent, leaves no core file, and writes files of at most
a megabyte. A library that panics, aborts or exceeds its memory ends only the child. Without a memory limit only
wall-clock time is limited: for functions of mjax that may hang or abort, such as calls of a driver.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mjax.errors import RunError

WAIT = 10  # seconds of wall-clock time for each second of processor time, on a busy machine; after that a child hangs
THREADS = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
"""A pool of threads maps memory in proportion to the cores of the machine."""
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mjax.utils.child import serve; serve()"
NO_MEMORY = re.compile(rb"memory allocation|bad_alloc|MemoryError")


class ChildError(ValueError):
    """The reason why a child has no answer, as a clause: "it is not done after 10 s".

    Attributes:
      code: exit code of a child that has ended, or minus the number of the signal that ended it.
      log: output of the child until then.
    """

    def __init__(self, reason: str, code: int | None = None, log: str = ""):
        super().__init__(reason)
        self.code, self.log = code, log


class Child:
    """A function that runs within limits; its process starts with the first call of `ask`."""

    def __init__(self, function: str, seconds: float, memory: int | None, environment: Mapping[str, str] | None = None):
        """Set the function and its limits.

        Args:
          function: module:name; maps bytes to a JSON value, or raises ChildError.
          seconds: processor time of each question; without a memory limit, wall-clock time.
          memory: bytes that the process may map; None: no limit, and files of any size.
          environment: of the child; by default this process's environment.
        """
        self.function, self.seconds, self.memory, self.environment = function, seconds, memory, environment
        self._process: subprocess.Popen | None = None

    def ask(self, question: bytes) -> Any:
        """Return the function's answer.

        Raises:
          ChildError: the function raises it, exceeds its limits, or crashes.
          RunError: the process cannot be started.
        """
        if self._process is None:
            self._start()
        try:
            self._pipe.send_bytes(question)
            if not self._pipe.poll(wait := self.seconds * (1 if self.memory is None else WAIT)):
                raise ChildError(f"it is not done after {wait:.0f} s")
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process; another question starts a new one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)  # it may hang in the kernel, where no signal reaches it
            self._pipe.close()
            self._log.close()
            self._process = None

    __del__ = close

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        path = json.dumps([os.path.abspath(folder) for folder in sys.path])
        bounds = [self.function, str(self.seconds), str(self.memory or 0), str(theirs.fileno())]
        try:
            with theirs:
                self._log = tempfile.TemporaryFile()  # noqa: SIM115  an unread pipe would fill
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", START, path, *bounds],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={**(os.environ if self.environment is None else self.environment), **THREADS},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is answered by the parent alone
                )
            bounded = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            reason = self._lost() if self._process else error.strerror
            raise RunError(f"a process for {self.function} cannot be started: {reason}") from None
        if not bounded:
            _warn_unbounded()

    def _lost(self) -> ChildError:
        """Return the error about a child that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT)
        self._process.kill()  # if its answer is not JSON
        code = self._process.wait()
        self._log.seek(0)
        output = self._log.read()
        self.close()
        log = output.decode(errors="replace")
        last = next((line for line in reversed(log.split("\n")) if line.strip()), f"exit code {code}")
        reason = f"it crashes ({signal.Signals(-code).name if code < 0 else last[:200]})"
        if code == -signal.SIGPROF:
            reason = f"it is not done after {self.seconds:.0f} s"
        elif self.memory and (code == -signal.SIGKILL or NO_MEMORY.search(output)):  # the system kills without memory
            reason = f"it takes more than {self.memory >> 20} MiB"
        return ChildError(reason, code, log)


@cache
def _warn_unbounded() -> None:
    print("note: this system does not limit process memory; files from outside may fill it", file=sys.stderr)


def serve() -> None:
    """Answer every question of the parent until it ends; runs in the child."""
    function, seconds, memory, descriptor = sys.argv[2:]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in whatever library it is
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
    pipe = Connection(int(descriptor))
    with contextlib.suppress(OSError):  # a system out of memory ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    bound(resource.RLIMIT_CORE, 0)
    if is_bounded := int(memory) > 0:
        bound(resource.RLIMIT_FSIZE, 1 << 20)
    else:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe.send_bytes(json.dumps(not is_bounded or bound(resource.RLIMIT_AS, int(memory))).encode())
    while True:
        try:
            question = pipe.recv_bytes()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, float(seconds) if is_bounded else 0)
        try:
            reply = {"value": answer(question)}
        except ChildError as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply = {"error": f"it takes more than {int(memory) >> 20} MiB"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(json.dumps(reply).encode())


def _end_with(parent: int) -> None:
    """End this process soon after its parent."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def bound(what: int, most: int) -> bool:
    """Lower a limit of this process to `most`, unless it is lower; return False if the system has no such limit."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(what, (most, most))
    except (OSError, ValueError):  # macOS refuses RLIMIT_AS
        return False
    return True
