"""What a run will take, from a rehearsal: hours, memory, checkpoints, disk, and bytes on the network.

Measured are a mini-batch of training, a sample of an evaluation, and the server's part of a round, on a core
or the GPU of this machine. Assumed are the constants below, and that ranks do not share cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl.communication.network import Load, Network
from hpcfl.communication.world import World
from hpcfl.config import Config
from hpcfl.methods import Method
from hpcfl.simulation.device_memory import bytes_of_client
from hpcfl.simulation.experiment import is_batched
from hpcfl.simulation.federation import sampled
from hpcfl.simulation.placement import balanced
from hpcfl.simulation.rehearsal import TRAFFIC, Rehearsal
from hpcfl.simulation.work import adapting_a_batch, batches_of, evaluations, finetuning_a_batch

START_S = 10.0
"""Assumed: seconds from a job's start to its first round."""
COLLECTIVES_A_ROUND, COLLECTIVES_AN_EVALUATION = 18, 6
"""About how many there are; few of them carry models."""
DISK_BYTES_A_S = 100e6
"""Assumed: checkpoints are written, hashed and read back at this rate."""
RANK_BYTES = 40e6
"""Assumed: what MPI and the first steps of training add to the memory of a process."""

FILE_BYTES, DATASET_BYTES = 4_600, 460
"""What HDF5 adds to the numbers of a checkpoint: once, and for a dataset."""
NODE_ROWS, FULL_NODE_ROWS, NODE_BYTES = 64, 57, 2_800
"""What it adds for a dataset of a row a client: nodes of a tree, of so many rows."""
METRICS_ROW_BYTES, TRAFFIC_ROW_BYTES = 330, 20
CLIENT_LINE_BYTES, CLASS_LINE_BYTES = 90, 12
REPORT_BYTES, SHOWN_NUMBER_BYTES = 60_000, 3

SAMPLED_COHORTS = 50
"""Rounds whose cohorts are dealt to the workers to find the busiest."""
SERVER_COPIES = 2
"""Of the server's state: a step's, or that of the report, which reads the last checkpoint."""
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


@dataclass(frozen=True)
class Sizes:
    """Bytes, whatever the number of ranks."""

    checkpoint: int
    """Of the last checkpoint before the end."""
    last_checkpoint: int
    tables: int
    """Of CSV files."""
    report: int

    @property
    def peak(self) -> int:
        """Of the run folder while the last checkpoint is written beside the newest and the previous one."""
        return 2 * self.checkpoint + self.last_checkpoint + self.tables + self.report


