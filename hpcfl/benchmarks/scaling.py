"""How rounds scale with workers: measured part by part, next to what a plan predicts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from hpcfl.benchmarks.ratios import Ratio
from hpcfl.benchmarks.runs import config_of, run
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.interconnect import Interconnect, measured
from hpcfl.planning.dry_run import dry_run
from hpcfl.planning.estimate import Estimate, Planner
from hpcfl.setup.experiment import load_data, make_method
from hpcfl.simulation.recording import Timing

CLIENTS_A_WORKER = 4
MAX_CLIENTS = 256
MAX_WORKERS = MAX_CLIENTS // CLIENTS_A_WORKER
"""Of weak scaling."""
SAMPLES = 20
"""Of a client; 70 % are trained on."""
HIDDEN = 320
"""Width of the model's hidden layer, which makes it 4 MB."""

Timed = tuple[Timing, Estimate]


def by_workers(world: Communicator, rounds: int) -> Iterator[Ratio]:
    """Time rounds of FedAvg and pFedLA on 1, 2, 4 workers and so on up to all. Collective.

    Strong scaling has the same clients on any number of workers, weak scaling the same for each worker. A
    figure is the time of a round as planned over the measured one; its parts are the efficiency beside one
    worker, and seconds of the fastest round: training on the slowest worker, of it what workers
    wait for the slowest on average, messages, and rank 0's work.
    """
    interconnect = measured(world)
    most = world.num_workers
    sizes = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
    # the last case is in strong and in weak scaling
    timed = cache(partial(_timed, world, interconnect, rounds))
    for method in ("fedavg", "pfedla"):
        for kind in ("strong", "weak"):
            alone = timed(method, 1, most if kind == "strong" else 1)
            # with more, the clients would not be as many for each worker
            for workers in sizes if kind == "strong" else (one for one in sizes if one <= MAX_WORKERS):
                here = timed(method, workers, most if kind == "strong" else workers)
                if alone is not None and here is not None:
                    yield _ratio(f"{kind}, {method}", here, alone, workers if kind == "strong" else 1)


def _timed(
    world: Communicator, interconnect: Interconnect, rounds: int, method: str, workers: int, shares: int
) -> Timed | None:
    """Time rounds on some workers, with the clients of `shares` workers, next to what a plan predicts.

    None on other ranks than 0. Collective.
    """
    settings = {
        "method": {"name": method},
        "model": {"name": "mlp", "hidden": [HIDDEN]},
        "data": {"clients": min(MAX_CLIENTS, CLIENTS_A_WORKER * shares), "per_client": SAMPLES},
        "train": {"rounds": rounds + 1, "local_epochs": 1, "batch_size": SAMPLES},
        "run": {"device": "cpu", "eval_every": rounds + 1, "checkpoint_every": rounds + 1},
    }
    config = config_of(settings)

    def planned() -> Estimate | None:
        if not world.is_server:
            return None
        arrays, parts = load_data(config)
        method = make_method(config, arrays, parts)
        found = dry_run(config, arrays, parts)
        return Planner(config.run, method, parts, found, interconnect).on(workers + 1)

    plan = run_collectively(world, planned)
    with world.part(workers + 1) as part:
        timing = run_collectively(world, lambda: run(part, config) if part else Timing())
    return None if plan is None else (timing, plan)


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
