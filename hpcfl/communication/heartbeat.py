"""Whether the other ranks are alive, and their launcher: what nothing else tells a rank that waits.

mpirun and SLURM end a job one of whose processes has died, where they see it die. They do not see a rank that
stands still, nor, for minutes or for ever, a node without power or a link that is cut: `Heartbeat` names that
rank. A launcher killed outright may leave its ranks behind, at work and with the lock on the run folder:
`die_with_launcher` ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcfl.errors import RankTimeoutError

Communicator = Any
"""MPI's, which only `world` imports."""

HEARTBEAT_TAG = 1
"""Tag of heartbeats; all other messages have another one."""

_BEAT_EVERY_S = 10.0
_LONGEST_LOOK_S = 1.0
_PAUSE_S = 1e-3
_ALIVE, _LAST = np.zeros(1, np.int8), np.ones(1, np.int8)

_PR_SET_PDEATHSIG = 1


class Heartbeat:
    """Small messages between the server and each worker, so that a rank that waits can name a silent one.

    The server listens to all workers, and each worker to the server. A rank beats while it waits and, by
    `beat`, between pieces of its own work. A rank's silence counts only while this one waits and looks: after
    a job has been suspended as a whole, no rank is blamed for the time in which none could move.

    Each receive names its rank. Receives from any source, and probes before them, lose messages in some
    versions of MPI as soon as ranks talk over a network.
    """

    def __init__(self, comm: Communicator, hosts: Sequence[str], timeout_s: float) -> None:
        """Know the hosts of all ranks, and after how many seconds a silent rank is given up."""
        self._comm, self._hosts, self._timeout_s = comm, hosts, timeout_s
        peers = range(1, comm.Get_size()) if comm.Get_rank() == 0 else [0]
        self._arrived = {peer: np.empty(1, np.int8) for peer in peers}
        self._coming = {peer: self._receive(peer) for peer in peers}
        self._going: dict[int, Any] = {}
        self._every_s = min(_BEAT_EVERY_S, timeout_s / 4)
        self._beat_s = time.monotonic()
        self.begin_wait()

    def begin_wait(self) -> None:
        """Begin to wait; silence counts from here."""
        self._waited_s = 0.0
        self._heard_s = dict.fromkeys(self._coming, 0.0)
        self._looked_s = time.monotonic()

    def wait(self, stage: str) -> None:
        """Look at the others while a wait goes on at this stage of the run.

        Raises RankTimeoutError, which names them and the stage.
        """
        self._pass_time()
        if self.beat():
            self._check(stage)

    def beat(self) -> bool:
        """Let the others know that this rank is alive, and hear of them, at most every few seconds.

        Returns whether it was time to.
        """
        now_s = time.monotonic()
        if now_s - self._beat_s < self._every_s:
            return False
        self._beat_s = now_s
        self._take()
        # one that has ended listens until it hears of this rank's end
        for peer in self._arrived:
            # one that stands still takes nothing: what is on the way to it is enough
            if peer not in self._going or self._going[peer].Test():
                self._going[peer] = self._send(_ALIVE, peer)
        return True

    def end(self, stage: str) -> None:
        """Receive all heartbeats that are on their way: MPI may crash where it ends with messages left.

        Nobody beats from then on. Collective. Raises RankTimeoutError as `wait` does.
        """
        self.begin_wait()
        # messages between two ranks keep their order
        going = [*self._going.values(), *(self._send(_LAST, peer) for peer in self._arrived)]
        while self._coming or not all(request.Test() for request in going):
            time.sleep(_PAUSE_S)
            self._pass_time()
            self._take()
            self._check(stage)

    def _receive(self, peer: int) -> Any:
        return self._comm.Irecv([self._arrived[peer], "i1"], peer, HEARTBEAT_TAG)

    def _send(self, beat: np.ndarray, peer: int) -> Any:
        return self._comm.Isend([beat, "i1"], peer, HEARTBEAT_TAG)

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s

    def _take(self) -> None:
        """Receive the heartbeats that have come, and be ready for the next ones."""
        for peer in list(self._coming):
            while self._coming[peer].Test():
                self._heard_s[peer] = self._waited_s
                if self._arrived[peer] == _LAST:
                    del self._coming[peer], self._heard_s[peer]
                    break
                self._coming[peer] = self._receive(peer)

    def _check(self, stage: str) -> None:
        late_s = self._waited_s - self._timeout_s
        silent = [peer for peer, heard_s in self._heard_s.items() if heard_s <= late_s]
        if not silent:
            return
        names = ", ".join(f"rank {peer} on {self._hosts[peer]}" for peer in silent)
        them = "has" if len(silent) == 1 else "have"
        raise RankTimeoutError(
            f"{names} {them} not been heard of for {self._timeout_s:g} s (run.timeout) {stage}: dead, cut "
            "off, stopped, or at one piece of work all the time; all ranks end, the last checkpoint stays, "
            "and the same command resumes from it; where one client takes so long, set run.timeout="
            f"{2 * self._timeout_s:g} or null"
        )


def die_with_launcher() -> None:
    """Have Linux kill this process when the one that started it dies: mpirun, or what acts for it here.

    Does nothing on other systems. A program between the two, such as a script that does not `exec` the rank,
    must end with the launcher itself.
    """
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # it died before
        os.kill(os.getpid(), signal.SIGKILL)
