"""Faults that strike a run at a counted call of a point in it: at the same moment each time.

python tests/helpers/strikes.py '{"fault": "kill", "point": "gather", "count": 40, "rank": 1}' HPCFL_ARGUMENTS
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
"""Where a fault can strike: a mini-batch, a message, datasets of a checkpoint, and what makes files last."""

STANDS_S = 600


@dataclass(frozen=True)
class Strike:
    """What strikes, at which call of a point counted from 1, and on which rank."""

    fault: str
    point: str
    count: int
    rank: int = 0
    after: bool = False
    """Whether the call that is struck has done its work."""
    above: int = 0
    """The process that started the launcher, for the faults that kill launchers."""
    mark: str = ""
    """File to make when it strikes."""

    def words(self) -> list[str]:
        """Return the command that takes the arguments of a run that is struck."""
        return [str(Path(__file__)), json.dumps(asdict(self))]

    def prepare(self) -> None:
        """Have this process struck."""
        owner, name = POINTS[self.point]
        real: Callable[..., Any] = getattr(owner, name)
        calls = 0

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count and not self.after:
                self._strike()
            found = real(*arguments, **named)
            if calls == self.count and self.after:
                self._strike()
            return found

        setattr(owner, name, counted)

    def _strike(self) -> None:
        if self.mark:
            Path(self.mark).touch()
        FAULTS[self.fault](self)


def launchers(below: int) -> list[int]:
    """Return the processes between this one and the one that started the launcher, from the top."""
    found: list[int] = []
    pid = os.getppid()
    while pid not in (below, 1):
        found.insert(0, pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def kill(strike: Strike) -> None:
    """SIGKILL, as by the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_mpirun(strike: Strike) -> None:
    os.kill(launchers(strike.above)[0], signal.SIGKILL)
    time.sleep(STANDS_S)


def kill_launchers(strike: Strike) -> None:
    """SIGKILL of mpirun and of what acts for it on this node."""
    for pid in launchers(strike.above):
        os.kill(pid, signal.SIGKILL)
    time.sleep(STANDS_S)


def stop(strike: Strike) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stand(strike: Strike) -> None:
    """Do nothing for long, but take signals."""
    time.sleep(STANDS_S)


def no_memory_for_torch(strike: Strike) -> None:
    _leave_memory(2**24)
    torch.empty(2**26)


def no_memory_for_numpy(strike: Strike) -> None:
    _leave_memory(2**24)
    np.empty(2**26)


def _leave_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


FAULTS: dict[str, Callable[[Strike], None]] = {
    function.__name__: function
    for function in (kill, kill_mpirun, kill_launchers, stop, stand, no_memory_for_torch, no_memory_for_numpy)
}


if __name__ == "__main__":
    own = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    coming = Strike(**json.loads(sys.argv[1]))
    if coming.rank == int(own):
        coming.prepare()
    sys.exit(main(sys.argv[2:]))
