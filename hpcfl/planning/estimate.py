"""What a run will take, from a dry run: hours, memory, checkpoints, and bytes on the network.

All that was measured grows with rounds, clients and mini-batches. Assumed are the constants below, and that
ranks do not share cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.network import Load, Network
from hpcfl.config import Config
from hpcfl.data.partitions import ClientIndices
from hpcfl.methods import Method
from hpcfl.planning.dry_run import TRAFFIC, DryRun, batches_of
from hpcfl.setup.experiment import is_batched
from hpcfl.simulation.federation import sampled
from hpcfl.simulation.migration import assign_workers

START_S = 10.0
"""Assumed: seconds from a job's start to its first round."""
COLLECTIVES_A_ROUND, COLLECTIVES_AN_EVALUATION = 18, 6
"""About how many there are; few of them carry models."""
DISK_BYTES_A_S = 100e6
"""Assumed: checkpoints are written, hashed and read back at this rate."""
SAMPLED_COHORTS = 50
"""Rounds whose cohorts are dealt to the workers to find the busiest."""
COPIES = 3
"""Of a client's model in a round: sent, received and decoded."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes on so many ranks."""

    nodes: int
    ranks: int
    round_s: float
    train_s: float
    """Of a round: the busiest worker's training."""
    server_s: float
    network_s: float
    evaluation_s: float
    checkpoint_s: float
    total_s: float
    server_memory: float
    worker_memory: float
    cohort: int
    """Clients of a round."""

    @property
    def limit(self) -> str:
        """What takes most of a round."""
        training = "training" if self.ranks <= self.cohort + 1 else f"a cohort of {self.cohort} clients"
        network = "rank 0's link" if self.nodes > 1 else "rank 0's messages"
        parts = {training: self.train_s, "rank 0's work": self.server_s, network: self.network_s}
        return max(parts, key=lambda part: parts[part])

    @property
    def stop_s(self) -> float:
        """Seconds before the end of a job at which the run must know of it, to end with a checkpoint."""
        return 1.5 * (self.round_s + self.evaluation_s + self.checkpoint_s) + 10


def evaluations(config: Config) -> int:
    """Return how many evaluations a run has; the last round always has one."""
    return math.ceil(config.train.rounds / config.run.eval_every)


