"""The clients' hypernetworks and their optimiser in pFedLA's server state.

Shapes: N clients, S of a cohort, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.methods.base import State
from hpcfl.models.hypernetworks import (
    HeadInit,
    HypernetworkOptimiser,
    Hypernetworks,
    descend,
    initial_moments,
    moment_names,
)

PLACES = (("hypernetworks/", "optimiser/"), ("common/", "common_optimiser/"))
"""Prefixes in the state of tensors and of their moments: of those with one row per client, and of common
ones."""


@dataclass(frozen=True)
class HypernetworkState:
    """Names, outputs and steps of the hypernetworks in the server's state."""

    shape: Hypernetworks
    optimiser: HypernetworkOptimiser
    lr: float

    def initial(self, seed: int, head_init: HeadInit) -> State:
        """Return the part of the server's state at the start."""
        state: State = {}
        drawn = self.shape.initial(seed, head_init), self.shape.initial_codes(seed, head_init)
        for (place, place_of_moments), tensors in zip(PLACES, drawn, strict=True):
            moments = initial_moments(tensors, self.optimiser)
            state |= {place + name: tensor for name, tensor in tensors.items()}
            state |= {place_of_moments + name: tensor for name, tensor in moments.items()}
        return state

    def outputs(self, server: State, clients: Sequence[int]) -> Tensor:
        """Return the outputs [S, L, N] of some clients' hypernetworks."""
        return self.shape.outputs(self._rows(server, clients), clients)

    def outputs_to_differentiate(self, server: State, clients: Sequence[int]) -> tuple[Tensor, State]:
        """Return the outputs [S, L, N] and the leaves that `step` differentiates."""
        leaves = {
            name: tensor.detach().requires_grad_() for name, tensor in self._rows(server, clients).items()
        }
        return self.shape.outputs(leaves, clients), leaves

    def step(
        self, server: State, clients: Sequence[int], objective: Tensor, leaves: State, frozen: Tensor
    ) -> None:
        """Descend on an objective of the leaves; heads of frozen layers, bool [S, L], stay as they are."""
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        slopes = dict(zip(leaves, gradients, strict=True))
        if self.optimiser == "scaled":
            slopes |= {name: slopes[name] * times for name, times in self.shape.head_steps.items()}
        moved = (clients, frozen), ([0], frozen.all(dim=0, keepdim=True))
        for places, names, (rows, frozen_rows) in zip(PLACES, self.shape.names, moved, strict=True):
            descend(
                _part(server, places[0], names),
                _part(server, places[1], moment_names(names, self.optimiser)),
                {name: slopes[name] for name in names},
                rows,
                self.optimiser,
                self.lr,
                frozen_rows,
            )

    def _rows(self, server: State, clients: Sequence[int]) -> State:
        """Return copies of some clients' own rows [S, ...], and the common tensors."""
        (own, _), (common, _) = PLACES
        of_clients, of_all = self.shape.names
        index = torch.tensor(list(clients))
        rows = {name: server[own + name].index_select(0, index) for name in of_clients}
        return rows | _part(server, common, of_all)


def _part(server: State, place: str, names: Sequence[str]) -> State:
    """Return tensors under a prefix of the state, by the rest of their names."""
    return {name: server[place + name] for name in names}
