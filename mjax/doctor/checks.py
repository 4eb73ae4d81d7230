"""The list of checks, and how they run.

A check that touches a device or a disk runs in a child process, so that a driver that hangs or aborts costs only its
own line of the report. The child, python -m mjax.doctor.checks CHECK …, reads the facts from stdin and writes one line
of JSON for each check, among what libraries write. If it is silent for too long or ends early, its current check is
red, and another child continues with the next one.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from mjax.config import load_config
from mjax.doctor import RED, YELLOW, Facts, Finding
from mjax.errors import UsageError, first_line

CHECKS = (
    (None, "installation", ("python", "packages", "jax")),
    ("driver", "installation", ("driver",)),
    (None, "host", ("processes",)),
    ("devices", "devices", ("devices", "device memory")),
    ("devices", "numerics", ("attention", "experts", "numerics")),
    ("devices", "devices", ("matmul", "copy", "all-reduce")),
    (None, "host", ("memory", "shared memory", "open files")),
    ("disk", "host", ("storage",)),
)
"""The child process of some checks (None: without), their module of mjax/doctor, which is imported when one runs, and
their names: `all-reduce` is the function check_all_reduce."""
MODULES = {name: module for _, module, names in CHECKS for name in names}
FOUNDATION = "devices"  # the checks after it in its child need it
SILENT = "--limit 600 where a machine is slow to start; else the driver or the file system hangs: sudo dmesg | tail"
MEMORY_IN_USE = "nvidia-smi shows who holds a GPU's memory, another doctor perhaps: wait, or set CUDA_VISIBLE_DEVICES"
COMMAND = (sys.executable, "-m", "mjax.doctor.checks")
ANSWER = b"findings: "  # begins the lines of a child that are not a library's
MAX_LINES = 2000  # of these: XLA's stack traces are some hundred


def examine(facts: Facts, begin: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks and yield their findings; `begin` is called with the name of each check before it runs."""
    for child, rows in itertools.groupby(CHECKS, key=lambda row: row[0]):
        names = [name for _, _, names in rows for name in names]
        if child:
            yield from run_in_child(names, facts, begin)
        for name in names if child is None else ():
            begin(name)
            yield from run_check(name, facts)


def run_check(name: str, facts: Facts) -> list[Finding]:
    """The findings of a check; if it raises, one red finding, so that it never hides the others."""
    try:
        module = importlib.import_module(f"mjax.doctor.{MODULES[name]}")
        result = getattr(module, "check_" + re.sub(r"\W", "_", name))(facts)
        findings = [result] if isinstance(result, Finding) else list(result or ())
    except UsageError as error:
        findings = [Finding(RED, *str(error).rsplit("; ", 1))]
    except Exception as error:  # any error concerns this check alone
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = f"could not be checked: {type(error).__name__}: {first_line(error)}"
        findings = [Finding(RED, text, f"look at {line.filename}, line {line.lineno}, or report it")]
    return [_named(name, finding) for finding in findings]


def _named(name: str, finding: Finding) -> Finding:
    """The finding with its name; lack of GPU memory has its own advice."""
    out_of_memory = finding.status == RED and re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY", finding.found)
    return replace(finding, check=name, advice=MEMORY_IN_USE if out_of_memory else finding.advice)


def run_in_child(names: Sequence[str], facts: Facts, begin: Callable[[str], None]) -> Iterator[Finding]:
    """Run the checks `names` in child processes and yield their findings.

    The facts' limit is for each check; the first includes the child's start. If FOUNDATION is red, the checks after it
    are not run.
    """
    names = list(names)
    while names:
        for name, findings in _run_child(tuple(names), facts, begin):
            names.remove(name)
            yield from (_named(name, finding) for finding in findings)
            if name == FOUNDATION and names and any(finding.status == RED for finding in findings):
                yield Finding(YELLOW, ", ".join(names), f"fix the line {FOUNDATION} first", check="not checked")
                return


def _run_child(names, facts, begin) -> Iterator[tuple[str, list[Finding]]]:
    """Findings by check, until all are done or the child is lost; the last is then the check that lost it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen([*COMMAND, *names], env=facts.environment, start_new_session=True, bufsize=0, **pipes)
    log: deque[bytes] = deque(maxlen=MAX_LINES)
    values = vars(facts) | {"config": None, "runs": str(facts.runs)}
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(values).encode() + b"\n")
        for name in names:
            begin(name)
            answer = _answer(child.stdout, log, facts.limit)
            if not answer:
                silent = Finding(RED, f"no answer in {facts.limit:g} s", SILENT)
                yield name, [silent if answer is None else _lost(child, b"".join(log).split(ANSWER)[0])]
                return
            yield name, [Finding(**finding) for finding in json.loads(answer.removeprefix(ANSWER))]
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=5)  # it may hang in the kernel, where no signal reaches it


def _answer(stdout: IO[bytes], log: deque[bytes], limit: float) -> bytes | None:
    """The next answer of a child, after adding other lines to `log`; empty at the end, None after `limit` seconds."""
    while select.select([stdout], [], [], limit)[0]:
        line = stdout.readline()
        if not line or (line.startswith(ANSWER) and line.endswith(b"\n")):
            return line
        log.append(line)
    return None


def _lost(child: subprocess.Popen, log: bytes) -> Finding:
    """The finding of a check whose child has ended, with its last words."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    code = child.returncode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    # XLA's messages begin with E or F and the date; the stack trace after them does not help here.
    text = log.decode(errors="replace").strip()
    fatal = re.findall(r"^(?:E\d{4} .*for flag .*|F\d{4} .*)", text, re.MULTILINE)[:1]
    words = (fatal or text.splitlines() or ["no message"])[-1]
    flags = re.search("XLA_FLAGS|for flag", words)
    memory = " (as the system does when memory is short)" if code == -signal.SIGKILL else ""
    advice = "remove the flag from XLA_FLAGS, or correct it" if flags else "report it with this line"
    return Finding(RED, f"the process of this check {how}{memory}: {words[:300]}", advice)


def main(names: Sequence[str]) -> None:
    """In the child: run the named checks and write their findings. It ends with its parent, which closes stdin."""
    values = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    config = load_config(values["name"]) if values["name"] else None
    facts = Facts(**values | {"config": config, "runs": Path(values["runs"])})
    for name in names:
        findings = json.dumps([asdict(finding) for finding in run_check(name, facts)])
        print(f"\n{ANSWER.decode()}{findings}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