class Planner:
    """What a run takes, in all and on any number of ranks."""

    def __init__(
        self,
        config: Config,
        method: Method,
        parts: Sequence[ClientIndices],
        measured: DryRun,
        network: Network,
    ) -> None:
        self.network = network
        self._config, self._method, self._measured = config, method, measured
        self._cohort = config.train.cohort_size(method.context.num_clients)
        self._num_evaluated = np.array([len(getattr(part, config.run.eval_split)) for part in parts])
        self._num_samples = np.array([len(part.train) + len(part.val) + len(part.test) for part in parts])

    def checkpoints(self) -> tuple[float, float]:
        """Return the bytes of a checkpoint shortly before the end, and of the last, which has the models."""
        measured, run, rounds = self._measured, self._config.run, self._config.train.rounds
        context = self._method.context
        count, num_unseen = context.num_clients, len(context.num_samples_of_unseen)
        fixed = measured.checkpoint_bytes - measured.shared_model_bytes - measured.evaluation_bytes
        fixed -= measured.clients * measured.model_bytes + bool(num_unseen) * measured.unseen_model_bytes
        fixed += (count - measured.clients) * measured.client_bytes
        models = measured.shared_model_bytes + count * measured.model_bytes
        models += num_unseen * measured.unseen_model_bytes
        last = fixed + rounds * measured.round_bytes + evaluations(self._config) * measured.evaluation_bytes
        done = (rounds - 1) // run.checkpoint_every * run.checkpoint_every
        middle = fixed + done * measured.round_bytes + done // run.eval_every * measured.evaluation_bytes
        return middle, last + models

    def traffic(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes of a round, of the last kind that there is, and of the whole run, by TRAFFIC."""
        phases = self._measured.phases
        whole = {name: sum(phase.count * phase.traffic[name] for phase in phases) for name in TRAFFIC}
        a_round, in_all = (
            {name: self._cohort * count for name, count in traffic.items()}
            for traffic in (phases[-1].traffic, whole)
        )
        return a_round, in_all

    def on(self, ranks: int) -> Estimate:
        """Return what a run takes on so many ranks."""
        config, measured, train = self._config, self._measured, self._config.train
        deal = _Deal(config, self._method, ranks)
        # the first round has what comes once, such as memory that is taken
        later = measured.phases[1:] or measured.phases
        counts = [phase.count for phase in later]
        train_s = float(np.average([phase.batch_s for phase in later], weights=counts)) * deal.busiest_round()
        server_s = float(np.average([phase.server_s for phase in later], weights=counts)) * self._cohort
        load = Load(later[-1].load.common, later[-1].load.rows * self._cohort)
        network_s = self.network.seconds(COLLECTIVES_A_ROUND, load, ranks)
        round_s = train_s + server_s + network_s
        evaluation_s = self._evaluation_s(deal, ranks)
        middle, last = self.checkpoints()
        saves = (train.rounds - 1) // config.run.checkpoint_every
        total_s = START_S + train.rounds * round_s + evaluations(config) * evaluation_s
        total_s += (saves * middle + last) / DISK_BYTES_A_S
        times = (round_s, train_s, server_s, network_s, evaluation_s, middle / DISK_BYTES_A_S, total_s)
        return Estimate(self.network.nodes(ranks), ranks, *times, *self._memory(deal, ranks), self._cohort)

    def _evaluation_s(self, deal: _Deal, ranks: int) -> float:
        measured, num_clients = self._measured, self._method.context.num_clients
        # the members of the round are scored after training, too
        units = self._num_evaluated * (1 + self._cohort / num_clients)
        if self._config.train.finetune_epochs:
            units = deal.batches
        seconds = np.where(deal.is_unseen, measured.adapt_s * deal.batches, measured.score_s * units)
        load = Load(measured.evaluation.common, measured.evaluation.rows * num_clients)
        network_s = self.network.seconds(COLLECTIVES_AN_EVALUATION, load, ranks)
        return network_s + num_clients * measured.send_s + deal.busiest(seconds)

    def _memory(self, deal: _Deal, ranks: int) -> tuple[float, float]:
        """Return the memory of rank 0 and of the worker that needs most."""
        measured = self._measured
        a_client = COPIES * (measured.evaluation.common + measured.evaluation.rows)
        a_sample = 4 * math.prod(self._method.context.image_shape) + 8
        own = a_sample * deal.busiest(self._num_samples) + measured.client_bytes * deal.largest_shard
        own += a_client * deal.most_members()
        server = measured.peak_bytes + a_client * self._cohort
        if ranks == 1:
            return server + own, server + own
        return server, measured.peak_bytes - measured.server_bytes + own


class _Deal:
    """Who of so many ranks has which clients, in rounds and evaluations."""

    def __init__(self, config: Config, method: Method, ranks: int) -> None:
        context, self._config = method.context, config
        self._num_clients, num_unseen = context.num_clients, len(context.num_samples_of_unseen)
        self._samples = torch.cat([context.num_samples, context.num_samples_of_unseen]).tolist()
        self.batches = np.array(batches_of(self._samples, config))
        self.is_unseen = np.arange(len(self._samples)) >= self._num_clients
        # further workers have nobody
        self._layout = Communicator()
        self._layout.num_workers = max(1, min(ranks - 1, max(self._num_clients, num_unseen)))
        workers = range(self._layout.num_workers)
        self._shards = [
            [
                *self._layout.shard(self._num_clients, worker),
                *(self._num_clients + number for number in self._layout.shard(num_unseen, worker)),
            ]
            for worker in workers
        ]
        self.largest_shard = max(len(self._layout.shard(self._num_clients, worker)) for worker in workers)
        self._cohorts = self._dealt_cohorts()

    def _dealt_cohorts(self) -> list[list[list[int]]]:
        """Return the members of some rounds, worker by worker."""
        config, count, num_workers = self._config, self._num_clients, self._layout.num_workers
        rounds = config.train.rounds
        some = 1 if config.train.cohort_size(count) == count else min(rounds, SAMPLED_COHORTS)
        # a batched engine trains its clients at home
        visit = config.run.placement == "balanced" and not is_batched(config, Communicator().device("auto"))
        dealt = []
        for number in np.linspace(0, rounds - 1, some).astype(int).tolist():
            members = sampled(config, count, number)
            workers: Sequence[int] = self._layout.homes(members, count)
            if visit:
                workers = assign_workers([self._samples[client] for client in members], workers, num_workers)
            by_worker: list[list[int]] = [[] for _ in range(num_workers)]
            for client, worker in zip(members, workers, strict=True):
                by_worker[worker].append(client)
            dealt.append(by_worker)
        return dealt

    def busiest_round(self) -> float:
        """Return the mini-batches of an epoch of the busiest worker, on average over rounds."""
        return float(np.mean([max(self.batches[own].sum() for own in dealt) for dealt in self._cohorts]))

    def most_members(self) -> int:
        """Return the most clients that a worker trains in a round."""
        return max(len(own) for dealt in self._cohorts for own in dealt)

    def busiest(self, of_clients: np.ndarray) -> float:
        """Return the largest sum of a figure of clients [N + U] over those that live on a worker."""
        return max(float(of_clients[shard].sum()) for shard in self._shards)
