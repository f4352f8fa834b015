"""Exit codes of all commands, and the exceptions that end a command with one line and no traceback."""

from __future__ import annotations

import signal
from typing import ClassVar
from unicodedata import category

FINISHED = 0
FAULT = 1
"""Exit code after an error of hpcfl itself, or in a Python file of the user's own."""
BAD_INPUT = 2
"""Exit code after a UserError."""
DIVERGED = 3
"""Exit code after a DivergedError."""
OUT_OF_MEMORY = 71
"""Exit code after an OutOfMemoryError (EX_OSERR in sysexits.h)."""
STORAGE_ERROR = 74
"""Exit code after a StorageError (EX_IOERR in sysexits.h)."""
STOPPED = 75
"""Exit code of a run or table that stopped early with a checkpoint; the same command resumes it."""
INTERRUPTED = 130
"""Exit code after Ctrl-C in a command that has no rounds."""
BROKEN_PIPE = 141
"""Exit code where the reader of a command's output has closed it, as in `hpcfl list | head`."""


class UserError(Exception):
    """A mistake in what the user asked for: printed as one line, no traceback, exit code 2.

    The message names the offending key and value, what is allowed, and what to type next.
    """

    exit_code: ClassVar[int] = BAD_INPUT
    is_on_all_ranks = False
    """Whether all ranks raise it in the same step."""


class DivergedError(UserError):
    """The run stopped because numbers became nan or infinite (`run.on_divergence`): exit code 3.

    The configuration was valid, but the run needs other settings to continue.
    """

    exit_code = DIVERGED
    is_on_all_ranks = True


class OutOfMemoryError(UserError):
    """A process or a GPU is out of memory: exit code 71.

    The message names rank and host, and what to change. Of several ranks, the failing one ends all.
    """

    exit_code = OUT_OF_MEMORY


class ForcedStop(BaseException):
    """A second stop signal arrived: the command ends at once."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped at once by a second signal, {signal.Signals(number).name}; the last checkpoint, "
            "if there is one, was kept; rerun the same command to resume"
        )
        self.exit_code = 128 + number
        """The code that a shell reports for a process killed by this signal."""


class DifferentTensorsError(ValueError):
    """A hook has returned other tensors for one client than for another: a mistake in a method."""


class StorageError(Exception):
    """The system refused to write results, for example on a full disk; this ends all ranks.

    The message names the file, what to fix before the same command, and of a run the last good checkpoint.
    """

    exit_code: ClassVar[int] = STORAGE_ERROR


class RankTimeoutError(Exception):
    """Other ranks sent no heartbeat for `run.timeout` seconds; this ends all ranks."""

    exit_code: ClassVar[int] = FAULT


MAX_CHARACTERS = 2000
"""Longest error that is printed."""


def printable(text: str) -> str:
    """Return a text in which characters that could control the terminal are escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or category(one) == "Zs" else one.encode("unicode_escape").decode()
        for one in text
    )


def for_terminal(error: Exception | str) -> str:
    """Return an error as one line of at most `MAX_CHARACTERS`."""
    line = printable(" ".join(str(error).splitlines()))
    half = MAX_CHARACTERS // 2
    return line if len(line) <= MAX_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


def one_line(error: BaseException) -> str:
    """Return the type and text of another library's error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
