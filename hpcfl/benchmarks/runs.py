"""A rank's start, and rounds, checkpoints and methods in real runs. All parts are collective."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfl.benchmarks.ratios import Ratio
from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, Method
from hpcfl.randomness import numpy_stream
from hpcfl.registries import merge, resolve
from hpcfl.setup.experiment import build
from hpcfl.simulation.round_loop import Simulation, Timing
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress

NUM_IMAGES = 6000
NUM_CLIENTS = 10
"""Clients in the rounds that are timed."""
ROUND_SAMPLES = 600
"""Samples of each client in the rounds that are timed; 70 % are trained on."""
MESSAGE_TURNS = 5
METHOD_SAMPLES = 200
"""Those of each client in the comparison of methods."""
CHECKPOINT_EVERY = 50
METHODS_BESIDE_FEDAVG = 3
"""Methods that are compared with one run of FedAvg, just before them."""


class StoppedError(Exception):
    """A request to stop ended a run."""


def start(world: Communicator) -> Iterator[Ratio]:
    """Time the way from a rank's start as a process to its first round on the bundled digits.

    Means something as the first part only. Yields nothing where the system does not tell a process's age.
    """
    run_collectively(world, lambda: build(resolve({}), world))
    slowest_s = world.maximum(round(1000 * _age_s())) / 1000
    if slowest_s:
        yield Ratio("start: seconds to the first round", slowest_s, 8, f"slowest of {world.size} ranks")


def rounds(world: Communicator, count: int, device: str = "cpu") -> Iterator[Ratio]:
    """Time rounds of 10 clients with 10 local epochs, a checkpoint after each, and how long workers wait."""
    settings = {
        "model": {"batchnorm": True},
        "data": {"clients": NUM_CLIENTS, "per_client": ROUND_SAMPLES},
        "train": {"rounds": count + 1, "local_epochs": 10, "batch_size": 32, "lr": 0.01},
        "run": {"device": device, "eval_every": count + 1, "checkpoint_every": 1},
    }
    with images(world) as folder:
        method, timing = _run(world, folder, settings)
        exchange_s, moved = _messages(world, method)
        waiting = _waiting(world, folder) if world.num_workers > 1 else {}
    if not world.is_server:
        return
    # the first of each warms up, and the last checkpoint evaluates all models
    round_s, train_s = statistics.median(timing.round_s[1:]), statistics.median(timing.train_s[1:])
    save_s = statistics.median(timing.save_s[1:-1])
    of_rounds = f"{NUM_CLIENTS} clients, 10 epochs, {world.num_workers} worker(s), {round_s:.1f} s"
    yield Ratio("round: share that is not training", 1 - train_s / round_s, 0.1, of_rounds)
    share = save_s / (CHECKPOINT_EVERY * round_s + save_s)
    each = f"every {CHECKPOINT_EVERY} rounds, {save_s * 1e3:.0f} ms"
    yield Ratio("checkpoints: share of a run", share, 0.02, each)
    if world.size > 1:
        sent = 2 * NUM_CLIENTS * 4 * method.layout.size
        each = f"{sent / 1e6:.1f} MB down and up among {world.size} ranks in {exchange_s * 1e3:.0f} ms"
        yield Ratio("messages: share of a round", exchange_s / round_s, 0.05, each)
        yield Ratio("messages: bytes moved by MPI / bytes of the messages", moved / sent, 1.05)
    if waiting:
        # 10 equal clients take 8 workers as long as 16 would
        least = 1 - NUM_CLIENTS / (world.num_workers * math.ceil(NUM_CLIENTS / world.num_workers))
        where = (
            f"{NUM_CLIENTS} of {2 * NUM_CLIENTS} clients on {world.num_workers} workers, "
            f"{least:.2g} is the least possible; {waiting['home']:.2f} with run.placement=home"
        )
        yield Ratio("training: share of workers' time spent waiting", waiting["balanced"], least + 0.1, where)


def _messages(world: Communicator, method: Method) -> tuple[float, int]:
    """Send each client a model and bring one back; return the seconds and the bytes that MPI moved.

    Both are the server's to know. Collective.
    """
    channel = Channel(world, method.layers, NUM_CLIENTS)
    cohort = Cohort(0, tuple(range(NUM_CLIENTS)), torch.ones(NUM_CLIENTS))
    rows = torch.zeros(NUM_CLIENTS, method.layout.size)
    sent = Message(rows={"theta": rows}, num_clients=NUM_CLIENTS) if world.is_server else None
    seconds, before = [], world.bytes_received
    for _ in range(MESSAGE_TURNS):
        world.barrier()
        began_s = time.perf_counter()
        channel.up(channel.down(sent, cohort), cohort).collect()
        seconds.append(time.perf_counter() - began_s)
    received = world.gather_bytes(str((world.bytes_received - before) // MESSAGE_TURNS).encode())
    return min(seconds), sum(map(int, received or []))


def _waiting(world: Communicator, folder: Path) -> dict[str, float]:
    """Return how much of their time workers wait for the slowest, by `run.placement`."""
    settings: dict[str, Any] = {
        "model": {"batchnorm": True},
        "data": {"clients": 2 * NUM_CLIENTS, "per_client": METHOD_SAMPLES},
        "train": {"rounds": 8, "local_epochs": 2, "batch_size": 35, "participation": 0.5},
    }
    shares = {}
    for placement in ("home", "balanced"):
        run = {"device": "cpu", "placement": placement, "eval_every": 8, "checkpoint_every": 8}
        _, timing = _run(world, folder, settings | {"run": run})
        shares[placement] = statistics.mean(timing.idle_shares[1:]) if world.is_server else 0.0
    return shares


def methods(world: Communicator, device: str = "cpu") -> Iterator[Ratio]:
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
    others = [name for name in METHODS if name != "fedavg"]
    with images(world) as folder, warnings.catch_warnings():
        # such as Clustered FL's, which does not split in so few rounds
        warnings.simplefilter("ignore")
        for number, name in enumerate(others):
            if number % METHODS_BESIDE_FEDAVG == 0:
                _, fedavg = _run(world, folder, settings | {"method": {"name": "fedavg"}})
            _, other = _run(world, folder, settings | {"method": {"name": name}})
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


@contextmanager
def images(world: Communicator) -> Iterator[Path]:
    """Make a folder that all ranks see, with random images in it; remove it at the end. Collective."""
    with ExitStack() as at_exit:
        made = run_collectively(world, lambda: _made_images(at_exit) if world.is_server else "")
        yield Path(world.broadcast_bytes(made.encode()).decode())
        world.barrier()


def _made_images(at_exit: ExitStack) -> str:
    """Write random images in a new folder, which `at_exit` removes; UserError where that is not possible."""
    x = numpy_stream(0, "bench").integers(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=np.uint8)
    try:
        folder = at_exit.enter_context(tempfile.TemporaryDirectory(dir="."))
        np.savez(Path(folder) / "images.npz", x=x, y=np.arange(NUM_IMAGES) % 10)
    except OSError as error:
        raise UserError(
            f"cannot write images here: {error.strerror}; go to a folder that can be written"
        ) from error
    return folder


def _run(world: Communicator, folder: Path, settings: Mapping[str, Any]) -> tuple[Method, Timing]:
    """Run settings on the images, as `run` does a configuration. Collective."""
    return run(world, folder, config_of(folder, settings))


def config_of(folder: Path, settings: Mapping[str, Any]) -> Config:
    """Return a configuration with the images as its data."""
    images = {"source": "npz", "path": str(folder / "images.npz"), "layout": "NCHW"}
    return resolve(merge(settings, {"data": images}))


def run(world: Communicator, folder: Path, config: Config) -> tuple[Method, Timing]:
    """Run a configuration on the images; return its method and its timing. Collective.

    Raises StoppedError if a request to stop ended it.
    """
    with ExitStack() as at_exit:
        experiment = run_collectively(world, lambda: build(config, world))
        run_folder = RunFolder(folder / "run", config) if world.is_server else None
        layout = experiment.method.layout
        run_collectively(world, lambda: run_folder.open(True, layout, [], at_exit) if run_folder else None)
        stop = StopFlag()
        at_exit.callback(stop.restore)
        simulation = Simulation(experiment, world, stop, Progress(), run_folder)
        if simulation.run() == "stopped":
            raise StoppedError
        return experiment.method, simulation.timing


def _age_s() -> float:
    """Return the seconds since this process was started; 0 where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return 0.0
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
