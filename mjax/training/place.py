"""Where a process of a run is, and what the others are told of one that is lost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Place:
    """Where a process is: `step` is the last it began, `doing` what it does there, `since` a time of this clock."""

    name: str
    step: int = 0
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def move(self, step: int, doing: str) -> None:
        """Note the place; the time starts anew if it is another one."""
        if (step, doing) != (self.step, self.doing):
            self.step, self.doing, self.since = step, doing, time.monotonic()

    def death(self) -> str:
        """What is said of one that closed its connection without a goodbye."""
        return f"{self.name} died, last heard of at step {self.step}"

    def silence(self, now: float) -> str:
        """What is said of one that is silent."""
        return f"{self.name} has not been heard of for {now - self.heard:.0f} s, since step {self.step}"

    def error(self, farewell: dict) -> tuple[str, int]:
        """What is said of one that ended with an error, and the exit code for it."""
        return f"{self.name} ended at step {self.step} with an error: {farewell['failed']}", farewell["code"]

    def unheard(self, now: float, suspect: float) -> str:
        """Added to where it is, if it has been silent for more than `suspect` seconds."""
        silent = now - self.heard
        return f", not heard of for {silent:.0f} s" if silent > suspect else ""
