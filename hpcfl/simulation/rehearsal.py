"""A few rounds of a run in small, in this process alone: what they take here says what the whole run will.

Clients have one mini-batch each, but for one client, who has as many as some seconds allow and whose training
is timed. Everything else is the run's: its hooks, messages, server and state. Nothing is written.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.network import Load
from hpcfl.communication.world import World
from hpcfl.config import Config
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import Arrays
from hpcfl.methods import Method
from hpcfl.simulation.driver import Driver
from hpcfl.simulation.evaluation import Evaluation
from hpcfl.simulation.experiment import assemble, describe, is_batched, method_of
from hpcfl.simulation.federation import sampled
from hpcfl.simulation.loop import Simulation
from hpcfl.simulation.progress import Progress
from hpcfl.simulation.stopping import StopFlag
from hpcfl.simulation.work import adapting_a_batch, batches_of, finetuning_a_batch, step_seconds
from hpcfl.training.clients import Clients

PASS_S = 0.5
"""Most seconds of the client's pass that is timed, and of the training of the others in a round."""
PASSES = 3
"""How often it is timed; the fastest counts, as whatever else the machine does only slows it."""
MOST_TOGETHER = 32
"""Most clients whose pass is timed where many train as one computation."""
MOST_SCORED = 2000
"""Most samples of the client that is scored."""

TRAFFIC = tuple(f"{kind}bytes_{way}" for way in ("down", "up") for kind in ("", "buffer_", "index_"))
"""Columns of metrics.csv with bytes that are cumulative over rounds."""


@dataclass(frozen=True)
class Phase:
    """Rounds that are alike, by one of them."""

    count: int
    server_s: float
    """Seconds of a round that are not training."""
    traffic: Mapping[str, float]
    """Bytes of one round by TRAFFIC."""
    load: Load
    """What of it passes rank 0 where each worker has a rank of its own."""


@dataclass(frozen=True)
class Models:
    """Bytes of evaluated models, part by part."""

    shared: Sequence[int] = ()
    """Of the parts that all clients have in common."""
    rows: Sequence[int] = ()
    """Of one client's own parts."""

    @staticmethod
    def of(messages: Sequence[Message]) -> Models:
        """Describe the models of some clients; nothing where there are none."""
        if not messages:
            return Models()
        shared, rows = messages[0].shared.values(), messages[0].rows.values()
        own = [tensor[0].nbytes for tensor in rows if tensor.numel()]
        return Models([tensor.nbytes for tensor in shared if tensor.numel()], own)


@dataclass(frozen=True)
class Stored:
    """Bytes of what a checkpoint holds."""

    server: int
    """With what is derived from the state for readers."""
    client_rows: Sequence[int]
    """State of one client by part, what a codec keeps included."""
    models: Models
    models_of_unseen: Models
    an_evaluation: int
    a_round: int
    once: int
    """Figures that are kept once."""
    datasets: int
    """How many there are beside those of a row a client."""


@dataclass(frozen=True)
class Rehearsal:
    """What was measured."""

    wall_s: float
    """What the rehearsal itself took."""
    device: str
    gradient_s: float
    """Of one gradient in a real local pass, with all that the method does beside the network; mean over
    rounds."""
    adapting_s: float
    """The same of a client that takes no part in training; 0 where there are none."""
    score_s: float
    """Of one sample in an evaluation, with all that the method does for it but for fine-tuning."""
    send_s: float
    """What the server takes to make the download of one client's evaluation."""
    phases: Sequence[Phase]
    stored: Stored
    evaluation: Load
    """What goes to one client for an evaluation."""
    server_bytes: int
    """Memory of the server's state."""
    chooses_layers: bool = False
    """Whether the layers that travel depend on what was learnt."""
    has_diverged: bool = False
    """Whether clients had numbers that are nan or infinite."""


def rehearse(config: Config, arrays: Arrays, parts: Sequence[ClientIndices]) -> Rehearsal:
    """Rehearse a run in this process; takes seconds. May raise UserError, as the run would.

    It goes on where numbers become nan or infinite, whatever `run.on_divergence` says.
    """
    began_s = time.monotonic()
    world = World(max_elements=config.run.max_elements)
    device = world.device(config.run.device)
    data = describe(config, arrays, list(parts))
    method = method_of(config, data)
    step_s = step_seconds(config, method)
    config = _shortened(config, method, step_s)
    config = replace(config, run=config.run.model_copy(update={"on_divergence": "continue"}))
    method = method_of(config, data)
    a_batch_s = step_s * method.epochs_a_round

    num_clients = method.context.num_clients
    together = MOST_TOGETHER if is_batched(config, device) else 1
    batches = batches_of(method.context.num_samples, config.train)
    timed = _around_median(batches, together)
    num_batches = max(1, int(PASS_S / (a_batch_s * len(timed))))
    most = max(2, int(PASS_S / a_batch_s))
    numbers = _phases(method, config.train.rounds)
    cohorts = {number: _members(config, method, number, most) for number in numbers}
    members = {client for cohort in cohorts.values() for client in cohort} | set(timed)
    # the server mixes the rows of all
    clients = sorted(members) if method.sharded_state is None else range(num_clients)
    unseen = range(num_clients, len(parts))[:1]
    cut = _cut_for(config, parts, {*timed, *unseen}, num_batches)
    experiment = assemble(config, world, device, method, data, arrays, cut, clients, unseen)
    stop = StopFlag()
    # a rehearsal ends at once, as any command does
    stop.restore()
    run = _Run(experiment, world, stop, Progress(), None)
    with warnings.catch_warnings():
        # of clients cut short, which is no news of the run
        warnings.simplefilter("ignore")
        return run.rehearse(began_s, numbers, cohorts, timed, list(unseen))


