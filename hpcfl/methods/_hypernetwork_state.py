"""The clients' hypernetworks and their optimiser in pFedLA's server state.

Shapes: N clients, S of a cohort, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.methods.base import State
from hpcfl.models.hypernetworks import HeadInit, Hypernetworks, Optimiser, descend, initial_moments

OWN, OWN_OPTIMISER = "hypernetworks/", "optimiser/"
"""Prefixes in the state of tensors with one row per client, and of their moments."""
COMMON, COMMON_OPTIMISER = "common/", "common_optimiser/"
"""Prefixes of tensors that all hypernetworks share, and of their moments."""


@dataclass(frozen=True)
class HypernetworkState:
    """Names, outputs and steps of the hypernetworks in the server's state."""

    shape: Hypernetworks
    optimiser: Optimiser
    lr: float

    def initial(self, seed: int, head_init: HeadInit) -> State:
        """Return the part of the server's state at the start."""
        state: State = {}
        for place, optimiser, tensors in (
            (OWN, OWN_OPTIMISER, self.shape.initial(seed, head_init)),
            (COMMON, COMMON_OPTIMISER, self.shape.initial_codes(seed, head_init)),
        ):
            moments = initial_moments(tensors, self.optimiser)
            state |= {place + name: tensor for name, tensor in tensors.items()}
            state |= {optimiser + name: tensor for name, tensor in moments.items()}
        return state

    def rows(self, server: State, clients: Sequence[int]) -> tuple[State, State]:
        """Return copies of some clients' own rows [S, ...], and the shared tensors."""
        index = torch.tensor(list(clients))
        own = {name: rows.index_select(0, index) for name, rows in _under(server, OWN).items()}
        return own, _under(server, COMMON)

    def outputs(self, server: State, clients: Sequence[int]) -> Tensor:
        """Return the outputs [S, L, N] of some clients' hypernetworks."""
        own, common = self.rows(server, clients)
        return self.shape.outputs(own | common, clients)

    def outputs_to_differentiate(self, server: State, clients: Sequence[int]) -> tuple[Tensor, State, State]:
        """Return the outputs [S, L, N] and the leaves that `step` differentiates: own, and shared."""
        own, common = self.rows(server, clients)
        own = {name: rows.requires_grad_() for name, rows in own.items()}
        common = {name: tensor.detach().requires_grad_() for name, tensor in common.items()}
        return self.shape.outputs(own | common, clients), own, common

    def step(
        self,
        server: State,
        clients: Sequence[int],
        objective: Tensor,
        own: State,
        common: State,
        frozen: Tensor,
    ) -> None:
        """Descend on an objective of the leaves; heads of frozen layers, bool [S, L], stay as they are."""
        leaves = own | common
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        slopes = dict(zip(leaves, gradients, strict=True))
        if self.optimiser == "scaled":
            slopes |= {name: slopes[name] * times for name, times in self.shape.head_steps.items()}
        frozen_for_all = frozen.all(dim=0, keepdim=True)
        for place, optimiser, names, rows, frozen_rows in (
            (OWN, OWN_OPTIMISER, own, clients, frozen),
            (COMMON, COMMON_OPTIMISER, common, [0], frozen_for_all),
        ):
            of_names = {name: slopes[name] for name in names}
            parts = _under(server, place), _under(server, optimiser)
            descend(*parts, of_names, rows, self.optimiser, self.lr, frozen_rows)


def _under(server: State, place: str) -> State:
    """Return the tensors under a prefix of the state, by the rest of their names."""
    return {name.removeprefix(place): tensor for name, tensor in server.items() if name.startswith(place)}
