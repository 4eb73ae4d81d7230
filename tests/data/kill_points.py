"""Kills a command before each thing it does to its output folder, and runs it again.

    python -m tests.data.kill_points prepare|merge FOLDER [--overwrite]

Python announces every file that is opened, renamed or removed to its audit hooks. A forked copy of this process runs
the command with a hook that sends SIGKILL to itself at the first such event, the next copy at the second, and so on,
until one reaches the end. After each, the dataset must not be there, or be whole; then the same command runs
undisturbed, and must leave the files of a clean run, byte for byte. Prints the number of points.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

from mjax.commands.merge import MergeArguments, merge
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.indexed import IndexedDataset
from mjax.errors import UsageError

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def in_a_copy(command: Callable[[], None], folder: Path, kill_at: int | None) -> int:
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


def main() -> None:
    kind, place, overwrite = sys.argv[1], Path(sys.argv[2]), "--overwrite" in sys.argv
    inputs, folder, start = place / "inputs", place / "out", place / "start"
    for directory in (inputs, start):
        directory.mkdir(parents=True)
    for name in ("a", "b"):
        (inputs / f"{name}.txt").write_text(f"a text by the name of {name}")
        with redirect_stdout(None):
            prepare(PrepareArguments(output=f"{inputs}/{name}", inputs=(inputs / f"{name}.txt",), tokenizer="bytes"))
            if overwrite:  # an older dataset, of another text
                old = PrepareArguments(
                    output=f"{start}/d", inputs=(inputs / "a.txt",), tokenizer="bytes", overwrite=True
                )
                prepare(old)

    def command() -> None:
        if kind == "merge":
            merge(MergeArguments(f"{folder}/d", (f"{inputs}/a", f"{inputs}/b"), overwrite))
        else:
            files = (inputs / "b.txt", inputs / "a.txt")
            prepare(PrepareArguments(output=f"{folder}/d", inputs=files, tokenizer="bytes", overwrite=overwrite))

    shutil.copytree(start, folder)
    assert in_a_copy(command, folder, None) == 0
    old, clean = contents(start), contents(folder)

    point = 0
    for point in deaths(command, folder, start):
        left = {name: data for name, data in contents(folder).items() if ".tmp" not in name}
        whole = (folder / "d.idx").exists()
        if whole:
            assert left in (old, clean), (point, sorted(left))
            IndexedDataset(folder / "d")
        if whole and not overwrite:
            assert in_a_copy(command, folder, None) == 2, "a whole dataset is not written again"
        else:
            assert in_a_copy(command, folder, None) == 0, point
        assert contents(folder) == clean, (point, sorted(contents(folder)))
    print(point)


if __name__ == "__main__":
    main()
