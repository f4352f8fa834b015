"""MOON. Li et al., Model-contrastive federated learning, CVPR 2021.

    theta_i <- E epochs of SGD on L_i(theta) + mu l_con from w                  (Algorithm 1)
    l_con    = -log( exp(cos(z, z_w) / tau) / (exp(cos(z, z_w) / tau) + exp(cos(z, z_p) / tau)) )    (eq. 3)
    w       <- weighted mean of theta_i

z, z_w and z_p are a sample's features by theta, by the received w and by the client's previous model theta_p.

Choices: features are those of the body, without the paper's projection to 256 numbers, as in PFLlib and
FL-bench, so that all methods train the same network. w and theta_p are in evaluation mode and get no
gradient. theta_p is the client's model after its last participation; in the client's first participation,
theta_p is w and l_con is constant. The evaluated model is w. With mu = 0 the method is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import body_features


class MoonParams(Params):
    mu: float = Field(1.0, ge=0)
    """Weight of the contrastive loss (paper: 5 for CIFAR-10, of 0.1, 1, 5, 10); 0 is FedAvg."""
    temperature: float = Field(0.5, gt=0)
    """Temperature tau (paper: 0.5); large ones make the contrastive loss constant."""


class Moon(FedAvg):
    summary = "FedAvg with a contrastive loss: features near the global model's, far from the client's last"
    privacy_units = ("client",)
    Params = MoonParams
    traits = FedAvg.traits.replace(
        needs_body=True, refuses={"augment": "whose teachers see the images themselves"}
    )
    params: MoonParams

    def client_state(self, clients: Sequence[int]) -> State:
        previous = {"previous": self.context.initial_parameters(clients)}
        if self.layout.buffer_size:
            previous["previous_buffers"] = self.buffers.initial(clients)
        return previous | {"count": torch.zeros(len(clients), dtype=torch.int64)}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        received = {"theta": down["theta"], BUFFERS: clients.buffers}
        previous = {"theta": clients["previous"], BUFFERS: clients.buffers}
        if self.layout.buffer_size:
            previous[BUFFERS] = clients["previous_buffers"]
        is_first = (clients["count"] == 0).unsqueeze(1)
        previous = {name: torch.where(is_first, received[name], rows) for name, rows in previous.items()}
        tables = {
            "z_w": clients.over_training_set(received, body_features),
            "z_p": clients.over_training_set(previous, body_features),
        }

        def known(batch: Batch) -> Tensors:
            return {name: batch.pick(table) for name, table in tables.items()}

        theta = clients.sgd(down["theta"], gradient=clients.gradient_with_constants(self._loss, known)).theta
        clients["previous"], clients["count"] = theta, clients["count"] + 1
        if self.layout.buffer_size:
            clients["previous_buffers"] = clients.buffers.clone()
        return Message(per_client={"theta": theta})

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        features = forward.features(tensors["theta"], batch.x)
        loss = forward.cross_entropy(forward.head(tensors["theta"], features), batch.y)
        return loss + self.params.mu * self.contrast(
            features, tensors["z_w"].detach(), tensors["z_p"].detach()
        )

    def contrast(self, features: Tensor, of_global: Tensor, of_previous: Tensor) -> Tensor:
        """Return the mean of l_con over a batch, from features [B, F] each (eq. 3)."""
        near, far = (cosine_similarity(features, other, dim=1) for other in (of_global, of_previous))
        scores = torch.stack([near, far], dim=1) / self.params.temperature
        return -scores.log_softmax(dim=1)[:, 0].mean()
