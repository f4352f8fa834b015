"""Numbers that are nan or infinite: found client by client, and told to the user in a line.

Shapes: C clients of a group, N clients of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config import Config
from hpcfl.errors import DivergedError
from hpcfl.methods.base import State
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.runfolder import RunFolder
from hpcfl.terminal import Progress
from hpcfl.training.client_group import ClientGroup

LARGEST = 2.0**126
"""Above this magnitude a number counts as infinite: codecs send differences, and those of two such numbers
may be too large for float32."""
MAX_NAMED = 3
"""Clients and tensors that a line names; it counts the others."""

_SKIP = "set run.on_divergence=skip in the same command"

Diverged = Mapping[int, str]
"""What is nan or infinite of each client that has diverged, by client in ascending order."""


def losses_and_extremes(clients: ClientGroup, up: Message) -> Tensor:
    """Return each client's sum of losses, and the largest magnitude of what it sends and keeps, [2, C].

    The magnitude is nan where one of these numbers is. Both are float64 and on the group's device.
    """
    extremes = torch.zeros_like(clients.loss_sum)
    for _, rows in _numbers(clients, up):
        # both pass nan on, and neither makes a copy
        largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
        extremes = torch.maximum(extremes, largest.to(extremes))
    return torch.stack([clients.loss_sum, extremes])


def diverged_members(clients: ClientGroup, up: Message, figures: Tensor) -> dict[int, str]:
    """Return the members of a group that have diverged, by their places, and what is nan or infinite of them.

    `figures` are those of `losses_and_extremes`, on the CPU.
    """
    losses, extremes = figures
    is_sound = losses.isfinite() & (extremes <= LARGEST)
    return {place: _told(clients, up, losses, place) for place in (~is_sound).nonzero().flatten().tolist()}


def not_finite(state: State) -> str:
    """Say which tensors of the server's have numbers that are nan or infinite; "" where none has."""
    floating = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    return _listed(
        [
            _counted(name, value, torch.finfo(value.dtype).max)
            for name, value in floating.items()
            if not _is_finite(value)
        ]
    )


class Divergence:
    """What one run does about numbers that are nan or infinite (`run.on_divergence`), on one rank.

    Its methods are collective, and raise DivergedError on all ranks where such numbers end the run.
    """

    def __init__(
        self,
        config: Config,
        world: Communicator,
        ledger: Ledger,
        progress: Progress,
        folder: RunFolder | None,
    ) -> None:
        self._world, self._ledger, self._progress, self._folder = world, ledger, progress, folder
        self._method, self._train, self._policy = config.method.name, config.train, config.run.on_divergence
        self._told_of_scores = False
        self.saved = 0
        """The round of the newest checkpoint; 0 before there is one."""

    @property
    def leaves_out(self) -> bool:
        """Whether the round of a client that diverges is undone."""
        return self._policy != "continue"

    def judge_clients(self, here: Diverged, server: State, cohort: Cohort) -> Diverged:
        """Return the members of a cohort that have diverged, given those of this rank, and tell the user.

        Warns of clients that have not diverged before, or, where their numbers stay, of the first ones.
        """
        diverged = _on_all_ranks(self._world, here)
        if not diverged:
            return diverged
        first, what = next(iter(diverged.items()))
        whose = f"client {first}: " if len(diverged) > 1 else ""
        is_all = len(diverged) == len(cohort) > 1
        who = f"all {len(cohort)} clients" if is_all else named(list(diverged))
        told = f"{who} diverged in round {cohort.round + 1} ({self._method}; {whose}{what})"
        if self.leaves_out:
            # what is nan on the server makes clients diverge that are not to blame
            self.judge_server(server, cohort.round)
        if self._policy == "stop":
            # without all clients' rounds nothing is trained
            self._end(told, "" if is_all else f"{_SKIP} to continue without such clients' rounds")
        before = self._ledger.diverged
        if self._policy == "skip" and not before[list(diverged)].all():
            self._progress.warn(f"{told}: left out of the round (run.on_divergence=skip)")
        if self._policy == "continue" and not before.any():
            self._progress.warn(f"{told}: the run continues with these numbers (run.on_divergence=continue)")
        return diverged

    def judge_server(self, server: State, done: int) -> None:
        """Look at the server's numbers after `done` rounds, unless they may be whatever they are."""
        what = not_finite(server) if self.leaves_out else ""
        if self._world.maximum(len(what)):
            told = f"the server's state is not finite after round {done} ({self._method}; {what})"
            self._end(told, "take smaller steps on the server (hpcfl list keys method)")

    def judge_scores(self, losses: np.ndarray, server: State, done: int) -> None:
        """Look at the losses [clients] of the models that were scored after `done` rounds, on the server."""
        clients = np.isnan(losses).nonzero()[0].tolist()
        if not self._world.maximum(len(clients)):
            return
        clients = json.loads(self._world.broadcast_bytes(json.dumps(clients).encode()))
        self.judge_server(server, done)
        epochs = self._train.finetune_epochs
        tuned = f" after {epochs} epochs of fine-tuning" if epochs else ""
        what = f"{self._method}; loss is nan{tuned}"
        told = f"{named(clients)} diverged in the evaluation after round {done} ({what})"
        if self._policy == "stop":
            self._end(told, f"{_SKIP} to continue with such scores")
        if not self._told_of_scores and not self._ledger.diverged.any():
            self._progress.warn(told)
        self._told_of_scores = True

    def _end(self, told: str, instead: str) -> NoReturn:
        """End the run; `instead` is what may be done but for smaller steps."""
        kept = (
            f"the last good checkpoint is of round {self.saved}"
            if self.saved
            else "there is no checkpoint yet"
        )
        lower = f"start anew with a lower train.lr (it is {self._train.lr:g})"
        text = f"{told}; {kept}: {lower}" + (f", or {instead}" if instead else "")
        if self._folder is not None:
            self._folder.log(f"error: {text}")
        raise DivergedError(text)


