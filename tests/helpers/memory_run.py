"""Measure one run's memory: started by tests, under mpirun. Collective.

Arguments: those of a run. Rank 0 prints a JSON object: by how many bytes its resident memory rose from the
end of the set-up to its highest, and the bytes of the samples that each rank holds.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from hpcfl.main import main
from hpcfl.simulation.round_loop import Simulation

M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


def resident_bytes(name: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since it was forgotten) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measured(self: Simulation) -> str:
    world, shard = self._world, self._experiment.worker_context.shard
    sample_bytes = world.gather_bytes(str(shard.x.nbytes + shard.y.nbytes).encode())
    world.barrier()
    # the highest so far is forgotten
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    outcome = run(self)
    rise = resident_bytes("VmHWM") - before
    if sample_bytes is not None:
        print(json.dumps({"rise": rise, "samples": [int(count) for count in sample_bytes]}))
    return outcome


if __name__ == "__main__":
    # a copy of another process has memory to use again: every block of 64 KiB or more is to be new
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    run = Simulation.run
    Simulation.run = measured  # type: ignore[method-assign]
    sys.exit(main(["--quiet", *sys.argv[1:]]))
