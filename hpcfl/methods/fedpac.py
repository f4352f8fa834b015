"""FedPAC. Xu, Tong, Huang, Personalized federated learning with feature alignment and classifier
collaboration, ICLR 2023.

    h_i,k   = n_i,k / n_i times the mean of phi(x) over the client's samples of class k
    V_i     = (mean of ||phi(x)||^2 - sum_k ||h_i,k||^2) / n_i                   both of the received phi
    h_i    <- one epoch of SGD on CE, phi frozen                                 (Algorithm 1)
    phi_i  <- E epochs of SGD on CE + lambda mean (phi_i(x) - c_y)^2, h_i frozen
    c_k    <- mean over clients of their mean features of class k by phi_i, weighted by n_i,k
    phi    <- weighted mean of phi_i
    head_i <- sum_j a_ij head_j, a_i = argmin over the simplex of sum_j a_j^2 V_j + ||h_i - sum_j a_j h_j||^2

The second term of the last line is sum_jl a_j a_l sum_k <h_i,k - h_j,k, h_i,k - h_l,k>, as the paper has it.
So all clients have the matrix diag(V) + G in common, with G_jl = <h_j, h_l>, and a_i minimises
a (diag(V) + G) a - 2 G_i a.

Choices:
  loss         a mean over samples and features, as in the authors' code. A sample of a class whose c_k is not
               known adds 0 (authors' code: from the second round on, it is pulled towards the client's own
               mean before training)
  statistics   of features in evaluation mode
  solver       projected gradients with momentum, until no weight moves any more; they find zeros as such.
               (The authors' code sets weights below 0.001 to 0.) The matrix is a Gram matrix plus a diagonal,
               and needs no repair of its eigenvalues
  where        the server combines the heads of the round's cohort once they are trained, and keeps each
               client's head until its next round. The client gets it with the next download
  absent       a class that no client of the round holds keeps its c_k
  evaluated    the newest phi with the client's newest combined head
  BatchNorm    running statistics are updated in both phases and averaged with the body, as in FedRep
  unseen       a client that takes no part in training learns a head under phi as it is, from the initial head
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._own_layers import SharedLayers
from hpcfl.methods._prototypes import (
    aligned_gradient,
    average_prototypes,
    prototypes,
    server_prototypes,
)
from hpcfl.methods._simplex import project_to_simplex
from hpcfl.methods.base import Params, State
from hpcfl.training.client_group import ClientGroup

SETTLED = 1e-10
"""Weights that move by less in a step are found."""
MAX_STEPS = 5_000
"""Most steps of the solver; a cohort of 50 takes about 1,000, one of 300 about 4,000."""


class FedPACParams(Params):
    alignment: float = Field(1.0, ge=0)
    """Strength lambda of the pull of features towards prototypes (authors: 1); 0 leaves it out."""
    head_lr: float = Field(0.1, gt=0)
    """Learning rate of the head (authors: 0.1, and 0.01 for the body), with the run's `train.lr_decay`."""
    head_epochs: int = Field(1, ge=0)
    """Epochs of the head before the body's `train.local_epochs` (authors: 1); 0 never trains it."""