def named(clients: Sequence[int]) -> str:
    """Return the first few of some clients, and how many more there are."""
    more = len(clients) - MAX_NAMED
    told = [str(client) for client in clients[:MAX_NAMED]] + [f"{more} more"] * (more > 0)
    if len(told) == 1:
        return f"client {told[0]}"
    return f"clients {', '.join(told[:-1])} and {told[-1]}"


def _on_all_ranks(world: Communicator, here: Diverged) -> Diverged:
    """Return the clients that have diverged on any rank, given those of this one. Collective."""
    if not world.maximum(len(here)):
        return {}
    found = world.gather_bytes(json.dumps(list(here.items())).encode())
    everywhere = None
    if found is not None:
        everywhere = json.dumps(sorted(entry for text in found for entry in json.loads(text))).encode()
    return dict(json.loads(world.broadcast_bytes(everywhere)))


def _numbers(clients: ClientGroup, up: Message) -> Iterator[tuple[str, Tensor]]:
    """Yield by name the floating-point numbers that each client of a group sends, and keeps, as [C, n]."""
    # many a method sends what it keeps
    sent = {(rows.data_ptr(), rows.shape) for rows in up.rows.values()}
    kept = {
        f"its {name}": rows
        for name, rows in clients.kept.items()
        if (rows.data_ptr(), rows.shape) not in sent
    }
    for name, rows in (up.rows | kept).items():
        if rows.is_floating_point() and rows.numel():
            yield name, rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def _told(clients: ClientGroup, up: Message, losses: Tensor, place: int) -> str:
    """Say what is nan or infinite of a member of a group."""
    loss = float(losses[place])
    found = [] if np.isfinite(loss) else [f"loss is {'nan' if np.isnan(loss) else 'infinite'}"]
    found += [_counted(name, rows[place], LARGEST) for name, rows in _numbers(clients, up)]
    return _listed([text for text in found if text])


def _counted(name: str, numbers: Tensor, largest: float) -> str:
    """Say how many numbers of a tensor are nan or above a magnitude; "" where none is."""
    counts = {"nan": int(numbers.isnan().sum()), "infinite": int((numbers.abs() > largest).sum())}
    told = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{name} has {told} number{'s' * (sum(counts.values()) > 1)}" if told else ""


def _is_finite(numbers: Tensor) -> bool:
    # unlike isfinite, neither makes a copy
    return bool(numbers.amax().isfinite() & numbers.amin().isfinite())


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - MAX_NAMED
    return "; ".join([*texts[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])])
