"""What all pictures have in common: two inks, and a file that exists completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mjax.data.atomic import put

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

INK, SOFT_INK = "#222222", "#666666"


def save(figure: Figure, file: Path | BinaryIO) -> None:
    """Write a picture under a temporary name, then under its own, so that no reader sees half of it.

    Args:
      file: .png, .pdf or .svg; replaced if it exists. Or what a PNG is written to, such as a `BytesIO` in a notebook.
    """
    if not isinstance(file, Path):
        figure.savefig(file)
        return
    temporary = file.with_name(f"{file.stem}.tmp{file.suffix}")
    figure.savefig(temporary)
    put(temporary, file)
