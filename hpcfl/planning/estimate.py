"""What a run will take, from a dry run: hours, memory, checkpoints, and bytes of messages.

The measured times are multiplied by rounds, clients and mini-batches; messages between ranks take no time.
The constants below are assumptions, and so is that ranks do not share cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl.communication.communicator import shard_of
from hpcfl.communication.sharded import shard_unit_of
from hpcfl.config.keys import RunConfig
from hpcfl.data.partitions import ClientIndices
from hpcfl.methods import Method
from hpcfl.planning.dry_run import TRAFFIC, DryRun, batches_of
from hpcfl.setup.experiment import is_batched
from hpcfl.simulation.federation import num_evaluated_cohorts
from hpcfl.simulation.migration import assign_workers
from hpcfl.simulation.sampling import Sampler
from hpcfl.simulation.stopping import notice_s
from hpcfl.training.local_work import Work

START_S = 10.0
"""Assumed: seconds from a job's start to its first round."""
DISK_BYTES_A_S = 100e6
"""Assumed: checkpoints are written, hashed and read back at this rate."""
SAMPLED_COHORTS = 50
"""Number of sampled rounds for the average load of the busiest worker."""
COPIES, GATHERED = 3, 2
"""Copies of what the server sends, as made, packed and received; and of rows on their way to the server, as
made and packed, or as they arrive and in the clients' order."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes on this many ranks."""

    ranks: int
    train_s: float
    """Time of the busiest worker in a round."""
    server_s: float
    """Time of rank 0 in a round."""
    evaluation_s: float
    checkpoint_s: float
    total_s: float
    """Without the start of a job."""
    server_memory: float
    worker_memory: float

    @property
    def round_s(self) -> float:
        return self.train_s + self.server_s

    @property
    def stop_s(self) -> float:
        """Seconds before the end of a job at which the run must get the signal, to end with a checkpoint."""
        return notice_s(self.round_s + self.evaluation_s, self.checkpoint_s)


