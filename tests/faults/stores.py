"""Faults of an object store: what the user of a run sees, and what is lost.

    python tests/faults/stores.py                          # everything, a quarter of an hour on two cores
    python tests/faults/stores.py --only "403" --markdown

Every row is `train.py` in separate processes, on moto's S3 server, which fails in the middle. Afterwards a machine
without local copies continues the run. Its losses are compared with an undisturbed run, and every checkpoint in the
store is read back. Exit code 1 if a row loses something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mjax.utils import stores
from tests.object_store import Server

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--config", "gpt_demo", "--data.mock", "--model.layers", "1", "--model.hidden", "32", "--model.heads", "2",
    "--model.sequence", "16", "--model.vocabulary", "64", "--train.global-batch", "2", "--train.micro-batch", "2",
    "--optimizer.warmup-steps", "1", "--optimizer.decay-steps", "9000", "--train.steps", "24",
    "--train.eval-interval", "0", "--checkpoint.interval", "4", "--log.sample-tokens", "0",
]  # fmt: skip
LONGEST = 4000  # steps of the undisturbed run
RUNS, RUN = "s3://bucket/runs", "s3://bucket/runs/one"
ABOUT = re.compile(r"s3://|s3fs|credential|bucket|lock", re.IGNORECASE)
CLOCK = "import runpy, sys, time; now = time.time; time.time = lambda: now() + {}; sys.argv[:] = sys.argv[1:]; "
CLOCK += "runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass
class Place:
    """A store and machines, which are folders of caches."""

    server: Server
    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, machine: str, *flags: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        """Start to train on a machine."""
        variables = {**os.environ, **self.server.environment(), "XDG_CACHE_HOME": str(self.folder / machine)}
        variables |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "300", "MJAX_COMPILED": str(self.folder / "c"), **environment}
        command = [*(before or (sys.executable,)), str(ROOT / "train.py"), "--runs", RUNS, "--name", "one"]
        log = (self.folder / f"{machine}-{len(self.processes)}.log").open("w")
        options = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": self.folder, "env": variables}
        self.processes.append(process := subprocess.Popen([*command, *FLAGS, *flags], **options))
        process.log = Path(log.name)
        return process

    def train(self, machine: str, *flags: str, **options) -> tuple[int, list[str]]:
        """Train on a machine to the end: exit code, and the lines about the store."""
        return ended(self.start(machine, *flags, **options))

    def put(self, key: str, content: bytes = b"theirs") -> None:
        """Write an object with any key."""
        self.fs.call_s3("put_object", Bucket="bucket", Key=key, Body=content)

    @property
    def fs(self):
        """The store, as another program sees it."""
        import s3fs

        keys = {"key": "x", "secret": "y", "endpoint_url": self.server.url}
        return s3fs.S3FileSystem(**keys, use_listings_cache=False, skip_instance_cache=True)

    def lost(self, reference: dict[int, float]) -> list[str]:
        """Continue on a machine that has nothing, and return what is missing or different."""
        from mjax.checkpoint.folders import check_files, read_manifest, steps_in
        from mjax.checkpoint.mirror import fetch_files, local_run
        from mjax.run.metrics import read_metrics

        os.environ.update(self.server.environment(), XDG_CACHE_HOME=str(self.folder / "reader"))
        stores._file_system.cache_clear()
        folder, lost = local_run(RUN, lambda line: None), []
        steps = steps_in(folder / "checkpoints")
        saved = [int(step) for step in re.findall(r"checkpoint (\d+) saved", self.processes[-1].log.read_text())]
        if max(saved, default=0) not in (0, *steps):
            lost.append(f"checkpoint {max(saved)}: the store has {steps}")
        for step in steps:
            at = folder / "checkpoints" / str(step)
            files = read_manifest(at)["files"]
            fetch_files(at, files, files, lambda line: None)
            check_files(at, files, None)
        newest = max(steps, default=0)
        code, lines = self.train("last", "--train.steps", str(newest + 4))
        if code or (newest and f"continued after step {newest}" not in self.processes[-1].log.read_text()):
            lost.append(f"another machine cannot continue after {newest}: {lines[-1:]}")
        metrics = read_metrics(local_run(RUN, lambda line: None) / "metrics.jsonl")
        losses = {record["step"]: record["loss"] for record in metrics}
        if losses != {step: reference[step] for step in range(1, newest + 5)}:
            lost.append("losses differ")
        return lost


def ended(process: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code, and the lines about the store."""
    code = process.wait(400)
    lines = [line.strip() for line in process.log.read_text(errors="replace").splitlines()]
    if any("Traceback" in line for line in lines):
        raise AssertionError("\n".join(lines[-30:]))
    said = [line for line in lines if ABOUT.search(line) and not re.match(r"model|run  |curve|checkpoint  ", line)]
    return code, [line for line in said if not re.match(r"checkpoint \d+ copied|reading checkpoint", line)]


