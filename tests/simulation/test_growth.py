"""A run keeps of each round the rows of its ledger, and nothing else in memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from bits import method_settings, tiny_settings

from hpcfl.communication.communicator import Communicator
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build
from hpcfl.simulation.round_loop import Simulation
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress

FIRST, LAST = 10, 25
"""Rounds between which growth is taken: the first ones fill what is kept for good."""
BYTES_A_ROUND, OBJECTS_A_ROUND = 12000, 10
"""Above what is measured, 7500 and 3: rows of the ledger, and what torch gathers in its first rounds."""


class Counting(Progress):
    """Counts what there is after the rounds FIRST and LAST.

    That is: tensors, all objects that the garbage collector knows, bytes of Python's memory since tracing
    began (NumPy's included, torch's not), and open files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, int, int, int]] = []

    def round_done(self, done: int, ledger: Ledger, is_last: bool) -> None:
        super().round_done(done, ledger, is_last)
        if done == FIRST:
            tracemalloc.start()
        if done in (FIRST, LAST):
            gc.collect()
            traced_bytes, _ = tracemalloc.get_traced_memory()
            objects = gc.get_objects()
            tensors = sum(type(found) is torch.Tensor for found in objects)
            self.kept.append((tensors, len(objects), traced_bytes, len(os.listdir("/proc/self/fd"))))


def test_memory_grows_only_by_the_rows_of_the_ledger(digits: Path, tmp_path: Path) -> None:
    """State on server and clients; evaluations and checkpoints in every round."""
    keys = [f"train.rounds={LAST + 1}", "train.participation=0.3", "run.checkpoint_every=1"]
    settings = [*tiny_settings(digits), *method_settings("heurpfedla"), *keys]
    config = load_config(None, settings)
    counting, stop = Counting(), StopFlag()
    try:
        with ExitStack() as at_exit:
            at_exit.callback(stop.restore)
            experiment = build(config, Communicator())
            folder = RunFolder(tmp_path / "run", config, uses_total_rounds=True)
            folder.open(False, experiment.method.layout, at_exit, {})
            simulation = Simulation(experiment, Communicator(), stop, counting, folder)
            assert simulation.run() == "finished"
    finally:
        tracemalloc.stop()
    before, after = counting.kept
    tensors, objects, traced_bytes, open_files = (np.array(after) - np.array(before)).tolist()
    assert tensors == open_files == 0
    assert objects < OBJECTS_A_ROUND * (LAST - FIRST)
    assert traced_bytes < BYTES_A_ROUND * (LAST - FIRST)
