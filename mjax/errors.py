"""The two ways mjax tells a person that something cannot go on; the command line turns them into exit codes."""


class UsageError(ValueError):
    """A flag, file or shape that cannot work: exit code 2, nothing was started and nothing was lost.

    The message is one sentence that says what was given, what is allowed and what to type.
    """


class RunError(RuntimeError):
    """A run that had started cannot go on (a full disk, a damaged checkpoint with none before it): exit code 1."""
