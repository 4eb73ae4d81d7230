"""A progress bar and a spinner, on a terminal only: elsewhere nothing is printed. And a table of facts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
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
