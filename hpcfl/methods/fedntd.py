"""FedNTD. Lee et al., Preservation of the global knowledge by not-true distillation in federated learning,
NeurIPS 2022.

    theta_i <- E epochs of SGD on L_i(theta) + beta l_ntd from w
    l_ntd    = tau^2 KL( softmax_{c != y} z_w / tau || softmax_{c != y} z / tau ),  mean over a mini-batch
    w       <- weighted mean of theta_i

z and z_w are a sample's logits by theta and by the received w; the sample's own class y is left out of both,
so that only what w knows of the other classes is kept.

Choices: w is in evaluation mode and gets no gradient. The evaluated model is w. With beta = 0, or with two
classes, the method is FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import distillation_loss


class FedNTDParams(Params):
    beta: float = Field(1.0, ge=0)
    """Weight of the distillation (authors: 1); 0 is FedAvg."""
    temperature: float = Field(1.0, gt=0)
    """Temperature tau of both softmaxes (authors: 1); large ones compare the logits themselves."""


class FedNTD(FedAvg):
    summary = "FedAvg with not-true distillation: clients keep the global model's outputs for other classes"
    privacy_units = ("client",)
    Params = FedNTDParams
    traits = FedAvg.traits.replace(refuses={"augment": "whose teachers see the images themselves"})
    params: FedNTDParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        received = {"theta": down["theta"], BUFFERS: clients.buffers}
        table = clients.over_training_set(received, lambda network, x, y: network(x))
        gradient = clients.gradient_with_constants(self._loss, lambda batch: {"z_w": batch.pick(table)})
        return Message(per_client={"theta": clients.sgd(down["theta"], gradient=gradient).theta})

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        logits, others = forward.logits(tensors["theta"], batch.x), tensors["z_w"].detach()
        kept = distillation_loss(
            not_true(others, batch.y), not_true(logits, batch.y), self.params.temperature
        )
        return forward.cross_entropy(logits, batch.y) + self.params.beta * kept


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """Return the logits [B, K - 1] of the classes that samples are not, from [B, K] and their classes [B]."""
    classes = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, classes + (classes >= y.unsqueeze(1)))
