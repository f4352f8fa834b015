"""The round loop: sample, send down, train, send up, aggregate, evaluate, checkpoint."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator, abort_with_message
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.traffic import RoundTraffic
from hpcfl.errors import UserError, for_terminal
from hpcfl.methods.base import State
from hpcfl.setup.experiment import Experiment
from hpcfl.simulation.checkpointing import Saver
from hpcfl.simulation.clock import Clock
from hpcfl.simulation.divergence import Divergence, on_all_ranks
from hpcfl.simulation.evaluation import Evaluator
from hpcfl.simulation.federation import Delivery, Federation, stack
from hpcfl.simulation.local_round import Groups, LocalTraining
from hpcfl.simulation.recording import Recorder
from hpcfl.simulation.sampling import Sampler
from hpcfl.simulation.stopping import StopFlag, notice_s
from hpcfl.storage.ledger import ACCURACY_VAL, is_over
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress

Outcome = Literal["finished", "stopped", "already finished"]


class Simulation:
    """One run on one rank. The docstrings of methods that all ranks must call together contain "Collective".

    `folder` is the server's open run folder and None elsewhere; a `stop` flag raised on any rank ends the
    run with a checkpoint at the next round boundary, and None never does.
    """

    def __init__(
        self,
        experiment: Experiment,
        world: Communicator,
        stop: StopFlag | None,
        progress: Progress,
        folder: RunFolder | None,
    ) -> None:
        self.method, self._train = experiment.method, experiment.method.context.train
        self._world, self._stop, self._progress, self._folder = world, stop, progress, folder
        self._experiment = experiment
        self._federation = Federation(experiment, world)
        settings, seed = self.method.context.clients, self.method.context.seed
        self._sampler = Sampler(self.method.context)
        self._clock = Clock(settings, seed) if settings.has_clock else None
        self._recorder = Recorder(self._federation, self._sampler, self._clock)
        self.ledger, self.timing = self._recorder.ledger, self._recorder.timing
        self._evaluator = Evaluator(self._federation)
        self._saver = Saver(self._federation, self._evaluator, self.ledger, folder)
        self._divergence = Divergence(self._federation, self.ledger, folder)
        self._local = LocalTraining(self._federation, self._evaluator, self._clock)
        self.server: State = {}
        self._longest_s = 0.0

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
        train, run = self._train, self._experiment.run
        self._experiment.place_state()
        self.server, first = self._saver.start()
        self._evaluator.try_new_client_download(self.server)
        if self._folder is not None and self._experiment.samples_by_class is not None:
            self._folder.write_partition(*self._experiment.samples_by_class)
        self._recorder.start(first)
        self._progress.start(first, train.rounds)
        done, finished = first, self._is_over(first)
        while not finished:
            began_s = time.monotonic()
            cohort = self._federation.migration.placed(self.cohort(done))
            done += 1
            self._world.begin_phase(f"in round {done}")
            is_evaluated = done == train.rounds or done % run.eval_every == 0
            after_training = self._round(cohort, is_evaluated)
            self.timing.round_s.append(time.monotonic() - began_s)
            if is_evaluated:
                self._evaluate(done, after_training)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            finished = self._is_over(done)
            stops = not finished and self._must_stop()
            if finished or stops or done % run.checkpoint_every == 0:
                self._save(done, with_models=finished)
            self._progress.round_done(done, self.ledger, finished)
            if stops:
                return "stopped"
        # a finished run that is repeated without run.metrics keeps its metrics
        wanted = run.metrics or (self._folder is not None and self._folder.keeps_metrics)
        added = self._evaluator.client_metrics(self.server, done) if self._world.maximum(wanted) else None
        if self._folder is not None:
            experiment = self._experiment
            self._folder.write_clients(self.ledger, experiment.num_train, experiment.num_evaluated, added)
        return "already finished" if first == done else "finished"

    def _is_over(self, done: int) -> bool:
        """Whether no round follows the first `done`: all are done, or its patience is over. Collective."""
        train = self._train
        if train.patience is None:
            return done == train.rounds
        # workers have no evaluations
        known = self.ledger.column(ACCURACY_VAL)
        return bool(self._world.maximum(is_over(done, train.rounds, known, train.patience)))

    def cohort(self, number: int) -> Cohort:
        """Sample the clients of round `number`, the same on every rank. Collective."""
        if self.method.context.clients.sampling != "power_of_choice":
            return self._federation.cohort_of(number, self._sampler.clients(number))
        # only the server has the losses
        chosen = torch.tensor(self._sampler.clients_of_highest_loss(number, self.ledger.client_losses))
        self._world.broadcast(chosen)
        return self._federation.cohort_of(number, chosen.tolist())

    def _round(self, cohort: Cohort, is_evaluated: bool) -> np.ndarray:
        """Train and aggregate one cohort and record it. Collective.

        Returns each client's accuracy right after training, as `Recorder.record_round` does.
        """
        federation, adapter = self._federation, self._federation.adapter
        has_request = adapter.needs_request(cohort.round)
        # a client that requested layers knows which ones it gets, so no bytes for their indices
        traffic = RoundTraffic(len(cohort), self.method.layers, names_layers=not has_request)
        places = self._sampler.not_dropped(cohort)
        reached, here = federation.select(cohort, places)
        federation.migration.begin(reached)
        groups = list(federation.groups(reached))
        message = federation.on_server(lambda: adapter.download(self.server, cohort))
        delivered = federation.deliver(message, cohort)
        traffic.count_down(delivered.sent)
        if len(reached) < len(cohort):
            traffic.keep(places)
            delivered = delivered.select(here, places)
        down = federation.on_device(delivered.received)
        if has_request and len(reached):
            requests, response = self._exchange_requests(reached, groups, down, traffic)
            down |= requests | federation.on_device(response.received)
            delivered |= response
        moved = self._moved(traffic, reached)
        local = self._local.train(groups, down, delivered.received, moved, is_evaluated)
        late = list(on_all_ranks(self._world, dict.fromkeys(local.late, ""))) if self._clock else []
        diverged = self._divergence.judge_clients(local.diverged, self.server, reached)
        left_out = {*late, *(diverged if federation.leaves_out else ())}
        members, up, places = reached, local.up, list(range(len(reached)))
        if left_out:
            places = [n for n, client in enumerate(reached.clients) if client not in left_out]
            members, here = federation.select(reached, places)
            traffic.keep(places)
            up, delivered = up.select(here), delivered.select(here, places)
        upload = federation.upload(up, members, delivered)
        traffic.count_up(upload)
        if not self._world.is_server:
            # serves what the server reads in `aggregate`
            upload.drain()
        federation.migration.end()
        federation.on_server(lambda: adapter.aggregate(self.server, members, upload))
        return self._recorder.record_round(cohort, traffic, reached, local, places, diverged, late)

    def _moved(self, traffic: RoundTraffic, cohort: Cohort) -> Tensor:
        """Return the bytes so far of each of this rank's members, int64; 0 without a clock. Collective."""
        moved = torch.zeros(len(cohort), dtype=torch.int64)
        if self._clock is not None:
            moved = torch.from_numpy(traffic.moved)
            self._world.broadcast(moved)
        return moved[self._federation.channel.own(cohort)]

    def _exchange_requests(
        self, cohort: Cohort, groups: Groups, down: Message, traffic: RoundTraffic
    ) -> tuple[Message, Delivery]:
        """Collect the cohort's requests and send the server's response; return both. Collective."""
        federation, adapter = self._federation, self._federation.adapter
        requests_here = [adapter.client_request(clients, down.select(part)) for part, clients in groups]
        own = stack(requests_here, federation.own(cohort))
        upload = federation.send_requests(own, cohort)
        traffic.count_up(upload)
        requests = upload.collect()
        message = federation.on_server(lambda: adapter.server_response(self.server, cohort, requests))
        response = federation.deliver(message, cohort)
        traffic.count_down(response.sent)
        return own, response

    def _evaluate(self, done: int, after_training: np.ndarray) -> None:
        """Score all clients after `done` rounds and record it. Collective.

        Raises DivergedError on all ranks if a model has no finite score and `run.on_divergence` is stop.
        """
        began_s = time.monotonic()
        found = self._evaluator.evaluate(self.server, done)
        self.ledger.spent["evaluate_s"] += time.monotonic() - began_s
        self._divergence.judge_scores(found.loss, self.server, done)
        of_clients = self._evaluator.client_diagnostics(done)
        if self._folder is not None:
            of_method = self._federation.adapter.server_diagnostics(self.server, done) | of_clients
            self._recorder.record_evaluation(done, found, after_training, of_method)
            self._folder.append_files(self.ledger)
        self.timing.evaluate_s.append(time.monotonic() - began_s)

    def _save(self, done: int, with_models: bool = False) -> None:
        """Write a checkpoint after `done` rounds, with the evaluated models if asked. Collective.

        If numbers of the server's state are not finite, raises DivergedError on all ranks and writes nothing.
        """
        began_s = time.monotonic()
        self._divergence.judge_server(self.server, done)
        self._recorder.set_wall_time()
        self._saver.save(self.server, done, with_models)
        self.timing.save_s.append(time.monotonic() - began_s)
        self.ledger.spent["save_s"] += self.timing.save_s[-1]

    def _must_stop(self) -> bool:
        """Agree whether to stop: a signal on any rank, or SLURM's end time on the server. Collective."""
        needed_s = notice_s(self._longest_s, max(self.timing.save_s, default=0.0))
        return self._stop is not None and self._stop.is_requested(self._world, needed_s)
