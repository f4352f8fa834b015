"""Memory of a large federation: the server needs a few cohorts of models, a worker its own samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from bits import tiny_settings
from processes import REPOSITORY, Mpirun

from hpcfl.communication.communicator import Communicator
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build

NUM_CLIENTS = 500
COHORT = 50
PARAMETERS = 121_278
"""Trainable numbers of LeNet-16/32 with BatchNorm on 3x32x32 images and ten classes."""
IMAGES_PER_CLIENT = 4


def test_memory_of_fedavg_stays_bounded_with_many_clients(mpirun: Mpirun, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = NUM_CLIENTS * IMAGES_PER_CLIENT
    x = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(count) % 10)
    settings = [
        *tiny_settings(tmp_path / "images.npz"),
        *("method.name=fedavg", "model.name=lenet", "train.rounds=2", "run.eval_every=2"),
        *(f"data.clients={NUM_CLIENTS}", f"train.participation={COHORT / NUM_CLIENTS}"),
        *("data.subset_per_class=null", "data.partition.name=classes"),
        "data.partition.classes_per_client=1",
    ]
    serial = build(load_config(None, settings), Communicator())
    assert serial.method.layout.size == PARAMETERS
    script = REPOSITORY / "tests" / "helpers" / "memory_run.py"
    measured = json.loads(mpirun(3, script, "--out", tmp_path / "run", *settings, timeout=300).stdout)

    state_bytes = 4 * (PARAMETERS + serial.method.layout.buffer_size)
    cohort_bytes = 4 * COHORT * PARAMETERS
    assert measured["rise"] < 1.2 * state_bytes + 3 * cohort_bytes

    image_bytes = 3 * 32 * 32 * 4 + 8
    shard = serial.worker_context.shard
    assert shard.x.nbytes + shard.y.nbytes == count * image_bytes
    half = count // 2 * image_bytes
    assert measured["samples"] == [0, half, half]