class FedPAC(SharedLayers):
    summary = "a shared body with aligned features, under heads that similar clients share"
    Params = FedPACParams
    traits = SharedLayers.traits.replace(
        has_global_model=False, linear_head=True, differences=("theta", "head", "prototypes")
    )
    params: FedPACParams

    def server_state(self) -> State:
        heads = {"heads": self._first_head().repeat(self.context.num_clients, 1)}
        known = server_prototypes(self.context.num_classes, self.context.network.num_features)
        return super().server_state() | heads | known

    def download(self, server: State, cohort: Cohort) -> Message:
        known = {name: server[name] for name in ("prototypes", "is_known")}
        return self.eval_download(server, cohort) | Message(shared=known)

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        heads = {"head": server["heads"][list(cohort.clients)]}
        return self.new_client_download(server, cohort) | Message(per_client=heads)

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        return super().download(server, cohort)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        body, head, classes = self.layout.body, self.layout.head, self.context.num_classes
        theta = self.layout.with_head(down["theta"], down["head"])
        weighted_means, variance = head_statistics(clients, theta, classes)
        theta = clients.sgd(
            theta,
            epochs=self.params.head_epochs,
            lr=self.params.head_lr * clients.lr_decay,
            trained=head,
            purpose="head",
        ).theta
        gradient = aligned_gradient(clients, self.params.alignment, down["prototypes"], down["is_known"])
        theta = clients.sgd(theta, gradient=gradient, trained=body).theta
        found = prototypes(clients, theta, classes)
        return Message(
            per_client={
                "theta": theta,
                "head": theta[:, head],
                "prototypes": found.uploaded(down["prototypes"]),
                "counts": found.counts,
                "weighted_means": weighted_means,
                "variance": variance,
            },
            layer_mask={"theta": self.body_layers},
        )

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        super().aggregate(server, cohort, up)
        rows = up.collect("counts", "head", "weighted_means", "variance")
        average_prototypes(server, up, rows["counts"])
        alpha = head_weights(rows["weighted_means"], rows["variance"]).to(rows["head"])
        server["heads"][list(cohort.clients)] = alpha @ rows["head"]

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.layout.with_head(down["theta"], down["head"])})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        theta = self.layout.with_head(down["theta"], self._first_head().to(clients.device))
        with self.buffers.keeping_averages(clients):
            trained = clients.sgd(theta, trained=self.layout.head, purpose="finetune")
        return Message(per_client={"theta": trained.theta})

    def _first_head(self) -> Tensor:
        return self.context.initial_parameters()[self.layout.head]


def head_statistics(clients: ClientGroup, theta: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return h [C, K, F] and V [C] of models [C, P]."""
    found = prototypes(clients, theta, num_classes)
    counts = found.counts.to(found.means)
    samples = counts.sum(dim=1)
    h = found.means * (counts / samples.unsqueeze(1)).unsqueeze(2)
    return h, (found.mean_square - h.square().sum(dim=(1, 2))) / samples


def head_weights(h: Tensor, variance: Tensor) -> Tensor:
    """Return a [S, S] from h [S, K, F] and V [S]: row i has the weights of all heads in that of client i."""
    rows = h.flatten(1).double()
    # shifts all rows alike, which changes no distance: the solver needs fewer steps
    rows = rows - rows.mean(dim=0)
    gram = rows @ rows.T
    # rounding may leave a variance just below 0
    return least_on_simplex(gram + variance.double().clamp(min=0).diag(), gram)


def least_on_simplex(matrix: Tensor, linear: Tensor) -> Tensor:
    """Return the points a [n, S] on the simplex with the least a matrix a / 2 - linear_n a, for each row n.

    The matrix [S, S] is symmetric and has no negative eigenvalue. Accelerated projected gradients (Beck and
    Teboulle, 2009), without momentum in each row where it would lead uphill (O'Donoghue and Candes, 2015).
    """
    # an upper bound of the largest eigenvalue
    step = 1 / matrix.abs().sum(dim=1).max().clamp(min=torch.finfo(matrix.dtype).tiny)
    points = torch.full_like(linear, 1 / len(matrix))
    ahead, age = points, torch.ones(len(linear), 1, dtype=matrix.dtype)
    for _ in range(MAX_STEPS):
        following = project_to_simplex(ahead - step * (ahead @ matrix - linear))
        moved = following - points
        if not (moved.abs() > SETTLED).any():
            return following
        is_uphill = ((ahead - following) * moved).sum(dim=1, keepdim=True) > 0
        older = (1 + (1 + 4 * age.square()).sqrt()) / 2
        ahead = following + torch.where(is_uphill, 0.0, (age - 1) / older) * moved
        points, age = following, torch.where(is_uphill, 1.0, older)
    return points
