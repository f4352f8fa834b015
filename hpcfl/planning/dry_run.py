"""A dry run: a few rounds of a run, with a few of its clients, in this process and a temporary folder.

Configuration, method, messages, the server's whole state and the checkpoint are the run's own. Clients train
on only as many of their mini-batches as take less than a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import Config, RunConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices
from hpcfl.formatting import readable_bytes
from hpcfl.machine import free_bytes, peak_bytes
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import Method
from hpcfl.setup.experiment import Experiment, assemble, configure_process, describe, is_batched, method_of
from hpcfl.simulation.round_loop import Simulation
from hpcfl.storage.ledger import OF_CLIENTS, Evaluation
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress, silenced
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.local_work import Work

CLIENTS, CLIENTS_TOGETHER = 4, 32
"""Largest number of clients of a round: with the loop engine, and with the batched engine."""
TRAINING_S = 0.5
"""Clients train on more than one mini-batch if a round's training takes less than this."""
FEWEST_SAMPLES, MAX_SCORED = 10, 500
"""Of each client: the fewest training samples, and the most samples that are scored."""
STATES = 2.5
"""Memory of a dry run, as a multiple of the server's state."""
ROUNDS = 3
"""Rounds that are measured; the fastest counts, since one-time costs and other load only slow a round."""

TRAFFIC = tuple(f"{kind}bytes_{way}" for kind in ("", "buffer_", "index_") for way in ("down", "up"))
"""Columns of metrics.csv with bytes that are cumulative over rounds."""


def lacks_memory(method: Method, of_server: Mapping[str, int]) -> str | None:
    """Return why a method's dry run does not fit in the free memory; None if it does.

    `of_server` are the bytes of the server's state by part.
    """
    needed, free = STATES * sum(of_server.values()), free_bytes()
    if method.sharded is not None:
        # with sharded models, the only process has those of all clients
        rows = MethodAdapter(method).initial_clients([0]).values()
        needed += method.context.num_clients * sum(of_client.nbytes for of_client in rows)
    if needed <= free:
        return None
    return (
        f"the dry run needs about {readable_bytes(needed)}, and this machine, or its job, has "
        f"{readable_bytes(free)} free"
    )


@dataclass(frozen=True)
class DryRun:
    """What was measured."""

    wall_s: float
    """Duration of the dry run itself."""
    cpu_s: float
    """Time that this process had on its cores in it."""
    device: str
    batch_s: float
    """Training time of a round per mini-batch of a client, all local epochs together."""
    server_s: float
    """All other time of a round, per client of the cohort."""
    traffic: Mapping[str, float]
    """Bytes of a client in a round by TRAFFIC."""
    first_traffic: Mapping[str, float]
    """Those of the first round, where a method may not choose layers yet."""
    send_s: float
    """Server's time to make one client's download for an evaluation."""
    score_s: float
    """Other time of an evaluation, per scored sample, or per mini-batch of fine-tuning."""
    adapt_s: float
    """Adaptation time of an unseen client per mini-batch; 0 without unseen clients."""
    download_bytes: int
    """Of one client's download for an evaluation: those of its own."""
    shared_download_bytes: int
    """Of the same download: those that all clients share."""
    clients: int
    """Number of clients in the checkpoint."""
    checkpoint_bytes: int
    """Size after the last round, with an evaluation and its models."""
    client_bytes: int
    """Part of it: the state of one client, including a codec's."""
    model_bytes: int
    unseen_model_bytes: int
    shared_model_bytes: int
    """Parts of the evaluated models that all clients share."""
    evaluation_bytes: int
    round_bytes: int
    server_bytes: int
    """Memory of the server's state."""
    peak_bytes: int
    """Peak memory of this process; 0 if unknown."""
    chooses_layers: bool
    """Whether the choice of layers that are sent depends on training."""
    has_diverged: bool
    """Whether clients had numbers that are nan or infinite."""


def dry_run(config: Config, arrays: Arrays, parts: Sequence[ClientIndices]) -> DryRun:
    """Do a dry run; takes seconds, or as long as three rounds of a few mini-batches. May raise UserError.

    It continues if numbers become nan or infinite, for any `run.on_divergence`, loses no client, and takes
    the CPU where `run.device=cuda` finds no GPU.
    """
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    device = config.run.device if torch.cuda.device_count() else "cpu"
    run = config.run.model_copy(update={"on_divergence": "continue", "tracker": None, "device": device})
    config = _without_losses(replace(config, run=run))
    with ExitStack() as at_exit:
        # warnings about clients with few samples concern the dry run only
        at_exit.enter_context(silenced())
        folder = Path(at_exit.enter_context(TemporaryDirectory(prefix="hpcfl-")))
        rounds = _prepared(config, arrays, parts, 1, folder / "first", at_exit)
        done = rounds.done()
        batches = int(TRAINING_S / _fastest(done).train_s)
        if batches > 1:
            rounds = _prepared(config, arrays, parts, batches, folder / "second", at_exit)
            done = rounds.done()
        return rounds.measure(done, began_s, cpu_began_s)


