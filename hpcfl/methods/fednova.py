"""FedNova. Wang et al., Tackling the objective inconsistency problem in heterogeneous federated optimization,
NeurIPS 2020.

    theta_i <- E epochs of SGD on L_i from w, which are tau_i steps
    d_i      = (w - theta_i) / |a_i|                              the mean step of a client
    w       <- w - tau_eff sum_{i in S} p_i d_i,  tau_eff = sum_{i in S} p_i |a_i|

|a_i| is the sum of the factors with which gradients enter theta_i: tau_i for plain SGD, and with momentum rho
(tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho). p_i is the client's share of the cohort's training
samples. The client sends theta_i and tau_i.

Choices: weight decay counts as part of the gradient, as in the authors' code. There is no proximal variant.
The paper's momentum of the server is `server.optimiser=momentum`. Running statistics are averaged by training
samples. The evaluated model is w. Where all clients do as many steps, the method is FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup


class FedNova(FedAvg):
    summary = "FedAvg with normalised averaging: of the clients' mean steps, however many each does"
    privacy_units = ("sample",)
    traits = FedAvg.traits.replace(
        refuses={"optimiser": "which knows how gradients add up to a client's update with SGD only"}
    )

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta, steps = clients.sgd(down["theta"])
        return Message(per_client={"theta": theta, "steps": steps})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        norms = sum_of_factors(up.collect("steps")["steps"], self.context.train.momentum)
        shares = cohort.num_samples.double() / cohort.num_samples.sum()
        mean = weighted_mean(up, "theta", shares / norms)
        # tau_eff sum_i p_i / |a_i| (theta_i - w); the factor is 1 or more
        factor = (shares * norms).sum() * (shares / norms).sum()
        server["theta"] = torch.lerp(up.received("theta"), mean, float(factor))


def sum_of_factors(steps: Tensor, momentum: float) -> Tensor:
    """Return |a_i| [S], float64, of this many steps [S] with a momentum that starts from zero."""
    count = steps.double()
    return (count - momentum * (1 - momentum**count) / (1 - momentum)) / (1 - momentum)
