"""Heartbeats: a rank that waits learns which of the other ranks is silent.

mpirun and SLURM end a job when they see one of its processes die. They do not notice a rank that hangs, nor,
for minutes or for ever, a node without power or a cut link: `Heartbeat` names that rank. A killed launcher
may leave ranks behind that hold the lock on the run folder: `die_with_launcher` ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcfl.errors import RankTimeoutError

HEARTBEAT_TAG = 1
"""Tag of heartbeats; all other messages have another one."""

_BEAT_EVERY_S = 10.0
_PAUSE_S = 1e-3
_ALIVE, _LAST, _PROBE = (np.full(1, value, np.int8) for value in range(3))

_PR_SET_PDEATHSIG = 1


class Heartbeat:
    """One byte goes back and forth between the server and each worker; who does not return it is silent.

    A rank returns it while it waits and, by `beat`, between pieces of its own work. Silence is counted in
    beats of a waiting rank: if the whole job was suspended, no rank is blamed for that time. At each beat the
    waiting server sends one more byte, which is not answered, to each silent rank: the system finds out that
    a link is cut when it cannot deliver, and MPI when it sends again. Each receive names its source rank: in
    some versions of MPI, receives from any source lose messages over a network.
    """

    def __init__(self, comm: Any, hosts: Sequence[str], timeout_s: float) -> None:
        """Take MPI's communicator, the hosts of all ranks, and the seconds after which a rank is silent."""
        self._comm, self._hosts, self._timeout_s = comm, hosts, timeout_s
        self._is_server = comm.Get_rank() == 0
        peers = range(1, comm.Get_size()) if self._is_server else range(1)
        self._every_s = min(_BEAT_EVERY_S, timeout_s / 4)
        self._beats, self._beat_s = 0, time.monotonic()
        self._heard = dict.fromkeys(peers, 0)
        """The beat at which each rank was heard last."""
        self._arrived = {peer: np.zeros(1, np.int8) for peer in peers}
        self._coming = {peer: self._receive(peer) for peer in peers}
        self._going: list[Any] = []
        for peer in peers if self._is_server else ():
            self._send(_ALIVE, peer)

    def begin_wait(self) -> None:
        """Start to wait; silence counts from here."""
        self._heard = dict.fromkeys(self._heard, self._beats)

    def beat(self, phase: str | None = None) -> None:
        """Return the bytes that have arrived, at most every few seconds.

        A waiting rank gives the phase of the run; it raises RankTimeoutError, which names silent ranks.
        """
        now_s = time.monotonic()
        if now_s - self._beat_s < self._every_s:
            return
        self._beats, self._beat_s = self._beats + 1, now_s
        self._answer(_ALIVE)
        if phase is not None:
            self._probe()
            self._check(phase)

    def end(self, phase: str) -> None:
        """Receive all bytes: MPI may crash if it ends with messages left. Collective; raises as `beat`."""
        self.begin_wait()
        while self._heard or not all(request.Test() for request in self._going):
            time.sleep(_PAUSE_S)
            self._answer(_LAST if self._is_server else _ALIVE)
            self.beat(phase)

    def _answer(self, byte: np.ndarray) -> None:
        """Answer each byte that has arrived; after the last one, its rank is heard no more."""
        for peer in list(self._heard):
            while peer in self._heard and self._coming[peer].Test():
                self._heard[peer] = self._beats
                if self._arrived[peer] == _ALIVE:
                    self._send(byte, peer)
                if _LAST in (byte, self._arrived[peer]):
                    del self._heard[peer]
                else:
                    self._coming[peer] = self._receive(peer)

    def _probe(self) -> None:
        """Send a byte to each worker that has been silent since the last beat."""
        for peer, beat in self._heard.items():
            if self._is_server and beat < self._beats:
                self._send(_PROBE, peer)

    def _receive(self, peer: int) -> Any:
        return self._comm.Irecv(self._arrived[peer], peer, HEARTBEAT_TAG)

    def _send(self, byte: np.ndarray, peer: int) -> None:
        self._going = [request for request in self._going if not request.Test()]
        self._going.append(self._comm.Isend(byte, peer, HEARTBEAT_TAG))

    def _check(self, phase: str) -> None:
        longest = self._timeout_s / self._every_s
        silent = [peer for peer, beat in self._heard.items() if self._beats - beat >= longest]
        if not silent:
            return
        names = ", ".join(f"rank {peer} on {self._hosts[peer]}" for peer in silent)
        them = "has" if len(silent) == 1 else "have"
        raise RankTimeoutError(
            f"{names} {them} sent no heartbeat for {self._timeout_s:g} s (run.timeout) {phase}: dead, "
            "cut off, stopped, or busy with one long step; all ranks end; the last checkpoint, if there is "
            "one, was kept; rerun the same command to resume; if one client takes so long, set run.timeout="
            f"{2 * self._timeout_s:g} or null"
        )


def die_with_launcher() -> None:
    """Ask Linux to kill this process when its parent dies: mpirun, or mpirun's helper on this node.

    A program between the two, such as a script that does not `exec` the rank,
    must end with the launcher itself.
    """
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # the parent died before this call
        os.kill(os.getpid(), signal.SIGKILL)
