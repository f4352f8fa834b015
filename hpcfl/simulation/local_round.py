"""One rank's part of a round: its members of the cohort train, and are scored and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.simulation.clock import Clock
from hpcfl.simulation.divergence import diverged_members, losses_and_extremes
from hpcfl.simulation.evaluation import Evaluator
from hpcfl.simulation.federation import Federation, Uploads
from hpcfl.training.client_group import ClientGroup

Groups = Sequence[tuple[slice, ClientGroup]]


@dataclass
class LocalRound:
    """The result of this rank's members of a cohort."""

    up: Message
    figures: Tensor
    """Float64 [own members, 4]: mean loss over the steps; steps; accuracy of the model right after training,
    nan without an evaluation or without such a model; seconds on the simulated clock, 0 without one."""
    train_s: float
    evaluate_s: float
    """Seconds of scoring the models."""
    late: list[int]
    """Members that missed `clients.deadline_s`."""
    diverged: dict[int, str]
    """Other members that have diverged, and which of their numbers are nan or infinite."""


class LocalTraining:
    """Trains this rank's members of cohorts; `clock` is the simulated one, if there is one."""

    def __init__(self, federation: Federation, evaluator: Evaluator, clock: Clock | None) -> None:
        self._federation, self._evaluator, self._clock = federation, evaluator, clock

    def train(
        self, groups: Groups, down: Message, received: Message, moved: Tensor, is_evaluated: bool
    ) -> LocalRound:
        """Train this rank's cohort members, and score them right after if asked.

        `received` and `moved`: messages from the server, and bytes both ways, in this round so far.
        """
        figures = [torch.zeros(0, 4, dtype=torch.float64)]
        uploads = Uploads([client for _, clients in groups for client in clients.ids])
        adapter, began_s, scoring_s = self._federation.adapter, time.monotonic(), 0.0
        diverged: dict[int, str] = {}
        all_late: list[int] = []
        handover = Message()
        for part, clients in groups:
            mine = down.select(part).to(clients.device) | handover
            up = adapter.train(clients, mine)
            found = losses_and_extremes(clients, up).cpu()
            seconds, late = self._on_the_clock(clients, up, received.select(part), moved[part])
            all_late += [clients.ids[place] for place in late]
            bad = {
                place: what
                for place, what in diverged_members(clients, up, found).items()
                if place not in late
            }
            diverged |= {clients.ids[place]: what for place, what in bad.items()}
            scoring_began_s = time.monotonic()
            model = adapter.model_after_training(clients, mine, up) if is_evaluated else Message()
            accuracy = self._evaluator.scores(clients, model)[:, 0]
            scoring_s += time.monotonic() - scoring_began_s
            losses = found[0] / clients.steps.clamp(min=1)
            figures.append(torch.stack([losses, clients.steps.double(), accuracy, seconds], dim=1))
            # copied to the CPU group by group, so that a GPU never holds the uploads of a whole cohort
            uploads.add(part, adapter.sent(mine, up))
            # they keep the state that they had before the round
            left_out = {*late, *(bad if self._federation.leaves_out else ())}
            if left_out:
                clients.commit([place for place in range(len(clients)) if place not in left_out])
            else:
                clients.commit()
                handover = clients.handover
            self._federation.world.heartbeat()
        return LocalRound(
            up=uploads.message,
            figures=torch.cat(figures),
            train_s=time.monotonic() - began_s - scoring_s,
            evaluate_s=scoring_s,
            late=all_late,
            diverged=diverged,
        )

    def _on_the_clock(
        self, clients: ClientGroup, up: Message, received: Message, moved: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Return the simulated seconds of a group that has trained, float64 [C], and which of its members are
        late, by position; arguments as in `train`."""
        if self._clock is None:
            return torch.zeros(len(clients), dtype=torch.float64), []
        moved = moved + self._federation.upload_bytes(up, received, clients.round)
        seconds = self._clock.seconds(clients.ids, clients.steps, moved)
        return seconds, self._clock.are_late(seconds).nonzero().flatten().tolist()
