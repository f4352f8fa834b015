"""Settings drawn at random give the same bits on any number of ranks and after a stop.

Two seconds for each; HPCFL_SOAK_SEED draws others.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from bits import DIFFERENT, differing, method_settings, run_here, run_until_time_is_up, tiny_settings
from kinds import MODELS_OF, words_of
from processes import run_in_one_world

from hpcfl.communication.communicator import Communicator
from hpcfl.errors import FINISHED, STOPPED, UserError
from hpcfl.methods import METHODS
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build

NUM_DRAWN = 100
WAYS = ("serial", "ranks", "stopped")
SOMETIMES = 0.25
"""The chance that a key below is set."""

OPTIONAL: dict[str, list[Any]] = {
    "data.unseen_clients": [0.2, 0.4],
    "data.label_noise": [0.3],
    "data.shift": ["rotation", "colour", "noise", "blur"],
    "data.val_fraction": [0.3],
    "data.normalise": ["standard"],
    "model.batchnorm": ["true", "false"],
    "train.participation": [0.2, 0.6],
    "train.finetune_epochs": [1],
    "train.buffers": ["local", "average", "mixed"],
    "train.optimiser": ["adam"],
    "train.weight_decay": [0.01],
    "train.clip": [1],
    "train.label_smoothing": [0.1],
    "train.augment": ["[crop,flip]"],
    "train.lr_decay_rounds": ["[1]"],
    "train.warmup_rounds": [1],
    "train.last_batch": ["drop", "keep"],
    "train.patience": [1],
    "clients.sampling": ["size", "power_of_choice"],
    "clients.drop_rate": [0.3],
    "clients.step_s": [0.5],
    "clients.slowness": [0.6],
    "clients.bytes_per_s": [1e6],
    "clients.deadline_s": [5],
    "clients.local_epochs": ["[1,3]"],
    "clients.batch_size": ["[6,12]"],
    "comm.codec": ["float16", "int8", "topk"],
    "comm.directions": ["up"],
    "server.optimiser": ["adam", "momentum"],
    "run.eval_every": [1, 3],
    "run.metrics": ["true"],
    "run.placement": ["home"],
    "run.on_divergence": ["skip", "continue"],
}


def values_of(method: str) -> dict[str, list[Any]]:
    """Return keys of a method that are a choice or yes or no, with their values."""
    found: dict[str, list[Any]] = {}
    for name, field in METHODS[method].Params.model_fields.items():
        if get_origin(field.annotation) is Literal:
            # a chain needs a single worker
            found[f"method.{name}"] = [value for value in get_args(field.annotation) if value != "chain"]
        elif field.annotation is bool:
            found[f"method.{name}"] = ["true", "false"]
    return found


def is_allowed(settings: list[str]) -> bool:
    try:
        build(load_config(None, settings), Communicator())
    except UserError:
        return False
    return True


def drawn(chance: random.Random, digits: Path, folder: Path) -> Iterator[list[str]]:
    """Yield settings: a method, a kind of samples, and optional keys that go with those drawn before."""
    while True:
        method = chance.choice(DIFFERENT)
        settings = [*tiny_settings(digits), "train.momentum=0", *method_settings(method)]
        kind = chance.choice(["images", *MODELS_OF])
        if kind != "images":
            (folder / kind).mkdir(exist_ok=True)
            of_images = ("data.subset_per_class", "data.layout", "model.")
            settings = [word for word in settings if not word.startswith(of_images)]
            settings += [*words_of(kind, folder / kind), "data.partition.name=dirichlet"]
        if not is_allowed(settings):
            continue
        for key, values in (OPTIONAL | values_of(method)).items():
            more = [*settings, f"{key}={chance.choice(values)}"]
            if chance.random() < SOMETIMES and is_allowed(more):
                settings = more
        yield settings


@pytest.mark.soak
@pytest.mark.warns
def test_random_settings_give_the_same_bits_on_ranks_and_after_a_stop(
    digits: Path, tmp_path: Path, mpirun_command: list[str]
) -> None:
    chance = random.Random(int(os.environ.get("HPCFL_SOAK_SEED", "0")))
    cases = list(itertools.islice(drawn(chance, digits, tmp_path), NUM_DRAWN))
    serial, ranks, stopped = ([tmp_path / f"{way}{number}" for number in range(NUM_DRAWN)] for way in WAYS)
    for folder, settings in zip(serial, cases, strict=True):
        assert run_here(folder, settings) == FINISHED, settings
    run_in_one_world(mpirun_command, 3, dict(zip(ranks, cases, strict=True)))
    for folder, settings in zip(stopped, cases, strict=True):
        while (code := run_until_time_is_up(folder, settings)) == STOPPED:
            pass
        assert code == FINISHED, settings
    found = [
        (other.name, differing(one, other), settings)
        for others in (ranks, stopped)
        for one, other, settings in zip(serial, others, cases, strict=True)
    ]
    assert [case for case in found if case[1]] == []