class _Run(Simulation):
    """The rounds of a rehearsal, on the only rank."""

    def rehearse(
        self,
        began_s: float,
        numbers: Mapping[int, int],
        cohorts: Mapping[int, Sequence[int]],
        timed: Sequence[int],
        unseen: Sequence[int],
    ) -> Rehearsal:
        """Measure rounds, a pass, an evaluation and an adaptation."""
        federation = self._federation
        self._experiment.place_state()
        self.server = federation.driver.initial_server()
        self._evaluator.try_welcome(self.server)
        phases = [self._phase(number, count, cohorts[number]) for number, count in numbers.items()]
        last, later = max(numbers), {number: count for number, count in numbers.items() if number}
        kinds = later or numbers
        seconds = {number: self._pass(federation.cohort_of(number, timed)) for number in kinds}
        gradient_s = sum(count * seconds[number] for number, count in kinds.items()) / sum(kinds.values())
        score_s, models, evaluation = self._evaluation(last + 1, timed[0], gradient_s)
        adapting_s, of_unseen = self._adaptation(last + 1, unseen)
        members = cohorts[last]
        send_began_s = self._clock()
        sent = federation.driver.send(self.server, federation.cohort_of(last, members), for_evaluation=True)
        send_s = (self._clock() - send_began_s) / len(members)
        return Rehearsal(
            time.monotonic() - began_s,
            self._federation.workplace.device.type,
            gradient_s,
            adapting_s,
            score_s,
            send_s,
            phases,
            self._stored(timed[0], models, of_unseen),
            evaluation,
            sum(tensor.nbytes for tensor in self.server.values()),
            self._federation.driver.needs_request(last)
            or any(mask.dim() == 2 for mask in sent.keep.values()),
            bool(self.ledger.diverged.any()),
        )

    def _phase(self, number: int, count: int, members: Sequence[int]) -> Phase:
        """Do a round; a part of its cohort stands for all of it."""
        federation = self._federation
        share = len(members) / len(federation.cohort(number))
        before = [self.ledger.last(name) for name in TRAFFIC] if self.ledger.metrics else [0.0] * len(TRAFFIC)
        common, rows = self._world.bytes_in_common, self._world.bytes_of_rows
        round_s, train_s = self._timed_round(federation.cohort_of(number, members))
        server_s = max(0.0, round_s - train_s)
        load = Load(self._world.bytes_in_common - common, (self._world.bytes_of_rows - rows) / share)
        self._enter(number + 1)
        moved = [self.ledger.last(name) - old for name, old in zip(TRAFFIC, before, strict=True)]
        traffic = dict(zip(TRAFFIC, (count / share for count in moved), strict=True))
        return Phase(count, server_s / share, traffic, load)

    def _enter(self, done: int) -> None:
        """Enter an evaluation without scores in the ledger, which then has the bytes of the rounds so far."""
        nobody, unscored = np.zeros(self._federation.num_unseen), np.zeros(self._federation.num_clients)
        history = {name: value.numpy() for name, value in self.method.server_diagnostics(self.server).items()}
        moments = dict.fromkeys(("after_download", "after_training"), unscored)
        self.ledger.record_evaluation(
            done,
            unscored,
            unscored,
            np.ones_like(unscored),
            moments,
            1.0,
            history,
            {"accuracy": nobody, "loss": nobody},
        )

    def _pass(self, cohort: Cohort) -> float:
        """Return the seconds of a mini-batch in a client's training."""
        train_s = min(self._timed_round(cohort)[1] for _ in range(PASSES))
        counts = [self._batches(client) for client in cohort.clients]
        return train_s / (sum(counts) * self.method.epochs_a_round)

    def _timed_round(self, cohort: Cohort) -> tuple[float, float]:
        """Do a round; return its seconds and those of training."""
        began_s, wall_began_s = self._clock(), time.monotonic()
        self._round(cohort, False)
        round_s = self._clock() - began_s
        wall_s = max(1e-9, time.monotonic() - wall_began_s)
        return round_s, min(round_s, self.timing.train_s[-1] * round_s / wall_s)

    def _clock(self) -> float:
        """Return seconds, without those of other processes where that can be told."""
        is_alone = self._federation.workplace.device.type == "cpu" and self.config.run.threads == 1
        return time.process_time() if is_alone else time.monotonic()

    def _batches(self, client: int) -> int:
        """Return the mini-batches that a client has here in an epoch."""
        for place in (self._federation.workplace, self._experiment.unseen.workplace):
            if client in place.clients:
                return batches_of(place.shard.count["train"], self.config.train)[place.clients.index(client)]
        raise KeyError(client)

    def _evaluation(self, done: int, client: int, gradient_s: float) -> tuple[float, Sequence[Message], Load]:
        """Return the seconds of a sample, the client's model, and what went to it."""
        federation, found = self._federation, Evaluation.of(self._federation.num_clients)
        cohort = federation.cohort_of(done, [client])
        models = list(self._evaluator.models(self.server, cohort, found))
        began_s = self._clock()
        deque(self._evaluator.models(self.server, cohort, found), maxlen=0)
        all_s = self._clock() - began_s
        tuning_s = gradient_s * finetuning_a_batch(self.method) * self._batches(client)
        # a part of it at the least, as both were measured
        score_s = max(0.1 * all_s, all_s - tuning_s) / self._experiment.num_evaluated[client]
        message = federation.driver.send(self.server, cohort, for_evaluation=True)
        return float(score_s), models, Load(_bytes(message.shared.values()), _bytes(message.rows.values()))

    def _adaptation(self, done: int, unseen: Sequence[int]) -> tuple[float, Sequence[Message]]:
        """Return the seconds of a mini-batch of an unseen client, and its models."""
        if not unseen:
            return 0.0, []
        found = Evaluation.of(self._federation.num_unseen)
        cohort = self._federation.unseen_cohort(done, unseen)
        began_s = self._clock()
        models = list(self._evaluator.adapted(self.server, cohort, found))
        seconds = self._clock() - began_s
        return seconds / (self._batches(unseen[0]) * max(1.0, adapting_a_batch(self.method))), models

    def _stored(self, client: int, models: Sequence[Message], of_unseen: Sequence[Message]) -> Stored:
        federation = self._federation
        server = self.server | self.method.derived(self.server)
        kept = {name: rows[:1] for name, rows in federation.kept_by_codec().items()}
        rows = federation.driver.initial_clients([client]) | kept
        history, ledger = self.ledger.history(), self.ledger.tables()
        of_clients = self.method.client_diagnostics(Clients(federation.workplace, [client], 0))
        growing = {name: ledger.pop(name).values for name in ("metrics", "bytes")}
        an_evaluation = _bytes(history.values()) + growing["metrics"].nbytes
        return Stored(
            _bytes(server.values()),
            [tensor.nbytes for tensor in rows.values()],
            Models.of(models),
            Models.of(of_unseen),
            an_evaluation // len(self.ledger.metrics) + federation.num_clients * _bytes(of_clients.values()),
            growing["bytes"].nbytes // len(growing["bytes"]),
            _bytes(table.values for table in ledger.values()),
            len(server) + len(history) + len(of_clients) + len(ledger) + len(growing),
        )


