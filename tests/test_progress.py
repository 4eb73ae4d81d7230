"""The bar for long work."""

import io
import re
from itertools import count
from threading import Event

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from mjax.utils import progress as module
from mjax.utils.progress import Pace, progress, show_progress


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_is_drawn_on_terminal_only(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress("perplexity", 7, MofNCompleteColumn(), TextColumn("{task.description}"), console=console) as advance:
        advance(3)
        advance(4, description="windows")
    shown = console.file.getvalue()
    assert ("7/7" in shown and "perplexity" in shown and "windows" in shown) if terminal else shown == ""


@pytest.fixture
def watch(monkeypatch):
    """Watch work whose every look finds 100 kB more of 6 MB, until its second half; returns what was printed."""
    monkeypatch.setattr(module, "INTERVAL", 0.001)
    monkeypatch.setattr(module, "FIRST_LINE", 0)

    def watch(terminal):
        console, looks, ended = Console(file=io.StringIO(), force_terminal=terminal, width=150), count(10), Event()
        monkeypatch.setattr(module, "Console", lambda **options: console)

        def read():
            look = next(looks)
            if look > 80:
                ended.set()
            return 100_000 * look

        with show_progress("read (1 of 15)", 6_000_000, read, Pace()):
            assert ended.wait(60)
        return console.file.getvalue()

    return watch


def test_watched_work_is_a_bar_on_terminal(watch):
    shown = watch(True)
    assert all(part in shown for part in ("read (1 of 15)", "6.0/6.0 MB", "MB/s"))


def test_watched_work_is_lines_elsewhere(watch, monkeypatch):
    """Bytes, their rate, and the time that is left; then only that it continues."""
    (line,) = watch(False).splitlines()
    assert line.startswith("read (1 of 15): 1.1 MB of 6.0 MB")
    monkeypatch.setattr(module, "NEXT_LINE", 0)
    lines = watch(False).splitlines()
    assert re.fullmatch(r"read \(1 of 15\): 1.6 MB of 6.0 MB, \d+.\d MB/s, 0:00:0\d left", lines[5])
    assert re.fullmatch(r"read \(1 of 15\): 0:\d\d:\d\d", lines[60])


def test_short_work_prints_nothing_elsewhere(capsys):
    with show_progress("merge (2 of 15)", 7, lambda: 3, Pace(), "tasks"):
        pass
    assert capsys.readouterr().err == ""
