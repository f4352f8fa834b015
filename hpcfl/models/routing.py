"""FedMN's decisions: the paths of the modular network that each client opens (eq. 5 and 10).

Shapes: C clients, E paths in the order of modular.py. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcfl.models.modular import ModularNetwork
from hpcfl.randomness import torch_stream

Routing = Literal["straight", "soft", "open"]


@dataclass(frozen=True)
class Decisions:
    """Decisions [C, E] from the clients' mean logits z [C, E]: hard, soft, or all paths open."""

    network: ModularNetwork
    routing: Routing
    temperatures: tuple[float, float]
    """tau of the first and of the last round."""
    rounds: range
    """The rounds that have decisions, counted from 0."""
    seed: int

    def temperature(self, round: int) -> float:
        """Return tau of a round; before the first of `rounds`, that of the first."""
        first, last = self.temperatures
        share = max(0, round - self.rounds.start) / max(1, len(self.rounds) - 1)
        return float(first * (last / first) ** share)

    def drawn(self, logits: Tensor, round: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the decisions that clients draw in a round, and the derivatives dv/dz (eq. 5)."""
        tau, rows = self.temperature(round), []
        # client by client, as the last bits of a sigmoid depend on a number's place in its tensor
        for z, client in zip(logits, clients, strict=True):
            stream = torch_stream(self.seed, "routing", round, client)
            uniform = torch.rand(z.shape, generator=stream, dtype=torch.float64)
            rows.append(((uniform.logit(eps=1e-12) + z) / tau).sigmoid().to(z.dtype))
        soft = torch.stack(rows)
        return self._as_applied(soft, logits), soft * (1 - soft) / tau

    def likely(self, logits: Tensor, round: int) -> Tensor:
        """Return the decisions without noise: hard ones open the paths with Pi > 0.5 (eq. 10)."""
        return self._as_applied((logits / self.temperature(round)).sigmoid(), logits)

    def _as_applied(self, soft: Tensor, logits: Tensor) -> Tensor:
        """Return the decisions that the network uses, from soft ones."""
        if self.routing == "soft":
            return soft
        if self.routing == "open":
            return torch.ones_like(soft)
        hard = (soft > 0.5).to(soft.dtype)
        return torch.stack([self.network.opened(row, z) for row, z in zip(hard, logits, strict=True)])
