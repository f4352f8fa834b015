"""FedProto. Tan et al., FedProto: federated prototype learning across heterogeneous clients, AAAI 2022.

    C_i,c    = mean of f_i(x) over the client's samples of class c                         (eq. 3)
    Cbar_c  <- sum_i n_i,c C_i,c / sum_i n_i,c over the clients that hold class c          (eq. 6)
    theta_i <- E epochs of SGD on CE + lambda mean (f_i(x) - Cbar_y)^2                     (eq. 7)
    prediction: the class c with the least ||f_i(x) - Cbar_c||                             (section 4.3)

f_i is the body of the client's own model. Prototypes travel, and no weights.

Differs from the paper:
  mean         eq. 6 as printed also divides by the number of clients that hold class c. Its prototypes would
               be that much smaller than any client's; this is the mean that the text describes.
               (The authors' code has a plain mean over clients.)
  loss         the distance is that of each sample's features, as in the authors' code; eq. 7 has that of the
               class means. It is a mean over samples and features, in which a sample of a class without
               Cbar_c counts as 0
  upload       it has K rows, with what came down for classes that the client does not hold, and K counts.
               The paper's has rows only for the classes that the client holds

Choices the paper leaves open:
  prototypes   C_i,c is computed after the local epochs, over the training set, in evaluation mode. (The
               authors' code uses the last epoch's features, from weights that still change.)
  absent       a class that no client of the round holds keeps its Cbar_c
  probability  softmax over c of -||f_i(x) - Cbar_c||^2, as in Snell et al., Prototypical networks,
               NeurIPS 2017. This is the own body under a linear head with weights 2 Cbar_c and
               biases -||Cbar_c||^2, and this head is evaluated. A class without Cbar_c has probability 0;
               before the first round, the own head predicts
  evaluated    the own model after its last training, with the newest Cbar_c. Running statistics stay with
               the client
  fine-tuning  trains on the same loss. So does a client that takes no part in training, from the initial
               model
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._own_model import OwnModel
from hpcfl.methods._prototypes import (
    aligned_gradient,
    average_prototypes,
    prototypes,
    server_prototypes,
)
from hpcfl.methods.base import Params, State
from hpcfl.training.client_group import ClientGroup

NEVER = -1e6
"""Logit of a class without a prototype: its probability is 0."""


class FedProtoParams(Params):
    alignment: float = Field(1.0, ge=0)
    """Strength lambda of the pull of features towards prototypes (authors: 1); 0 is local training, evaluated
    by the nearest prototype."""


class FedProto(OwnModel):
    summary = "own models whose features of a class lean towards the mean over all clients"
    Params = FedProtoParams
    traits = OwnModel.traits.replace(eval_after="download", linear_head=True, differences=("prototypes",))
    params: FedProtoParams

    def server_state(self) -> State:
        return server_prototypes(self.context.num_classes, self.context.network.num_features)

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={name: server[name] for name in ("prototypes", "is_known")})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        clients["theta"] = self._trained(clients, down)
        found = prototypes(clients, clients["theta"], self.context.num_classes)
        return Message(per_client={"prototypes": found.uploaded(down["prototypes"]), "counts": found.counts})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        average_prototypes(server, up, up.collect("counts")["counts"])

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return self._by_nearest_prototype(clients["theta"], down)

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return self.eval_model(clients, down)

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        return self._by_nearest_prototype(self._trained(clients, down, epochs, "finetune"), down)

    def _trained(
        self, clients: ClientGroup, down: Message, epochs: int | None = None, purpose: str = "batches"
    ) -> Tensor:
        gradient = aligned_gradient(clients, self.params.alignment, down["prototypes"], down["is_known"])
        return clients.sgd(clients["theta"], gradient=gradient, epochs=epochs, purpose=purpose).theta

    def _by_nearest_prototype(self, theta: Tensor, down: Message) -> Message:
        """Return models [C, P] with the head whose likeliest class is that of the nearest prototype."""
        means, is_known = down["prototypes"], down["is_known"] == 1
        bias = torch.where(is_known, -means.square().sum(dim=2), NEVER)
        head = torch.cat([2 * means.flatten(1), bias], dim=1)
        head = torch.where(is_known.any(dim=1, keepdim=True), head, theta[:, self.layout.head])
        return Message(per_client={"theta": self.layout.with_head(theta, head)})
