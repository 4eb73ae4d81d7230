"""The position of a process of a run, and the messages about a process that is lost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Place:
    """Position of a process: `step` is the last it began, `doing` what it does there, `since` a time of this clock."""

    name: str
    step: int = 0
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def move(self, step: int, doing: str) -> None:
        """Record the position; the time restarts if it changes."""
        if (step, doing) != (self.step, self.doing):
            self.step, self.doing, self.since = step, doing, time.monotonic()

    def death(self) -> str:
        """Message about a process that closed its connection without a goodbye."""
        return f"{self.name} died, last heard of at step {self.step}"

    def silence(self, now: float) -> str:
        """Message about a silent process."""
        return f"{self.name} has not been heard of for {now - self.heard:.0f} s, since step {self.step}"

    def error(self, farewell: dict) -> tuple[str, int]:
        """Message about a process that ended with an error, and the exit code for it."""
        return f"{self.name} ended at step {self.step} with an error: {farewell['failed']}", farewell["code"]

    def unheard(self, now: float, suspect: float) -> str:
        """Suffix of its position, if it has been silent for more than `suspect` seconds."""
        silent = now - self.heard
        return f", not heard of for {silent:.0f} s" if silent > suspect else ""
