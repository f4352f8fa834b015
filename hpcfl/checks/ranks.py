"""The ranks as they were started: versions, cores and GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcfl.checks.nodes import check_same_versions, numeric_versions
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import RunConfig
from hpcfl.errors import UserError
from hpcfl.formatting import aligned
from hpcfl.machine import package_versions
from hpcfl.terminal import LOG

Facts = Mapping[str, Any]
"""Of one rank."""


def check_versions(world: Communicator) -> None:
    """Print versions; raise UserError on all ranks if they differ. Collective."""
    versions = numeric_versions() | package_versions(("h5py", "mpi4py"))
    versions["MPI"] = world.library() or "not used by one rank"
    print("versions:", ", ".join(f"{name} {version}" for name, version in versions.items()))
    check_same_versions(world, versions)


def check_ranks(world: Communicator, run: RunConfig) -> None:
    """Print a table of the ranks; warn of workers that share cores. Collective.

    Raises UserError on all ranks if a worker has no GPU, and others have one or `run.device` is cuda.
    """
    facts = {
        "rank": world.rank,
        "host": world.host,
        "node": min(world.ranks_of_node()),
        "is_worker": world.is_worker,
        "device": str(world.device("cpu" if run.device == "cpu" else "auto")),
        "cores": sorted(os.sched_getaffinity(0)),
        "node_cores": os.cpu_count() or 1,
    }
    ranks = world.all_gather(facts)
    # before messages are sent, which may hang
    print("\n".join(aligned(rank_table(ranks))), flush=True)
    for node in sorted({rank["node"] for rank in ranks}):
        check_cores([rank for rank in ranks if rank["node"] == node], run.threads)
    check_devices(ranks, run.device == "cuda")


def rank_table(ranks: Sequence[Facts]) -> list[list[str]]:
    """Return header and rows of what ranks have; those with the same share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        row = (rank["host"], rank["device"], f"{ranges(rank['cores'])} of {rank['node_cores']}")
        rows.setdefault(row, []).append(rank["rank"])
    return [["ranks", "host", "device", "cores"], *([ranges(numbers), *row] for row, numbers in rows.items())]


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as 0-3,6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def check_cores(node: Sequence[Facts], threads: int) -> None:
    """Warn if a node's workers may use fewer cores than they train with threads."""
    workers = [rank for rank in node if rank["is_worker"] and rank["device"] == "cpu"]
    cores = len({core for rank in workers for core in rank["cores"]})
    if threads * len(workers) > cores:
        host, all_cores = node[0]["host"], node[0]["node_cores"]
        LOG.warning(
            f"{host}: {len(workers)} worker(s) with run.threads={threads} take turns on {cores} of "
            f"{all_cores} cores: ask SLURM for --cpus-per-task={threads}, type mpirun --bind-to none, or "
            "start fewer ranks"
        )


def check_devices(ranks: Sequence[Facts], needs_gpu: bool) -> None:
    """Raise UserError if a worker has no GPU where it needs one, or others have one."""
    workers = [rank for rank in ranks if rank["is_worker"]]
    without = [rank for rank in workers if rank["device"] == "cpu"]
    if without and (needs_gpu or len(without) < len(workers)):
        raise UserError(
            f"rank {without[0]['rank']} on {without[0]['host']} sees no GPU: ask SLURM for "
            "--gpus-per-node on every node, install a PyTorch for CUDA, or set run.device=cpu"
        )
