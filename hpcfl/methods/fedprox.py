"""FedProx. Li et al., Federated optimization in heterogeneous networks, MLSys 2020.

    theta_i <- E epochs of SGD on L_i(theta) + mu/2 ||theta - w||^2 from w,
               that is, steps theta <- theta - lr (g + mu (theta - w))          (eq. 2)
    w       <- weighted mean of theta_i

Choices: w is the received model, unchanged while the client trains; the pull covers parameters, not running
statistics; every client does all its epochs (the paper's inexact solutions, gamma, are not simulated).
By default cohorts are drawn uniformly; the weights of the mean are training-set sizes (in the paper, cohorts
are drawn by these sizes, and the mean is plain).
mu = 0 is FedAvg to the bit.
"""

from __future__ import annotations

from pydantic import Field

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Params, proximal_gradient
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup


class FedProxParams(Params):
    mu: float = Field(0.01, ge=0)
    """Strength of the pull (paper's grid: 0.001, 0.01, 0.1, 1); 0 is FedAvg, lr mu above 2 diverges."""


class FedProx(FedAvg):
    summary = "FedAvg whose clients are pulled towards the global model"
    privacy_units = ("client", "sample")
    Params = FedProxParams
    params: FedProxParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        w = down["theta"]
        return Message(
            per_client={"theta": clients.sgd(w, extra_gradient=proximal_gradient(w, self.params.mu)).theta}
        )
