"""Measure how long a checkpoint blocks training, and its cost for the step that follows.

    python benchmarks/checkpoint_blocking.py                      # on this machine's devices
    python benchmarks/checkpoint_blocking.py --rounds 3 --runs s3://bucket/runs
    python benchmarks/checkpoint_blocking.py --wait 1 --model.sequence 32 --train.micro-batch 1 --train.global-batch 1

With --wait the loop sleeps where it would wait for an accelerator: the cores are free, as with a GPU.

Three contenders run in turns: no checkpoints, checkpoints on the disk, and checkpoints that are also copied to a store,
which is a server on the loopback if --runs is left out (`pip install 'moto[server]' s3fs`). The numbers come from
metrics.jsonl: `checkpoint_blocked_seconds`, and the `seconds` of the step after a checkpoint over the median of the
steps without one before it.
"""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mjax.run.metrics import read_metrics
from mjax.utils.stores import mirror_address

ROOT = Path(__file__).resolve().parent.parent
EVERY = 8  # steps between two checkpoints
SETTINGS = "--data.mock --precision.compute fp32 --optimizer.warmup-steps 2 --train.eval-interval 0"

WAITING = """
import runpy, sys, time
sys.path.insert(0, {root!r})
from mjax.run.loop import Run
record = Run._record
Run._record = lambda *arguments: time.sleep({wait}) or record(*arguments)
runpy.run_path({root!r} + "/train.py", run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--runs", help="address of a folder of runs")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that the loop sleeps in each step")
    parser.add_argument("--config", default="gpt_demo")
    arguments, flags = parser.parse_known_args()
    figures: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        runs = arguments.runs or stack.enter_context(_loopback())
        for turn in range(arguments.rounds):
            for name, where, every in (("none", folder, 0), ("disk", folder, EVERY), ("store", runs, EVERY)):
                at = f"{where}/{name}-{turn}"
                records = _train(arguments, flags, where, f"{name}-{turn}", every)
                figures.setdefault(name, []).extend(_figures(records))
                print(f"{at}: {len(records)} steps, median {_median(records):.3f} s", flush=True)
    print("\n| checkpoints | blocked, median (max) | the step after, over the median before it (max) |\n|---|---|---|")
    for name, values in figures.items():
        blocked, ratios = zip(*values, strict=True)
        shown = f"{statistics.median(blocked):.3f} ({max(blocked):.3f}) s"
        print(f"| {name} | {shown} | {statistics.median(ratios) - 1:+.1%} ({max(ratios) - 1:+.1%}) |")


def _train(arguments, flags: list[str], runs: str, name: str, every: int) -> list[dict]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(WAITING.format(root=str(ROOT), wait=arguments.wait))
        script.flush()
        command = [sys.executable, script.name, "--config", arguments.config, "--runs", runs, "--name", name]
        length = ["--train.steps", str(arguments.steps), "--checkpoint.interval", str(every)]
        subprocess.run([*command, *SETTINGS.split(), *length, *flags], check=True, stdout=subprocess.DEVNULL)
    return read_metrics(mirror_address(runs) / name / "metrics.jsonl")


def _median(records: list[dict]) -> float:
    return statistics.median(record["seconds"] for record in records[2:])


def _figures(records: list[dict]) -> list[tuple[float, float]]:
    """Seconds blocked, and the next step over the median of those before; without checkpoints, of the same steps."""
    found = []
    for index in range(EVERY, len(records), EVERY):
        before = statistics.median(record["seconds"] for record in records[max(index - 5, 2) : index])
        blocked = records[index].get("checkpoint_blocked_seconds", 0.0)
        found.append((blocked, records[index]["seconds"] / before))
    return found


@contextlib.contextmanager
def _loopback():
    """s3://bucket/runs on moto's server, in a separate process."""
    import s3fs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(where | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"})
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                break
            time.sleep(0.2)
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/runs"
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