def _shortened(config: Config, method: Method, step_s: float) -> Config:
    """Return the configuration with one local epoch if an epoch a mini-batch would take too long."""
    train = config.train
    batches = float(np.median(batches_of(method.context.num_samples, train)))
    epochs = train.local_epochs if step_s * method.epochs_a_round * batches <= PASS_S else 1
    unseen = min(epochs, train.unseen_epochs or train.local_epochs)
    finetuning = min(1, train.finetune_epochs)
    shorter = {"local_epochs": epochs, "unseen_epochs": unseen, "finetune_epochs": finetuning}
    return replace(config, train=train.model_copy(update=shorter))


def _phases(method: Method, rounds: int) -> dict[int, int]:
    """Return the numbers of the rounds to rehearse, and how many rounds each stands for."""
    found = {0: 1}
    firsts: dict[bool, int] = {}
    for number in range(1, rounds):
        first = firsts.setdefault(Driver(method).needs_request(number), number)
        found[first] = found.get(first, 0) + 1
    return found


def _members(config: Config, method: Method, number: int, most: int) -> list[int]:
    """Return the clients of a round, or `most` of them."""
    return sampled(config, method.context.num_clients, number)[:most]


def _around_median(batches: Sequence[int], count: int) -> list[int]:
    """Return the ids of `count` clients with a middling number of mini-batches, ascending."""
    order = sorted(range(len(batches)), key=lambda client: batches[client])
    start = max(0, min(len(order) - count, (len(order) - count) // 2))
    return sorted(order[start : start + count])


def _cut_for(
    config: Config, parts: Sequence[ClientIndices], long: set[int], num_batches: int
) -> list[ClientIndices]:
    """Leave the clients in `long` so many mini-batches, and the others one."""
    size = config.train.batch_size
    cut = []
    for client, part in enumerate(parts):
        samples = size * (num_batches if client in long else 1)
        scored = MOST_SCORED if client in long else 1
        cut.append(ClientIndices(part.train[:samples], part.val[:scored], part.test[:scored]))
    return cut


def _bytes(tensors: Iterable[Tensor | np.ndarray]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
