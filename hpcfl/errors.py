"""The exit codes of all commands, and the exceptions that end one with a line and without a traceback."""

from __future__ import annotations

import signal
from typing import ClassVar
from unicodedata import category

FINISHED = 0
BAD_INPUT = 2
"""Exit code after a UserError."""
DIVERGED = 3
"""Exit code after a DivergedError."""
OUT_OF_MEMORY = 71
"""Exit code after an OutOfMemoryError: in the system's header sysexits.h, what a machine cannot do."""
STORAGE_ERROR = 74
"""Exit code after a StorageError; as the system's header sysexits.h has it."""
STOPPED = 75
"""Exit code of a run or table that was told to stop, and resumes when it is run again."""
INTERRUPTED = 130
"""Exit code after Control-C, where a command has no round to end."""


class UserError(Exception):
    """A mistake in what the user asked for: printed as one line, no traceback, exit code 2.

    The message names the offending key and value, what is allowed, and what to type next.
    """

    exit_code: ClassVar[int] = BAD_INPUT
    is_on_all_ranks = False
    """Whether all ranks raise it in the same step."""


class DivergedError(UserError):
    """Numbers that are nan or infinite, at which a run stops (`run.on_divergence`): exit code 3.

    It was asked for nothing impossible, but other settings are needed to continue.
    """

    exit_code = DIVERGED
    is_on_all_ranks = True


class OutOfMemoryError(UserError):
    """Memory of a process or a GPU that does not suffice: exit code 71.

    The message names rank and host, and what to change. A rank among several ends all ranks with it.
    """

    exit_code = OUT_OF_MEMORY


class ForcedStop(BaseException):
    """A second stop signal: the command ends in the midst of its work."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped at once by a second signal, {signal.Signals(number).name}; the last checkpoint stays, "
            "and the same command resumes from it"
        )
        self.exit_code = 128 + number
        """What a shell gives for a process that dies of the signal."""


class StorageError(Exception):
    """A write of a run's results that the machine refused, such as one to a full disk; it ends all ranks.

    The message names what could not be written, the last good checkpoint, and what to do before the same
    command resumes.
    """

    exit_code: ClassVar[int] = STORAGE_ERROR


class RankTimeoutError(Exception):
    """Ranks that this one waited for and has not heard of for `run.timeout` seconds; it ends all ranks."""

    exit_code: ClassVar[int] = 1


MAX_CHARACTERS = 2000
"""Of an error that is printed."""


def printable(text: str) -> str:
    """Return a text whose characters a terminal shows: others, which may be commands to it, are escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() or category(one) == "Zs" else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def for_terminal(error: Exception) -> str:
    """Return what is printed of an error: one line, of no more characters than somebody reads."""
    said = printable(" ".join(str(error).splitlines()))
    half = MAX_CHARACTERS // 2
    return said if len(said) <= MAX_CHARACTERS else f"{said[:half]} ... {said[-half:]}"


def one_line(error: BaseException) -> str:
    """Return what an error of somebody else's says, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
