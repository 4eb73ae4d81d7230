"""Errors that the command line prints as one sentence with an exit code, and helpers for such sentences."""

import contextlib
import difflib
import errno
import os
import re
import select
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

PrintLine = Callable[[str], None]  # a function that is called with one line of text: a notice or a warning

MAX_MESSAGE_CHARACTERS = 1500  # longer than any path, which is never shortened
UNREAD = 141  # exit code of a command whose output is no longer read: 128 + SIGPIPE, as in shells for `yes | head`
STOPPED = 75  # exit code of interrupted work that the same command continues
CONTINUES = "the same command continues"
"""First words of an exception's note for the user; other notes, such as JAX's, are for tracebacks."""


def without_secrets(text: str) -> str:
    """Replace user, password and query of each address in `text` by …"""
    text = re.sub(r"(\b[a-z][a-z0-9]*:/+)[^\s/'\"]+@", r"\1…@", text)
    text = re.sub(r"(?<![\w/])[\w.%+-]+:[^\s/'\"@]+@(?=\w)", "…@", text)  # as libraries quote it, without the scheme
    # In a store a question mark may be a pattern: s3://bucket/part-?.jsonl
    query = r"(\b(?:https?:/+[^\s?'\"]*\?|[a-z][a-z0-9]*:/+[^\s?'\"]*\?(?=[\w.%-]+=)))(?!…)[^\s'\"]*[^\s'\";:,.)]"
    return re.sub(query, r"\1…", text)


def one_sentence(message: str) -> str:
    """Return `message` on one printable line, without secrets and the middle of a very long one.

    Files may contain anything.
    """
    message = without_secrets(message)
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[: MAX_MESSAGE_CHARACTERS // 2]} […] {message[-MAX_MESSAGE_CHARACTERS // 3 :]}"
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in message)


class OneSentence(Exception):
    """An error whose message is one printable line without secrets."""

    def __init__(self, message: object = ""):
        super().__init__(one_sentence(str(message)))


class UsageError(OneSentence, ValueError):
    """An invalid flag, file or shape: exit code 2, nothing was started and nothing was lost.

    The message is one sentence: the value, the allowed values and the line to type.
    """


FLAG = re.compile(r"--(?:([a-z]+)\.)?((?:no-)?[a-z0-9-]+)( (?=[A-Z0-9]))?")


@contextlib.contextmanager
def name_arguments(*arguments: str) -> Iterator[None]:
    """Name fields and `arguments` instead of flags in a `UsageError`: `mesh.model` for `--mesh.model`."""

    def name_field(flag: re.Match) -> str:
        section, name, equals = flag[1], flag[2].replace("-", "_"), "=" if flag[3] else ""
        if section is None:
            return name + equals if name in arguments else flag[0]
        if name.startswith("no_"):
            return f"{section}.{name.removeprefix('no_')}=False{flag[3] or ''}"
        return f"{section}.{name}{flag[3] or ''}"

    try:
        yield
    except UsageError as error:
        message = re.sub(r"--simulate (\d+)", r"call mjax.simulate(\1) first", str(error))
        raise UsageError(FLAG.sub(name_field, message)) from error.__cause__


def check_options(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Reject keyword arguments that a function of `mjax` does not have.

    Raises:
      UsageError: one of them is not known.
    """
    for option in set(options) - set(known):
        near = suggestion(option, known, f"it has {', '.join(known)}")
        raise UsageError(f"mjax.{function} has no argument {option}; {near}")


class RunError(OneSentence, RuntimeError):
    """A run cannot continue (a full disk, a damaged checkpoint with none before it): exit code 1."""


class UnhealthyError(RunError):
    """A run that skips steps or diverges, and would do so again: exit code 3."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`."""
    if isinstance(error, UnhealthyError):
        return 3
    return 2 if isinstance(error, UsageError) else 1


def explain(error: BaseException) -> int:
    """Print an error, as one sentence if the user can fix it, and return the exit code."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(CONTINUES)]
    if isinstance(error, KeyboardInterrupt):
        words = ["stopping", *notes] if notes else ["interrupted", "completed files are intact"]
        print(f"mjax: {'; '.join(words)}", file=sys.stderr)
        return STOPPED if notes else 130
    if isinstance(error, BrokenPipeError) and output_is_unread():
        return UNREAD
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UsageError(f"{error.filename} is longer than the file system allows; choose a shorter name")
    if isinstance(error, OSError):
        advice = "what was saved is intact, the same command continues from it"
        print(f"mjax: error: {without_secrets(str(error))}; {advice}", file=sys.stderr)
    elif isinstance(error, UsageError | RunError):
        print(f"mjax: error: {'; '.join([str(error), *notes])}", file=sys.stderr)
    else:
        print(without_secrets("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return exit_code(error)


def output_is_unread() -> bool:
    """Return True if stdout or stderr is no longer read; redirect it, so that Python prints no error at exit."""
    broken = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_broken(stream)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in broken:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return bool(broken)


def _is_broken(stream) -> bool:
    """True if `stream` writes into a pipe or socket without a reader."""
    try:
        file = stream.fileno()
    except (OSError, ValueError):  # not a real file, or a closed one
        return False
    poll = select.poll()
    poll.register(file, 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def check_folder(flag: str, file: Path) -> None:
    """Reject an output file whose folder does not exist, before any work is done.

    Raises:
      UsageError: the folder does not exist.
    """
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: there is no folder {file.parent}; create it, or use another path")


def check_picture(flag: str, file: Path) -> None:
    """Reject a figure in an unsupported format, or whose folder does not exist.

    Raises:
      UsageError: the figure could not be written.
    """
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{flag} {file} is not a picture; use a name that ends in .png, .pdf or .svg")
    check_folder(flag, file)


def suggestion(word: str, known: Iterable[str], otherwise: str, form: str = "{}") -> str:
    """`did you mean x?` with the known name closest to `word`, in a form such as `--{}`; `otherwise` if none is."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {form.replace('{}', close[0])}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def join_shortened(names: Sequence[str], what: str = "") -> str:
    """`a and 3 more`."""
    return names[0] + (f" and {len(names) - 1} more{what}" if len(names) > 1 else "")


def shorten_list(names: list[str], most: int, more: str = "more") -> list[str]:
    """Return the first `most` names and the number of `more`."""
    return names if len(names) <= most else [*names[:most], f"{len(names) - most} {more}"]


def split_lines(text: str) -> list[str]:
    """Split `text` at line feeds only: `str.splitlines` also splits at U+2028 and U+0085, which are text."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def either(words: Iterable, conjunction: str = "or") -> str:
    """`a, b or c`."""
    *most, last = map(str, words)
    return f"{', '.join(most)} {conjunction} {last}" if most else last
