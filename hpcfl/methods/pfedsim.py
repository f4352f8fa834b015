"""pFedSim. Tan et al., pFedSim: similarity-aware model aggregation towards personalized federated learning,
2023.

    warm-up: w <- FedAvg, in the first half of the rounds; all clients' models then start as w
    s_ij    = mean over classes c of cos(h_i,c, h_j,c),  h_i,c the weights of class c in client i's head
    phi_i  <- sum_j a_ij phi_j,  a_ij in proportion to -log(1 - s_ij), and s_ii = 0.9999
    theta_i = (phi_i, h_i) <- E epochs of SGD on L_i, body and head together

Choices: s_ij is kept between 0 (as in the authors' code, so that heads which point apart have no weight) and
0.9999 (its logarithm is infinite for equal heads). Of an unsampled client, theta_j is its last upload after
the warm-up (in the authors' code, s_ij is that of the last round which had both clients). A client without
such an upload has no part in the phi_i of others, and starts from w; so does one whose model is nan or
infinite. Running statistics stay with the client, in the warm-up too. The evaluated model is w until the
client has trained after the warm-up, and then theta_i after its last training; the model after a download
has the mixed phi_i. A client that takes no part in training fine-tunes w.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._model_bank import ModelBank, rows_among
from hpcfl.methods.base import Context, Params, State
from hpcfl.training.client_group import ClientGroup

MAX_SIMILARITY = 0.9999
"""Largest similarity, and that of a client to itself (authors: 0.9999)."""


class PFedSimParams(Params):
    warm_up: float = Field(0.5, ge=0, le=1)
    """Share of `train.rounds` that are FedAvg's, rounded down (authors: 0.5); 1 is FedAvg but for running
    statistics."""


class PFedSim(ModelBank):
    summary = "each client's own model, whose body is mixed with those under similar heads"
    Params = PFedSimParams
    traits = ModelBank.traits.replace(averages=("theta",), linear_head=True, uses_total_rounds=True)
    params: PFedSimParams

    def __init__(self, context: Context, params: PFedSimParams) -> None:
        super().__init__(context, params)
        self._head_shape = (context.num_classes, context.network.num_features)
        # without rounding, 0.29 of 100 rounds would be 28
        self._warm_up = int(round(params.warm_up * context.train.rounds, 9))

    def server_state(self) -> State:
        return super().server_state() | {"theta": self.context.initial_parameters()}

    def client_state(self, clients: Sequence[int]) -> State:
        return super().client_state(clients) | {"has_own": torch.zeros(len(clients), dtype=torch.uint8)}

    def download(self, server: State, cohort: Cohort) -> Message:
        known = self.known(server)
        positions, rows = rows_among(known, cohort.clients)
        if not len(positions):
            return Message(shared={"theta": server["theta"]})
        theta, body = server["theta"].repeat(len(cohort), 1), self.layout.body
        read = self.models_of(server, known)
        mixed = read[rows]
        mixed[:, body] = self.weights(read, rows).to(read) @ read[:, body]
        theta[positions] = mixed
        return Message(per_client={"theta": theta})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = clients.sgd(down["theta"]).theta
        if clients.round >= self._warm_up:
            clients["theta"] = theta
            clients["has_own"] = torch.ones_like(clients["has_own"])
        return Message(per_client={"theta": theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        if cohort.round < self._warm_up:
            server["theta"] = weighted_mean(up, "theta", cohort.num_samples)
        else:
            super().aggregate(server, cohort, up)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        has_own = clients["has_own"].unsqueeze(1) == 1
        return Message(per_client={"theta": torch.where(has_own, clients["theta"], down["theta"])})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": up.per_client["theta"]})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        return self.finetune(clients, down, clients.local_epochs)

    def weights(self, models: Tensor, rows: Tensor) -> Tensor:
        """Return the weights a [S, n], float64, of the bodies of models [n, P] in those of some rows [S]."""
        heads = models[:, self.layout.head.start :][:, : self._head_shape[0] * self._head_shape[1]]
        directions = normalize(heads.double().unflatten(1, self._head_shape), dim=2).flatten(1)
        alike = directions[rows] @ directions.T / self._head_shape[0]
        alike[torch.arange(len(rows)), rows] = MAX_SIMILARITY
        weights = -torch.log1p(-alike.clamp(min=0, max=MAX_SIMILARITY))
        return weights / weights.sum(dim=1, keepdim=True)
