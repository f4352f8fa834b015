"""The round loop: sample, send down, train, send up, aggregate, evaluate, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator, abort_with_message
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.traffic import RoundTraffic
from hpcfl.errors import UserError, for_terminal
from hpcfl.methods.base import State
from hpcfl.privacy import epsilon_after, epsilon_of_samples
from hpcfl.setup.experiment import Experiment
from hpcfl.simulation.checkpointing import Saver
from hpcfl.simulation.clock import Clock
from hpcfl.simulation.divergence import (
    Diverged,
    Divergence,
    diverged_members,
    losses_and_extremes,
    on_all_ranks,
)
from hpcfl.simulation.evaluation import Evaluation, Evaluator
from hpcfl.simulation.federation import Delivery, Federation, Uploads, stack
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.ledger import ACCURACY_VAL, EPSILON, Ledger, has_stopped
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress
from hpcfl.training.client_group import ClientGroup

Groups = Iterable[tuple[slice, ClientGroup]]

Outcome = Literal["finished", "stopped", "already finished"]


@dataclass
class Timing:
    """Seconds on the server, one entry per round, evaluation or checkpoint.

    `train_s` is the slowest worker's; the last of `save_s` includes making the evaluated models.
    """

    idle_shares: list[float] = field(default_factory=list)
    """The share of the workers' time in a round's training that they waited for the slowest."""

    round_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    """In messages and waiting for them, in a round."""
    evaluate_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


@dataclass
class LocalRound:
    """The result of this rank's members of a cohort: their upload, and float64 figures [own members]."""

    up: Message
    losses: Tensor
    """Mean loss over the steps."""
    steps: Tensor
    accuracy: Tensor
    """Accuracy of the models right after training; nan without an evaluation or without such a model."""
    train_s: float
    evaluate_s: float
    """Seconds of scoring them."""
    simulated_s: Tensor
    """Seconds on the simulated clock; 0 without one."""
    late: list[int]
    """Members that missed `clients.deadline_s`."""
    diverged: dict[int, str]
    """Other members that have diverged, and which of their numbers are nan or infinite."""


