"""Numbers in words and in tables of text."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

GB, MIB, GIB = 1e9, 2**20, 2**30


def human_bytes(count: float) -> str:
    """'23.79 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def duration(seconds: float) -> str:
    """'2:31' or '3:02:31'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_rows(rows: Mapping[str, Any]) -> list[str]:
    """One line per name and value, with aligned values; a newline in a value starts a line."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {value}".replace("\n", "\n" + " " * (width + 2)) for name, value in rows.items()]


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int | Container[str] = 1) -> list[str]:
    """Lines of a table, with at least two spaces between columns.

    Args:
      header: one word per column.
      rows: one cell per column.
      left: how many of the first columns are left-aligned, or the words of those that are; numbers are right-aligned.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    for column, word in enumerate(header):
        width = max(cell_len(row[column]) for row in cells)
        is_left = column < left if isinstance(left, int) else word in left
        for row in cells:
            spaces = " " * (width - cell_len(row[column]))
            row[column] = row[column] + spaces if is_left else spaces + row[column]
    return ["  ".join(row).rstrip() for row in cells]
