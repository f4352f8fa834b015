"""Inject a fault into a run at a counted call of a function: at the same moment each time.

python tests/helpers/inject_fault.py '{"kind": "kill", "point": "gather", "count": 40, "rank": 1}' ARGUMENTS
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch

from hpcfl.communication.communicator import Communicator
from hpcfl.main import main
from hpcfl.storage.ledger import Ledger
from hpcfl.training.engines import LoopEngine

POINTS: dict[str, tuple[Any, str]] = {
    "step": (LoopEngine, "plain_gradient"),
    "gather": (Communicator, "_gather_array"),
    "write": (h5py.Group, "create_dataset"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "csv": (Ledger, "append_files"),
}
"""Where a fault can occur: a mini-batch, a message, datasets of a checkpoint, and writes to disk."""

SLEEP_S = 600


@dataclass(frozen=True)
class Fault:
    """What happens, at which call of a point (counted from 1), and on which rank."""

    kind: str
    point: str
    count: int
    rank: int = 0
    after: bool = False
    """Whether the fault occurs after the call, not before it."""
    above: int = 0
    """The process that started the launcher, for the faults that kill launchers."""
    mark: str = ""
    """File to create when the fault occurs."""

    def words(self) -> list[str]:
        """Return the command that runs hpcfl with this fault; the arguments of the run follow."""
        return [str(Path(__file__)), json.dumps(asdict(self))]

    def inject(self) -> None:
        """Let the fault occur in this process."""
        owner, name = POINTS[self.point]
        real: Callable[..., Any] = getattr(owner, name)
        calls = 0

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count and not self.after:
                self._occur()
            result = real(*arguments, **named)
            if calls == self.count and self.after:
                self._occur()
            return result

        setattr(owner, name, counted)

    def _occur(self) -> None:
        if self.mark:
            Path(self.mark).touch()
        KINDS[self.kind](self)


def launchers(below: int) -> list[int]:
    """Return the processes between this one and the one that started the launcher, topmost first."""
    above = [process.pid for process in psutil.Process().parents()]
    return above[: above.index(below)][::-1]


def kill(fault: Fault) -> None:
    """SIGKILL, as by the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_mpirun(fault: Fault) -> None:
    os.kill(launchers(fault.above)[0], signal.SIGKILL)
    time.sleep(SLEEP_S)


def kill_launchers(fault: Fault) -> None:
    """SIGKILL of mpirun and of its helper processes on this node."""
    for pid in launchers(fault.above):
        os.kill(pid, signal.SIGKILL)
    time.sleep(SLEEP_S)


def stop(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(fault: Fault) -> None:
    """Sleep for long, but handle signals."""
    time.sleep(SLEEP_S)


def no_memory_for_torch(fault: Fault) -> None:
    _leave_memory(2**24)
    torch.empty(2**26)


def no_memory_for_numpy(fault: Fault) -> None:
    _leave_memory(2**24)
    np.empty(2**26)


def _leave_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


KINDS: dict[str, Callable[[Fault], None]] = {
    function.__name__: function
    for function in (kill, kill_mpirun, kill_launchers, stop, sleep, no_memory_for_torch, no_memory_for_numpy)
}


if __name__ == "__main__":
    own = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    fault = Fault(**json.loads(sys.argv[1]))
    if fault.rank == int(own):
        fault.inject()
    sys.exit(main(sys.argv[2:]))
