"""Options of the tasks on long contexts (`long_contexts.py`), for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mjax.config.bounds import Bounds, Count, Seed


@dataclass(frozen=True)
class PositionsOptions:
    """Flags of the task positions."""

    length: Count | None = None
    """Tokens that the model reads at once; by default its sequence. Shorter documents are left out."""
    bins: Count = 16
    """Bins of positions, fewer where there are not as many positions."""
    spacing: Literal["log", "equal"] = "log"
    """Bins whose width grows with the position, or bins of equal width."""


@dataclass(frozen=True)
class NeedleOptions:
    """Flags of the task needle."""

    lengths: tuple[int, ...] = ()
    """Tokens of the whole text; by default an eighth, a quarter, a half and all of the model's sequence."""
    depths: Annotated[int, Bounds(ge=2)] = 11
    """Places of the fact, from the beginning of the text to its end."""
    samples: Count = 4
    """Cities and numbers asked for at each length and depth."""
    seed: Seed = 1234
    """Draws the cities, the numbers and the stretches of filler text."""