def until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come to it")
        time.sleep(0.05)


def says(process: subprocess.Popen, text: str) -> None:
    """Wait until a process has printed this."""
    until(lambda: text in process.log.read_text(errors="replace") or process.poll() is not None)


# --- The rows: each returns the exit code, and what the user sees -----------------------------------------------------


def failing(rule: Callable[[dict], object], **settings) -> Callable[[Place], tuple[int, list[str]]]:
    """A store that answers by a rule from the first step on."""

    def row(place: Place) -> tuple[int, list[str]]:
        process = place.start("one")
        says(process, "step 1/")
        place.server.rule = rule
        for name, value in settings.items():
            setattr(place.server, name, value)
        result = ended(process)
        place.server.rule, place.server.lag, place.server.delay = None, 0.0, 0.0
        return result

    return row


def at_first(count: int, answer: object, part: str = "/checkpoints/") -> Callable[[dict], object]:
    """A rule for the first writes of a kind."""
    left = iter(range(count))
    return lambda environ: (
        environ["REQUEST_METHOD"] == "PUT" and part in environ["PATH_INFO"] and next(left, None) is not None and answer
    )


def every(number: int, answer: object) -> Callable[[dict], object]:
    """A rule for every so many requests."""
    count = iter(range(1, 10**9))
    return lambda environ: next(count) % number == 0 and answer


def server_stops(place: Place) -> tuple[int, list[str]]:
    process = place.start("one")
    says(process, "checkpoint 4 copied")
    place.server.stop()
    time.sleep(8)
    place.server.start()
    return ended(process)


def store_is_gone(place: Place) -> tuple[int, list[str]]:
    """The store is gone for longer than the end waits; then the command in the error message continues."""
    process = place.start("one")
    says(process, "step 1/")
    place.server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT"
    code, lines = ended(process)
    place.server.rule = None
    again, _ = place.train("one")
    return code, [*lines, f"(the same command again: exit code {again})"]


def killed(place: Place) -> tuple[int, list[str]]:
    """kill -9 in an upload; another machine starts at once."""
    process = place.start("one", "--train.steps", "3900")
    place.server.kill_at(14, process.pid, "/checkpoints/")
    process.wait(200)
    return place.train("two")


def second_machine(ahead: int) -> Callable[[Place], tuple[int, list[str]]]:
    """A second process, whose clock is so many seconds ahead."""

    def row(place: Place) -> tuple[int, list[str]]:
        first = place.start("one", "--train.steps", "3900")
        says(first, "checkpoint 4 copied")
        result = place.train("two", before=(sys.executable, "-c", CLOCK.format(ahead)))
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == 75
        return result

    return row


def containers(place: Place) -> tuple[int, list[str]]:
    """Both are process 1 on the same host."""
    box = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable)
    first = place.start("one", "--train.steps", "3900", before=box)
    says(first, "checkpoint 4 copied")
    result = place.train("two", before=box)
    children = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout), signal.SIGTERM)
    assert ended(first)[0] == 75
    return result


def paused(place: Place) -> tuple[int, list[str]]:
    """The run pauses for longer than a minute, in which another machine takes the run over and ends it."""
    first = place.start("one", "--train.steps", "3900")
    says(first, "checkpoint 4 copied")
    first.send_signal(signal.SIGSTOP)
    second = place.start("two", "--train.steps", "3900")
    says(second, " copied to ")
    first.send_signal(signal.SIGCONT)
    result = ended(first)
    second.send_signal(signal.SIGTERM)
    assert ended(second)[0] == 75
    return result


