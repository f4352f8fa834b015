"""SCAFFOLD. Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020.

    y_i <- E epochs of SGD from w, steps y <- y - lr (g(y) - c_i + c)           (Algorithm 1)
    c_i <- c_i - c + (w - y_i) / (K lr)                                         (option II)
    w   <- w + lr_g (weighted mean of y_i - w)
    c   <- c + |S| / N mean over S of the change of c_i

K is the number of steps client i did in this round, lr the step size of this round, so that c_i is the mean
of its gradients. w and c go down; what goes up are y_i and the change of c_i.

Choices: y_i are averaged by training-set sizes like everybody's models (the paper's mean is uniform), the
changes of c_i uniformly, so that c stays the mean of all c_i; momentum would make (w - y_i) / (K lr)
something else and is refused; weight decay counts as part of the gradient; evaluated is w. With c = c_i = 0,
so in the first round, this is FedAvg to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.clients import Clients
from hpcfl.errors import UserError
from hpcfl.messages import Cohort, Message, Upload
from hpcfl.methods.base import Context, Params, State, weighted_means
from hpcfl.methods.fedavg import FedAvg


class ScaffoldParams(Params):
    """Hyper-parameters of SCAFFOLD."""

    global_lr: float = Field(1.0, gt=0)
    """Server's step lr_g (paper: 1); 1 takes the mean of the clients' models."""


class Scaffold(FedAvg):
    name = "scaffold"
    summary = "FedAvg whose clients correct their drift by control variates"
    Params = ScaffoldParams
    params: ScaffoldParams

    def __init__(self, context: Context, params: ScaffoldParams) -> None:
        super().__init__(context, params)
        if context.train.momentum:
            raise UserError(
                f"train.momentum={context.train.momentum} does not go with method.name={self.name}, whose "
                "control variates are means of plain gradients; allowed: 0"
            )

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        return {"theta": theta, "variate": torch.zeros_like(theta)}

    def client_state(self, clients: Sequence[int]) -> State:
        return {"variate": torch.zeros(len(clients), self.layout.size)}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"], "variate": server["variate"]})

    def scored(self, server: State, cohort: Cohort) -> Message:
        return super().download(server, cohort)

    def train(self, clients: Clients, down: Message) -> Message:
        w, towards = down["theta"], down["variate"] - clients["variate"]

        def correction(theta: Tensor, rows: slice | Tensor) -> Tensor:
            return towards[rows]

        theta, steps = clients.sgd(w, extra_gradient=correction)
        change = (w - theta) / (steps * clients.lr).unsqueeze(1).to(theta) - down["variate"]
        clients["variate"] = clients["variate"] + change
        return Message(rows={"theta": theta, "variate": change})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        means = weighted_means(up, {"theta": cohort.num_samples, "variate": torch.ones(len(cohort))})
        server["theta"] = torch.lerp(server["theta"], means["theta"], self.params.global_lr)
        server["variate"] = server["variate"] + len(cohort) / self.context.num_clients * means["variate"]
