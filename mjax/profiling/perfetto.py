"""The trace as JSON for ui.perfetto.dev, with the part of the model in the name of each kernel.

The profiler's own trace calls a kernel by its instruction, `fusion.12`, and keeps at most a million events.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from mjax.profiling.kernels import Kernel, Trace


def write_perfetto(trace: Trace, file: Path) -> None:
    """Write `trace` to `file`, whose name ends in .json.gz: a process for each device and one for the host, a thread
    for each stream."""
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        stream.write(",\n".join(json.dumps(event) for event in _events(trace)))
        stream.write("\n]}\n")


def _events(trace: Trace) -> Iterator[dict]:
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}

    def place(process: str, thread: str) -> Iterator[dict]:
        if process not in processes:
            processes[process] = len(processes)
            yield _name("process_name", process, {"pid": processes[process]})
        if (process, thread) not in threads:
            threads[process, thread] = len(threads)
            yield _name("thread_name", thread, {"pid": processes[process], "tid": threads[process, thread]})

    for name, begin, end in trace.host:
        yield from place("host", "Python")
        yield _span(name, begin, end, processes["host"], threads["host", "Python"])
    for kernel in trace.kernels:
        yield from place(kernel.device, kernel.line)
        there = processes[kernel.device], threads[kernel.device, kernel.line]
        details = {"operation": kernel.source, "instruction": kernel.name}
        yield {**_span(_title(kernel), kernel.begin, kernel.end, *there), "cat": kernel.kind, "args": details}


def _title(kernel: Kernel) -> str:
    return f"{kernel.part}: {kernel.name}" if kernel.part else kernel.name


def _name(what: str, name: str, place: dict) -> dict:
    return {"ph": "M", "name": what, **place, "args": {"name": name}}


def _span(name: str, begin: float, end: float, process: int, thread: int) -> dict:
    return {"ph": "X", "name": name, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "pid": process, "tid": thread}
