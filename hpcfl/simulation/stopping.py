"""Requests to stop a run: signals, and the end of a SLURM job."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from hpcfl.communication.communicator import Communicator
from hpcfl.errors import ForcedStop

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

SAME_REQUEST_S = 1.0
"""Signals within this time of a request are the same request: a terminal and a launcher both deliver it."""


def notice_s(round_s: float, save_s: float) -> float:
    """Return the seconds before the end of a job in which a run can still stop.

    They hold a round with its evaluation, `round_s`, and a checkpoint, `save_s`, and some more.
    """
    return 1.5 * (round_s + save_s) + 10


class StopFlag:
    """A request to stop at the next round boundary: SIGTERM, SIGUSR1, SIGUSR2 or SIGINT, or SLURM's end time.

    The first signal only sets the flag; a second request, by any of these signals, raises ForcedStop. In a
    SLURM job the first SIGTERM after SIGUSR1 or SIGUSR2 does not: it is the time limit's, which leaves the
    round some seconds (KillWait) to end before SIGKILL comes anyway. Each rank has its own flag, so ranks
    agree before they act on it.
    """

    def __init__(self) -> None:
        """Install the handlers; in another than the main thread, where Python has none, only time counts."""
        self._requests: list[int] = []
        self._last_request_s = 0.0
        end_time = os.environ.get("SLURM_JOB_END_TIME", "")
        # a monotonic clock: later changes of the system clock have no effect
        self._end_s = time.monotonic() + int(end_time) - time.time() if end_time.isdecimal() else None
        self._in_slurm = "SLURM_JOB_ID" in os.environ
        is_main = threading.current_thread() is threading.main_thread()
        numbers = STOP_SIGNALS if is_main else ()
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}

    def is_requested(self, world: Communicator, needed_s: float) -> bool:
        """Agree whether to stop: after a signal on any rank, or where SLURM's end time leaves the server less
        than `needed_s`, the seconds of what would come next. Collective."""
        is_short = self._end_s is not None and self._end_s - time.monotonic() < needed_s
        return bool(world.maximum(bool(self._requests) or (world.is_server and is_short)))

    @property
    def is_interrupted(self) -> bool:
        """Whether a request was Ctrl-C, on this rank."""
        return signal.SIGINT in self._requests

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python, such as one of an MPI library
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignore these signals from now on: the process ends, and a signal would replace its exit code."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._requests and now_s - self._last_request_s < SAME_REQUEST_S:
            return
        if self._requests and not self._is_time_limit(number):
            raise ForcedStop(number)
        self._requests.append(number)
        self._last_request_s = now_s

    def _is_time_limit(self, number: int) -> bool:
        warned = set(self._requests) <= {signal.SIGUSR1, signal.SIGUSR2}
        return self._in_slurm and number == signal.SIGTERM and warned
