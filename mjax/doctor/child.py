"""Checks in a child process, so that a driver that hangs or aborts costs only its own line of the report.

The child, python -m mjax.doctor.child SETTINGS CHECK …, runs the given checks one after the other and writes one line
of JSON for each. If it is silent for too long or ends early, its current check is red, and another child continues with
the next one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mjax.config import load_config
from mjax.doctor import RED, YELLOW, Finding, advice_on, guarded, listed
from mjax.doctor.driver import Driver

SILENT = "--limit 600 where a machine is slow to start; else the driver or the file system hangs: sudo dmesg | tail"
COMMAND = (sys.executable, "-m", "mjax.doctor.child")
CHECKS = {
    "devices": ("devices:check_devices", "driver", "cuda", "complaints"),
    "device memory": ("devices:check_device_memory", "driver"),
    "attention": ("numerics:check_attention", "config"),
    "numerics": ("numerics:check_numerics",),
    "matmul": ("devices:check_matmul",),
    "copy": ("devices:check_copy",),
    "all-reduce": ("devices:check_all_reduce",),
    "storage": ("host:check_storage", "runs", "config", "name"),
    "programs": ("host:check_programs",),
}
"""By check: MODULE:FUNCTION in mjax/doctor, imported when it runs, and the settings it takes."""
ON_DISK = ("storage", "programs")
ON_DEVICES = tuple(name for name in CHECKS if name not in ON_DISK)
LAST_WORDS = 2000  # lines kept of a child's stderr: XLA's stack traces are some hundred


def run_in_child(
    names: Sequence[str],
    settings: dict,
    environment: Mapping[str, str],
    limit: float,
    begin: Callable[[str], None] = lambda name: None,
    command: Sequence[str] = COMMAND,
    foundation: str | None = None,
) -> Iterator[Finding]:
    """Run the checks `names` and yield their findings.

    Args:
      settings: plain values for the checks.
      environment: of the child.
      limit: seconds for each check; the first includes the child's start.
      begin: called with the name of each check before it runs.
      command: starts the child; its arguments are the settings and the names.
      foundation: a check that the later ones need; if it is red they are not run.
    """
    names = list(names)
    while names:
        for name, findings in _one_child(tuple(names), settings, environment, limit, begin, command):
            names.remove(name)
            yield from findings
            if name == foundation and any(finding.status == RED for finding in findings):
                if names:
                    yield Finding("not checked", YELLOW, listed(names), f"fix the line {foundation} first")
                return


def _one_child(names, settings, environment, limit, begin, command) -> Iterator[tuple[str, list[Finding]]]:
    """Findings by check, until all are done or the child is lost; the last is then the check that lost it."""
    try:
        child = subprocess.Popen(
            [*command, json.dumps(settings), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # not a file, so that a full or read-only disk does not prevent the report
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        text = f"cannot start a process for the check: {error.strerror or error}"
        yield names[0], [Finding(names[0], RED, text, "ulimit -a; free memory, or end processes")]
        return
    try:
        lines: queue.Queue[bytes] = queue.Queue()
        errors: deque[bytes] = deque(maxlen=LAST_WORDS)
        _forward(child.stdout, lines.put)
        listener = _forward(child.stderr, errors.append)
        for name in names:
            begin(name)
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                yield name, [Finding(name, RED, f"no answer in {limit:g} s", SILENT)]
                return
            if not line.endswith(b"\n"):  # nothing, or half an answer: the child is lost
                try:
                    code = child.wait(timeout=limit)
                except subprocess.TimeoutExpired:
                    text = f"the process of this check does not end in {limit:g} s"
                    yield name, [Finding(name, RED, text, SILENT)]
                    return
                listener.join(timeout=5)  # a process that the child left behind may hold the pipe
                yield name, [_lost(name, code, b"".join(errors).decode(errors="replace"))]
                return
            yield name, [Finding(**finding) for finding in json.loads(line)]
    finally:
        _end(child)


def _forward(stream, put: Callable[[bytes], None]) -> threading.Thread:
    """Pass on the lines of a pipe, then an empty one at its end, from a thread."""

    def read() -> None:
        with stream:
            for line in stream:
                put(line)
        put(b"")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _lost(name: str, code: int, errors: str) -> Finding:
    lines = [line for line in errors.splitlines() if line.strip()]
    # XLA's fatal message is a line that begins with F and the date; the stack trace after it does not help here.
    fatal = [line for line in lines if line[:1] == "F" and line[1:5].isdecimal()]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    words = (fatal or lines or ["no message"])[-1].strip()
    memory = " (as the system does when memory is short)" if code == -signal.SIGKILL else ""
    text = f"the process of this check {how}{memory}: {words[:300]}"
    return Finding(name, RED, text, advice_on(words, "report it with this line"))


def _end(child: subprocess.Popen) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, where no signal reaches it
            child.wait(timeout=5)


# --- In the child -----------------------------------------------------------------------------------------------------


class _Complaints(logging.Handler):
    """Keeps the last line of each log record: of a stack trace, the exception."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).strip().splitlines()[-1])


def main(arguments: list[str]) -> None:
    """Run the named checks and write their findings.

    All that a library prints goes to stderr, so that stdout holds only the lines of JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    complaints = _Complaints()
    logging.getLogger("jax").addHandler(complaints)
    values = json.loads(arguments[0])
    lists = {name: tuple(value) for name, value in values["driver"].items() if isinstance(value, list)}
    settings = values | {
        "driver": Driver(**values["driver"] | lists),
        "config": None if values["config"] is None else load_config(values["config"]),
        "runs": Path(values["runs"]),
        "complaints": complaints.lines,
    }

    def run(name: str) -> list[Finding]:
        path, *needed = CHECKS[name]
        module, function = path.split(":")
        check = getattr(importlib.import_module(f"mjax.doctor.{module}"), function)
        return check(*map(settings.get, needed))

    for name in arguments[1:]:
        findings = guarded(name, partial(run, name))
        print(json.dumps([asdict(finding) for finding in findings]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
