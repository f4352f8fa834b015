"""What methods share whose server keeps every client's last model, to send others what they make of them."""

from __future__ import annotations

from hpcfl.messages import Cohort, Upload
from hpcfl.methods._own_model import OwnModel
from hpcfl.methods.base import State


class ModelBank(OwnModel):
    """Own models, the last uploads of which are the rows of `models` [N, P] on the server."""

    def server_state(self) -> State:
        return {"models": self.context.initial_parameters(range(self.context.num_clients))}

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        for positions, block in up:
            server["models"][list(cohort.clients[positions])] = block.rows["theta"]

    def memory(self) -> dict[str, int]:
        return {"models": 4 * self.context.num_clients * self.layout.size}
