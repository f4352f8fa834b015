"""Elastic aggregation. Chen et al., Elastic aggregation for federated optimization, CVPR 2023.

    Omega_i <- mu Omega_i + (1 - mu) |d ||F(x; w)||^2 / d w|, mini-batch by mini-batch, from 0 in each round
    theta_i <- E epochs of SGD on L_i from w
    w       <- w + zeta sum_i p_i (theta_i - w),  zeta = 1 + tau - (sum_i p_i Omega_i) / max_i Omega_i

Omega_i says how much the outputs F change with each number of w, without any label; zeta is one factor for
each number. Numbers to which few clients are sensitive get a longer step than FedAvg's, those to which all
are equally sensitive a shorter one. p_i is client i's share of the cohort's training samples.

Choices: F are the logits, and ||F||^2 is a mean over the samples of a mini-batch. Omega_i comes from one pass
over the training set with the received w, in which BatchNorm takes the statistics of mini-batches and keeps
none of them. A number to which no client is sensitive has zeta = 1 + tau; a bias before BatchNorm, which
changes no output, has any, since its Omega is rounding errors. int8 has one scale for a layer, and sends its
smallest Omega_i as 0. Running statistics are averaged as in FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward


class ElasticParams(Params):
    tau: float = Field(0.5, ge=0)
    """Shortest factor of a step (authors: 0.5), that of numbers to which all clients are equally sensitive;
    with 1 and a single client in each round, the method is FedAvg, except that numbers of which Omega is 0
    have a step twice as long."""
    mu: float = Field(0.95, ge=0, lt=1)
    """Share that the sensitivity keeps of itself in each mini-batch (authors: 0.95); 0 takes the last
    mini-batch alone."""


class Elastic(FedAvg):
    summary = "FedAvg with smaller updates of weights to which all clients' outputs are sensitive"
    Params = ElasticParams
    params: ElasticParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        sensitivity = self.sensitivity(clients, down["theta"])
        theta = clients.sgd(down["theta"]).theta
        return Message(per_client={"theta": theta, "sensitivity": sensitivity})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        start = up.received("theta")
        update = weighted_mean(up, "theta", cohort.num_samples) - start
        sensitivity = up.collect("sensitivity")["sensitivity"]
        server["theta"] = start + self.factors(sensitivity, cohort.num_samples) * update

    def sensitivity(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Return Omega [C, P] of models [C, P]."""
        sensitivity = torch.zeros_like(theta)
        for batch in clients.batches("sensitivity", 1, augmented=False):
            members = batch.members
            gradients, _ = clients.gradient(_squared_outputs, {"theta": theta[members]}, batch)
            sensitivity[members] = torch.lerp(gradients["theta"].abs(), sensitivity[members], self.params.mu)
        return sensitivity

    def factors(self, sensitivity: Tensor, num_samples: Tensor) -> Tensor:
        """Return zeta [P] from Omega [S, P] and the training samples [S] of a cohort."""
        shares = num_samples.double() / num_samples.double().sum()
        largest = sensitivity.amax(dim=0)
        mean = shares.to(sensitivity) @ sensitivity
        return 1 + self.params.tau - torch.where(largest > 0, mean / largest, 0.0)


def _squared_outputs(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    logits = forward.logits(tensors["theta"], batch.x, forward.buffers_copy())
    return logits.square().sum(dim=1).mean()
