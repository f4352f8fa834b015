"""A rank's start, and rounds and checkpoints in real runs. All parts are collective."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.benchmarks.ratios import Ratio
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config.keys import Config, RunConfig
from hpcfl.data.arrays import arrays_of
from hpcfl.data.sources import SOURCES, Source
from hpcfl.methods import METHODS
from hpcfl.parameters import ParameterLayout
from hpcfl.randomness import numpy_stream
from hpcfl.registries import merge, resolve
from hpcfl.setup.experiment import build
from hpcfl.simulation.recording import Timing
from hpcfl.simulation.round_loop import Simulation
from hpcfl.storage.atomic import writing
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress, silenced

NUM_IMAGES = 6000
NUM_CLIENTS = 10
"""Clients in the rounds that are timed."""
ROUND_SAMPLES = 600
"""Samples of each; 70 % are trained on."""
METHOD_SAMPLES = 200
"""Samples of each client where methods are compared."""
CHECKPOINT_EVERY = RunConfig().checkpoint_every
METHODS_BESIDE_FEDAVG = 3
"""Methods that are compared with one run of FedAvg, just before them."""


def start(world: Communicator) -> Iterator[Ratio]:
    """Time the way from a rank's start as a process to its first round on the bundled digits.

    Means something as the first part only.
    """
    run_collectively(world, lambda: build(resolve({}), world))
    slowest_s = world.maximum(round(1000 * _age_s())) / 1000
    yield Ratio("start: seconds to the first round", slowest_s, 8, f"slowest of {world.size} ranks")


def rounds(world: Communicator, count: int, device: str) -> Iterator[Ratio]:
    """Time rounds of 10 clients with 10 local epochs, a checkpoint after each."""
    settings = {
        "model": {"batchnorm": True},
        "data": {"clients": NUM_CLIENTS, "per_client": ROUND_SAMPLES},
        "train": {"rounds": count + 1, "local_epochs": 10, "batch_size": 32, "lr": 0.01},
        "run": {"device": device, "eval_every": count + 1, "checkpoint_every": 1},
    }
    timing = run(world, config_of(settings))
    if not world.is_server:
        return
    # the first of each warms up, and the last checkpoint evaluates all models
    round_s, train_s = statistics.median(timing.round_s[1:]), statistics.median(timing.train_s[1:])
    save_s = statistics.median(timing.save_s[1:-1])
    workers = world.num_workers
    of_rounds = f"{NUM_CLIENTS} clients, 10 epochs, {workers} worker(s), {round_s:.1f} s"
    yield Ratio("round: share that is not training", 1 - train_s / round_s, 0.1, of_rounds)
    share = save_s / (CHECKPOINT_EVERY * round_s + save_s)
    each = f"every {CHECKPOINT_EVERY} rounds, {save_s * 1e3:.0f} ms"
    yield Ratio("checkpoints: share of a run", share, 0.02, each)


def methods(world: Communicator, device: str) -> Iterator[Ratio]:
    """Time each method's round over FedAvg's.

    Its parts are the seconds of training and of all else (server and messages) over those of FedAvg's whole
    round, and the seconds of an evaluation over FedAvg's.
    """
    # rounds 3, 5 and 7 are timed, which are not evaluated; evaluations after 2, 4 and 6
    settings: dict[str, Any] = {
        "model": {"batchnorm": True},
        "data": {"clients": 4, "per_client": METHOD_SAMPLES},
        "train": {"rounds": 8, "local_epochs": 1, "batch_size": 30, "lr": 0.01},
        "run": {"device": device, "eval_every": 2, "checkpoint_every": 8},
    }
    for number, name in enumerate(name for name in METHODS if name != "fedavg"):
        # such as Clustered FL's warning, which does not split in so few rounds
        with silenced():
            if number % METHODS_BESIDE_FEDAVG == 0:
                fedavg = run(world, config_of(settings | {"method": {"name": "fedavg"}}))
            other = run(world, config_of(settings | {"method": {"name": name}}))
        if world.is_server:
            yield _beside_fedavg(name, other, fedavg)


def _beside_fedavg(name: str, other: Timing, fedavg: Timing) -> Ratio:
    """Return the cost of a method's round over FedAvg's."""
    training_s, server_s = _round_s(other)
    fedavg_s = sum(_round_s(fedavg))
    parts = {
        "training": training_s / fedavg_s,
        "server": server_s / fedavg_s,
        "evaluation": min(other.evaluate_s) / min(fedavg.evaluate_s),
    }
    return Ratio(f"{name}: round / FedAvg's", (training_s + server_s) / fedavg_s, parts=parts)


def _round_s(timing: Timing) -> tuple[float, float]:
    """Return the seconds of a round without an evaluation: of training, and of all else, the server's."""
    round_s, number = min((timing.round_s[number], number) for number in (2, 4, 6))
    return timing.train_s[number], round_s - timing.train_s[number]


def config_of(settings: Mapping[str, Any]) -> Config:
    """Return a configuration with random images as its data."""
    x = numpy_stream(0, "bench").integers(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=np.uint8)
    images = arrays_of(x, np.arange(NUM_IMAGES) % 10, "bench")
    SOURCES["bench"] = Source("random images", read=lambda _: images)
    return resolve(merge(settings, {"data": {"source": "bench"}}))


def run(world: Communicator, config: Config) -> Timing:
    """Run a configuration in a folder that is removed; return its timing. Collective."""
    with ExitStack() as at_exit:
        experiment = run_collectively(world, lambda: build(config, world))
        layout = experiment.method.layout
        folder = run_collectively(
            world, lambda: _run_folder(config, layout, at_exit) if world.is_server else None
        )
        simulation = Simulation(experiment, world, None, Progress(), folder)
        simulation.run()
        return simulation.timing


def _run_folder(config: Config, layout: ParameterLayout, at_exit: ExitStack) -> RunFolder:
    """Open a new run folder here, which `at_exit` removes; UserError where it cannot be."""
    with writing("here", "go to a folder that can be written"):
        made = at_exit.enter_context(tempfile.TemporaryDirectory(prefix=".hpcfl-bench-", dir="."))
    folder = RunFolder(Path(made) / "run", config, uses_total_rounds=True)
    folder.open(False, layout, at_exit, {})
    return folder


def _age_s() -> float:
    """Return the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
