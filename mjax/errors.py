"""The ways mjax tells a person that something cannot go on; the command line turns them into exit codes.

And what such sentences are often made of.
"""

import difflib
import errno
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from mjax.pipes import UNREAD, output_is_unread

LONGEST = 1500  # characters of a sentence; more than a path can take on any system is shown of nothing


def one_sentence(message: str) -> str:
    """`message` on one line that can be printed, without the middle of a very long one: files may hold anything."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} […] {message[-LONGEST // 3 :]}"
    if message.isprintable():
        return message
    return "".join(
        letter
        if letter.isprintable() or (letter.isspace() and letter not in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
        else letter.encode("unicode_escape").decode()
        for letter in message
    )


class UsageError(ValueError):
    """A flag, file or shape that cannot work: exit code 2, nothing was started and nothing was lost.

    The message is one sentence that says what was given, what is allowed and what to type.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_sentence(str(message)))


class RunError(RuntimeError):
    """A run that had started cannot go on (a full disk, a damaged checkpoint with none before it): exit code 1."""

    def __init__(self, message: object = ""):
        super().__init__(one_sentence(str(message)))


class UnhealthyError(RunError):
    """A run that skips its steps or whose loss has left its course, and that would do so again: exit code 3."""


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with `error`."""
    if isinstance(error, UnhealthyError):
        return 3
    return 2 if isinstance(error, UsageError) else 1


def explain(error: BaseException) -> int:
    """Print what went wrong, in one sentence where a person can fix it, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("mjax: interrupted; completed files are intact", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError) and output_is_unread():
        return UNREAD
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UsageError(f"{error.filename} is a name longer than the file system takes; choose a shorter one")
    if isinstance(error, OSError):
        print(
            f"mjax: error: {error}; what was saved before is intact, the same command continues from it",
            file=sys.stderr,
        )
    elif isinstance(error, UsageError | RunError):
        print(f"mjax: error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return exit_code(error)


def check_folder(flag: str, file: Path) -> None:
    """Refuse a file that could not be written at the end, because its folder is not there.

    Raises:
      UsageError: there is no such folder.
    """
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: there is no folder {file.parent}; make it, or name another file")


def check_picture(flag: str, file: Path) -> None:
    """Refuse a picture of another format, or whose folder is not there.

    Raises:
      UsageError: it could not be written.
    """
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{flag} {file} is not a picture; let its name end in .png, .pdf or .svg")
    check_folder(flag, file)


def suggestion(word: str, known: list[str]) -> str:
    """`, did you mean 'x'?` when something close to `word` is known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def either(words: Iterable) -> str:
    """`a, b or c`."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last
