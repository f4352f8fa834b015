"""Methods whose server keeps the last model of each client, and sends clients what it makes of these."""

from __future__ import annotations

import torch

from hpcfl.communication.channel import Upload
from hpcfl.communication.messages import Cohort
from hpcfl.methods._own_model import OwnModel
from hpcfl.methods.base import State


class ModelBank(OwnModel):
    """Own models, the last uploads of which are the rows of `models` [N, P] on the server.

    `is_known` [N] is 1 for clients that uploaded one; the rows of the others are the common start.
    """

    def server_state(self) -> State:
        clients = self.context.num_clients
        return {
            "models": self.context.initial_parameters(range(clients)),
            "is_known": torch.zeros(clients, dtype=torch.int64),
        }

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        for positions, block in up:
            members = list(cohort.clients[positions])
            server["models"][members] = block.rows["theta"]
            server["is_known"][members] = 1

    def memory(self) -> dict[str, int]:
        return {"models": 4 * self.context.num_clients * self.layout.size}