def missing_gpu(run: RunConfig, measured: DryRun) -> str:
    """Return what follows "this machine" where `run.device=cuda` was measured on a CPU, else none."""
    is_missing = run.device == "cuda" and measured.device == "cpu"
    return ", which has no GPU although run.device=cuda expects one" if is_missing else ""


def batches_of(num_samples: Iterable[int], work: Work, first: int = 0) -> list[int]:
    """Return the mini-batches in a local epoch of clients with this many samples, whose ids begin with
    `first`."""
    return [len(work.minibatches(client, count)) for client, count in enumerate(num_samples, first)]


def _without_losses(config: Config) -> Config:
    """Return the configuration of a run in which no client is lost, and all do the mean of local epochs."""
    epochs, train = config.clients.local_epochs, config.train
    clients = config.clients.model_copy(update={"drop_rate": None, "deadline_s": None, "local_epochs": None})
    if epochs is not None:
        train = train.model_copy(update={"local_epochs": round(sum(epochs) / 2)})
    return replace(config, clients=clients, train=train)


def _prepared(
    config: Config,
    arrays: Arrays,
    parts: Sequence[ClientIndices],
    batches: int,
    path: Path,
    at_exit: ExitStack,
) -> _Rounds:
    """Return a simulation of the first clients, with this many mini-batches each, and an unseen one."""
    world = Communicator()
    device = configure_process(config.run, world)
    data = describe(config.data, arrays, list(parts))
    method = method_of(config, data)
    num_clients = method.context.num_clients
    most = CLIENTS_TOGETHER if is_batched(config.run.engine, device, config.model.name) else CLIENTS
    members = range(min(most, config.train.cohort_size(num_clients)))
    # with sharded models, the server mixes the rows of all clients
    count = len(members) if method.sharded is None else num_clients
    samples = max(FEWEST_SAMPLES, batches * max(config.clients.batch_size or [config.train.batch_size]))
    cut = [
        ClientIndices(part.train[:samples], part.val[:MAX_SCORED], part.test[:MAX_SCORED])
        for part in (*parts[:count], *parts[num_clients : num_clients + 1])
    ]
    experiment = assemble(config, world, device, method, data, arrays, cut, count)
    folder = RunFolder(path, config, uses_total_rounds=True)
    folder.open(False, method.layout, at_exit, {})
    return _Rounds(experiment, world, folder, members)


class _Round(NamedTuple):
    """What one round took; traffic as in `DryRun`."""

    round_s: float
    train_s: float
    traffic: Mapping[str, float]


def _fastest(rounds: Sequence[_Round]) -> _Round:
    return min(rounds, key=lambda one: one.round_s)


