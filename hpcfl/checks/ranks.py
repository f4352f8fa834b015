"""The ranks as they were started: versions, cores, threads, GPUs, the SLURM job."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hpcfl.checks.findings import Findings, ranges
from hpcfl.checks.nodes import Facts, by_node, compare_nodes, node_facts, place
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import RunConfig
from hpcfl.formatting import aligned, clock, readable_bytes
from hpcfl.machine import free_bytes

PACKAGES = ("torch", "numpy", "h5py", "mpi4py")
LITTLE_TIME_S = 600


def check_ranks(world: Communicator, run: RunConfig, found: Findings) -> None:
    """Print a table of the ranks, and find what does not fit. Collective."""
    is_cpu = run.device == "cpu"
    own = {
        "is_worker": world.is_worker,
        "device": str(world.device("cpu" if is_cpu else "auto")),
        "cores": sorted(os.sched_getaffinity(0)),
        "node_cores": os.cpu_count() or 1,
        "free": free_bytes(),
    }
    facts = node_facts(world, PACKAGES)
    facts["versions"]["MPI"] = world.library() or "not used by one rank"
    ranks = world.all_gather(facts | own)
    if not world.is_server:
        return
    print("versions:", ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()))
    compare_nodes(ranks, found)
    # before messages are sent, which may hang
    print("\n".join(aligned(rank_table(ranks))), flush=True)
    for node in by_node(ranks):
        check_cores(node, run.threads, found)
    if not is_cpu:
        check_devices(ranks, run.device == "cuda", found)
    if "SLURM_JOB_ID" in os.environ:
        check_slurm(found)


def rank_table(ranks: Sequence[Facts]) -> list[list[str]]:
    """Return header and rows of what ranks have; those with the same share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for node in by_node(ranks):
        free = readable_bytes(min(rank["free"] for rank in node))
        for rank in node:
            cores = f"{ranges(rank['cores'])} of {rank['node_cores']}"
            row = (rank["host"], rank["device"], cores, free)
            rows.setdefault(row, []).append(rank["rank"])
    header = ["ranks", "host", "device", "cores", "free memory"]
    return [header, *([ranges(numbers), *row] for row, numbers in rows.items())]


def check_cores(node: Sequence[Facts], threads: int, found: Findings) -> None:
    """Compare the cores that a node's workers may use with the threads of their training."""
    workers = [rank for rank in node if rank["is_worker"] and rank["device"] == "cpu"]
    cores = len({core for rank in workers for core in rank["cores"]})
    if threads * len(workers) <= cores:
        return
    all_cores = node[0]["node_cores"]
    what = f"{node[0]['host']}: {len(workers)} worker(s) of {threads} thread(s)"
    if cores < all_cores:
        found.errors.append(
            f"{what} are pinned to {cores} of {all_cores} cores: ask SLURM for --cpus-per-task={threads}, "
            "type mpirun --bind-to none, or start fewer ranks"
        )
    else:
        fewer = "start fewer ranks" + ", or set run.threads=1" * (threads > 1)
        found.warnings.append(f"{what} take turns on {cores} cores: {fewer}")


def check_devices(ranks: Sequence[Facts], needs_gpu: bool, found: Findings) -> None:
    """Find a worker without a GPU where it needs one, or others have one."""
    without = [rank for rank in ranks if rank["is_worker"] and rank["device"] == "cpu"]
    if without and (needs_gpu or any(rank["device"] != "cpu" for rank in ranks)):
        found.errors.append(
            f"{place(without[0])} sees no GPU: ask SLURM for --gpus-per-node on every node, install "
            "a PyTorch for CUDA, or set run.device=cpu"
        )


def check_slurm(found: Findings) -> None:
    """Print when the SLURM job ends, and find whether a run would know and have time."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    left_s = max(0.0, int(end) - time.time()) if end.isdecimal() else None
    ends = "no end time" if left_s is None else f"ends in {clock(left_s)}"
    print(f"SLURM: job {os.environ['SLURM_JOB_ID']}, {ends}")
    if left_s is None:
        found.warnings.append(
            "SLURM_JOB_END_TIME is not set, so that a run stops in time only if signalled: give sbatch "
            "--signal=B:USR1@120, as jobs/train.sbatch does"
        )
    elif left_s < LITTLE_TIME_S:
        found.warnings.append(f"the job ends in {round(left_s)} s: submit one with a longer --time")
