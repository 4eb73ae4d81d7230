"""Work counted instead of timed: a test that counts says the same on a busy machine."""

import sys


def calls_of(function, *arguments):
    """Calls of Python and C functions that `function(*arguments)` makes, and what it returns."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(before)
    return count, result
