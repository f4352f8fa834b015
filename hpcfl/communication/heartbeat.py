"""Heartbeats: a rank that waits learns whether the other ranks, and the launcher, are alive.

mpirun and SLURM end a job when they see one of its processes die. They do not notice a rank that hangs, nor,
for minutes or for ever, a node without power or a cut link: `Heartbeat` names that rank. A killed launcher
may leave ranks behind that still work and hold the lock on the run folder: `die_with_launcher` ends them.
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
"""The MPI module, which only `communicator` imports."""

HEARTBEAT_TAG = 1
"""Tag of heartbeats; all other messages have another one."""

_BEAT_EVERY_S = 10.0
_LONGEST_LOOK_S = 1.0
_PAUSE_S = 1e-3
_ALIVE, _LAST = np.zeros(1, np.int8), np.ones(1, np.int8)

_PR_SET_PDEATHSIG = 1


class Heartbeat:
    """Small messages between the server and each worker, so that a rank that waits can name a silent one.

    The server listens to all workers, and each worker to the server. A rank sends heartbeats while it waits
    and, by `beat`, between pieces of its own work. Silence counts only while this rank waits: if the whole
    job was suspended, no rank is blamed for that time. Each receive names its source rank: in some versions
    of MPI, receives from any source lose messages over a network.
    """

    def __init__(self, comm: Communicator, hosts: Sequence[str], timeout_s: float) -> None:
        """Take the hosts of all ranks, and the seconds after which a silent rank counts as lost."""
        self._comm, self._hosts, self._timeout_s = comm, hosts, timeout_s
        peers = range(1, comm.Get_size()) if comm.Get_rank() == 0 else [0]
        self._arrived = {peer: np.empty(1, np.int8) for peer in peers}
        self._coming = {peer: self._receive(peer) for peer in peers}
        self._going: dict[int, Any] = {}
        self._every_s = min(_BEAT_EVERY_S, timeout_s / 4)
        self._beat_s = time.monotonic()
        self.begin_wait()

    def begin_wait(self) -> None:
        """Start to wait; silence counts from here."""
        self._waited_s = 0.0
        self._heard_s = dict.fromkeys(self._coming, 0.0)
        self._looked_s = time.monotonic()

    def wait(self, stage: str) -> None:
        """Check the other ranks during a wait in this phase of the run.

        Raises RankTimeoutError, which names silent ranks and the phase.
        """
        self._pass_time()
        if self.beat():
            self._check(stage)

    def beat(self) -> bool:
        """Send a heartbeat and receive those of the others, at most every few seconds.

        Returns whether it was due.
        """
        now_s = time.monotonic()
        if now_s - self._beat_s < self._every_s:
            return False
        self._beat_s = now_s
        self._take()
        # a rank that has ended listens until it gets this rank's last heartbeat
        for peer in self._arrived:
            # a rank that hangs receives nothing: one pending heartbeat is enough
            if peer not in self._going or self._going[peer].Test():
                self._going[peer] = self._send(_ALIVE, peer)
        return True

    def end(self, stage: str) -> None:
        """Receive all pending heartbeats: MPI may crash if it ends with messages left. No rank sends any
        afterwards. Collective. Raises RankTimeoutError as `wait` does.
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
        """Receive the heartbeats that have arrived, and post receives for the next ones."""
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
            f"{names} {them} sent no heartbeat for {self._timeout_s:g} s (run.timeout) {stage}: dead, "
            "cut off, stopped, or busy with one long step; all ranks end; the last checkpoint was kept; "
            "rerun the same command to resume; if one client takes so long, set run.timeout="
            f"{2 * self._timeout_s:g} or null"
        )


def die_with_launcher() -> None:
    """Ask Linux to kill this process when its parent dies: mpirun, or mpirun's helper on this node.

    Does nothing on other systems. A program between the two, such as a script that does not `exec` the rank,
    must end with the launcher itself.
    """
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # the parent died before this call
        os.kill(os.getpid(), signal.SIGKILL)
