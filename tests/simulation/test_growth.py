"""A run keeps of each round the rows of its ledger, and nothing else in memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import method_settings, run_here, tiny_settings

from hpcfl.errors import FINISHED
from hpcfl.storage.ledger import Ledger
from hpcfl.terminal import Progress

FIRST, LAST = 10, 25
"""Rounds between which growth is taken: the first ones fill what is kept for good."""
BYTES_A_ROUND, OBJECTS_A_ROUND = 12000, 10
"""Above what is measured, 7500 and 3: rows of the ledger, and what torch gathers in its first rounds."""


def count() -> tuple[int, int, int, int]:
    """Count tensors, all objects that the garbage collector knows, bytes of memory, and open files.

    Memory is Python's since tracing began, NumPy's included and torch's not.
    """
    gc.collect()
    traced_bytes, _ = tracemalloc.get_traced_memory()
    objects = gc.get_objects()
    tensors = sum(type(found) is torch.Tensor for found in objects)
    return tensors, len(objects), traced_bytes, len(os.listdir("/proc/self/fd"))


def test_memory_grows_only_by_the_rows_of_the_ledger(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State on server and clients; evaluations and checkpoints in every round."""
    show, kept = Progress.round_done, []

    def counting(self: Progress, done: int, ledger: Ledger, is_last: bool) -> None:
        show(self, done, ledger, is_last)
        if done == FIRST:
            tracemalloc.start()
        if done in (FIRST, LAST):
            kept.append(count())

    monkeypatch.setattr(Progress, "round_done", counting)
    keys = [f"train.rounds={LAST + 1}", "train.participation=0.3", "run.checkpoint_every=1"]
    settings = [*tiny_settings(digits), *method_settings("heurpfedla"), *keys]
    try:
        assert run_here(tmp_path / "run", settings) == FINISHED
    finally:
        tracemalloc.stop()
    before, after = kept
    tensors, objects, traced_bytes, open_files = (np.array(after) - np.array(before)).tolist()
    assert tensors == open_files == 0
    assert objects < OBJECTS_A_ROUND * (LAST - FIRST)
    assert traced_bytes < BYTES_A_ROUND * (LAST - FIRST)
