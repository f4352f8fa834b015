"""SCAFFOLD. Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020.

    y_i <- E epochs of SGD from w, steps y <- y - lr (g(y) - c_i + c)           (Algorithm 1)
    c_i <- c_i - c + (w - y_i) / (K lr)                                         (option II)
    w   <- w + lr_g sum_{i in S} p_i (y_i - w) / sum_{i in S} p_i
    c   <- c + sum_{i in S} p_i (change of c_i),  so that c = sum_i p_i c_i over all clients

p_i is client i's share of all training samples, or 1/N with `method.weights=uniform`, the paper's. K is the
number of steps client i did in this round, lr the learning rate of this round, so that c_i is the mean of its
gradients. w and c go down; what goes up are y_i and the change of c_i.

Choices: the means of models and of control variates have the same weights p_i. Whatever the weights of the
models, corrected steps converge where c = 0, which is a stationary point of sum_i p_i L_i; with weights by
samples, this is the objective of the other methods. With momentum, Adam or clipping, (w - y_i) / (K lr) would
not be a mean gradient, so these are refused. Weight decay counts as part of the gradient. Running statistics
are averaged by samples, with either weights. The evaluated model is w. The codecs float16 and int8 round the
change of c_i on its way, so that c differs from the sum of the c_i by what they left out. In the first round,
where c = c_i = 0, the method with weights by samples and lr_g = 1 equals FedAvg bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.aggregation import weighted_means
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup

_PLAIN = "whose control variates are means of plain gradients"


class ScaffoldParams(Params):
    global_lr: float = Field(1.0, gt=0)
    """Server's step lr_g (paper: 1); 1 takes the mean of the clients' models."""
    weights: Literal["samples", "uniform"] = "samples"
    """Whether a client counts by its training samples, as with FedAvg, or all alike, as in the paper."""


class Scaffold(FedAvg):
    summary = "FedAvg whose clients correct their drift by control variates"
    privacy_units = ("sample",)
    Params = ScaffoldParams
    traits = FedAvg.traits.replace(refuses=dict.fromkeys(("momentum", "optimiser", "clip"), _PLAIN))
    params: ScaffoldParams

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        return {"theta": theta, "variate": torch.zeros_like(theta)}

    def client_state(self, clients: Sequence[int]) -> State:
        return {"variate": torch.zeros(len(clients), self.layout.size)}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"], "variate": server["variate"]})

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        return super().download(server, cohort)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        w, towards = down["theta"], down["variate"] - clients["variate"]

        def correction(theta: Tensor, members: slice | Tensor) -> Tensor:
            return towards[members]

        theta, steps = clients.sgd(w, extra_gradient=correction)
        change = (w - theta) / (steps * clients.lr).unsqueeze(1).to(theta) - down["variate"]
        clients["variate"] = clients["variate"] + change
        return Message(per_client={"theta": theta, "change": change})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        of_cohort, of_all = cohort.num_samples, self.context.num_samples
        if self.params.weights == "uniform":
            of_cohort, of_all = torch.ones(len(cohort)), torch.ones(self.context.num_clients)
        means = weighted_means(up, {"theta": of_cohort, "change": of_cohort})
        share = float(of_cohort.sum() / of_all.sum())
        server["theta"] = torch.lerp(up.received("theta"), means["theta"], self.params.global_lr)
        server["variate"] = server["variate"] + share * means["change"]
