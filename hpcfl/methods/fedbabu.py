"""FedBABU. Oh et al., FedBABU: toward enhanced representation for federated image classification, ICLR 2022.

    phi_i <- E epochs of SGD on L_i(phi_i, h_0) from phi, the head h_0 frozen   (Algorithm 1)
    phi   <- weighted mean of phi_i
    to evaluate, each client trains a copy of (phi, h_0) for `train.finetune_epochs` and throws it away

Choices: h_0 is the common initial head, which every rank draws from the run's seed, so it never travels.
Momentum and weight decay do not act on h_0. The weights of the mean are training-set sizes (the authors' code
has uniform ones). BatchNorm keeps running statistics, which are averaged like parameters (the authors'
network keeps none). The default of five epochs of fine-tuning is the authors'; `fedavg_ft` has one, so a
comparison should set the same `train.finetune_epochs` for all methods. Few steps of it can lower the
accuracy, while the head is still near h_0; `method.finetune=body` keeps h_0, with which the body was trained.
The accuracy after a download is that before fine-tuning, which the paper calls initial accuracy. A client
that takes no part in training is fine-tuned in the same way, for `train.unseen_epochs`.
"""

from __future__ import annotations

from typing import Literal

from hpcfl.communication.messages import Message
from hpcfl.methods._own_layers import SharedLayers
from hpcfl.methods.base import Context, Params
from hpcfl.training.client_group import ClientGroup


class FedBABUParams(Params):
    finetune: Literal["all", "head", "body"] = "all"
    """What fine-tuning trains (the paper compares the three and reports `all`)."""


class FedBABU(SharedLayers):
    summary = "a shared body under one fixed random head, fine-tuned before each evaluation"
    privacy_units = ("client", "sample")
    Params = FedBABUParams
    traits = SharedLayers.traits.replace(needs_body=True, train_defaults={"finetune_epochs": 5})
    params: FedBABUParams

    def __init__(self, context: Context, params: FedBABUParams) -> None:
        super().__init__(context, params)
        self._head = context.initial_parameters()[self.layout.head]
        parts = {"all": slice(None), "head": self.layout.head, "body": self.layout.body}
        self._finetuned_part = parts[params.finetune]

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = clients.sgd(self._with_head(down)["theta"], trained=self.layout.body).theta
        return Message(per_client={"theta": theta}, layer_mask={"theta": self.body_layers})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return self._with_head(down)

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        return self._finetuned(clients, self._with_head(down), epochs, trained=self._finetuned_part)

    def _with_head(self, down: Message) -> Message:
        """Return the downloaded body under the fixed head, which all clients share."""
        theta = down.shared["theta"]
        shared = {"theta": self.layout.with_head(theta, self._head.to(theta))}
        return Message(shared, num_clients=down.num_clients)
