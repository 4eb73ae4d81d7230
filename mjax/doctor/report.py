"""Print findings as they come, in words as well as in colour."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from mjax.doctor.finding import FIGURE, GREEN, RED, YELLOW, Finding

# A word and a sign for each colour: not every terminal, log or reader sees colours.
MARKS = {
    GREEN: ("✓ ok", "green"),
    YELLOW: ("! look", "yellow"),
    RED: ("✗ fix", "bold red"),
    FIGURE: ("· shown", "default"),
}
NAME_WIDTH = 14


class Report:
    """Prints findings; on a terminal, also the current check below them.

    With `shown` false it prints nothing, for --json.
    """

    def __init__(self, console: Console | None = None, shown: bool = True):
        self.console = console or Console(highlight=False, soft_wrap=True, quiet=not shown)
        self._status = self.console.status("starting …") if self.console.is_terminal and shown else None

    def __enter__(self) -> Report:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_) -> None:
        if self._status:
            self._status.stop()

    def begin(self, check: str) -> None:
        """Show the name of the current check."""
        if self._status:
            self._status.update(f"checking {check} …")

    def show(self, finding: Finding) -> None:
        """Print one finding, and below it what to do."""
        mark, style = MARKS[finding.status]
        line = Text(f"{mark:<8}", style=style)
        line.append(f"{finding.check:<{NAME_WIDTH}}", style="bold")
        indent = " " * (8 + NAME_WIDTH)
        line.append(self._fold(finding.found, indent), style="default")
        if finding.advice:
            line.append(f"\n{indent}→ " + self._fold(finding.advice, indent + "  "), style="default")
        self.console.print(line)

    def close(self, findings: list[Finding]) -> None:
        """Print the number of findings of each status."""
        count = {status: sum(finding.status == status for finding in findings) for status in MARKS}
        parts = [f"{count[GREEN]} ok", f"{count[YELLOW]} to look at", f"{count[RED]} to fix"]
        style = MARKS[RED if count[RED] else YELLOW if count[YELLOW] else GREEN][1]
        end = "fix what is marked ✗ before training" if count[RED] else "ready to train"
        self.console.print(Text(f"\n{', '.join(parts)}: {end}", style=style))

    def _fold(self, text: str, indent: str) -> str:
        """Wrapped to the terminal's width; whole lines elsewhere, for grep."""
        if not self.console.is_terminal:
            return text
        width = max(40, self.console.width - len(indent))
        return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False).replace("\n", f"\n{indent}")
