"""Options of the task positions (`long_contexts.py`), for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mjax.config.bounds import Count


@dataclass(frozen=True)
class PositionsOptions:
    """Flags of the task positions."""

    length: Count | None = None
    """Tokens that the model reads at once; by default its sequence. Shorter documents are left out."""
    bins: Count = 16
    """Bins of positions whose width grows with the position, fewer where there are not as many positions."""
