"""Which clients a round gets, and which of them are lost before they train: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort
from hpcfl.config.keys import ClientsConfig
from hpcfl.methods import Context
from hpcfl.privacy import drawn_clients
from hpcfl.randomness import torch_stream, uniform


class Sampler:
    """Draws the clients of each round of a run, and those that it loses before they train."""

    def __init__(self, context: Context) -> None:
        self._context, self._size = context, context.train.cohort_size(context.num_clients)

    def clients(self, number: int) -> list[int]:
        """Return the ids of the clients of round `number`, in ascending order.

        It knows no losses: with power_of_choice it returns clients drawn by size.
        """
        context, size = self._context, self._size
        if context.privacy.unit == "client":
            return drawn_clients(context.num_clients, context.train.participation, context.seed, number)
        if context.clients.sampling is not None:
            return sorted(drawn_by_size(context.num_samples, size, context.seed, number))
        order = torch.randperm(context.num_clients, generator=torch_stream(context.seed, "cohort", number))
        return sorted(order[:size].tolist())

    def clients_of_highest_loss(self, number: int, losses: np.ndarray) -> list[int]:
        """Return the ids of the clients of round `number` with power_of_choice, in ascending order.

        `losses` are the last training losses [N], nan where unknown.
        """
        count = self._context.clients.candidates or 2 * self._size
        candidates = drawn_by_size(self._context.num_samples, count, self._context.seed, number)
        return of_highest_loss(candidates, losses, self._size)

    def not_dropped(self, cohort: Cohort) -> list[int]:
        """Return the positions of the members that `clients.drop_rate` leaves in the round."""
        settings, seed, number = self._context.clients, self._context.seed, cohort.round
        return [n for n, one in enumerate(cohort.clients) if not is_dropped(settings, seed, number, one)]


def drawn_by_size(num_samples: Tensor, size: int, seed: int, number: int) -> list[int]:
    """Return `size` clients in the order in which they are drawn, without replacement.

    Each draw takes a client with a probability proportional to its training samples, of those that are left.
    Client i with n_i samples comes at an exponential time of rate n_i (Efraimidis and Spirakis, Weighted
    random sampling with a reservoir, 2006); this is Gumbel top-k of log n_i.
    """
    stream = torch_stream(seed, "cohort", number)
    numbers = torch.rand(len(num_samples), dtype=torch.float64, generator=stream)
    times = -torch.log1p(-numbers) / num_samples
    return times.argsort(stable=True)[:size].tolist()


def of_highest_loss(candidates: Sequence[int], losses: np.ndarray, size: int) -> list[int]:
    """Return the `size` candidates whose losses [N] are highest, in ascending order of id.

    A loss that is nan is unknown, and counts as infinite. Of equal ones the first candidates are taken.
    """
    known = np.nan_to_num(losses[list(candidates)], nan=np.inf, posinf=np.inf)
    order = np.argsort(-known, kind="stable")[:size]
    return sorted(candidates[place] for place in order.tolist())


def is_dropped(settings: ClientsConfig, seed: int, number: int, client: int) -> bool:
    """Return whether a member of the cohort of round `number` is lost before it trains."""
    return settings.drop_rate is not None and uniform(seed, "drop", number, client) < settings.drop_rate