class Simulation:
    """One run on one rank. The docstrings of methods that all ranks must call together contain "Collective".

    `folder` is the server's open run folder and None elsewhere; a `stop` flag raised on any rank ends the
    run with a checkpoint at the next round boundary.
    """

    def __init__(
        self,
        experiment: Experiment,
        world: Communicator,
        stop: StopFlag,
        progress: Progress,
        folder: RunFolder | None,
    ) -> None:
        self.config, self.method = experiment.config, experiment.method
        self._world, self._stop, self._progress, self._folder = world, stop, progress, folder
        self._experiment = experiment
        self._federation = Federation(experiment, world)
        layers = [layer.name for layer in self.method.layers]
        is_there = {
            ACCURACY_VAL: self.config.train.patience is not None,
            EPSILON: self.config.privacy.unit is not None,
        }
        others = [name for name, has in is_there.items() if has]
        settings, federation = self.config.clients, self._federation
        self.ledger = Ledger(federation.num_clients, layers, federation.num_unseen, settings, others)
        self._clock = Clock(settings, self.config.run.seed) if settings.has_clock else None
        self._evaluator = Evaluator(self._federation)
        self._saver = Saver(self._federation, self._evaluator, self.ledger, folder)
        self.server: State = {}
        self.timing = Timing()
        self._started_s = time.monotonic()
        self._wall_before_s = 0.0
        self._longest_s = 0.0
        policy = self.config.run.on_divergence
        self._divergence = Divergence(policy, self.method, world, self.ledger, progress, folder)

    def run(self) -> Outcome:
        """Run all rounds that are not done yet. Collective.

        Raises UserError if a hook raises it. If only one of several ranks fails, it ends all of them.
        """
        try:
            return self._rounds()
        except UserError as error:
            if self._world.size == 1 or error.is_on_all_ranks:
                raise
            # such as an error in a user's hook: the other ranks would wait for this one for ever
            abort_with_message(self._world, f"hpcfl: error: {for_terminal(error)}\n", error.exit_code)

    def _rounds(self) -> Outcome:
        """Run all rounds; see `run`."""
        train, run = self.config.train, self.config.run
        self._experiment.place_state()
        self.server, first = self._saver.start()
        self._divergence.saved = first
        self._evaluator.try_new_client_download(self.server)
        if self._folder is not None and self._experiment.samples_by_class is not None:
            self._folder.write_partition(*self._experiment.samples_by_class)
        self._wall_before_s = self.ledger.wall_s
        self._progress.start(first, train.rounds)
        done, is_over = first, self._is_over(first)
        while not is_over:
            began_s, waited_s = time.monotonic(), self._world.waited_s
            cohort = self._federation.placed(self.cohort(done))
            done += 1
            self._world.phase = f"in round {done}"
            is_evaluated = done == train.rounds or done % run.eval_every == 0
            after_training = self._round(cohort, is_evaluated)
            self.timing.round_s.append(time.monotonic() - began_s)
            self.timing.wait_s.append(self._world.waited_s - waited_s)
            if is_evaluated:
                self._evaluate(done, after_training)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            is_over = self._is_over(done)
            stops = not is_over and self._must_stop()
            if is_over or stops or done % run.checkpoint_every == 0:
                self._save(done, with_models=is_over)
            self._progress.round_done(done, self.ledger)
            if stops:
                return "stopped"
        added = self._evaluator.client_metrics(self.server, done) if run.metrics else None
        if self._folder is not None:
            experiment = self._experiment
            self._folder.write_clients(self.ledger, experiment.num_train, experiment.num_evaluated, added)
        return "already finished" if first == done else "finished"

    def _is_over(self, done: int) -> bool:
        """Whether no round follows the first `done`: all are done, or its patience is over. Collective."""
        train = self.config.train
        if done == train.rounds or train.patience is None:
            return done == train.rounds
        # workers have no evaluations
        known = self.ledger.column(ACCURACY_VAL)
        return self._world.maximum(int(has_stopped(known, train.patience))) == 1

    def cohort(self, number: int) -> Cohort:
        """Sample the clients of round `number`, the same on every rank. Collective."""
        if self.config.clients.sampling == "power_of_choice":
            return self._federation.cohort_of_highest_loss(number, self.ledger.client_losses)
        return self._federation.cohort(number)

    def _round(self, cohort: Cohort, is_evaluated: bool) -> np.ndarray:
        """Train and aggregate one cohort and enter its cost in the ledger. Collective.

        Returns the accuracy of each client's model right after training [N]. It is nan for clients without
        such a model, in rounds without an evaluation, and on ranks other than the server.
        """
        federation, adapter = self._federation, self._federation.adapter
        # a client that requested layers knows which ones it gets, so no bytes for their indices
        has_request = adapter.needs_request(cohort.round)
        traffic = RoundTraffic(len(cohort), self.method.layers, names_layers=not has_request)
        places = federation.not_dropped(cohort)
        reached, here = federation.select(cohort, places)
        federation.migration.begin(federation.migrations(reached))
        groups = list(federation.groups(reached))
        message = federation.on_server(lambda: adapter.download(self.server, cohort))
        before = federation.deliver(message, cohort)
        traffic.count_down(before.sent)
        if len(reached) < len(cohort):
            traffic.keep(places)
            before = before.select(here, places)
        down, sent = federation.on_device(before.received), before.sent
        if has_request and len(reached):
            requests, response = self._exchange_requests(reached, groups, down, traffic)
            down |= requests | federation.on_device(response.received)
            sent, before = response.sent, before | response
        local = self._train(groups, down, before.received, self._moved(traffic, reached), is_evaluated)
        late = [*on_all_ranks(self._world, dict.fromkeys(local.late, ""))] if self._clock else []
        diverged = self._divergence.judge_clients(local.diverged, self.server, reached)
        left_out = {*late, *(diverged if self._divergence.leaves_out else ())}
        members, up, places = reached, local.up, list(range(len(reached)))
        if left_out:
            places = [n for n, client in enumerate(reached.clients) if client not in left_out]
            members, here = federation.select(reached, places)
            traffic.keep(places)
            up, before = up.select(here), before.select(here, places)
            sent = None if sent is None else sent.select(places)
        upload = federation.upload(up, members, sent, before)
        traffic.count_up(upload)
        if not self._world.is_server:
            upload.drain()
        federation.migration.end()
        federation.on_server(lambda: adapter.aggregate(self.server, members, upload))
        return self._record(cohort, traffic, reached, local, places, diverged, late)

    def _moved(self, traffic: RoundTraffic, cohort: Cohort) -> Tensor:
        """Return the bytes so far of each of this rank's members, int64; 0 if they take no simulated time.

        Collective.
        """
        moved = torch.zeros(len(cohort), dtype=torch.int64)
        if self._clock is not None and self._clock.counts_bytes:
            moved = torch.from_numpy(traffic.moved)
            self._world.broadcast(moved)
        return moved[self._federation.channel.own(cohort)]

    def _exchange_requests(
        self, cohort: Cohort, groups: Groups, down: Message, traffic: RoundTraffic
    ) -> tuple[Message, Delivery]:
        """Collect the cohort's requests and send the server's response; return both. Collective."""
        federation, adapter = self._federation, self._federation.adapter
        own = stack([adapter.client_request(clients, down.select(part)) for part, clients in groups])
        upload = federation.send_requests(own, cohort)
        traffic.count_up(upload)
        requests = upload.collect()
        message = federation.on_server(lambda: adapter.server_response(self.server, cohort, requests))
        response = federation.deliver(message, cohort)
        traffic.count_down(response.sent)
        return own, response

    def _train(
        self, groups: Groups, down: Message, received: Message, moved: Tensor, is_evaluated: bool
    ) -> LocalRound:
        """Train this rank's cohort members, and score them right after if asked.

        `received` and `moved`: messages from the server, and bytes both ways, in this round so far.
        """
        nothing = torch.zeros(0, dtype=torch.float64)
        losses, steps, scores, simulated_s = [nothing], [nothing], [nothing], [nothing]
        uploads = Uploads(down.num_clients)
        adapter, began_s, scoring_s = self._federation.adapter, time.monotonic(), 0.0
        diverged: dict[int, str] = {}
        all_late: list[int] = []
        handover = Message()
        for part, clients in groups:
            mine = down.select(part).to(clients.device) | handover
            up = adapter.train(clients, mine)
            steps.append(clients.steps.double())
            figures = losses_and_extremes(clients, up).cpu()
            losses.append(figures[0] / clients.steps.clamp(min=1))
            seconds, late = self._on_the_clock(clients, up, received.select(part), moved[part])
            simulated_s.append(seconds)
            all_late += [clients.ids[place] for place in late]
            bad = {
                place: what
                for place, what in diverged_members(clients, up, figures).items()
                if place not in late
            }
            diverged |= {clients.ids[place]: what for place, what in bad.items()}
            scoring_began_s = time.monotonic()
            model = adapter.model_after_training(clients, mine, up) if is_evaluated else Message()
            scores.append(self._evaluator.scores(clients, model)[:, 0])
            scoring_s += time.monotonic() - scoring_began_s
            # copied to the CPU group by group, so that a GPU never holds the uploads of a whole cohort
            uploads.add(part, adapter.sent(mine, up))
            left_out = {*late, *(bad if self._divergence.leaves_out else ())}
            if left_out:
                clients.commit([place for place in range(len(clients)) if place not in left_out])
            else:
                clients.commit()
                handover = clients.handover
            self._world.heartbeat()
        return LocalRound(
            up=uploads.message,
            losses=torch.cat(losses),
            steps=torch.cat(steps),
            accuracy=torch.cat(scores),
            train_s=time.monotonic() - began_s - scoring_s,
            evaluate_s=scoring_s,
            simulated_s=torch.cat(simulated_s),
            late=all_late,
            diverged=diverged,
        )

    def _on_the_clock(
        self, clients: ClientGroup, up: Message, received: Message, moved: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Return the simulated seconds of a group that has trained, float64 [C], and which of its members are
        late, by position; arguments as in `_train`."""
        if self._clock is None:
            return torch.zeros(len(clients), dtype=torch.float64), []
        if self._clock.counts_bytes:
            moved = moved + self._federation.upload_bytes(up, received, clients.round)
        seconds = self._clock.seconds(clients.ids, clients.steps, moved)
        return seconds, self._clock.are_late(seconds).nonzero().flatten().tolist()

    def _record(
        self,
        cohort: Cohort,
        traffic: RoundTraffic,
        trained: Cohort,
        local: LocalRound,
        places: Sequence[int],
        diverged: Diverged,
        late: Sequence[int],
    ) -> np.ndarray:
        """Record a round's figures in the server's ledger; return accuracies as `_round` does. Collective.

        `places` are the positions in `trained` of members that are not left out.
        """
        seconds_here = [torch.full_like(local.steps, spent) for spent in (local.train_s, local.evaluate_s)]
        figures_here = [local.losses, local.steps, local.accuracy, local.simulated_s, *seconds_here]
        figures = self._federation.channel.collect(trained, torch.stack(figures_here, dim=1))
        after_training = np.full(self._federation.num_clients, np.nan)
        if figures is not None:
            steps, seconds, evaluate_s = figures[:, [1, 4, 5]].T
            losses, _, accuracy, simulated_s, *_ = figures[list(places)].T
            members = np.array(trained.clients, np.int64)[list(places)]
            after_training[members] = accuracy.numpy()
            # all members may be lost
            train_s, scoring_s = (max(spent.tolist(), default=0.0) for spent in (seconds, evaluate_s))
            self.timing.train_s.append(train_s)
            self.ledger.spent["evaluate_s"] += scoring_s
            workers = self._federation.channel.workers(trained)
            busy_s = sum(dict(zip(workers, seconds.tolist(), strict=True)).values())
            all_s = self._world.num_workers * train_s
            self.timing.idle_shares.append(1 - busy_s / all_s if all_s else 0.0)
            moved, num_steps, loss = (traffic.down, traffic.up), float(steps.sum()), float(losses.mean())
            self.ledger.count_steps(trained, steps.tolist())
            lost = sorted({*cohort.clients} - {*trained.clients} | {*late})
            round_s = 0.0 if self._clock is None else self._clock.round_s(simulated_s, bool(lost))
            self.ledger.record_round(cohort, moved, num_steps, loss, train_s, list(diverged), lost, round_s)
            is_known = losses.isfinite().numpy()
            self.ledger.client_losses[members[is_known]] = losses.numpy()[is_known]
        return after_training

    def _evaluate(self, done: int, after_training: np.ndarray) -> None:
        """Score all clients after `done` rounds and enter it in the ledger. Collective."""
        began_s = time.monotonic()
        found = self._evaluator.evaluate(self.server, done)
        of_unseen = self._evaluator.evaluate_unseen(self.server, done)
        self.ledger.spent["evaluate_s"] += time.monotonic() - began_s
        self._record_evaluation(done, found, of_unseen, after_training)
        self.timing.evaluate_s.append(time.monotonic() - began_s)

    def _record_evaluation(
        self, done: int, found: Evaluation, of_unseen: Evaluation, after_training: np.ndarray
    ) -> None:
        """Enter an evaluation and the method's history in the ledger. Collective.

        Raises DivergedError on all ranks if a model has no finite score and `run.on_divergence` is stop.
        """
        self._divergence.judge_scores(np.concatenate([found.loss, of_unseen.loss]), self.server, done)
        of_clients = self._evaluator.client_diagnostics(done)
        if self._folder is None:
            return
        known = self.method.server_diagnostics(self.server) | of_clients
        self.ledger.wall_s = self._wall_s()
        self.ledger.record_evaluation(
            done,
            found.accuracy,
            found.loss,
            self._experiment.num_evaluated[: self._federation.num_clients],
            {"after_download": found.after_download, "after_training": after_training},
            self._coverage(done),
            {name: value.numpy() for name, value in known.items()},
            {"accuracy": of_unseen.accuracy, "loss": of_unseen.loss},
            self._others(done, found),
        )
        self._folder.append_files(self.ledger)

    def _coverage(self, done: int) -> float:
        """Return the share of clients that were sampled at least once in `done` rounds."""
        if self.config.clients.sampling == "power_of_choice":
            return float(self.ledger.is_sampled.mean())
        return self._evaluator.coverage(done)

    def _others(self, done: int, found: Evaluation) -> dict[str, float]:
        """Return the values of metrics.csv's other columns after `done` rounds, on the server."""
        privacy, train = self.config.privacy, self.config.train
        others = {} if train.patience is None else {ACCURACY_VAL: float(found.accuracy_val.mean())}
        if privacy.unit == "client":
            others[EPSILON] = epsilon_after(privacy, train.participation, done)
        if privacy.unit == "sample":
            sizes = self._experiment.num_train[: self._federation.num_clients].tolist()
            share = self._experiment.worker_context.work.drawn_share
            shares = [share(client, count) for client, count in enumerate(sizes)]
            others[EPSILON] = epsilon_of_samples(privacy, shares, self.ledger.client_steps.tolist())
        return others

    def _save(self, done: int, with_models: bool = False) -> None:
        """Write a checkpoint after `done` rounds, with the evaluated models if asked. Collective.

        If numbers of the server's state are not finite, raises DivergedError on all ranks and writes nothing.
        """
        began_s = time.monotonic()
        self._divergence.judge_server(self.server, done)
        self.ledger.wall_s = self._wall_s()
        self._saver.save(self.server, done, with_models)
        self._divergence.saved = done
        self.timing.save_s.append(time.monotonic() - began_s)
        self.ledger.spent["save_s"] += self.timing.save_s[-1]

    def _wall_s(self) -> float:
        """Seconds of this run so far, those before a resume included."""
        return self._wall_before_s + time.monotonic() - self._started_s

    def _must_stop(self) -> bool:
        """Agree whether to stop: a signal on any rank, or SLURM's end time on the server. Collective."""
        needed_s = 1.5 * (self._longest_s + max(self.timing.save_s, default=0.0)) + 10
        wanted = self._stop.requested or (self._world.is_server and self._stop.time_is_short(needed_s))
        return self._world.maximum(int(wanted)) == 1
