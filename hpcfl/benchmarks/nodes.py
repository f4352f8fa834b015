"""How rounds scale with workers: measured part by part, with what a plan says of them beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hpcfl.benchmarks.ratios import Ratio
from hpcfl.benchmarks.runs import StoppedError, config_of, images, run
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.network import (
    PROBE_BYTES,
    Network,
    fastest_s,
    measured,
    there_and_back,
)
from hpcfl.config import Config
from hpcfl.planning.dry_run import dry_run
from hpcfl.planning.estimate import Estimate, Planner
from hpcfl.setup.experiment import load_data, make_method
from hpcfl.simulation.round_loop import Timing

MESSAGE_BYTES = (100_000, 1_000_000, 4_000_000)
CLIENTS_A_WORKER = 4
MAX_CLIENTS = 256
SAMPLES = 20
"""Of a client; 70 % are trained on."""
HIDDEN = 320
"""Width of the model's hidden layer, which makes it 4 MB."""

Timed = tuple[Timing, Estimate]


def scaling(world: Communicator, rounds: int) -> Iterator[Ratio]:
    """Time messages, and rounds of FedAvg and pFedLA on 1, 2, 4 workers and so on up to all. Collective.

    Strong scaling has the same clients on any number of workers, weak scaling the same for each worker. A
    figure is the time of a round as planned over the measured one; its parts are the efficiency beside one
    worker, and seconds of the fastest round: training on the slowest worker, of it what workers
    wait for the slowest on average, messages, and rank 0's work.
    """
    network = measured(world)
    yield from _messages(world, network)
    most = world.num_workers
    sizes = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    with images(world) as folder:
        for method in ("fedavg", "pfedla"):
            # the last case is both
            time = cache(lambda *case, method=method: _timed(world, folder, network, method, rounds, *case))
            for kind in ("strong", "weak"):
                alone = time(1, most if kind == "strong" else 1)
                for workers in sizes:
                    timed = time(workers, most if kind == "strong" else workers)
                    if alone is not None and timed is not None:
                        yield _ratio(f"{kind}, {method}", timed, alone, workers if kind == "strong" else 1)


def _messages(world: Communicator, network: Network) -> Iterator[Ratio]:
    """Time broadcasts, sums, and scatters with gathers; yield MB/s over all workers. Collective."""
    rates = {"its node": network.node_bytes_a_s, "other nodes": network.link_bytes_a_s}
    found = [(f"rank 0 and {where}, {PROBE_BYTES / 1e6:g} MB", rate) for where, rate in rates.items()]
    everyone = range(world.num_workers)
    for size in MESSAGE_BYTES:
        there_s = fastest_s(world, partial(_broadcast, world, size))
        sum_s = fastest_s(world, partial(_sum, world, size))
        trip_s = fastest_s(world, partial(there_and_back, world, everyone, size))
        found.append((f"broadcast to all, {size / 1e6:g} MB", len(everyone) * size / there_s))
        found.append((f"sum of all, {size / 1e6:g} MB", len(everyone) * size / sum_s))
        found.append((f"scatter and gather, {size / 1e6:g} MB a worker", 2 * len(everyone) * size / trip_s))
    if world.is_server:
        yield Ratio("network: ms of a short message", 1e3 * (network.latency_s or 0.0))
        for name, rate in found:
            if rate is not None:
                yield Ratio(f"network: MB/s of {name}", rate / 1e6)


def _broadcast(world: Communicator, size: int) -> None:
    world.broadcast(torch.zeros(size, dtype=torch.uint8))
    world.barrier()


def _sum(world: Communicator, size: int) -> None:
    world.sum_on_server(torch.zeros(size // 8, dtype=torch.int64))


def _timed(
    world: Communicator, folder: Path, network: Network, method: str, rounds: int, workers: int, shares: int
) -> Timed | None:
    """Time rounds on some workers, with as many clients as so many workers have; beside what a plan says.

    None on other ranks than 0. Collective.
    """
    settings: dict[str, Any] = {
        "method": {"name": method},
        "model": {"name": "mlp", "hidden": [HIDDEN]},
        "data": {"clients": min(MAX_CLIENTS, CLIENTS_A_WORKER * shares), "per_client": SAMPLES},
        "train": {"rounds": rounds + 1, "local_epochs": 1, "batch_size": SAMPLES},
        "run": {"device": "cpu", "eval_every": rounds + 1, "checkpoint_every": rounds + 1},
    }
    config = config_of(folder, settings)
    plan = run_collectively(world, lambda: _plan(config, network, workers + 1) if world.is_server else None)
    with world.part(workers + 1) as part:
        timing = run_collectively(world, lambda: _run(part, folder, config))
    if world.maximum(timing is None):
        raise StoppedError
    return None if plan is None or timing is None else (timing, plan)


def _run(part: Communicator | None, folder: Path, config: Config) -> Timing | None:
    """Return the timing of a run, empty on ranks that take no part; None if a request to stop ended it."""
    try:
        return Timing() if part is None else run(part, folder, config)[1]
    except StoppedError:
        return None


def _plan(config: Config, network: Network, ranks: int) -> Estimate:
    """Return what a plan says of a run on so many ranks."""
    arrays, parts = load_data(config)
    method = make_method(config, arrays, parts)
    return Planner(config, method, parts, dry_run(config, arrays, parts), network).on(ranks)


def _fastest(timing: Timing) -> tuple[int, float]:
    """Return the fastest round but for the first one, which warms up, and its seconds.

    What else a machine does only slows a round, and a plan does not know of it.
    """
    seconds, number = min((seconds, number) for number, seconds in enumerate(timing.round_s) if number)
    return number, seconds


def _ratio(name: str, timed: Timed, alone: Timed, speed_up: int) -> Ratio:
    """Return a plan's round over the measured one, which ideally is that of one worker over `speed_up`."""
    timing, plan = timed
    number, round_s = _fastest(timing)
    train_s, wait_s = timing.train_s[number], timing.wait_s[number]
    parts = {
        "efficiency": _fastest(alone[0])[1] / speed_up / round_s,
        "planned s": plan.round_s,
        "round s": round_s,
        "training": train_s,
        "of it idle": train_s * timing.idle_shares[number],
        "messages": max(0.0, wait_s - train_s),
        "server": round_s - max(wait_s, train_s),
    }
    return Ratio(
        f"{name}, clients {plan.cohort}, workers {plan.ranks - 1}, nodes {plan.nodes}: planned / measured",
        plan.round_s / round_s,
        parts=parts,
        detail=f"slowest round {max(timing.round_s[1:]):.3g} s",
    )
