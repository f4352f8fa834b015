"""The round loop: sample, send down, train, send up, aggregate, evaluate, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.channel import Channel, Upload
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.traffic import Traffic, count_bytes
from hpcfl.communication.world import World
from hpcfl.methods.base import Method, State
from hpcfl.randomness import torch_stream
from hpcfl.simulation.experiment import Experiment
from hpcfl.simulation.progress import Progress
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.checkpoint import Block, Header, LayoutRecord, Rows, RowShape, Snapshot
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.runfolder import RunFolder
from hpcfl.training.clients import Clients

EVALUATED_ELEMENTS = 2**27
"""Numbers in the models that are evaluated at once. How clients are cut may change a product's last bits, so
this is no setting, as `run.max_elements` is."""

Groups = Iterable[tuple[slice, Clients]]

Outcome = Literal["finished", "stopped", "already finished"]


@dataclass
class Timing:
    """Seconds on the server, one entry a round or checkpoint; `train_s` is the slowest worker's."""

    round_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


class Simulation:
    """One run on one rank. Methods that all ranks must call together say so.

    `folder` is the server's open run folder and None elsewhere; a `stop` flag raised on any rank ends the
    run with a checkpoint at the next round boundary.
    """

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        stop: StopFlag,
        progress: Progress,
        folder: RunFolder | None,
    ) -> None:
        self._experiment, self._world, self._stop, self._progress = experiment, world, stop, progress
        self._folder = folder
        self.method = experiment.method
        self.config = experiment.config
        self._place = experiment.workplace
        self._num_clients = len(experiment.num_train)
        self._channel = Channel(world, self.method.layers, self._num_clients)
        self._labels = [*(layer.name for layer in self.method.layers), *self.method.extra_labels]
        self.ledger = Ledger(self._num_clients, self._labels)
        self._history: dict[str, list[Tensor]] = {}
        self._seen: set[int] = set()
        self._counted_rounds = 0
        self.server: State = {}
        self._wall_before_s = 0.0
        self._started_s = time.monotonic()
        self.timing = Timing()
        self._longest_s = 0.0

    def run(self) -> Outcome:
        """Run all rounds that are not done yet. Collective."""
        train, run = self.config.train, self.config.run
        first = self._start()
        for number in range(first, train.rounds):
            began_s = time.monotonic()
            done = number + 1
            is_last = done == train.rounds
            is_evaluated = is_last or done % run.eval_every == 0
            after_training = self._round(self.cohort(number), is_evaluated)
            self.timing.round_s.append(time.monotonic() - began_s)
            if is_evaluated:
                self._evaluate(done, after_training)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            stops = not is_last and self._must_stop()
            if is_last or stops or done % run.checkpoint_every == 0:
                self._save(done)
            self._progress.round_done(done, self.ledger)
            if stops:
                return "stopped"
        if self._folder is not None:
            self.ledger.write_clients(
                self._folder.path, self._experiment.num_train, self._experiment.num_evaluated
            )
        return "already finished" if first == train.rounds else "finished"

    def cohort(self, number: int) -> Cohort:
        """Sample the clients of round `number`, the same on every rank without a message."""
        size = self.config.train.cohort_size(self._num_clients)
        order = torch.randperm(
            self._num_clients, generator=torch_stream(self.config.run.seed, "cohort", number)
        )
        return self._cohort_of(number, sorted(order[:size].tolist()))

    def _round(self, cohort: Cohort, is_evaluated: bool) -> np.ndarray:
        """Train and aggregate one cohort and enter its cost in the ledger. Collective.

        Returns on the server, if asked, the accuracy of each client's model right after training [N], nan
        where there is none.
        """
        world, method = self._world, self.method
        traffic = _Counter(len(cohort), method, self._labels)
        groups = list(self._groups(cohort))
        sent = method.send(self.server, cohort) if world.is_server else None
        down = self._channel.down(sent, cohort)
        traffic.count_down(sent)
        if method.negotiates(cohort.round):
            down, sent = self._negotiate(cohort, groups, down, traffic)
        began_s = time.monotonic()
        up, loss, steps, accuracy, scoring_s = self._train(groups, down, is_evaluated)
        train_s = time.monotonic() - began_s - scoring_s
        upload = traffic.counting_up(self._channel.up(up, cohort, sent))
        if world.is_server:
            method.receive(self.server, cohort, upload)
        upload.drain()
        seconds_here = torch.full_like(steps, train_s)
        figures = self._collect(cohort, torch.stack([loss, steps, seconds_here, accuracy], dim=1))
        after_training = np.full(self._num_clients, np.nan)
        if figures is not None:
            losses, steps_done, seconds, scores = figures.T
            after_training[list(cohort.clients)] = scores.numpy()
            self.timing.train_s.append(float(seconds.max()))
            self.ledger.record_round(
                cohort,
                (traffic.down, traffic.up),
                float(steps_done.sum()),
                float(losses.mean()),
                float(seconds.max()),
            )
        return after_training

    def _negotiate(
        self, cohort: Cohort, groups: Groups, down: Message, traffic: _Counter
    ) -> tuple[Message, Message | None]:
        """Let a cohort answer its download and send it more. Collective.

        Returns all that this rank's clients have now, and on the server what it sent last.
        """
        asked = _stack([self.method.ask(clients, down.select(part)) for part, clients in groups])
        requests = traffic.counting_up(self._channel.up(asked, cohort)).collect()
        more = self.method.answer(self.server, cohort, requests) if self._world.is_server else None
        traffic.count_down(more)
        return down | asked | self._channel.down(more, cohort), more

    def _train(
        self, groups: Groups, down: Message, is_evaluated: bool
    ) -> tuple[Message, Tensor, Tensor, Tensor, float]:
        """Train this rank's cohort members.

        Returns their upload, mean losses, steps and, if asked, accuracies, and the seconds these took.
        """
        nothing = torch.zeros(0, dtype=torch.float64)
        uploads, losses, steps, scores = [], [nothing], [nothing], [nothing]
        scoring_s = 0.0
        for part, clients in groups:
            mine = down.select(part)
            up = self.method.work(clients, mine)
            steps.append(clients.steps.double().cpu())
            losses.append((clients.loss_sum / clients.steps.clamp(min=1)).cpu())
            began_s = time.monotonic()
            model = self.method.after_training(clients, mine, up) if is_evaluated else {}
            scores.append(self._scores(clients, model)[:, 0])
            scoring_s += time.monotonic() - began_s
            # brought to the CPU group by group, so that a GPU never holds a whole cohort's
            uploads.append(_stack([up]))
            clients.commit()
        return _stack(uploads), torch.cat(losses), torch.cat(steps), torch.cat(scores), scoring_s

    def _own_rows(self, cohort: Cohort) -> list[int]:
        """Return where the cohort's members on this rank stand in the rank's client state."""
        return [client - self._place.clients.start for client in cohort.clients[self._channel.own(cohort)]]

    def _groups(self, cohort: Cohort) -> Iterator[tuple[slice, Clients]]:
        """Yield this rank's cohort members, as many at once as the engine takes."""
        own = list(cohort.clients[self._channel.own(cohort)])
        size = self._place.engine.clients_at_once
        for start in range(0, len(own), size):
            yield slice(start, start + size), Clients(self._place, own[start : start + size], cohort.round)

    def _evaluate(self, done: int, after_training: np.ndarray) -> None:
        """Score every client on its own samples; changes no state and counts no bytes. Collective."""
        accuracy, loss, after_download = np.zeros((3, self._num_clients))
        for cohort in self._everyone(done):
            rows = [torch.zeros(0, 3, dtype=torch.float64)]
            for clients, down in self._downloads(cohort):
                rows.append(self._figures(clients, down))
            figures = self._collect(cohort, torch.cat(rows))
            if figures is not None:
                everyone = list(cohort.clients)
                accuracy[everyone], loss[everyone], after_download[everyone] = figures.T.numpy()
        known = self._client_history(done)
        if self._folder is not None:
            self.ledger.wall_s = self._wall_s()
            moments = {"after_download": after_download, "after_training": after_training}
            coverage = len(self._sampled(done)) / self._num_clients
            evaluated = self._experiment.num_evaluated
            self.ledger.record_evaluation(done, accuracy, loss, evaluated, moments, coverage)
            for name, value in (self.method.history(self.server) | known).items():
                self._history.setdefault(name, []).append(value.clone())
            self.ledger.append_files(self._folder.path)

    def _figures(self, clients: Clients, down: Message) -> Tensor:
        """Return accuracy and mean loss of a group's evaluated models, and accuracy after download [C, 3]."""
        is_scored = self.method.scored_moment == "download" and not self.config.train.finetune_epochs
        before = None if is_scored else self._scores(clients, self.method.after_download(clients, down))
        scores = self._scores(clients, self.method.evaluated(clients, down))
        return torch.cat([scores, (scores if before is None else before)[:, :1]], dim=1)

    def _scores(self, clients: Clients, model: State) -> Tensor:
        """Return (accuracy, mean loss) of each client's model as float64 [C, 2]; nan where there is none."""
        if not model:
            return torch.full((len(clients), 2), torch.nan, dtype=torch.float64)
        return torch.cat([self._score(clients, model, position) for position in range(len(clients))])

    def _sampled(self, done: int) -> set[int]:
        """Return the clients that were sampled at least once in `done` rounds."""
        while self._counted_rounds < done:
            self._seen.update(self.cohort(self._counted_rounds).clients)
            self._counted_rounds += 1
        return self._seen

    def _client_history(self, done: int) -> State:
        """Bring what the method is known by from the clients to the server, [N, ...] a name. Collective."""
        cohort = self._cohort_of(done, range(self._num_clients))
        rows = [
            Message(rows=self.method.client_history(clients), num_clients=len(clients))
            for _, clients in self._groups(cohort)
        ]
        return self._channel.up(_stack(rows), cohort).collect()

    def _downloads(self, cohort: Cohort) -> Iterator[tuple[Clients, Message]]:
        """Yield groups of this rank's clients with what they need to be evaluated. Collective."""
        server = self._world.is_server
        message = self.method.send(self.server, cohort, for_evaluation=True) if server else None
        down = self._channel.down(message, cohort)
        for part, clients in self._groups(cohort):
            yield clients, down.select(part)

    def _score(self, clients: Clients, model: State, position: int) -> Tensor:
        """Return (accuracy, mean loss) of one client as float64 [1, 2]."""
        x, y = clients.samples(self.config.run.eval_split, position)
        probabilities = self.method.predict(clients, model, position, x)
        accuracy = (probabilities.argmax(dim=1) == y).double().mean()
        chosen = probabilities.gather(1, y.unsqueeze(1)).clamp(min=torch.finfo(probabilities.dtype).tiny)
        return torch.stack([accuracy, -chosen.double().log().mean()]).cpu().unsqueeze(0)

    def _everyone(self, round: int) -> Iterator[Cohort]:
        """Cut all clients in cohorts of bounded size that span all shards alike, for any number of ranks."""
        parts = max(1, math.ceil(self._num_clients * self.method.row_size / EVALUATED_ELEMENTS))
        for part in range(min(parts, self._num_clients)):
            yield self._cohort_of(round, list(range(part, self._num_clients, parts)))

    def _cohort_of(self, round: int, clients: Sequence[int]) -> Cohort:
        return Cohort(round, tuple(clients), self.method.context.num_samples[list(clients)])

    def _collect(self, cohort: Cohort, rows: Tensor) -> Tensor | None:
        """Bring float64 figures [own clients, F] to the server, [S, F]. Collective."""
        width = rows.shape[1]
        counts = [n * width for n in self._world.owner_counts(cohort.clients, self._num_clients)]
        gathered = self._world.gather(rows.reshape(-1).contiguous(), counts)
        return None if gathered is None else gathered.view(-1, width)

    def _wall_s(self) -> float:
        """Seconds of this run so far, those before a resume included."""
        return self._wall_before_s + time.monotonic() - self._started_s

    def _must_stop(self) -> bool:
        """Agree whether to stop: a signal on any rank, or SLURM's end time on the server. Collective."""
        needed_s = 1.5 * (self._longest_s + max(self.timing.save_s, default=0.0)) + 10
        wanted = self._stop.requested or (self._world.is_server and self._stop.time_is_short(needed_s))
        return self._world.maximum(int(wanted)) == 1

    # Start, resume and checkpoints

    def _start(self) -> int:
        """Take over a checkpoint's state, or the initial one; return the completed rounds. Collective."""
        checkpoint = self._folder.checkpoint if self._folder is not None else None
        done = self._world.maximum(checkpoint.header.round if checkpoint is not None else 0)
        if checkpoint is not None:
            self.server = checkpoint.server
            self.ledger.restore(checkpoint.ledger, checkpoint.history)
            ledgers = self.ledger.history()
            self._history = {
                name: [torch.from_numpy(row) for row in rows]
                for name, rows in checkpoint.history.items()
                if name not in ledgers
            }
            self._forget_off_schedule(done)
            self._wall_before_s = self.ledger.wall_s
        elif self._world.is_server:
            self.server = self.method.initial_server()
        if done:
            for cohort in self._blocks():
                rows = {}
                if checkpoint is not None:
                    rows = checkpoint.client_rows(cohort.clients[0], cohort.clients[-1] + 1)
                message = Message(rows=rows, num_clients=len(cohort)) if self._world.is_server else None
                received = self._channel.down(message, cohort)
                own = self._own_rows(cohort)
                for name, tensor in received.rows.items():
                    if own:
                        self._place.state[name][own] = tensor
        if checkpoint is not None:
            checkpoint.close()
        if self._folder is not None:
            self.ledger.start_files(self._folder.path)
        self._progress.start(done, self.config.train.rounds)
        return done

    def _forget_off_schedule(self, done: int) -> None:
        """Drop the evaluation that a shorter run did at its end and this one would not have done."""
        if done == self.config.train.rounds or done % self.config.run.eval_every == 0:
            return
        if self.ledger.metrics and self.ledger.last("round") == done:
            self.ledger.forget_last_evaluation()
            for rows in self._history.values():
                rows.pop()

    def _save(self, done: int) -> None:
        """Write a checkpoint after `done` rounds, with all evaluated models after the last. Collective."""
        began_s = time.monotonic()
        is_last = done == self.config.train.rounds
        if self._folder is None:
            self._send_rows(self._client_rows())
            if is_last:
                self._send_rows(self._model_rows(done))
        else:
            history = {name: torch.stack(rows).numpy() for name, rows in self._history.items()}
            self.ledger.wall_s = self._wall_s()
            history |= self.ledger.history()
            self._folder.store.save(
                Snapshot(
                    Header(self.config.method, done, self.config.yaml()),
                    LayoutRecord.of(self.method.layout),
                    self.server,
                    self.method.derived(self.server),
                    self._client_rows(),
                    history,
                    self.ledger.tables(),
                    (lambda: self._model_rows(done)) if is_last else None,
                )
            )
        self._world.barrier()
        self.timing.save_s.append(time.monotonic() - began_s)

    @staticmethod
    def _send_rows(rows: Rows) -> None:
        """Take a worker's part in what the server writes. Collective."""
        for _ in rows.blocks:
            pass

    def _client_rows(self) -> Rows:
        """Describe the state of all clients; its blocks are collective."""
        one = self.method.initial_clients([0])
        shapes = {
            name: RowShape(self._num_clients, tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in one.items()
        }
        return Rows(shapes, self._client_blocks())

    def _model_rows(self, done: int) -> Rows:
        """Describe the evaluated models by client 0's, which stands for all if shared. Collective."""
        of_client_0 = list(self._model_blocks(self._cohort_of(done, [0]), lambda _: True))
        first = of_client_0[0][1] if of_client_0 else {}
        shapes = {
            name: RowShape(1 if self._is_shared(name) else self._num_clients, tuple(row.shape[1:]), row.dtype)
            for name, row in first.items()
        }

        def blocks() -> Iterator[Block]:
            yield np.array([0]), {name: row for name, row in first.items() if self._is_shared(name)}
            for cohort in self._everyone(done):
                yield from self._model_blocks(cohort, lambda name: not self._is_shared(name))

        return Rows(shapes, blocks())

    def _blocks(self) -> Iterator[Cohort]:
        """Cut all clients in consecutive cohorts of bounded size."""
        state = self.method.initial_clients([0])
        numbers = max(1, sum(rows.numel() for rows in state.values()))
        step = max(1, self._world.max_elements // numbers)
        for start in range(0, self._num_clients, step):
            yield self._cohort_of(0, range(start, min(start + step, self._num_clients)))

    def _client_blocks(self) -> Iterator[Block]:
        """Bring the state of all clients to the server, block by block. Collective."""
        for cohort in self._blocks():
            own = self._own_rows(cohort)
            rows = {name: tensor[own] for name, tensor in self._place.state.items()} if own else {}
            for positions, block in self._channel.up(Message(rows=rows, num_clients=len(own)), cohort):
                yield np.array(cohort.clients[positions]), block.rows

    def _model_blocks(self, cohort: Cohort, is_wanted: Callable[[str], bool]) -> Iterator[Block]:
        """Bring some tensors of the cohort's evaluated models to the server, block by block. Collective."""
        models = [
            Message(
                rows={name: rows for name, rows in model.items() if rows.numel() and is_wanted(name)},
                num_clients=len(clients),
            )
            for clients, down in self._downloads(cohort)
            for model in [self.method.evaluated(clients, down)]
        ]
        for positions, block in self._channel.up(_stack(models), cohort):
            yield np.array(cohort.clients[positions]), block.rows

    def _is_shared(self, name: str) -> bool:
        """Whether all clients are evaluated on the same tensor, so that one row says it all."""
        if self.config.train.finetune_epochs:
            return False
        if name == BUFFERS:
            return bool(self.method.shared_parts) and self.method.buffers == "average"
        return name in self.method.shared_parts


class _Counter:
    """The bytes of a round on the server: int64 figures of each client of the cohort, down and up."""

    def __init__(self, num_clients: int, method: Method, labels: Sequence[str]) -> None:
        self._method, self._labels = method, labels
        self.down, self.up = (
            Traffic(np.zeros((num_clients, len(labels)), np.int64), *np.zeros((2, num_clients), np.int64))
            for _ in range(2)
        )

    def count_down(self, message: Message | None) -> None:
        """Count what was sent to the whole cohort; None on other ranks than the server."""
        if message is not None:
            self.down.add(slice(None), self._count(message))

    def counting_up(self, upload: Upload) -> Upload:
        """Return an upload whose blocks are counted as they are read."""
        upload.observe(lambda positions, block: self.up.add(positions, self._count(block)))
        return upload

    def _count(self, message: Message) -> Traffic:
        return count_bytes(message, self._method.layers, self._labels, self._method.names_layers)


def _stack(messages: Sequence[Message]) -> Message:
    """Put the messages of several groups together; rows are brought to the CPU."""
    if not messages:
        return Message(num_clients=0)
    first = messages[0]
    rows = {name: torch.cat([m.rows[name].cpu() for m in messages]) for name in first.rows}
    keep = {
        name: mask if mask.dim() == 1 else torch.cat([m.keep[name] for m in messages])
        for name, mask in first.keep.items()
    }
    return Message(rows=rows, keep=keep, num_clients=sum(m.num_clients for m in messages))
