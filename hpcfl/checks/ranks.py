"""The ranks as they were started: versions, MPI and its launcher, cores, threads, memory, GPUs, SLURM."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hpcfl.checks.alike import Told, by_node, compare, of_this_rank, place
from hpcfl.checks.finding import Checked, gathered, ranges
from hpcfl.communication.communicator import Communicator
from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.machine import free_bytes
from hpcfl.storage.hdf5 import HDF5_VERSION

PACKAGES = ("torch", "numpy", "h5py", "mpi4py")
LEAST_BYTES = 500e6
"""Memory that a rank should find, of which torch alone takes half."""
LITTLE_TIME_S = 600
LAUNCHER_ASKED_S = 20


def check_ranks(world: Communicator, config: Config, environment: Mapping[str, str]) -> Checked:
    """Look at all ranks. Collective; says something on rank 0."""
    error = ""
    try:
        device = str(world.device(config.run.device))
    except UserError as refused:
        device, error = "cpu", str(refused)
    told = gathered(world, _of_this_rank(world, device, environment))
    checked = Checked()
    if not world.is_server:
        return checked
    if error:
        checked.error(error)
    versions = told[0]["versions"].items()
    checked.lines.append("versions: " + ", ".join(f"{name} {found}" for name, found in versions))
    compare(told, checked)
    (_launcher if world.size == 1 else _world)(told, checked, environment)
    threads = config.run.threads
    for node in by_node(told):
        _cores(node, threads, world.size, checked)
        _threads(node, threads, checked)
        _memory(node, checked)
    _devices(told, checked)
    _slurm(environment, world.size, checked)
    return checked


def _of_this_rank(world: Communicator, device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    told = of_this_rank(world, PACKAGES)
    told["versions"]["HDF5"] = HDF5_VERSION
    return told | {
        "works": world.is_worker,
        "device": device,
        "gpus": torch.cuda.device_count(),
        "cores": sorted(os.sched_getaffinity(0)),
        "all_cores": os.cpu_count() or 1,
        "omp": environment.get("OMP_NUM_THREADS", ""),
        "memory": free_bytes(),
        "mpi": world.library(),
    }


def _world(told: Sequence[Told], checked: Checked, environment: Mapping[str, str]) -> None:
    nodes = [f"{node[0]['host']} {ranges(rank['rank'] for rank in node)}" for node in by_node(told)]
    checked.lines.append(f"MPI: {told[0]['mpi']}; ranks by node: {', '.join(nodes)}")
    others = [rank for rank in told if rank["mpi"] != told[0]["mpi"]]
    if others:
        checked.error(
            f"{place(others[0])} has {others[0]['mpi']}, rank 0 {told[0]['mpi']}: load the same MPI on "
            "every node"
        )


def _launcher(told: Sequence[Told], checked: Checked, environment: Mapping[str, str]) -> None:
    """Look at the mpirun that would be typed, where no launcher started this process."""
    mpirun = _mpirun()
    library = _said([sys.executable, "-m", "mpi4py", "--mpi-lib-version"], environment)
    if not library:
        checked.lines.append("MPI: none that mpi4py finds; one rank alone needs none")
        checked.warning(
            "mpi4py finds no MPI, so that there is one rank at the most: load the cluster's MPI module, or "
            "pip install mpi4py mpich"
        )
        return
    if mpirun is None:
        checked.lines.append(f"MPI: mpi4py has {library}; no mpirun; this is one rank alone")
        checked.warning(
            "there is no mpirun beside python or on PATH: load the cluster's MPI module, or under SLURM use "
            "srun --mpi=pmix"
        )
        return
    launcher = _said([mpirun, "--version"], environment)
    checked.lines.append(
        f"MPI: mpi4py has {library}; mpirun is {mpirun} ({_family(launcher)}); this is one rank alone"
    )
    if _family(launcher) != _family(library):
        checked.error(
            f"{mpirun} is of {_family(launcher)} and mpi4py has {library}, so that every rank would be "
            "alone: load the MPI module that mpi4py was built with, or put the mpirun of "
            f"{_family(library)} first on PATH"
        )


def _mpirun() -> str | None:
    beside_python = Path(sys.executable).parent / "mpirun"
    return str(beside_python) if beside_python.exists() else shutil.which("mpirun")


def _said(command: list[str], environment: Mapping[str, str]) -> str:
    """Return the first line that a command prints; empty where it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LAUNCHER_ASKED_S,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.replace("\0", "").strip().splitlines()
    return lines[0].strip() if lines and done.returncode == 0 else ""


def _family(text: str) -> str:
    """Return which MPI a version text is of; those that start each other's ranks are one."""
    lower = text.lower()
    if "open mpi" in lower or "openrte" in lower or "prrte" in lower:
        return "Open MPI"
    return "MPICH" if any(word in lower for word in ("mpich", "hydra", "intel", "mvapich")) else text


