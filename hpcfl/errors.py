"""The exceptions that end a command without a traceback: a user's mistake, and a user who will not wait."""

from __future__ import annotations

import signal

BAD_INPUT = 2
"""Exit code after a UserError."""


class UserError(Exception):
    """A mistake in what the user asked for: printed as one line, no traceback, exit code 2.

    The message names the offending key and value, what is allowed, and what to type next.
    """


class StoppedAtOnce(BaseException):
    """A second stop signal: the command ends in the midst of its work, with one line and no traceback."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped at once by a second signal, {signal.Signals(number).name}; the last checkpoint stays, "
            "and the same command goes on from it"
        )
        self.code = 128 + number
        """Exit code of the command: what a shell gives for a process that dies of the signal."""


def one_line(error: BaseException) -> str:
    """Return what an error of somebody else's says, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