def sizes(config: Config, method: Method, rehearsal: Rehearsal) -> Sizes:
    """Return the sizes of a run folder's files."""
    rounds, every = config.train.rounds, config.run.checkpoint_every
    middle = (rounds - 1) // every * every
    stored, context = rehearsal.stored, method.context
    num_clients, num_unseen = context.num_clients, len(context.num_samples_of_unseen)
    text = len(config.yaml().encode()) + 100 * len(method.layout.parameters)
    fixed = FILE_BYTES + text + stored.server + stored.once + DATASET_BYTES * stored.datasets
    fixed += 8 * num_clients + _rows_bytes(stored.client_rows, num_clients)
    models = 0
    for found, count in ((stored.models, num_clients), (stored.models_of_unseen, num_unseen)):
        models += _rows_bytes(found.shared, 1) + _rows_bytes(found.rows, count)

    def after(done: int, evaluated: int) -> int:
        return fixed + done * stored.a_round + evaluated * stored.an_evaluation

    times = evaluations(config)
    lines = max(1, (stored.a_round // 8 - 1))
    tables = times * METRICS_ROW_BYTES + rounds * lines * TRAFFIC_ROW_BYTES
    tables += (num_clients + num_unseen) * (CLIENT_LINE_BYTES + CLASS_LINE_BYTES * context.num_classes)
    report = REPORT_BYTES + SHOWN_NUMBER_BYTES * times * stored.an_evaluation // 8
    return Sizes(
        after(middle, middle // config.run.eval_every), after(rounds, times) + models, tables, report
    )


def _rows_bytes(rows: Sequence[int], count: int) -> int:
    """Return the bytes of datasets of `count` rows, a chunk each, given those of a row."""
    nodes = 1 if count <= NODE_ROWS else 1 + math.ceil(count / FULL_NODE_ROWS)
    return sum(count * row + NODE_BYTES * nodes for row in rows)


def traffic(rehearsal: Rehearsal) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of a round, of the last kind that there is, and of the whole run, by TRAFFIC."""
    phases = rehearsal.phases
    whole = {name: sum(phase.count * phase.traffic[name] for phase in phases) for name in TRAFFIC}
    return dict(phases[-1].traffic), whole


class Planner:
    """What a run takes on any number of ranks."""

    def __init__(
        self,
        config: Config,
        method: Method,
        rehearsal: Rehearsal,
        num_evaluated: Sequence[int],
        data_bytes: int,
        program_bytes: float,
        network: Network,
    ) -> None:
        """Take what is known.

        Args:
            config: what is run.
            method: its method.
            rehearsal: what was measured.
            num_evaluated: samples of each client in `run.eval_split`, those of unseen clients last.
            data_bytes: what the source takes of a rank's memory while it is dealt.
            program_bytes: what a process takes before it reads data.
            network: that of the ranks.
        """
        self.network = network
        self._config, self._method, self._rehearsal = config, method, rehearsal
        self._num_evaluated, self._data_bytes, self._program_bytes = num_evaluated, data_bytes, program_bytes
        self.sizes = sizes(config, method, rehearsal)

    def on(self, ranks: int) -> Estimate:
        """Return what a run takes on so many ranks."""
        config, rehearsal, train = self._config, self._rehearsal, self._config.train
        deal = _Deal(config, self._method, self._num_evaluated, ranks)
        train_s = rehearsal.gradient_s * self._method.epochs_a_round * deal.busiest_round()
        # the first round has what comes once, such as memory that is taken
        later = rehearsal.phases[1:] or rehearsal.phases
        server_s = sum(phase.count * phase.server_s for phase in later) / sum(phase.count for phase in later)
        network_s = self.network.seconds(COLLECTIVES_A_ROUND, rehearsal.phases[-1].load, ranks)
        round_s = train_s + server_s + network_s
        evaluation_s = self._evaluation_s(deal, ranks)
        checkpoint_s = self.sizes.checkpoint / DISK_BYTES_A_S
        saves = (train.rounds - 1) // config.run.checkpoint_every
        total_s = START_S + train.rounds * round_s + evaluations(config) * evaluation_s
        total_s += saves * checkpoint_s + self.sizes.last_checkpoint / DISK_BYTES_A_S
        times = (round_s, train_s, server_s, network_s, evaluation_s, checkpoint_s, total_s)
        cohort = train.cohort_size(self._method.context.num_clients)
        return Estimate(self.network.nodes(ranks), ranks, *times, *self._memory(deal, ranks), cohort)

    def _evaluation_s(self, deal: _Deal, ranks: int) -> float:
        method, rehearsal = self._method, self._rehearsal
        num_clients = method.context.num_clients
        seconds = rehearsal.send_s * num_clients + deal.busiest_evaluation(
            rehearsal.score_s,
            rehearsal.gradient_s * finetuning_a_batch(method),
            rehearsal.adapting_s * adapting_a_batch(method),
        )
        # the members of the round are scored after training, too
        share = self._config.train.cohort_size(num_clients) / num_clients
        seconds += share * deal.busiest_evaluation(rehearsal.score_s, 0.0, 0.0)
        load = Load(rehearsal.evaluation.common, rehearsal.evaluation.rows * num_clients)
        return seconds + self.network.seconds(COLLECTIVES_AN_EVALUATION, load, ranks)

    def _memory(self, deal: _Deal, ranks: int) -> tuple[float, float]:
        """Return the memory of rank 0 and of the worker that needs most."""
        config, method, rehearsal = self._config, self._method, self._rehearsal
        program, row = self._program_bytes + RANK_BYTES, method.largest_row
        a_client = COPIES * 4.0 * (row + method.layout.buffer_size)
        # what is larger than a block comes in blocks
        cohort = min(
            config.train.cohort_size(method.context.num_clients), max(1, config.run.max_elements // row)
        )
        at_work = SERVER_COPIES * rehearsal.server_bytes + cohort * a_client
        samples = deal.samples_of_largest_shard() * (4 * math.prod(method.context.image_shape) + 8)
        own = samples + sum(rehearsal.stored.client_rows) * deal.largest_shard
        training = deal.most_members() * a_client + bytes_of_client(method)
        if ranks == 1:
            alone = program + own + max(self._data_bytes, at_work + training)
            return alone, alone
        server = program + max(self._data_bytes, at_work)
        return server, program + own + max(self._data_bytes, training)


class _Deal:
    """Who of so many ranks has which clients, in rounds and evaluations."""

    def __init__(self, config: Config, method: Method, num_evaluated: Sequence[int], ranks: int) -> None:
        context, self._config, self._method = method.context, config, method
        self._num_clients, num_unseen = context.num_clients, len(context.num_samples_of_unseen)
        # further workers have nobody
        self._workers = max(1, min(ranks - 1, max(self._num_clients, num_unseen)))
        layout = World()
        layout.num_workers = self._workers
        shards = [layout.shard(self._num_clients, worker) for worker in range(self._workers)]
        self._homes = layout.homes(range(self._num_clients), self._num_clients)
        self._shards = [list(shard) for shard in shards]
        for shard, worker in zip(self._shards, range(self._workers), strict=True):
            shard += [self._num_clients + number for number in layout.shard(num_unseen, worker)]
        self._samples = torch.cat([context.num_samples, context.num_samples_of_unseen])
        self._batches = np.array(batches_of(self._samples, config.train))
        self._evaluated = np.array(num_evaluated)
        self._cohorts = list(self._dealt_cohorts())
        self.largest_shard = max(map(len, shards))

    def _dealt_cohorts(self) -> Sequence[list[list[int]]]:
        """Return the members of some rounds, worker by worker."""
        config = self._config
        rounds = config.train.rounds
        is_one = config.train.cohort_size(self._num_clients) == self._num_clients
        some = 1 if is_one else min(rounds, SAMPLED_COHORTS)
        # a batched engine trains its clients at home
        visit = config.run.placement == "balanced" and not is_batched(config, World().device("auto"))
        dealt = []
        for number in np.linspace(0, rounds - 1, some).astype(int).tolist():
            members = sampled(config, self._num_clients, number)
            homes = [self._homes[client] for client in members]
            work = self._samples[members].tolist()
            workers = balanced(work, homes, self._workers) if visit else homes
            by_worker: list[list[int]] = [[] for _ in range(self._workers)]
            for client, worker in zip(members, workers, strict=True):
                by_worker[worker].append(client)
            dealt.append(by_worker)
        return dealt

    def busiest_round(self) -> float:
        """Return the mini-batches of an epoch of the busiest worker, on average over rounds."""
        return float(np.mean([max(self._batches[own].sum() for own in dealt) for dealt in self._cohorts]))

    def most_members(self) -> int:
        """Return the most clients that a worker trains in a round."""
        return max(len(own) for dealt in self._cohorts for own in dealt)

    def busiest_evaluation(self, score_s: float, tuning_s: float, adapting_s: float) -> float:
        """Return the seconds of the busiest worker, given those of a sample and of a mini-batch."""
        is_unseen = np.arange(len(self._samples)) >= self._num_clients
        of_client = score_s * self._evaluated + self._batches * np.where(is_unseen, adapting_s, tuning_s)
        return max(float(of_client[shard].sum()) for shard in self._shards)

    def samples_of_largest_shard(self) -> int:
        """Return the samples of all splits of the worker that has most, if none are for validation."""
        both = self._samples.numpy() + self._evaluated
        return max(int(both[shard].sum()) for shard in self._shards)
