"""Clustered FL. Sattler et al., Clustered federated learning: model-agnostic distributed multitask
optimization under privacy constraints, IEEE TNNLS 2021.

    d_i     = E epochs of SGD on L_i from its cluster's model, minus that model
    theta_c <- theta_c + mean of d_i over the sampled clients of cluster c      (Algorithm 3)

A cluster c splits in two if || mean d_i || < eps_1 and max || d_i || > eps_2 over its clients, and if also
gamma_max < sqrt((1 - alpha_cross) / 2). Here alpha_cross is the largest cosine similarity between updates of
different parts, and the split is chosen to make it small. Both parts start from the model of c, and each adds
the mean of its own d_i.

Choices: the split is made by complete linkage on cosine similarities (authors' code); `method.linkage=single`
takes the split with the smallest alpha_cross instead (Algorithm 1). A cluster of two clients stays whole, as
in the authors' code; in the paper it may split. By default gamma_max is 0, so the third criterion holds
whenever the parts differ (the authors' code does not have this criterion). Splits are tested in every round
from `method.first_round` on, as in the authors' code; the paper first trains to convergence. Norms and
similarities are those of each client's last update in its present cluster. Neither the paper nor the code has
partial participation; here, a cluster waits until all its clients have trained, and then compares updates
that started from models of different rounds. Clients are identified by their ids. Means are uniform, as in
the paper. Each cluster averages its own running statistics. The evaluated model is the newest model of the
client's cluster. The server stores N updates, and a download holds one model per client of the cohort.

The paper leads a new client down the tree of splits by comparing its update with those that were split.
Neither tree nor old updates are kept here, so a client that takes no part in training gets all clusters'
models, picks the one of smallest training loss, as in IFCA, and fine-tunes it.
"""

from __future__ import annotations

import logging
import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from hpcfl.communication.aggregation import cluster_means, mean_of
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._clusters import best_model
from hpcfl.methods.base import Method, Params, State, Traits
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.training.client_group import ClientGroup

LOG = logging.getLogger(__name__)


class ClusteredFLParams(Params):
    """Hyper-parameters of Clustered FL.

    Norms scale with `train.lr`, the local epochs and the network. To choose eps_1 and eps_2, look at the
    lengths of updates on the page of a run (`hpcfl report`). A run that never split warns at its end and
    gives the reason.
    """

    eps_1: float = Field(0.4, ge=0)
    """A cluster splits only if the norm of its mean update is below this (authors: 0.4); 0 never splits."""
    eps_2: float = Field(1.6, ge=0)
    """A cluster splits only if the largest norm of its updates is above this (authors: 1.6)."""
    gamma_max: float = Field(0.0, ge=0, le=1)
    """Largest ratio of a client's gradient noise to its gradient (paper); the parts must differ by more than
    this noise explains. At 0 any difference is enough, at 0.5 alpha_cross must be below 0.5, at 1 no cluster
    splits."""
    first_round: int = Field(20, ge=0)
    """Number of rounds at the start without a split (authors: 20)."""
    linkage: Literal["complete", "single"] = "complete"
    """How a cluster is split: `complete` as in the authors' code, `single` as in the paper's Algorithm 1."""


