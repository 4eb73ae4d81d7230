"""Commands with limits, one after the other, and what they leave: the day of `gpu.py`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST = 5.0  # seconds that a command is worth being started with


@dataclass
class Ended:
    """A command that has run, or has not.

    Attributes:
      verdict: ok, left out, over its limit, killed as planned, or what ended it.
      seconds: it ran.
      output: what it printed; not kept in results.json.
    """

    part: str
    name: str
    command: str
    limit: float
    verdict: str
    seconds: float = 0.0
    output: str = field(default="", repr=False)

    @property
    def fine(self) -> bool:
        """True if it did the work it was started for."""
        return self.verdict in ("ok", "killed as planned")


class Day:
    """The results so far, and the commands that add to them."""

    def __init__(self, output: Path, seconds: float, tiny: bool):
        """`output` is made; `seconds` is the limit of all commands together; `tiny` says that sizes are toys."""
        self.folder, self.seconds, self.tiny = output.resolve(), seconds, tiny
        self.begun, self.part = time.monotonic(), ""
        self.ended: list[Ended] = []
        self.tables: list[tuple[str, str, list[dict]]] = []  # title, text in Markdown, values
        self.folder.mkdir(exist_ok=True)
        earlier = len(list(self.folder.glob("results*.json")))
        self.results = f"results-{earlier + 1}" if earlier else "results"

    def say(self, line: str) -> None:
        """On the screen and in day.log."""
        print(line, flush=True)
        with (self.folder / "day.log").open("a") as log:
            log.write(line + "\n")

    def run(
        self,
        name: str,
        command: list[str],
        limit: float,
        environment: dict[str, str] | None = None,
        kill_when: Callable[[], bool] | None = None,
    ) -> Ended:
        """Run a command in the repository; never raises.

        Args:
          limit: seconds; also ended when the day's are over.
          environment: variables in addition to this process's.
          kill_when: the command is killed, as by a crash, once this is true.
        """
        limit = min(limit, self.seconds - (time.monotonic() - self.begun))
        ended = Ended(self.part, name, shlex.join(command), round(limit, 1), "left out: no time")
        self.ended.append(ended)
        if limit < LEAST:
            self.say(f"-- {name}: {ended.verdict}")
        else:
            self.say(f"-- {name}, at most {limit:.0f} s: {ended.command}")
            begun = time.monotonic()
            try:
                self._run(ended, command, limit, environment or {}, kill_when)
            except OSError as error:
                ended.verdict = f"{type(error).__name__}: {error}"
            ended.seconds = round(time.monotonic() - begun, 1)
            self.say(f"-- {name}: {ended.verdict}, {ended.seconds:.0f} s")
        self.write()
        return ended

    def _run(self, ended: Ended, command: list[str], limit: float, environment, kill_when) -> None:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "160", **environment}
        if self.tiny:
            variables.setdefault("JAX_PLATFORMS", "cpu")
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        reason, finish = [], time.monotonic() + limit

        def watch() -> None:
            while process.poll() is None:
                over = time.monotonic() > finish
                if over or (kill_when is not None and kill_when()):
                    reason.append("over its limit" if over else "killed as planned")
                    os.killpg(process.pid, signal.SIGKILL)
                    return
                time.sleep(0.05)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            self.say("   " + line.rstrip()[:400])
        code = process.wait()
        watcher.join()
        ended.output = "".join(lines)
        ended.verdict = reason[0] if reason else "ok" if code == 0 else f"exit code {code}"

    def table(self, title: str, rows: list[dict], text: str | None = None) -> None:
        """Add a table; `text` is Markdown, made of `rows` by default."""
        text = markdown(rows) if text is None else text
        self.tables.append((title, text, rows))
        self.say(f"\n{title}\n\n{text}\n")
        self.write()

    def write(self) -> None:
        """The tables and commands, as they are now."""
        when, where = datetime.now(UTC).isoformat(timespec="seconds"), _device()
        verdicts = [
            {"part": e.part, "command": e.name, "result": e.verdict, "seconds": e.seconds, "limit": e.limit}
            for e in self.ended
        ]
        lines = [f"### {when[:10]}: {where}", ""]
        if self.tiny:
            lines += ["A dry run at toy size: the figures are of no use.", ""]
        lines += [markdown(verdicts), ""]
        for title, text, _ in self.tables:
            lines += [f"#### {title}", "", text, ""]
        (self.folder / f"{self.results}.md").write_text("\n".join(lines))
        commands = [{key: value for key, value in asdict(e).items() if key != "output"} for e in self.ended]
        tables = [{"title": title, "rows": rows} for title, _, rows in self.tables]
        record = {"date": when, "machine": where, "tiny": self.tiny, "command": shlex.join(sys.argv)}
        (self.folder / f"{self.results}.json").write_text(
            json.dumps(record | {"commands": commands, "tables": tables}, indent=1)
        )


def markdown(rows: list[dict]) -> str:
    """Rows as a table in Markdown; a column for every key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *(["–" if row.get(c) is None else str(row[c]) for c in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _device() -> str:
    asked = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return asked.stdout.strip().replace("\n", "; ") if asked and asked.returncode == 0 else "no GPU"
