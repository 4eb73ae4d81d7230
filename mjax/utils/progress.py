"""A progress bar and a spinner on a terminal, a line now and then in a log, and a table of facts."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from rich import filesize
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table


@contextmanager
def progress(
    verb: str, total: int | None, *figures: ProgressColumn, console: Console | None = None, transient: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a bar; yields a function to call with how much of `total` was done since the last call.

    Args:
      verb: label in front of the bar.
      total: amount of work; None if unknown: the bar only moves.
      figures: columns after the bar; by default the share done and the elapsed time. If they show the task's
        description, which is empty at first, the function takes a new one as `description`.
      console: stderr by default; whatever prints while the bar is shown must use the same.
      transient: whether the bar disappears at the end.
    """
    console = console or Console(stderr=True)
    figures = figures or (TaskProgressColumn(), TimeElapsedColumn())
    columns = [TextColumn(verb), BarColumn(), *figures, TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=transient) as shown:
        task = shown.add_task("", total=total)
        yield lambda done, **changes: shown.update(task, advance=done, **changes)


INTERVAL, FIRST_LINE, NEXT_LINE = 0.2, 1.7, 30.0
"""Seconds between updates, until the first line without a terminal, and until the next line."""


class Pace:
    """The time of the next line about a command without a terminal."""

    def __init__(self):
        self.due = time.monotonic() + FIRST_LINE


@contextmanager
def show_progress(verb: str, total: int, count: Callable[[], int], pace: Pace, unit: str = "bytes") -> Iterator[None]:
    """Show the progress of other threads or processes: a bar, or without a terminal a line now and then.

    Args:
      verb: label.
      total: amount of work.
      count: returns how much of `total` is done; it is called in another thread.
      pace: of the command.
      unit: of `total`; for bytes their rate is shown.
    """
    console = Console(stderr=True)
    rate = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn(verb), BarColumn(), *rate, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        number, ended = shown.add_task(verb, total=total, completed=min(count(), total)), threading.Event()
        task = shown.tasks[0]

        def follow() -> None:
            while not ended.wait(INTERVAL):
                done = min(count(), total)
                task.total = total if done < total else None  # without, the bar moves
                shown.update(number, completed=done)
                if not console.is_terminal and time.monotonic() >= pace.due:
                    console.print(_line(task, unit), highlight=False, soft_wrap=True, markup=False)
                    pace.due = time.monotonic() + NEXT_LINE

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
        task.total = total
        shown.update(number, completed=total)


def _line(task: Task, unit: str) -> str:
    """`read (1 of 15): 1.2 GB of 5.0 GB, 35.1 MB/s, 0:01:48 left`."""
    if task.total is None:
        return f"{task.description}: {timedelta(seconds=int(task.elapsed))}"
    if unit != "bytes":
        return f"{task.description}: {task.completed:,.0f} of {task.total:,.0f} {unit}"
    line = f"{task.description}: {filesize.decimal(int(task.completed))} of {filesize.decimal(int(task.total))}"
    if not task.speed:
        return line
    return f"{line}, {filesize.decimal(int(task.speed))}/s, {timedelta(seconds=int(task.time_remaining))} left"


def status(text: str, console: Console) -> AbstractContextManager[object]:
    """Show a spinner with `text` for work whose length is unknown; it disappears at the end."""
    return console.status(f"{text} …") if console.is_terminal else nullcontext()


def facts(rows: Iterable[Sequence[str]], justify: JustifyMethod = "left") -> Table:
    """A table of names, values and remarks; `justify` is for the last column."""
    rows = list(rows)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for _ in rows[0][1:-1]:
        table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
