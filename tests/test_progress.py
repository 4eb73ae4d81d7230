"""The bar for long work."""

import io

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from mjax.utils.progress import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_is_drawn_on_terminal_only(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress("perplexity", 7, MofNCompleteColumn(), TextColumn("{task.description}"), console=console) as advance:
        advance(3)
        advance(4, description="windows")
    shown = console.file.getvalue()
    assert ("7/7" in shown and "perplexity" in shown and "windows" in shown) if terminal else shown == ""
