"""Base of methods whose server stores each client's last uploaded model and builds downloads from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfl.communication.aggregation import mean_of
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._own_model import OwnModel
from hpcfl.methods.base import State
from hpcfl.training.client_group import ClientGroup


class ModelBank(OwnModel):
    """Each client keeps its own model; the server stores the last upload of each client in `models` [N, P].

    `is_known` [N] is 1 for each client that has uploaded a model. The rows of all other clients hold the
    common initial model.
    """

    def server_state(self) -> State:
        clients = self.context.num_clients
        return {
            "models": self.context.initial_parameters(range(clients)),
            "is_known": torch.zeros(clients, dtype=torch.int64),
        }

    def mean_of_models(self, server: State) -> Tensor:
        """Return the plain mean [P] of the uploaded models that have not diverged: where new clients start.

        While there are none, it is the common initial model.
        """
        known = self.known(server).tolist()
        if not known:
            return self.context.initial_parameters()
        return mean_of([server["models"][client] for client in known])

    def known(self, server: State) -> Tensor:
        """Return the ids of clients that have uploaded a model of finite numbers, in ascending order."""
        is_sound = server["models"].norm(dim=1).isfinite()
        return (is_sound & (server["is_known"] == 1)).nonzero().squeeze(1)

    def models_of(self, server: State, known: Tensor) -> Tensor:
        """Return the models [n, P] of known clients; all of them are not copied."""
        models = server["models"]
        return models if len(known) == len(models) else models[known]

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        for positions, block in up:
            self.store(server, cohort.clients[positions], block)

    def store(self, server: State, clients: Sequence[int], block: Message) -> None:
        """Keep the models that some clients sent."""
        server["models"][list(clients)] = block.per_client["theta"]
        server["is_known"][list(clients)] = 1

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"]})


def rows_among(known: Tensor, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the places of known clients in `clients`, and those in `known`, whose ids ascend."""
    ids = torch.tensor(list(clients))
    positions = torch.isin(ids, known).nonzero().squeeze(1)
    return positions, torch.searchsorted(known, ids[positions])