def keys(*names: str) -> Callable[[Place], tuple[int, list[str]]]:
    """Foreign objects in the run, which another machine lists and continues."""

    def row(place: Place) -> tuple[int, list[str]]:
        place.train("one", "--train.steps", "8")
        victim = place.folder / "victim"
        victim.write_text("mine")
        for name in names:
            place.put(f"runs/one/{name}".format(victim=victim, up="/".join([".."] * 20)))
        result = place.train("two")
        assert victim.read_text() == "mine"
        assert not [file for file in place.folder.rglob("*") if file.is_file() and file.read_bytes() == b"theirs"]
        return result

    return row


def with_environment(**environment: str) -> Callable[[Place], tuple[int, list[str]]]:
    """A start that cannot work."""
    return lambda place: place.train("one", **environment)


def without_conditions(place: Place) -> tuple[int, list[str]]:
    place.server.conditions = False
    result = place.train("one")
    place.server.conditions = True
    return result


def damaged_lock(place: Place) -> tuple[int, list[str]]:
    place.put("runs/one/.lock", b"not JSON")
    return place.train("one")


ROWS: dict[str, Callable[[Place], tuple[int, list[str]]]] = {
    "503 for a tenth of the requests": failing(every(10, True)),
    "connections reset, a tenth of them": failing(every(10, "reset")),
    "403 for 30 s in the middle": failing(at_first(12, (403, "AccessDenied", "Access Denied"))),
    "expired token, renewed later": failing(at_first(12, (400, "ExpiredToken", "The provided token has expired."))),
    "server gone for 8 s in an upload": server_stops,
    "store fails longer than the end waits": store_is_gone,
    "slow link: 0.4 s for each write": failing(lambda environ: False, delay=0.4),
    "listing that lags 5 s": failing(lambda environ: False, lag=5.0),
    "killed in an upload, another machine starts": killed,
    "second machine, same clock": second_machine(0),
    "second machine, clock 120 s ahead": second_machine(120),
    "second machine, clock 120 s behind": second_machine(-120),
    "two containers, one host name, process 1 twice": containers,
    "paused for over a minute, then awake": paused,
    "folder markers": keys("", "checkpoints/", "checkpoints/4/"),
    "keys with .. and //": keys("{up}{victim}", "{victim}", "checkpoints/4/../../x"),
    "a key below a file, a mark without a manifest": keys("config.json/x", "checkpoints/99/commit_success.txt"),
    "a lock that is not JSON": damaged_lock,
    "no conditional writes": without_conditions,
    "wrong bucket": lambda place: place.train("one", "--runs", "s3://buckett/runs"),
    "no credentials": with_environment(
        AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_EC2_METADATA_DISABLED="true", HOME="/nonexistent"
    ),
}  # fmt: skip


def reference_losses(folder: Path) -> dict[int, float]:
    """The losses of a run on a disk that nothing disturbs."""
    command = [sys.executable, str(ROOT / "train.py"), "--runs", str(folder), "--name", "one", *FLAGS]
    command += ["--train.steps", str(LONGEST), "--checkpoint.interval", "0"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    lines = (folder / "one" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def main() -> int:
    """Run the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows that contain this")
    parser.add_argument("--markdown", action="store_true", help="print a table for the log")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        reference = reference_losses(Path(temporary) / "reference")
        if arguments.markdown:
            print("| fault | exit code | what the user sees | lost |\n| --- | ---: | --- | --- |", flush=True)
        for name, row in ROWS.items():
            if arguments.only not in name:
                continue
            with Server() as server:
                place = Place(server, Path(temporary) / str(abs(hash(name))))
                place.folder.mkdir()
                place.fs.mkdir("bucket")
                try:
                    code, lines = row(place)
                    lost = place.lost(reference)
                except AssertionError as error:
                    code, lines, lost = -1, [str(error)], ["the campaign failed"]
                finally:
                    for process in place.processes:
                        process.kill()
                    server.rule, server.lag = None, 0.0
                    with contextlib.suppress(FileNotFoundError):
                        place.fs.rm("bucket", recursive=True)
            failed += bool(lost)
            seen = list(dict.fromkeys(re.sub(r"\d+ s\b", "N s", line) for line in lines))
            shown = [*seen[:3], *(["…"] if len(seen) > 4 else []), *seen[3:][-1:]]
            form = "| {} | {} | {} | {} |" if arguments.markdown else "{}: exit code {}\n    {}\n    lost: {}"
            join = "<br>".join if arguments.markdown else "\n    ".join
            print(form.format(name, code, join(shown) or "nothing", "; ".join(lost) or "nothing"), flush=True)
            shutil.rmtree(place.folder)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
