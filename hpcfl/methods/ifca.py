"""IFCA. Ghosh et al., An efficient framework for clustered federated learning, NeurIPS 2020.

    c_i     <- argmin_j L_i(theta_j) over the client's training samples        (Algorithm 1)
    theta_i <- E epochs of SGD on L_i from theta_{c_i}
    theta_j <- weighted mean of theta_i over the sampled clients with c_i = j; without any, theta_j stays

All k models go down; one model and the number c_i go up. The evaluated model is the newest theta_j with the
smallest training loss (the authors' script chooses by the loss on test data).

Choices: models are averaged (the paper's other variant averages gradients). The weights of the mean are
training-set sizes (paper: uniform). The first model is the common initial model, the others are independent
draws (equal models would stay equal). Ties go to the lowest number. Losses are computed in evaluation mode,
and each model has its own running statistics. There are no restarts in search of balanced clusters. With
k = 1 the method equals FedAvg bit for bit. A client that takes no part in training fine-tunes the model that
it picks.
"""

from __future__ import annotations

import torch
from pydantic import Field

from hpcfl.communication.aggregation import cluster_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._clusters import best_model
from hpcfl.methods.base import Context, Method, Params, State, Traits
from hpcfl.methods.checks import check_equal_starts
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.training.client_group import ClientGroup


class IFCAParams(Params):
    clusters: int = Field(2, ge=1)
    """Number of models k (authors: 2 for rotated CIFAR-10, 4 for MNIST); 1 is FedAvg."""


class IFCA(Method):
    summary = "several global models, of which each client picks the one that fits it"
    Params = IFCAParams
    traits = Traits(averages=("theta",), averages_own_buffers=True)
    diagnostics = (
        Diagnostic(
            "cluster",
            ("client",),
            "Which model each client picks",
            "Number of the model that a client chose when it last trained; none before.",
            is_name=True,
        ),
    )
    params: IFCAParams

    def __init__(self, context: Context, params: IFCAParams) -> None:
        super().__init__(context, params)
        check_equal_starts(context, "clusters", params.clusters)
        self.buffers = self.buffers.of_models(params.clusters)

    def server_state(self) -> State:
        return {
            "theta": self.context.different_starts(self.params.clusters),
            "cluster": torch.full((self.context.num_clients,), -1),
        }

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        chosen, start = best_model(clients, down["theta"])
        return Message(per_client={"theta": clients.sgd(start).theta, "cluster": chosen})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        chosen = up.collect("cluster")["cluster"]
        server["cluster"][list(cohort.clients)] = chosen
        names = [name for name in ("theta", BUFFERS) if name in server]
        server |= cluster_means(up, names, cohort.num_samples, chosen, server)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": best_model(clients, down["theta"])[1]})
