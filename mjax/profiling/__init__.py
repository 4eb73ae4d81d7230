"""`train.py --profile`: a trace of some steps, a table of where their time went, and the memory they took."""

import re

from mjax.errors import UsageError

MAX_STEPS = 100  # a trace grows by megabytes a step


def parse_steps(text: str, last: int) -> range:
    """The steps of START:END: from START up to END - 1, as in a slice.

    Args:
      text: as typed.
      last: the last step of the run.

    Raises:
      UsageError: wrong format, no steps, too many steps, or steps outside the run.
    """
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    start, end = map(int, match.groups()) if match else (0, 0)
    if not 1 <= start < end <= last + 1 or end - start > MAX_STEPS:
        fix = f"with at most {MAX_STEPS} steps; type --profile 10:13 for steps 10, 11 and 12"
        raise UsageError(f"--profile {text} is not START:END from 1 to {last + 1} {fix}")
    return range(start, end)
