"""Kills a command before each thing it does to its output folder, and runs it again.

    python -m tests.data.kill_points prepare|merge|dedup|clean|cache FOLDER [--overwrite] [--tasks]

Python announces every file that is opened, renamed or removed to its audit hooks. A forked copy of this process runs
the command with a hook that sends SIGKILL to itself at the first such event. The next copy is killed at the second
event, and so on, until one reaches the end. After each, the output must not be there, or be whole; then the same
command runs undisturbed, and must leave the files of a clean run, byte for byte. Prints the number of points.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

from mjax.commands.clean import CleanArguments, clean
from mjax.commands.data import MergeArguments, merge
from mjax.commands.dedup import DedupArguments, dedup
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data import cache
from mjax.data.corpus.near_duplicates import word_hashes
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import GPTDataset
from mjax.errors import UsageError

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}
COMPLETE = {"prepare": "d.idx", "merge": "d.idx", "dedup": "out.jsonl", "clean": "out.jsonl", "cache": ".json"}
"""How the name ends of the file that makes an output whole."""


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and ".tmp" not in str(file))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def in_a_copy(command: Callable[[], None], folder: Path, kill_at: int | None = None) -> int:
    """The exit status of `command` in a forked process that kills itself at its `kill_at`-th event in `folder`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        sys.addaudithook(hook)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            command()
        except UsageError as error:
            print(error, file=sys.stderr)
            os._exit(2)
    os._exit(0)


def deaths(command: Callable[[], None], folder: Path, start: Path) -> Iterator[int]:
    """Each point, from 1, at which `command` was killed; `folder`, a copy of `start`, is as that death left it."""
    for point in count(1):
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        status = in_a_copy(command, folder, point)
        if status == 0:
            return
        assert status == -signal.SIGKILL, status
        yield point


def command_of(kind: str, inputs: Path, folder: Path, overwrite: bool) -> Callable[[], None]:
    """Return the command to kill; its output is in `folder`."""
    texts, lines = (inputs / "b.txt", inputs / "a.txt"), inputs / "in.jsonl"
    common = {"inputs": (lines,), "output": folder / "out.jsonl", "overwrite": overwrite, "workers": 1}
    common["tasks"] = 3 if "--tasks" in sys.argv else 1

    def keep_indices() -> None:
        GPTDataset(IndexedDataset(inputs / "a"), range(1), 9, 5, 1, cache=cache.IndexCache([folder]))

    return {
        "prepare": lambda: prepare(
            PrepareArguments(
                output=f"{folder}/d", inputs=texts, tokenizer="bytes", overwrite=overwrite, tasks=common["tasks"]
            )
        ),
        "merge": lambda: merge(MergeArguments(f"{folder}/d", (f"{inputs}/a", f"{inputs}/b"), overwrite)),
        "dedup": lambda: dedup(DedupArguments(**common, threshold=1)),  # one band: few files
        "clean": lambda: clean(CleanArguments(**common, min_tokens=15)),
        "cache": keep_indices,
    }[kind]


def main() -> None:
    kind, place, overwrite = sys.argv[1], Path(sys.argv[2]), "--overwrite" in sys.argv
    inputs, folder, start = place / "inputs", place / "out", place / "start"
    for directory in (inputs, start):
        directory.mkdir(parents=True)
    text = "It was a bright cold day in April and the clocks were striking thirteen"
    lines = (json.dumps({"text": text + end}) + "\n" for end in ("", "!", " donâ€™t", ""))
    (inputs / "in.jsonl").write_text("".join(lines))
    with redirect_stdout(None):
        for name in ("a", "b"):
            (inputs / f"{name}.txt").write_text(f"a text by the name of {name}")
            prepare(PrepareArguments(output=f"{inputs}/{name}", inputs=(inputs / f"{name}.txt",), tokenizer="bytes"))
        if overwrite:  # older outputs, of another text
            prepare(PrepareArguments(output=f"{start}/d", inputs=(inputs / "a.txt",), tokenizer="bytes"))
            (start / "out.jsonl").write_text("an older output\n")
    cache.MIN_CACHED_BYTES = 0
    word_hashes("what is computed once is computed here, for all copies")
    command = command_of(kind, inputs, folder, overwrite)

    shutil.copytree(start, folder)
    assert in_a_copy(command, folder) == 0
    old, clean_run, point = contents(start), contents(folder), 0
    (complete,) = (name for name in clean_run if name.endswith(COMPLETE[kind]))
    for point in deaths(command, folder, start):
        left = contents(folder)
        whole = left.get(complete) == clean_run[complete]
        if complete in left:
            assert whole or left[complete] == old[complete], point
            assert left.items() >= (clean_run if whole else old).items(), (point, sorted(left))
        refused = whole and not overwrite and kind != "cache"  # a whole output is not written again
        assert in_a_copy(command, folder) == (2 if refused else 0), point
        assert contents(folder) == clean_run, (point, sorted(contents(folder)))
        assert kind == "cache" or refused or not list(folder.glob("*.tmp")), point
    print(point)


if __name__ == "__main__":
    main()
