"""The list of checks, and how they run.

Checks run in a child process, so that a driver or a disk that hangs or aborts costs only one line of the report. If the
child is silent for too long or ends early, its current check is red, and another child continues with the next one
(`mjax/utils/child.py`).
"""

import contextlib
import importlib
import json
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mjax.config import load_config
from mjax.doctor import RED, YELLOW, Finding, MachineInfo
from mjax.errors import UsageError, first_line
from mjax.utils.child import Child, ChildError

CHECKS = {
    **dict.fromkeys(("python", "packages", "jax", "driver", "processes"), "host"),
    **dict.fromkeys(("devices", "device memory"), "devices"),
    **dict.fromkeys(("attention", "experts", "numerics"), "numerics"),
    **dict.fromkeys(("matmul", "copy", "all-reduce"), "devices"),
    **dict.fromkeys(("memory", "shared memory", "open files", "storage"), "host"),
}
"""The module of mjax/doctor of each check; `all-reduce` is its function check_all_reduce."""
FOUNDATION = "devices"  # the checks of other modules than `host` need it
SILENT = "--timeout 600 where a machine is slow to start; else the driver or the file system hangs: sudo dmesg | tail"
MEMORY_IN_USE = "nvidia-smi shows who holds a GPU's memory, another doctor perhaps: wait, or set CUDA_VISIBLE_DEVICES"
ANSWER = "mjax.doctor.checks:answer"  # the function that a child calls


def examine(machine: MachineInfo, begin: Callable[[str], None], names: Iterable[str] = CHECKS) -> Iterator[Finding]:
    """Run checks in a child process, another one after each that is lost, and yield their findings.

    `machine` has the time limit of a check. If FOUNDATION is red, checks that need it are skipped. `begin` is called
    with the name of each check before it runs.
    """
    values = vars(machine) | {"config": None, "runs": str(machine.runs)}
    left_out: list[str] = []
    broken = False
    with contextlib.closing(Child(ANSWER, machine.limit, None, machine.environment)) as child:
        for name in names:
            if broken and CHECKS.get(name) != "host":
                left_out.append(name)
                continue
            begin(name)
            try:
                findings = [Finding(**finding) for finding in child.ask(json.dumps([name, values]).encode())]
            except ChildError as error:
                silent = Finding(RED, f"no answer in {machine.limit:g} s", SILENT)
                findings = [silent if error.code is None else _lost(error)]
            yield from (_with_name(name, finding) for finding in findings)
            broken = broken or (name == FOUNDATION and any(finding.status == RED for finding in findings))
    if left_out:
        yield Finding(YELLOW, ", ".join(left_out), f"fix the line {FOUNDATION} first", check="not checked")


def run_check(name: str, machine: MachineInfo) -> list[Finding]:
    """The findings of a check; if it raises, one red finding, so that it never hides the others."""
    try:
        module = importlib.import_module(f"mjax.doctor.{CHECKS[name]}")
        result = getattr(module, "check_" + re.sub(r"\W", "_", name))(machine)
        findings = [result] if isinstance(result, Finding) else list(result or ())
    except UsageError as error:
        findings = [Finding(RED, *str(error).rsplit("; ", 1))]
    except Exception as error:  # any error concerns this check alone
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = f"could not be checked: {type(error).__name__}: {first_line(error)}"
        findings = [Finding(RED, text, f"look at {line.filename}, line {line.lineno}, or report it")]
    return [_with_name(name, finding) for finding in findings]


def _with_name(name: str, finding: Finding) -> Finding:
    """The finding with its name; out of GPU memory, with the advice for that."""
    out_of_memory = finding.status == RED and re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY", finding.message)
    return replace(finding, check=name, advice=MEMORY_IN_USE if out_of_memory else finding.advice)


def answer(question: bytes) -> list[dict[str, Any]]:
    """Return the findings of a check; runs in the child."""
    name, values = json.loads(question)
    config = load_config(values["name"]) if values["name"] else None
    machine = MachineInfo(**values | {"config": config, "runs": Path(values["runs"])})
    return [asdict(finding) for finding in run_check(name, machine)]


def _lost(error: ChildError) -> Finding:
    """The finding of a check whose child has ended, with the last line of its log."""
    code = error.code or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    # XLA's messages begin with E or F and the date; the stack trace after them does not help here.
    fatal = re.findall(r"^(?:E\d{4} .*for flag .*|F\d{4} .*)", error.log, re.MULTILINE)[:1]
    line = (fatal or error.log.strip().splitlines() or ["no message"])[-1]
    flags = re.search("XLA_FLAGS|for flag", line)
    memory = " (as the system does when memory is short)" if code == -signal.SIGKILL else ""
    advice = "remove the flag from XLA_FLAGS, or correct it" if flags else "report it with this line"
    return Finding(RED, f"the process of this check {how}{memory}: {line[:300]}", advice)
