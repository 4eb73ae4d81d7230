"""`train.py --profile`: a trace of some steps, a table of where their time went, and the memory they took."""

from __future__ import annotations

import re

from mjax.errors import UsageError

MOST_STEPS = 100  # a trace grows by megabytes a step


def profiled_steps(text: str, last: int) -> range:
    """The steps that START:END names: from START up to END - 1, as in a slice.

    Args:
      text: as typed.
      last: the last step of the run.

    Raises:
      UsageError: it has another form, names no steps or too many, or steps that the run does not take.
    """
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise UsageError(f"--profile {text} is not START:END; type --profile 10:13 for steps 10, 11 and 12")
    start, end = map(int, match.groups())
    if start < 1:
        raise UsageError(f"--profile {text} starts at step {start}, and steps count from 1; type --profile 1:{end + 1}")
    if end <= start:
        raise UsageError(
            f"--profile {text} names no steps, because END is not included; type --profile {start}:{start + 3} for "
            f"steps {start} to {start + 2}"
        )
    if end - start > MOST_STEPS:
        raise UsageError(
            f"--profile {text} names {end - start} steps, and a trace grows by megabytes a step; use at most "
            f"{MOST_STEPS}, such as --profile {start}:{start + 3}"
        )
    if end - 1 > last:
        raise UsageError(
            f"--profile {text} ends with step {end - 1}, and the run with step {last}; use an END of at most {last + 1}"
        )
    return range(start, end)