def _cores(node: Sequence[Told], threads: int, size: int, checked: Checked) -> None:
    host, working = node[0]["host"], [rank for rank in node if rank["works"] and rank["device"] == "cpu"]
    cores = {core for rank in node for core in rank["cores"]}
    most = max(rank["all_cores"] for rank in node)
    alike = len({tuple(rank["cores"]) for rank in node}) == 1
    each = "all may use" if alike else "together they may use"
    whose = f"ranks {ranges(rank['rank'] for rank in node)}" if size > 1 else "this process"
    each = each if size > 1 else "may use"
    checked.lines.append(f"cores: {host}: {whose}, {each} {ranges(cores)} of {most}")
    narrow = [rank for rank in working if len(rank["cores"]) < threads]
    needed = threads * len(working)
    if needed > len(cores) and len(cores) < most:
        checked.error(
            f"{host}: {len(working)} workers of {threads} thread(s) are pinned to {len(cores)} of {most} "
            f"cores: ask SLURM for --cpus-per-task={threads}, or type mpirun --bind-to none"
        )
    elif narrow:
        checked.error(
            f"{place(narrow[0])} may use {len(narrow[0]['cores'])} cores, and run.threads={threads}: ask "
            f"SLURM for --cpus-per-task={threads}, or set run.threads=1"
        )
    elif needed > len(cores):
        enough = len(cores) // threads
        instead = f"mpirun -n {1 + enough} is" if len(node) == size else f"{enough} workers there are"
        checked.warning(
            f"{host}: {len(working)} workers of {threads} thread(s) take turns on {len(cores)} cores: "
            f"{instead} as fast"
        )


def _threads(node: Sequence[Told], threads: int, checked: Checked) -> None:
    """Compare the threads that libraries start in each rank with the node's cores."""
    host, cores = node[0]["host"], len({core for rank in node for core in rank["cores"]})
    asked = {rank["rank"]: int(rank["omp"]) for rank in node if rank["omp"].isdecimal()}
    texts = sorted({rank["omp"] or "not set" for rank in node})
    checked.lines.append(f"threads: {host}: run.threads={threads}, OMP_NUM_THREADS {', '.join(texts)}")
    too_many = sum(asked.values()) > max(cores, len(asked)) and max(asked.values()) > threads
    if asked and too_many:
        rank = max(asked, key=lambda number: asked[number])
        checked.error(
            f"rank {rank} on {host} has OMP_NUM_THREADS={asked[rank]}, and {len(node)} rank(s) there have "
            f"{cores} cores: type export OMP_NUM_THREADS={threads}"
        )


def _memory(node: Sequence[Told], checked: Checked) -> None:
    host, left = node[0]["host"], min(rank["memory"] for rank in node)
    if math.isinf(left):
        return
    checked.lines.append(f"memory: {host}: {left / 1e9:.3g} GB for {len(node)} rank(s)")
    if left < LEAST_BYTES * len(node):
        checked.error(
            f"{host}: {left / 1e9:.3g} GB of memory for {len(node)} rank(s): ask SLURM for more "
            "(--mem-per-cpu, see hpcfl plan), or start fewer ranks"
        )


def _devices(told: Sequence[Told], checked: Checked) -> None:
    on_gpu = [rank for rank in told if rank["device"] != "cpu"]
    if not on_gpu:
        checked.lines.append("devices: every worker trains on the CPU")
        return
    pairs = ", ".join(f"rank {rank['rank']} {rank['device']}" for rank in on_gpu)
    checked.lines.append(f"devices: {pairs}")
    for node in by_node(told):
        host = node[0]["host"]
        used = {rank["device"] for rank in node} - {"cpu"}
        seen = max(rank["gpus"] for rank in node)
        if 0 < len(used) < seen:
            checked.warning(
                f"{host}: {len(used)} of {seen} GPUs are used: start {1 + seen} ranks, or ask for fewer"
            )
    without = [rank for rank in told if rank["works"] and rank["device"] == "cpu"]
    if without:
        checked.error(
            f"{place(without[0])} sees no GPU where other workers do: ask SLURM for --gpus-per-node on "
            "every node, or set run.device=cpu"
        )


def _slurm(environment: Mapping[str, str], size: int, checked: Checked) -> None:
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return
    end, tasks = environment.get("SLURM_JOB_END_TIME", ""), environment.get("SLURM_NTASKS", "")
    memory = [
        f"{name.removeprefix('SLURM_').lower().replace('_', ' ')} {environment[name]} MB"
        for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU")
        if name in environment
    ]
    left_s = int(end) - time.time() if end.isdecimal() else None
    ends = "no end time" if left_s is None else f"ends in {timedelta(seconds=round(left_s))}"
    checked.lines.append(", ".join([f"SLURM: job {job}, {tasks or '?'} tasks, {ends}", *memory]))
    if left_s is None:
        checked.warning(
            "SLURM_JOB_END_TIME is not set, so that a run stops in time only if signalled: give sbatch "
            "--signal=B:USR1@120, as jobs/train.sbatch does"
        )
    elif left_s < LITTLE_TIME_S:
        checked.warning(f"the job ends in {round(left_s)} s: submit one with a longer --time")
    if tasks.isdecimal() and int(tasks) > size:
        checked.warning(
            f"the job has {tasks} tasks, and {size} rank(s) run: type mpirun -n {tasks} hpcfl doctor, or "
            "srun --mpi=pmix hpcfl doctor"
        )