class _Rounds(Simulation):
    """The rounds of a dry run, on the only rank."""

    def __init__(
        self,
        experiment: Experiment,
        world: Communicator,
        folder: RunFolder,
        members: Sequence[int],
    ) -> None:
        super().__init__(experiment, world, None, Progress(), folder)
        self._members, self._path = members, folder.path
        self._found = Evaluation.zeros(len(experiment.num_train))
        experiment.place_state()
        self.server, _ = self._saver.start()
        self._work = experiment.worker_context.work
        self._batches = batches_of(experiment.num_train[: len(members)], self._work)

    def done(self) -> list[_Round]:
        """Do some rounds like the last of the run."""
        return [self._measured_round() for _ in range(ROUNDS)]

    def measure(self, rounds: Sequence[_Round], began_s: float, cpu_began_s: float) -> DryRun:
        """Measure an evaluation, an adaptation, and the last checkpoint.

        `rounds` are measured already; the dry run began at these times of the clock and of the process.
        """
        last, size, fastest = self._train.rounds - 1, len(self._members), _fastest(rounds)
        send_s, sent = self._sent(last)
        chosen = any(mask.dim() == 2 for mask in sent.layer_mask.values())
        score_s, models = self._scored(last + 1, send_s)
        adapt_s, of_unseen = self._adapted(last + 1)
        everyone = self._federation.num_clients
        self._evaluate(last + 1, np.full(everyone, np.nan))
        self._save(last + 1, with_models=True)
        kept = self._federation.kept_by_codec()
        row = self._federation.adapter.initial_clients([0]) | {name: rows[:1] for name, rows in kept.items()}
        return DryRun(
            wall_s=time.monotonic() - began_s,
            cpu_s=time.process_time() - cpu_began_s,
            device=self._federation.worker_context.device.type,
            batch_s=fastest.train_s / sum(self._batches),
            server_s=max(0.0, fastest.round_s - fastest.train_s) / size,
            traffic=rounds[-1].traffic,
            first_traffic=rounds[0].traffic,
            send_s=send_s / size,
            score_s=score_s,
            adapt_s=adapt_s,
            download_bytes=_bytes(rows[0] for rows in sent.per_client.values()),
            shared_download_bytes=_bytes(sent.shared.values()),
            clients=everyone,
            checkpoint_bytes=(self._path / "checkpoint.h5").stat().st_size,
            client_bytes=_bytes(row.values()),
            model_bytes=_bytes(rows[0] for rows in models.per_client.values()),
            unseen_model_bytes=_bytes(rows[0] for rows in of_unseen.per_client.values()),
            shared_model_bytes=_bytes([*models.shared.values(), *of_unseen.shared.values()]),
            evaluation_bytes=self._evaluation_bytes(),
            round_bytes=self.ledger.tables()["bytes"].values[0].nbytes,
            server_bytes=_bytes(self.server.values()),
            peak_bytes=peak_bytes(),
            chooses_layers=chosen or self._federation.adapter.needs_request(last),
            has_diverged=bool(self.ledger.diverged.any()),
        )

    def _cohort(self, number: int) -> Cohort:
        return self._federation.cohort_of(number, self._members)

    def _measured_round(self) -> _Round:
        began_s = time.monotonic()
        self._round(self._cohort(self._train.rounds - 1), False)
        round_s = time.monotonic() - began_s
        # layers and other tensors, running statistics, indices; down and up
        moved = self.ledger.tables()["bytes"].values[-1, 1:].reshape(2, -1)
        kinds = np.stack([moved[:, :-2].sum(axis=1), moved[:, -2], moved[:, -1]]).ravel()
        of_client = (kinds / len(self._members)).tolist()
        traffic = dict(zip(TRAFFIC, of_client, strict=True))
        return _Round(round_s, max(1e-6, self.timing.train_s[-1]), traffic)

    def _sent(self, number: int) -> tuple[float, Message]:
        """Return what the server sends for an evaluation, and its seconds."""
        began_s = time.monotonic()
        sent = self._federation.adapter.eval_download(self.server, self._cohort(number))
        return time.monotonic() - began_s, sent

    def _scored(self, done: int, send_s: float) -> tuple[float, Message]:
        """Return the seconds of a sample or mini-batch in an evaluation, and a group's models."""
        seconds = []
        for _ in range(2):
            began_s = time.monotonic()
            models = list(self._evaluator.models(self.server, self._cohort(done), self._found))
            seconds.append(time.monotonic() - began_s)
        of_cohort = self._experiment.num_evaluated[: len(self._members)]
        units = sum(self._batches) if self._train.finetune_epochs else int(of_cohort.sum())
        return max(0.0, min(seconds) - send_s) / max(1, units), models[0]

    def _adapted(self, done: int) -> tuple[float, Message]:
        """Return the seconds of a mini-batch of an unseen client, and its model; empty without one."""
        federation = self._federation
        if not federation.num_unseen:
            return 0.0, Message()
        cohort = federation.cohort_of(done, [federation.num_clients])
        began_s = time.monotonic()
        (model,) = self._evaluator.models(self.server, cohort, self._found)
        seconds = time.monotonic() - began_s
        of_unseen = self._experiment.num_train[federation.num_clients :]
        return seconds / sum(batches_of(of_unseen, self._work, federation.num_clients)), model

    def _evaluation_bytes(self) -> int:
        """Return what an evaluation of all clients adds to a checkpoint."""
        clients = ClientGroup(self._federation.worker_context, [0], 0)
        adapter = self._federation.adapter
        of_client = 8 * len(OF_CLIENTS) + _bytes(adapter.client_diagnostics(clients).values())
        of_server = _bytes(adapter.server_diagnostics(self.server).values())
        return of_server + 8 * len(self.ledger.metrics[-1]) + of_client * self.method.context.num_clients


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
