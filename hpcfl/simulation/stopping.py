"""Requests to stop a run: signals, and the end of a SLURM job."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """A request to stop at the next round boundary: SIGTERM, SIGUSR1, SIGUSR2 or SIGINT, or SLURM's end time.

    The signals only set the flag; a second SIGINT raises KeyboardInterrupt. Each rank has its own flag, so
    ranks agree before they act on it.
    """

    def __init__(self) -> None:
        """Install the handlers; only the main thread may do so."""
        self._requested = False
        self._interrupted = False
        end_time = os.environ.get("SLURM_JOB_END_TIME", "")
        self._end_time_s = int(end_time) if end_time.isdecimal() else None
        self._previous = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested

    def time_is_short(self, needed_s: float) -> bool:
        """Return whether SLURM ends the job within `needed_s` seconds; False where it gave no end time."""
        return self._end_time_s is not None and self._end_time_s - time.time() < needed_s

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, such as one of an MPI library.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._requested = True
