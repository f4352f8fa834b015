"""Divergence: find numbers that are nan or infinite, client by client, and report them in one line.

Shapes: C clients of a group, N clients of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import DivergedError
from hpcfl.methods.base import State
from hpcfl.simulation.federation import Federation
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.runfolder import RunFolder
from hpcfl.training.client_group import ClientGroup

LOG = logging.getLogger(__name__)

LARGEST = 2.0**126
"""Above this magnitude a number counts as infinite: codecs send differences, and the difference of two such
numbers may be too large for float32."""
MAX_NAMED = 3
"""Clients and tensors that a message names; it counts the others."""

_SKIP = "set run.on_divergence=skip in the same command"


def losses_and_extremes(clients: ClientGroup, up: Message) -> Tensor:
    """Return each client's sum of losses, and the largest magnitude of what it sends and keeps, [2, C].

    The magnitude is nan if one of these numbers is nan. Both are float64 and on the group's device.
    """
    extremes = torch.zeros_like(clients.loss_sum)
    for _, rows in _numbers(clients, up):
        # both pass nan on, and neither makes a copy
        largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
        extremes = torch.maximum(extremes, largest.to(extremes))
    return torch.stack([clients.loss_sum, extremes])


def diverged_members(clients: ClientGroup, up: Message, figures: Tensor) -> dict[int, str]:
    """Return by position the members of a group that have diverged, and which of their tensors have nan or
    infinity.

    `figures` are those of `losses_and_extremes`, on the CPU.
    """
    losses, extremes = figures
    is_sound = losses.isfinite() & (extremes <= LARGEST)
    return {
        place: _describe(clients, up, losses, place) for place in (~is_sound).nonzero().flatten().tolist()
    }


def not_finite(state: State) -> str:
    """Name the tensors of the server's state that contain nan or infinity; "" if none does."""
    floating = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    # unlike isfinite, amax and amin make no copy
    ends = {name: torch.stack([value.amax(), value.amin()]) for name, value in floating.items()}
    return ", ".join(_first_few([name for name, values in ends.items() if not values.isfinite().all()]))


class Divergence:
    """Handles numbers that are nan or infinite in one run, on one rank (`run.on_divergence`).

    Its methods are collective, and raise DivergedError on all ranks if such numbers end the run.
    """

    def __init__(self, federation: Federation, ledger: Ledger, folder: RunFolder | None) -> None:
        self._world, self._ledger, self._folder = federation.world, ledger, folder
        self._policy, self._leaves_out = federation.experiment.run.on_divergence, federation.leaves_out
        method = federation.method
        self._method, self._train = method.name, method.context.train
        self._is_private = method.context.privacy.unit is not None
        self._has_warned_of_scores = False

    def judge_clients(self, here: Mapping[int, str], server: State, cohort: Cohort) -> dict[int, str]:
        """Return the members of a cohort that have diverged, each with the names of its tensors that have nan
        or infinity, given those of this rank; warn the user.

        With skip it warns of clients that had not diverged before, with continue of the first ones only.
        """
        diverged = on_all_ranks(self._world, here)
        if not diverged:
            return diverged
        first, what = next(iter(diverged.items()))
        prefix = f"client {first}: " if len(diverged) > 1 else ""
        is_all = len(diverged) == len(cohort) > 1
        who = f"all {len(cohort)} clients" if is_all else named(list(diverged))
        problem = f"{who} diverged in round {cohort.round + 1} ({self._method}; {prefix}{what})"
        if self._leaves_out:
            # nan in the server's state makes clients diverge: report the server first
            self.judge_server(server, cohort.round)
        if self._policy == "stop":
            instead = f"{_SKIP} to leave such clients out of the round and continue"
            # if all clients have diverged, skip would train nothing
            self._end(problem, "" if is_all else instead)
        before = self._ledger.diverged
        if self._policy == "skip" and not before[list(diverged)].all():
            LOG.warning(f"{problem}: left out of the round (run.on_divergence=skip)")
        if self._policy == "continue" and not before.any():
            LOG.warning(f"{problem}: the run continues with these numbers (run.on_divergence=continue)")
        return diverged

    def judge_server(self, server: State, done: int) -> None:
        """Check the server's numbers after `done` rounds, unless the policy is continue."""
        what = not_finite(server) if self._leaves_out else ""
        if self._world.maximum(len(what)):
            problem = f"the server's state is not finite after round {done} ({self._method}; {what})"
            self._end(problem, "take smaller steps on the server (hpcfl list keys method)")

    def judge_scores(self, losses: np.ndarray, server: State, done: int) -> None:
        """Check the losses [clients] of the models that were scored after `done` rounds, on the server."""
        here = dict.fromkeys(np.isnan(losses).nonzero()[0].tolist(), "")
        clients = list(on_all_ranks(self._world, here))
        if not clients:
            return
        self.judge_server(server, done)
        epochs = self._train.finetune_epochs
        tuned = f" after {epochs} epochs of fine-tuning" if epochs else ""
        what = f"{self._method}; loss is nan{tuned}"
        problem = f"{named(clients)} diverged in the evaluation after round {done} ({what})"
        if self._policy == "stop":
            self._end(problem, f"{_SKIP} to continue with such scores")
        if not self._has_warned_of_scores and not self._ledger.diverged.any():
            LOG.warning(problem)
        self._has_warned_of_scores = True

    def _end(self, problem: str, instead: str) -> NoReturn:
        """End the run; `instead` is an alternative to smaller steps."""
        if self._folder is None:
            # the server prints it
            raise DivergedError(problem)
        lower = f"start over with a lower train.lr (it is {self._train.lr:g})"
        if self._is_private:
            # a private run has no other policy
            lower, instead = f"{lower}, privacy.clip or privacy.noise", ""
        text = f"{problem}; {self._folder.last_good()}: {lower}" + (f", or {instead}" if instead else "")
        self._folder.log(f"error: {text}")
        raise DivergedError(text)


def named(clients: Sequence[int]) -> str:
    """Return the first few of some clients, and how many more there are."""
    names = _first_few(clients)
    if len(names) == 1:
        return f"client {names[0]}"
    return f"clients {', '.join(names[:-1])} and {names[-1]}"


def on_all_ranks(world: Communicator, here: Mapping[int, str]) -> dict[int, str]:
    """Return texts about clients of all ranks, in ascending order, given those of this one. Collective."""
    if not world.maximum(len(here)):
        return {}
    return dict(sorted(entry for part in world.all_gather(list(here.items())) for entry in part))


def _numbers(clients: ClientGroup, up: Message) -> Iterator[tuple[str, Tensor]]:
    """Yield by name the floating-point numbers that each client of a group sends, and keeps, as [C, n]."""
    # many methods keep the tensor that they send
    sent = {(rows.data_ptr(), rows.shape) for rows in up.per_client.values()}
    kept = {
        f"its {name}": rows
        for name, rows in clients.kept.items()
        if (rows.data_ptr(), rows.shape) not in sent
    }
    for name, rows in (up.per_client | kept).items():
        if rows.is_floating_point() and rows.numel():
            yield name, rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def _describe(clients: ClientGroup, up: Message, losses: Tensor, place: int) -> str:
    """Name the tensors of a member of a group that have numbers that are nan or infinite."""
    found = [] if losses[place].isfinite() else ["loss"]
    # not <=, for nan
    found += [name for name, rows in _numbers(clients, up) if not rows[place].abs().max() <= LARGEST]
    return ", ".join(_first_few(found))


def _first_few(names: Sequence[object]) -> list[str]:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return [*map(str, names[:MAX_NAMED]), *([f"{more} more"] if more > 0 else [])]
