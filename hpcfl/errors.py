"""The one exception that stands for a user's mistake."""

from __future__ import annotations

BAD_INPUT = 2
"""Exit code after a UserError."""


class UserError(Exception):
    """A mistake in what the user asked for: printed as one line, no traceback, exit code 2.

    The message names the offending key and value, what is allowed, and what to type next.
    """


def one_line(error: BaseException) -> str:
    """Return what an error of somebody else's says, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
