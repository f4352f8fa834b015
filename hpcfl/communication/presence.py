"""Whether the others are still there: signs of life between ranks that wait, and the launcher of them all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.errors import SilentRanks

Communicator = Any
"""MPI's, which only `world` imports."""

SIGN_TAG = 1
"""Tag of a sign of life; all other messages have another one."""

_FIRST_SIGN_S = 0.5
_SIGN_EVERY_S = 10.0
_LONGEST_LOOK_S = 1.0
_PAUSE_S = 1e-3

_LOOK_AT_LAUNCHER_EVERY_S = 1.0
# What only a rank has in its environment; SLURM_PROCID is not among them, for a batch script has it, too.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_BIRTH = 19
"""Place of the time at which a process began among the fields of `_status`."""
_ENDS_WITH_LAUNCHER = (
    "hpcfl: error: the launcher of this rank (pid {}) has died, so the rank ends; the last checkpoint stays, "
    "and the same command goes on from it\n"
)


class SignsOfLife:
    """Small messages between the server and each worker while they wait, so that a silent rank is noticed.

    The server listens to all workers, and each worker to the server. A rank gives signs while it waits and,
    by `give`, between pieces of its own work. A rank's silence counts only while this one waits and looks:
    after a job has been suspended as a whole, no rank is blamed for the time in which none could move.
    """

    def __init__(self, comm: Communicator, hosts: Sequence[str], timeout_s: float) -> None:
        """Know the hosts of all ranks, and after how many seconds a silent rank is given up."""
        self._comm, self._hosts, self._timeout_s = comm, hosts, timeout_s
        rank = comm.Get_rank()
        self._others = list(range(1, comm.Get_size())) if rank == 0 else [0]
        self._sign, self._last = np.array([rank], np.int64), np.array([-1 - rank], np.int64)
        self._others_ended: set[int] = set()
        self._going: dict[int, Any] = {}
        self._every_s = min(_SIGN_EVERY_S, timeout_s / 4)
        self._given_s = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Begin to wait; silence counts from here."""
        self._waited_s = 0.0
        self._heard_s = dict.fromkeys(self._others, 0.0)
        self._looked_s = time.monotonic()
        self._next_s = min(_FIRST_SIGN_S, self._every_s)

    def look(self, stage: str) -> None:
        """Give and take signs, where it is time to, while a wait goes on at this stage of the run.

        Raises SilentRanks, which names them and the stage.
        """
        self._pass_time()
        if self._waited_s < self._next_s:
            return
        self._next_s = self._waited_s + self._every_s
        self._give(self._looked_s)
        self._judge(stage)

    def give(self) -> None:
        """Give a sign of life in the midst of work, at most every few seconds, and take those that came."""
        self.take()
        now_s = time.monotonic()
        if now_s - self._given_s >= self._every_s:
            self._give(now_s)

    def _give(self, now_s: float) -> None:
        self._given_s = now_s
        for rank in self._others:
            # one that stands still takes nothing: what is on the way to it is enough
            if rank not in self._going or self._going[rank].Test():
                self._going[rank] = self._comm.Isend([self._sign, "i8"], rank, tag=SIGN_TAG)

    def end(self, stage: str) -> None:
        """Take all signs that are on their way: MPI may crash where it ends with messages that nobody took.

        Nobody gives signs from then on. Collective. Raises SilentRanks as `look` does.
        """
        self.begin()
        # messages between two ranks keep their order
        last = [self._comm.Isend([self._last, "i8"], rank, tag=SIGN_TAG) for rank in self._others]
        while self._heard_s or not all(going.Test() for going in (*last, *self._going.values())):
            time.sleep(_PAUSE_S)
            self._pass_time()
            self._judge(stage)

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s

    def take(self) -> None:
        """Take the signs that have come: those of a rank that seldom waits would pile up in its memory."""
        came = np.empty(1, np.int64)
        while self._comm.Iprobe(tag=SIGN_TAG):
            self._comm.Recv([came, "i8"], tag=SIGN_TAG)
            if came[0] >= 0:
                self._heard_s[int(came[0])] = self._waited_s
            else:
                self._others_ended.add(int(-1 - came[0]))

    def _judge(self, stage: str) -> None:
        self.take()
        for rank in self._others_ended:
            self._heard_s.pop(rank, None)
        late_s = self._waited_s - self._timeout_s
        silent = [rank for rank, heard_s in self._heard_s.items() if heard_s <= late_s]
        if silent:
            raise SilentRanks(self._told(silent, stage))

    def _told(self, silent: Sequence[int], stage: str) -> str:
        names = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in silent)
        them = "has" if len(silent) == 1 else "have"
        return (
            f"{names} {them} not been heard of for {self._timeout_s:g} s (run.timeout) {stage}: dead, "
            "stopped, or at one piece of work all the time; all ranks end, the last checkpoint stays, and "
            "the same command goes on from it; where one client takes so long, set run.timeout="
            f"{2 * self._timeout_s:g} or null"
        )


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Have this process end within seconds of its launcher's death, which may leave it behind.

    A rank left behind would hold the run folder's lock, and might wait for ever. The launcher is the nearest
    process above that is not a part of the rank, such as a script around it: mpirun, or what acts for it on
    this node. What a rank prints goes through the launcher, so hardly anybody reads why it ends. Nothing is
    done where the system does not show that process.
    """
    launcher = _launcher()
    try:
        birth = _status(launcher)[_BIRTH]
    except OSError:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_AT_LAUNCHER_EVERY_S):
            if _has_ended(launcher, birth):
                with suppress(OSError):
                    os.write(2, _ENDS_WITH_LAUNCHER.format(launcher).encode())
                os._exit(1)

    watcher = threading.Thread(target=watch, name="launcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _launcher() -> int:
    """Return the nearest process above this one that has not this rank's variables in its environment."""
    own = {f"{name}={os.environ[name]}".encode() for name in _RANK_VARIABLES if name in os.environ}
    pid = os.getppid()
    while own & _environment(pid):
        pid = int(_status(pid)[1])
    return pid


def _environment(pid: int) -> set[bytes]:
    """Return the variables that a process started with; none where it is not to be seen."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _has_ended(pid: int, birth: str) -> bool:
    """Whether a process is gone; its time of birth tells it from a later one of the same number."""
    try:
        status = _status(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        # such as no file descriptor left here: that says nothing of the other
        return False
    return status[0] in "ZX" or status[_BIRTH] != birth


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