class Planner:
    """Estimates of a run's cost on any number of ranks."""

    def __init__(
        self,
        run: RunConfig,
        method: Method,
        parts: Sequence[ClientIndices],
        measured: DryRun,
    ) -> None:
        self._run, self._method, self._measured = run, method, measured
        self._train, self._num_clients = method.context.train, method.context.num_clients
        self._num_unseen = len(parts) - self._num_clients
        self._cohort = self._train.cohort_size(self._num_clients)
        self._evaluations = evaluations(self._train.rounds, run.eval_every)
        self._num_train = [len(part.train) for part in parts]
        work = Work(self._train, run.seed, method.context.clients)
        self._batches = np.array(batches_of(self._num_train, work))
        self._num_evaluated = np.array([len(getattr(part, run.eval_split)) for part in parts])
        self._num_samples = np.array([len(part.train) + len(part.val) + len(part.test) for part in parts])

    def checkpoints(self) -> tuple[float, float]:
        """Return the bytes of the last-but-one checkpoint, and of the last, which contains the models."""
        measured, every, rounds = self._measured, self._run.checkpoint_every, self._train.rounds
        count, num_unseen = self._num_clients, self._num_unseen
        fixed = measured.checkpoint_bytes - measured.shared_model_bytes - measured.evaluation_bytes
        fixed -= measured.clients * measured.model_bytes + bool(num_unseen) * measured.unseen_model_bytes
        fixed += (count - measured.clients) * measured.client_bytes
        models = measured.shared_model_bytes + count * measured.model_bytes
        models += num_unseen * measured.unseen_model_bytes
        last = fixed + rounds * measured.round_bytes + self._evaluations * measured.evaluation_bytes
        done = (rounds - 1) // every * every
        evaluated = done // self._run.eval_every
        return fixed + done * measured.round_bytes + evaluated * measured.evaluation_bytes, last + models

    def traffic(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes of a round and of the whole run, by TRAFFIC."""
        first, later = (
            {name: self._cohort * moved[name] for name in TRAFFIC}
            for moved in (self._measured.first_traffic, self._measured.traffic)
        )
        return later, {name: first[name] + (self._train.rounds - 1) * later[name] for name in TRAFFIC}

    def on(self, ranks: int) -> Estimate:
        """Return what a run takes on this many ranks."""
        measured, rounds = self._measured, self._train.rounds
        # further workers have no clients
        num_workers = max(1, min(ranks - 1, max(self._num_clients, self._num_unseen)))
        shards = [self._shard(worker, num_workers) for worker in range(num_workers)]
        placed = self._placed_cohorts(shards)
        busiest = [max(self._batches[clients].sum() for clients in by_worker) for by_worker in placed]
        train_s = measured.batch_s * float(np.mean(busiest))
        server_s = measured.server_s * self._cohort
        evaluation_s = self._evaluation_s(shards)
        middle, last = self.checkpoints()
        saves = (rounds - 1) // self._run.checkpoint_every
        # the last checkpoint needs the models of one evaluation more
        total_s = rounds * (train_s + server_s) + (self._evaluations + 1) * evaluation_s
        total_s += (saves * middle + last) / DISK_BYTES_A_S
        server_memory, worker_memory = self._memory(shards, placed)
        return Estimate(
            ranks=ranks,
            train_s=train_s,
            server_s=server_s,
            evaluation_s=evaluation_s,
            checkpoint_s=middle / DISK_BYTES_A_S,
            total_s=total_s,
            server_memory=server_memory if ranks > 1 else server_memory + worker_memory,
            worker_memory=worker_memory + (measured.peak_bytes - measured.server_bytes if ranks > 1 else 0),
        )

    def _shard(self, worker: int, num_workers: int) -> list[int]:
        """Return the clients that live on a worker, unseen ones last."""
        unit, in_training = shard_unit_of(self._method.sharded), self._num_clients
        unseen = shard_of(self._num_unseen, worker, num_workers, unit)
        return [
            *shard_of(in_training, worker, num_workers, unit),
            *(in_training + number for number in unseen),
        ]

    def _placed_cohorts(self, shards: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Return the members of some rounds, worker by worker."""
        rounds, count, context = self._train.rounds, self._num_clients, self._method.context
        sampler = Sampler(context)
        some = 1 if self._cohort == count else min(rounds, SAMPLED_COHORTS)
        # a batched engine trains its clients at home
        device = torch.device(self._measured.device)
        is_batched_here = is_batched(self._run.engine, device, context.model_name)
        migrates = self._run.placement == "balanced" and not is_batched_here
        home = {client: worker for worker, shard in enumerate(shards) for client in shard}
        placed = []
        for number in np.linspace(0, rounds - 1, some).astype(int).tolist():
            members = sampler.clients(number)
            workers: Sequence[int] = [home[client] for client in members]
            if migrates:
                workers = assign_workers([self._num_train[c] for c in members], workers, len(shards))
            by_worker: list[list[int]] = [[] for _ in shards]
            for client, worker in zip(members, workers, strict=True):
                by_worker[worker].append(client)
            placed.append(by_worker)
        return placed

    def _evaluation_s(self, shards: Sequence[Sequence[int]]) -> float:
        measured, count = self._measured, self._num_clients
        # the members of the round are scored after training, too
        units = self._num_evaluated * (1 + self._cohort / count)
        if self._train.finetune_epochs:
            units = self._batches
        seconds = measured.score_s * units
        seconds[count:] = measured.adapt_s * self._batches[count:]
        return count * measured.send_s + max(float(seconds[shard].sum()) for shard in shards)

    def _memory(
        self, shards: Sequence[Sequence[int]], placed: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[float, float]:
        """Return the memory of rank 0, and what clients take on the worker that needs most.

        A round has messages of its cohort. The last checkpoint has those of an evaluation beside the models,
        and every checkpoint brings the clients' state to rank 0.
        """
        measured, count = self._measured, max(self._num_clients, self._num_unseen)
        common, rows = measured.shared_download_bytes, measured.download_bytes
        own = max(len(members) for by_worker in placed for members in by_worker)
        scored = math.ceil(count / num_evaluated_cohorts(count, self._method.layout.size))
        scored_here = min(scored, max(map(len, shards)))
        model = max(measured.model_bytes, measured.unseen_model_bytes)
        state = min(measured.client_bytes * count, 4 * self._run.max_elements)
        server = max(
            COPIES * (common + rows * self._cohort),
            COPIES * (common + rows * scored) + GATHERED * model * scored,
            GATHERED * state,
        )
        # an upload is as large as a download, and an evaluated model may be the download itself
        worker = COPIES * common + GATHERED * max((common + rows) * own, max(rows, model) * scored_here)
        a_sample = self._method.context.sample.num_bytes + 8
        kept = max(
            a_sample * float(self._num_samples[shard].sum()) + measured.client_bytes * len(shard)
            for shard in shards
        )
        return measured.peak_bytes + server, kept + worker


def evaluations(rounds: int, eval_every: int) -> int:
    """Return how many evaluations a run has; the last round always has one."""
    return math.ceil(rounds / eval_every)
