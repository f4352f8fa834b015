"""What a command prints: warnings, and the progress of a run as a bar and a curve or as lines."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, TYPE_CHECKING

from hpcfl.errors import printable
from hpcfl.formatting import clock, curve
from hpcfl.storage.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType
    from rich.progress import Progress as Bar

LINE_EVERY_S = 30.0
_RESUMING = "resuming after round"
_PROGRESS = re.compile(r" round (\d+)/\d+ .* time left (.*)")
CURVE_WIDTH = 40
"""Evaluations in the curve of the last ones, which fits on a line of 80 characters."""


class Progress:
    """Progress of one run; silent with `--quiet` and on all ranks but the server."""

    def __init__(self, log: Callable[[str], None] | None = None, quiet: bool = False) -> None:
        self._log = log
        self._console = console() if log is not None and not quiet else None
        self._bar: Bar | None = None
        self._rounds = self._first = 0
        self._began_s = self._last_line_s = 0.0

    def start(self, done: int, rounds: int) -> None:
        """Start at `done` of `rounds` rounds."""
        self._rounds, self._first = rounds, done
        self._began_s = self._last_line_s = time.monotonic()
        if 0 < done < rounds:
            self.say(f"{_RESUMING} {done} of {rounds}")
        if self._console is not None and self._console.is_terminal and done < rounds:
            self._bar = _bar(self._console)
            self._bar.add_task("rounds", total=rounds, completed=done, accuracy="-", curve="")
            self._bar.start()

    def round_done(self, done: int, ledger: Ledger, is_last: bool) -> None:
        """Show that `done` rounds are complete; `is_last`: no round follows, also where more were planned."""
        accuracy = f"{ledger.last('accuracy_mean'):.2%}" if ledger.metrics else "-"
        if ledger.diverged.any():
            accuracy += f"  diverged {ledger.diverged.sum()}"
        if self._bar is not None:
            last = ledger.column("accuracy_mean")[-CURVE_WIDTH:]
            drawn = curve(last, CURVE_WIDTH, self._bar.console.encoding) if len(last) > 1 else ""
            self._bar.update(self._bar.task_ids[0], completed=done, accuracy=accuracy, curve=drawn)
        now_s = time.monotonic()
        if is_last or now_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now_s
            passed_s = now_s - self._began_s
            left_s = passed_s / (done - self._first) * (self._rounds - done)
            time_text = f"took {clock(passed_s)}" if is_last else f"time left {clock(left_s)}"
            line = f"round {done}/{self._rounds}  accuracy {accuracy}  {time_text}"
            if self._bar is None:
                self.say(line)
            elif self._log is not None:
                self._log(line)

    def say(self, text: str) -> None:
        """Print a line (unless silent) and log it; output that the system refuses, as on a full disk, is
        dropped."""
        if self._log is not None:
            self._log(text)
        if self._console is not None:
            with _dropped_if_refused(sys.stdout):
                self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def logged_progress(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return the rounds done and the time left, as `Progress` logged them last; None before it did so.

    Lines of an attempt that was resumed later do not count.
    """
    for line in reversed(lines):
        if found := _PROGRESS.search(line):
            return int(found[1]), found[2]
        if _RESUMING in line:
            break
    return None


LOG = logging.getLogger("hpcfl")
"""Gets the warnings of all modules."""
_OF_LIBRARIES = logging.getLogger("py.warnings")


class WarningHandler(logging.Handler):
    """Gives the text of each warning to `show`, once; keeps them until there is a `show`."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._show = show
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning whose text is new."""
        text = record.getMessage()
        if text not in self._texts:
            self._texts.append(text)
            if self._show is not None:
                self._show(text)

    def show_by(self, show: Callable[[str], None]) -> None:
        """Give the texts so far, and all later ones, to `show`."""
        self._show = show
        for text in self._texts:
            show(text)

    def forget(self) -> None:
        """Show all texts again."""
        self._texts.clear()


def _print_warning(text: str) -> None:
    print_line(f"hpcfl: warning: {printable(' '.join(text.splitlines()))}", sys.stderr)


TERMINAL = WarningHandler(_print_warning)
"""Prints to standard error, also under `--quiet`."""


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Give a handler the warnings inside the block: the package's and those of libraries."""
    with warnings.catch_warnings(), ExitStack() as at_exit:
        # unlike logging.captureWarnings, the text alone: where a library warns is of no use to a user
        warnings.showwarning = lambda message, *_: _OF_LIBRARIES.warning("%s", message)
        for logger in (LOG, _OF_LIBRARIES):
            logger.addHandler(handler)
            at_exit.callback(logger.removeHandler, handler)
        yield


@contextmanager
def silenced() -> Iterator[None]:
    """Drop the warnings inside the block: the package's and those of libraries."""
    with warnings.catch_warnings(), ExitStack() as at_exit:
        warnings.simplefilter("ignore")
        at_exit.callback(LOG.setLevel, LOG.level)
        LOG.setLevel(logging.CRITICAL)
        yield


def print_line(text: str, stream: IO[str]) -> None:
    """Print a line at once; drop it if the system refuses it, as on a full disk."""
    with _dropped_if_refused(stream):
        print(text, file=stream, flush=True)


@contextmanager
def _dropped_if_refused(stream: IO[str]) -> Iterator[None]:
    """Drop output inside the block that the system refuses."""
    try:
        yield
    except OSError:
        drop_buffered(stream)


def drop_buffered(stream: IO[str]) -> None:
    """Drop text left in the buffer, which would fail again at Python's exit and change the exit code."""
    with suppress(OSError), ExitStack() as at_exit:
        number = stream.fileno()
        kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        at_exit.callback(os.close, kept)
        at_exit.callback(os.close, nowhere)
        at_exit.callback(os.dup2, kept, number)
        os.dup2(nowhere, number)
        stream.flush()


def console() -> Console:
    """Return a rich console on standard output, without highlighting."""
    # imported here: silent ranks start faster without it
    from rich.console import Console

    class LikePrint(Console):
        def on_broken_pipe(self) -> None:
            """Raise the BrokenPipeError that is handled; rich's own would end the program."""
            raise

    return LikePrint(file=sys.stdout, highlight=False, emoji=False)


def _bar(console: Console) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class WithCurve(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for task in self.tasks:
                if task.fields["curve"]:
                    yield Text(f"last evaluations {task.fields['curve']}")

    return WithCurve(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
