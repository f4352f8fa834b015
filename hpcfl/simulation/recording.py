"""What the server records of a run: rounds and evaluations in its ledger, and the seconds they took."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpcfl.communication.messages import Cohort
from hpcfl.communication.traffic import RoundTraffic
from hpcfl.methods.base import State
from hpcfl.privacy import epsilon_after, epsilon_of_samples
from hpcfl.simulation.clock import Clock
from hpcfl.simulation.federation import Federation
from hpcfl.simulation.local_round import LocalRound
from hpcfl.simulation.sampling import Sampler
from hpcfl.storage.ledger import Evaluation, Ledger


@dataclass
class Timing:
    """Seconds on the server, one entry per round, evaluation or checkpoint.

    `train_s` is the slowest worker's; the last of `save_s` includes making the evaluated models.
    """

    round_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    evaluate_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


class Recorder:
    """Enters a run's rounds and evaluations in the server's ledger; `clock` is the simulated one, if any."""

    def __init__(self, federation: Federation, sampler: Sampler, clock: Clock | None) -> None:
        self._federation, self._sampler, self._clock = federation, sampler, clock
        method = federation.method
        self._context = context = method.context
        self.ledger = Ledger(
            method.name,
            context.clients,
            federation.num_clients,
            [layer.name for layer in method.layers],
            federation.num_unseen,
            is_private=context.privacy.unit is not None,
            has_patience=context.train.patience is not None,
        )
        self.timing = Timing()
        self._started_s = time.monotonic()
        self._wall_before_s = 0.0

    def start(self, done: int) -> None:
        """Continue after `done` rounds, which the ledger has."""
        self._wall_before_s = self.ledger.wall_s
        is_sampled = self.ledger.is_sampled
        if self._federation.world.is_server and self._context.clients.sampling != "power_of_choice":
            for number in range(done):
                if is_sampled.all():
                    break
                is_sampled[self._sampler.clients(number)] = True

    def set_wall_time(self) -> None:
        """Bring the ledger's seconds of this run, those before a resume included, up to now."""
        self.ledger.wall_s = self._wall_before_s + time.monotonic() - self._started_s

    def record_round(
        self,
        cohort: Cohort,
        traffic: RoundTraffic,
        trained: Cohort,
        local: LocalRound,
        places: Sequence[int],
        diverged: Iterable[int],
        late: Iterable[int],
    ) -> np.ndarray:
        """Record a round's figures. Collective.

        `places` are the positions in `trained` of members that are not left out. Returns the accuracy of each
        client's model right after training [N]. It is nan for clients without such a model, in rounds without
        an evaluation, and on ranks other than the server.
        """
        channel = self._federation.channel
        spent = torch.tensor([local.train_s, local.evaluate_s], dtype=torch.float64)
        spent = spent.expand(len(local.figures), 2)
        figures = channel.collect(trained, torch.cat([local.figures, spent], dim=1))
        after_training = np.full(self._federation.num_clients, np.nan)
        if figures is None:
            return after_training
        steps, seconds, evaluate_s = figures[:, [1, 4, 5]].T
        losses, _, accuracy, simulated_s, *_ = figures[list(places)].T
        members = np.array(trained.clients, np.int64)[list(places)]
        after_training[members] = accuracy.numpy()
        # all members may be lost
        train_s, scoring_s = (max(spent.tolist(), default=0.0) for spent in (seconds, evaluate_s))
        self.timing.train_s.append(train_s)
        self.ledger.spent["evaluate_s"] += scoring_s
        lost = sorted({*cohort.clients} - {*trained.clients} | {*late})
        round_s = 0.0 if self._clock is None else self._clock.round_s(simulated_s, bool(lost))
        of_members = zip(members.tolist(), losses.tolist(), strict=True)
        known = {client: loss for client, loss in of_members if math.isfinite(loss)}
        self.ledger.record_round(
            cohort,
            (traffic.down, traffic.up),
            steps=dict(zip(trained.clients, steps.tolist(), strict=True)),
            losses=known,
            train_loss=float(losses.mean()),
            train_s=train_s,
            diverged=diverged,
            lost=lost,
            simulated_s=round_s,
        )
        return after_training

    def record_evaluation(
        self,
        done: int,
        found: Evaluation,
        after_training: np.ndarray,
        of_method: State,
    ) -> None:
        """Record an evaluation after `done` rounds, with the method's history; on the server."""
        self.set_wall_time()
        num_evaluated = self._federation.experiment.num_evaluated
        self.ledger.record_evaluation(
            done,
            found,
            num_evaluated[: self._federation.num_clients],
            after_training,
            {name: value.numpy() for name, value in of_method.items()},
            self._epsilon(done),
        )

    def _epsilon(self, done: int) -> float:
        """Return epsilon after `done` rounds; nan without `privacy.unit`."""
        federation, privacy, train = self._federation, self._context.privacy, self._context.train
        if privacy.unit is None:
            return math.nan
        if privacy.unit == "client":
            return epsilon_after(privacy, train.participation, done)
        sizes = federation.experiment.num_train[: federation.num_clients].tolist()
        share = federation.worker_context.work.sampling_rate
        shares = [share(client, count) for client, count in enumerate(sizes)]
        return epsilon_of_samples(privacy, shares, self.ledger.client_steps.tolist())