class ClusteredFL(Method):
    summary = "FedAvg that splits its clients in two where their updates disagree"
    Params = ClusteredFLParams
    traits = Traits(averages_own_buffers=True, growing_state=frozenset({"theta", BUFFERS}))
    diagnostics = (
        Diagnostic(
            "cluster",
            ("client",),
            "Which cluster each client is in",
            "Number of a client's cluster; a cluster splits where its clients' updates disagree.",
            is_name=True,
        ),
        Diagnostic(
            "update_norm",
            ("client",),
            "How long each client's update is",
            "Length of the update that a client last sent, if it has trained in its present cluster; a "
            "cluster splits only if the largest is above method.eps_2.",
            low=0,
            of_server=lambda method, server: method.update_norms(server),
        ),
        Diagnostic(
            "mean_update_norm",
            ("client",),
            "How long the mean update of each client's cluster is",
            "Length of the mean of the updates that a cluster's clients last sent; a cluster splits only if "
            "it is below method.eps_1.",
            low=0,
            of_server=lambda method, server: method.mean_update_norms(server),
        ),
    )
    params: ClusteredFLParams

    def server_state(self) -> State:
        clients, size = self.context.num_clients, self.layout.size
        buffers = {BUFFERS: self.buffers.initial().unsqueeze(0)} if self.buffers.has_policy("average") else {}
        return buffers | {
            "theta": self.context.initial_parameters().unsqueeze(0),
            "cluster": torch.zeros(clients, dtype=torch.int64),
            "updates": torch.zeros(clients, size),
            "is_known": torch.zeros(clients, dtype=torch.int64),
        }

    def download(self, server: State, cohort: Cohort) -> Message:
        cluster = server["cluster"][list(cohort.clients)]
        return Message(
            per_client={name: server[name][cluster] for name in ("theta", BUFFERS) if name in server}
        )

    def train(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"update": clients.sgd(down["theta"]).theta - down["theta"]})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        members = list(cohort.clients)
        for positions, block in up.blocks("update"):
            server["updates"][members[positions]] = block.per_client["update"]
        server["is_known"][members] = 1
        self._split_clusters(server, cohort)
        cluster, uniform = server["cluster"][members], torch.ones(len(cohort))
        theta = server["theta"].clone()
        for number in cluster.unique().tolist():
            of_cluster = [client for client in members if server["cluster"][client] == number]
            theta[number] += mean_of([server["updates"][n] for n in of_cluster])
        server["theta"] = theta
        if BUFFERS in server:
            server |= cluster_means(up, [BUFFERS], uniform, cluster, server)

    def _split_clusters(self, server: State, cohort: Cohort) -> None:
        """Split the cohort's clusters whose updates disagree; warn in the last round if none ever did."""
        rounds, first = self.context.train.rounds, self.params.first_round
        obstacle: str | None = f"method.first_round={first} allows none; allowed here: below {rounds}"
        if cohort.round >= first:
            for number in server["cluster"][list(cohort.clients)].unique().tolist():
                obstacle = self._split(server, number)
        if cohort.round == rounds - 1 and len(server["theta"]) == 1 and self.params.eps_1 > 0:
            LOG.warning(
                f"method.name={self.name} never split, so it was FedAvg with uniform means: {obstacle}"
            )

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"]})

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={name: server[name] for name in ("theta", BUFFERS) if name in server})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        _, theta = best_model(clients, down["theta"])
        return self.finetune(clients, Message(per_client={"theta": theta}), clients.local_epochs)

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": down["theta"] + up.per_client["update"]})

    def update_norms(self, server: State) -> Tensor:
        """Return the norm of each client's update [N]; nan if it has not trained in its present cluster."""
        return server["updates"].norm(dim=1).where(server["is_known"] == 1, torch.nan)

    def mean_update_norms(self, server: State) -> Tensor:
        """Return the norm of the mean update of each client's cluster [N]; nan as in `update_norms`."""
        updates, cluster, known = server["updates"], server["cluster"], server["is_known"] == 1
        means = torch.full_like(server["theta"], torch.nan)
        for number in cluster[known].unique().tolist():
            means[number] = updates[known & (cluster == number)].mean(dim=0)
        return means.norm(dim=1)[cluster].where(known, torch.nan)

    def _split(self, server: State, number: int) -> str | None:
        """Split a cluster if its clients' updates disagree: give some a new number. Otherwise return the
        reason."""
        members = (server["cluster"] == number).nonzero().squeeze(1)
        if len(members) <= 2:
            return f"it parts three clients or more, and there are {len(members)}"
        untrained = len(members) - int(server["is_known"][members].sum())
        if untrained:
            return f"a cluster waits until all its clients have trained, and {untrained} never did"
        updates = server["updates"][members]
        mean, longest = updates.mean(dim=0).norm(), updates.norm(dim=1).max()
        # `not <` and `not >`: with a diverged client the norms are nan, and the cluster must not split
        if not mean < self.params.eps_1:
            return f"its mean update was {mean:.3g} long, not shorter than method.eps_1={self.params.eps_1}"
        if not longest > self.params.eps_2:
            return f"its longest update was {longest:.3g}, not longer than method.eps_2={self.params.eps_2}"
        leaves = bipartition(updates, self.params.linkage)
        alike, noise = cross_similarity(updates, leaves), self.params.gamma_max
        if not noise < math.sqrt((1 - alike) / 2):
            return (
                f"its parts had a cross-similarity of {alike:.3g}, not below 1 - 2 method.gamma_max^2 = "
                f"{1 - 2 * noise**2:.3g}"
            )
        leaving = members[leaves]
        server["cluster"][leaving] = len(server["theta"])
        server["is_known"][members] = 0
        for name in ("theta", BUFFERS):
            if name in server:
                server[name] = torch.cat([server[name], server[name][number : number + 1]])
        return None


def bipartition(updates: Tensor, linkage: str) -> Tensor:
    """Split n clients in two by the cosine similarity of their updates [n, P].

    Returns bool [n], True for the clients that are not in the first client's part.
    """
    from sklearn.cluster import AgglomerativeClustering

    directions = normalize(updates.double(), dim=1)
    distances = (1 - directions @ directions.T).clamp(min=0).fill_diagonal_(0)
    parts = AgglomerativeClustering(2, metric="precomputed", linkage=linkage).fit_predict(distances.numpy())
    return torch.from_numpy(parts != parts[0])


def cross_similarity(updates: Tensor, leaves: Tensor) -> float:
    """Return the largest cosine similarity of updates [n, P] across two parts, bool [n]."""
    directions = normalize(updates.double(), dim=1)
    return min(1.0, float((directions[leaves] @ directions[~leaves].T).max()))
