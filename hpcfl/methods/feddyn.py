"""FedDyn. Acar et al., Federated learning based on dynamic regularization, ICLR 2021.

    theta_i <- E epochs of SGD on L_i(theta) - <g_i, theta> + alpha_i/2 ||theta - w||^2 from w
    g_i     <- g_i - alpha_i (theta_i - w)
    h       <- h + 1/N sum_{i in S} (theta_i - w)
    w       <- mean_{i in S} theta_i + h                                        (Algorithm 1)

h is the paper's h over -alpha. g_i tends to the gradient of L_i at w, so that clients and server converge to
one point. The mean over the cohort is plain, that of running statistics by samples. With
`method.weights=samples`, alpha_i is alpha divided by n_i / mean n, as in the authors' code, and the rest is a
stationary point of sum_i n_i L_i, the objective of the other methods; with uniform weights, alpha_i = alpha
as in the paper, and it is one of sum_i L_i.

Choices: g_i stays with the client, and is that of its last round. Momentum and weight decay act on the whole
gradient; the authors' code has no momentum, weight decay 0.001, and clips gradients at norm 10
(`train.clip=10`). The step of the server is not a mean of models, so `server.optimiser` is refused. The
evaluated model is w (the authors' code scores the mean of theta_i before h is added). In the first round,
clients train as FedProx's do with mu = alpha_i, and the server moves beyond their mean, by S/N of the mean's
distance from w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup


class FedDynParams(Params):
    alpha: float = Field(0.01, gt=0)
    """Strength of the pull towards w (authors: 0.01 for CIFAR-10, of 0.001, 0.01, 0.1); lr alpha above 2
    diverges, and towards 0 clients train as in FedAvg while the server still adds h."""
    weights: Literal["samples", "uniform"] = "samples"
    """Whether a client counts by its training samples, as in the authors' code, or all alike (paper)."""


class FedDyn(FedAvg):
    summary = "FedAvg with dynamic regularisation: a term in clients' losses makes all converge to one point"
    privacy_units = ("sample",)
    Params = FedDynParams
    traits = FedAvg.traits.replace(averages=())
    params: FedDynParams

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        return {"theta": theta, "h": torch.zeros_like(theta)}

    def client_state(self, clients: Sequence[int]) -> State:
        return {"gradient": torch.zeros(len(clients), self.layout.size)}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        w, slope = down["theta"], clients["gradient"]
        alpha = self.strengths(clients.num_samples).to(w)

        def regulariser(theta: Tensor, members: slice | Tensor) -> Tensor:
            return alpha[members] * (theta - w[members]) - slope[members]

        theta = clients.sgd(w, extra_gradient=regulariser).theta
        clients["gradient"] = slope - alpha * (theta - w)
        return Message(per_client={"theta": theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        mean = weighted_mean(up, "theta", torch.ones(len(cohort)))
        share = len(cohort) / self.context.num_clients
        server["h"] = server["h"] + share * (mean - up.received("theta"))
        server["theta"] = mean + server["h"]

    def strengths(self, num_samples: Tensor) -> Tensor:
        """Return alpha_i [C, 1] of clients with this many training samples [C]."""
        relative = num_samples.unsqueeze(1) / self.context.num_samples.double().mean()
        if self.params.weights == "uniform":
            relative = torch.ones_like(relative)
        return self.params.alpha / relative
