"""FedLC. Zhang et al., Federated learning with label distribution skew via logits calibration, ICML 2022.

    theta_i <- E epochs of SGD on the cross-entropy of z_c - tau n_c^(-1/4) from w
    w       <- weighted mean of theta_i

z are the logits and n_c is the number of the client's training samples of class c, so that rare classes of
the client get a wider margin. A class that it does not have drops out of the softmax, and its weights in the
head move for other clients only.

Differs from the paper:
  true class   the printed loss leaves the true class out of the softmax's denominator. It has no lower bound
               then, so the denominator here has all classes of the client, as in a cross-entropy

Choices: the margin is for training alone: the evaluated model is w with plain logits. A client with one class
has a loss of 0 and returns w, except for weight decay; it keeps its weight in the mean. With tau = 0 and
clients that all have every class, the method is FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward


class FedLCParams(Params):
    tau: float = Field(1.0, ge=0)
    """Width of the margins (public code: 1); 0 is a plain softmax among the classes that a client has."""


class FedLC(FedAvg):
    summary = "FedAvg whose clients learn with wider margins for their rare classes"
    privacy_units = ("client",)
    Params = FedLCParams
    traits = FedAvg.traits.replace(
        refuses={"label_smoothing": "whose loss leaves out the classes that a client does not have"}
    )
    params: FedLCParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        margins = self.margins(clients.class_counts(self.context.num_classes))
        gradient = clients.gradient_with_constants(
            calibrated_loss, lambda batch: {"margins": margins[batch.members]}
        )
        return Message(per_client={"theta": clients.sgd(down["theta"], gradient=gradient).theta})

    def margins(self, counts: Tensor) -> Tensor:
        """Return what is taken off each logit [C, K], from the samples by class [C, K]."""
        return torch.where(counts > 0, self.params.tau * counts ** (-1 / 4), torch.inf)


def calibrated_loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the logits without their margins [K]."""
    logits = forward.logits(tensors["theta"], batch.x) - tensors["margins"].detach()
    return cross_entropy(logits, batch.y)
