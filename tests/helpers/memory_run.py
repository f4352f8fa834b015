"""Measure one run's memory: started by tests, under mpirun. Collective.

Arguments: the run folder and its settings. Rank 0 prints a JSON object: by how many bytes its resident memory
rose from the end of the set-up to its highest, and the bytes of the samples that each rank holds.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from hpcfl.communication.communicator import abort_on_exception, open_world
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build
from hpcfl.simulation.round_loop import Simulation
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress

M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


def resident_bytes(name: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since it was forgotten) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(folder_path: Path, settings: list[str]) -> None:
    world = open_world()
    with abort_on_exception(world), ExitStack() as at_exit:
        config = load_config(None, settings)
        experiment = build(config, world)
        folder = RunFolder(folder_path, config, uses_total_rounds=True) if world.is_server else None
        if folder is not None:
            folder.open(False, experiment.method.layout, at_exit, {})
        simulation = Simulation(experiment, world, StopFlag(), Progress(), folder)
        shard = experiment.worker_context.shard
        sample_bytes = world.gather_bytes(str(shard.x.nbytes + shard.y.nbytes).encode())
        world.barrier()
        # the highest so far is forgotten
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        assert simulation.run() == "finished"
        rise = resident_bytes("VmHWM") - before
        if sample_bytes is not None:
            print(json.dumps({"rise": rise, "samples": [int(count) for count in sample_bytes]}))


if __name__ == "__main__":
    # a copy of another process has memory to use again: every block of 64 KiB or more is to be new
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    measure(Path(sys.argv[1]), sys.argv[2:])
