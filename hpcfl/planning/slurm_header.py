"""The #SBATCH header for a run, from an estimate."""

from __future__ import annotations

import math
import re

from hpcfl.errors import UserError
from hpcfl.planning.estimate import START_S, Estimate

MARGIN = 1.5
"""A job requests this multiple of the estimated time."""
LONGEST_S = 24 * 3600
"""Longest time limit that is requested if the user gives none."""
SHORTEST_S = 600
LEAST_SIGNAL_S = 120
MEMORY_MARGIN = 1.25
MEMORY_STEP = 100


def seconds_of(limit: str) -> int:
    """Read HH:MM:SS or D-HH:MM:SS; UserError for anything else."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", limit)
    seconds = 0
    if found:
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = ((24 * days + hours) * 60 + minutes) * 60 + rest
    if not seconds:
        raise UserError(f"--time {limit} is invalid; give HH:MM:SS or D-HH:MM:SS, such as --time 04:00:00")
    return seconds


def limit_of(seconds: int) -> str:
    """Return a number of seconds as SLURM reads it."""
    days, rest = divmod(seconds, 24 * 3600)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


class SlurmHeader:
    """The `#SBATCH` lines of a run that `jobs/train.sbatch` starts."""

    def __init__(
        self,
        name: str,
        threads: int,
        estimate: Estimate,
        nodes: int,
        on_gpu: bool,
        limit_s: int | None = None,
    ) -> None:
        """Choose the limits of a job; UserError if not even one round fits in the time limit."""
        self._name, self._threads, self._estimate = name, threads, estimate
        self._nodes, self._on_gpu = nodes, on_gpu
        self.signal_s = max(LEAST_SIGNAL_S, _up(estimate.stop_s, 30))
        wanted_s = max(SHORTEST_S, _up(MARGIN * (START_S + estimate.total_s) + self.signal_s, 600))
        self.limit_s = limit_s or min(LONGEST_S, wanted_s)
        least_s = START_S + estimate.round_s + estimate.evaluation_s + self.signal_s
        if self.limit_s < least_s:
            least = f"give --time {limit_of(_up(least_s, 60))} or more"
            if self.limit_s <= START_S + LEAST_SIGNAL_S:
                raise UserError(
                    f"--time {limit_of(self.limit_s)} is shorter than the start of a job ({START_S:g} s) and "
                    f"the {self.signal_s} s before its end at which the run gets its stop signal; {least}"
                )
            raise UserError(
                f"--time {limit_of(self.limit_s)} is shorter than one round with its evaluation and "
                f"checkpoint on {estimate.ranks} ranks; {least}, or more --ranks"
            )
        of_a_job = self.limit_s - START_S - self.signal_s
        self.jobs = max(1, math.ceil(estimate.total_s / of_a_job))
        """How many jobs of this limit the run takes, one after the other."""

    def lines(self) -> list[str]:
        """Return the lines, ready to be pasted."""
        estimate, nodes = self._estimate, self._nodes
        a_node = math.ceil(estimate.ranks / nodes)
        # nodes without rank 0 have a worker in its place
        first = max(estimate.server_memory, estimate.worker_memory * (nodes > 1))
        memory = MEMORY_MARGIN * (first + (a_node - 1) * estimate.worker_memory)
        options = [
            f"--job-name={self._name}",
            f"--nodes={nodes}",
            f"--ntasks={estimate.ranks}",
            *([f"--ntasks-per-node={a_node}"] if nodes > 1 else []),
            f"--cpus-per-task={self._threads}",
            f"--mem={_up(memory / 2**20, MEMORY_STEP)}M",
            f"--time={limit_of(self.limit_s)}",
            *(["--gpus-per-node=1"] if self._on_gpu else []),
            "--output=slurm-%j.out",
            "--requeue",
            "--open-mode=append",
            f"--signal=B:USR1@{self.signal_s}",
        ]
        return [f"#SBATCH {option}" for option in options]


def _up(value: float, step: int) -> int:
    """Round up to a multiple."""
    return math.ceil(value / step) * step
