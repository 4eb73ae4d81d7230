"""Folders outside the run folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path | None:
    """Folder of everything that mjax can make again: mjax in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if home.startswith("~") else Path(home) / "mjax"  # not everybody has a home
