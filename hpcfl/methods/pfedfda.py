"""pFedFDA. McLaughlin, Su, Personalized federated learning via feature distribution adaptation, NeurIPS 2024.

Features of class c are taken for Gaussian, N(mu_c, Sigma), with one covariance for all classes. The head is
then that of linear discriminant analysis: w_c = Sigma^-1 mu_c, b_c = -mu_c w_c / 2 + log pi_i,c with pi_i the
client's shares of the classes. With the received f, mu and Sigma:

    f_i          <- E epochs of SGD on CE from f, under the head of (mu, Sigma, pi_i), which is frozen
    m_c, S        = class means and covariance of f_i(x) over the client's training set
    mu_i, Sigma_i = beta_i (m, S) + (1 - beta_i) (mu, Sigma),  beta_i by two-fold cross-validation
    f, mu, Sigma <- means of f_i, mu_i, Sigma_i weighted by training samples

Evaluated is the newest f under the head of (mu_i, Sigma_i, pi_i), with m, S and beta_i of this f.

Choices:
  covariance   S = sum (f_i(x) - m_y)(f_i(x) - m_y)^T / (n - 1) + rho I. (The authors' code adds the identity,
               so rho = 1, and 0.0001 to each entry.) A rho far below the features' variances makes heads of
               so large weights that training diverges
  features     m and S are those of the trained f_i, in evaluation mode. (The authors' code takes the features
               of all local epochs, while f_i still changes.)
  beta_i       the one of 0, 0.1, .., 1 with the least cross-entropy on held-out samples, for means and
               covariance alike. (The authors' code finds one for the means and one for the covariance, or
               with `--single_beta` one for both, by at most ten steps of L-BFGS.) Each class is divided at
               random into two folds; m and S of each fold are tried on the other. All samples count. (The
               authors' code leaves out a class with a single sample.)
  absent       a class with at most two samples, in all or in a fold, has mu_c in the place of m_c there. So
               mu_c moves no further than the clients that hold c move it. (The authors' code means to do the
               same, but its test fails only for a class without samples, except in evaluations, where S is
               still around m_c.)
  priors       pi_i are (shares + epsilon) / their sum, so that a class that the client lacks has some chance;
               epsilon is 0.0001, as in the authors' code
  singular     a head is made with (1 - epsilon) Sigma + epsilon (trace Sigma / F) I, as in the authors' code
  start        mu is drawn from U(0, 1), and Sigma is I, as in the authors' code
  BatchNorm    running statistics are averaged with f
  unseen       a client that takes no part in training makes its head like any other, without a training step
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot

from hpcfl.communication.aggregation import weighted_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.randomness import torch_stream
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import body_features

GRID = 11
"""Values that beta_i is chosen among: from 0 to 1 in equal steps."""
REGULARISATION = 1e-4
"""Regularisation epsilon of covariances and class shares."""
FEW = 2
"""Most samples of a class whose own mean is not used."""


class PFedFDAParams(Params):
    ridge: float = Field(1.0, gt=0)
    """Number rho on the diagonal of a client's covariance (authors' code: 1); a very large one leaves the
    class shares alone."""
    beta: float | None = Field(None, ge=0, le=1)
    """Share beta of the client's own means and covariance, of every client; 0 is the global distribution
    alone, 1 the client's. Default: each client chooses its own."""


class Gaussians(NamedTuple):
    """Class means [K, F] and their common covariance [F, F]."""

    means: Tensor
    covariance: Tensor

    def towards(self, other: Gaussians, share: float) -> Gaussians:
        """Return the mixture that has a share of the other."""
        return Gaussians(*(torch.lerp(mine, theirs, share) for mine, theirs in zip(self, other, strict=True)))


class PFedFDA(FedAvg):
    summary = "a shared body under heads made of each client's class means and covariance"
    Params = PFedFDAParams
    traits = FedAvg.traits.replace(
        has_global_model=False, linear_head=True, differences=("theta", "means", "covariance")
    )
    params: PFedFDAParams

    def server_state(self) -> State:
        stream, features = torch_stream(self.context.seed, "pfedfda means"), self.context.network.num_features
        means = torch.rand(self.context.num_classes, features, generator=stream)
        return super().server_state() | {"means": means, "covariance": torch.eye(features)}

    def download(self, server: State, cohort: Cohort) -> Message:
        shared = {name: server[name] for name in ("theta", "means", "covariance")}
        return Message(shared=shared, layer_mask={"theta": self.body_layers})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = self._with_heads(clients, down["theta"], down["means"], down["covariance"])
        theta = clients.sgd(theta, trained=self.layout.body).theta
        means, covariance = self.adapted(clients, theta, down)
        return Message(
            per_client={"theta": theta, "means": means, "covariance": covariance},
            layer_mask={"theta": self.body_layers},
        )

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        names, body = ("theta", "means", "covariance"), self.layout.body
        found = weighted_means(up, dict.fromkeys(names, cohort.num_samples))
        server["theta"][body] = found["theta"][body]
        server["means"], server["covariance"] = found["means"], found["covariance"]

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        adapted = self.adapted(clients, down["theta"], down)
        return Message(per_client={"theta": self._with_heads(clients, down["theta"], *adapted)})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        if self.buffers.has_policy("local"):
            clients.find_statistics(down["theta"])
        return self.eval_model(clients, down)

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        theta = self._with_heads(clients, up["theta"], up["means"], up["covariance"])
        return Message(per_client={"theta": theta})

    def adapted(self, clients: ClientGroup, theta: Tensor, down: Message) -> tuple[Tensor, Tensor]:
        """Return mu_i [C, K, F] and Sigma_i [C, F, F] by the bodies of models [C, P]."""
        model = {"theta": theta, BUFFERS: clients.buffers}
        everyone = Gaussians(down["means"][0].double(), down["covariance"][0].double())
        found = []
        for position, features in enumerate(clients.training_outputs(model, body_features)):
            y, features = clients.labels("train", position), features.double()
            share = self.params.beta
            if share is None:
                stream = torch_stream(self.context.seed, "folds", clients.round, clients.ids[position])
                share = self.chosen_share(features, y, folds(y, stream), everyone)
            found.append(everyone.towards(self.moments(features, y, everyone.means), share))
        means, covariances = (torch.stack(rows).to(theta) for rows in zip(*found, strict=True))
        return means, covariances

    def moments(self, features: Tensor, y: Tensor, instead: Tensor) -> Gaussians:
        """Return m [K, F] and S of features [n, F], with means [K, F] instead of those of few samples."""
        is_class = one_hot(y, len(instead)).to(features)
        counts = is_class.sum(dim=0).unsqueeze(1)
        means = torch.where(counts > FEW, is_class.T @ features / counts.clamp(min=1), instead)
        apart = features - means[y]
        covariance = apart.T @ apart / max(1, len(y) - 1)
        covariance.diagonal().add_(self.params.ridge)
        return Gaussians(means, covariance)

    def chosen_share(self, features: Tensor, y: Tensor, fold: Tensor, everyone: Gaussians) -> float:
        """Return beta_i of features [n, F] whose samples are in fold 0 or 1, int64 [n]."""
        priors = self.priors(y)
        losses = features.new_zeros(GRID)
        for number in (0, 1):
            is_held_out = fold == number
            own = self.moments(features[~is_held_out], y[~is_held_out], everyone.means)
            held_out, labels = features[is_held_out], y[is_held_out]
            for place in range(GRID):
                weights, bias = self.head(everyone.towards(own, place / (GRID - 1)), priors)
                losses[place] += cross_entropy(linear(held_out, weights, bias), labels, reduction="sum")
        return int(losses.nan_to_num(torch.inf).argmin()) / (GRID - 1)

    def head(self, gaussians: Gaussians, priors: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [K, F] and biases [K] of linear discriminant analysis, given pi [K]."""
        means, covariance = gaussians
        shrunk = (1 - REGULARISATION) * covariance
        shrunk.diagonal().add_(REGULARISATION * covariance.diagonal().mean())
        # of a client that has diverged the result is nan, and no error
        weights = torch.linalg.solve_ex(shrunk, means.T).result.T
        return weights, priors.log() - (means * weights).sum(dim=1) / 2

    def priors(self, y: Tensor) -> Tensor:
        """Return pi, float64 [K], of a client's labels [n]."""
        shares = one_hot(y, self.context.num_classes).double().mean(dim=0) + REGULARISATION
        return shares / shares.sum()

    def _with_heads(self, clients: ClientGroup, theta: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
        """Return the bodies of models [C, P] under the heads of mu [C, K, F] and Sigma [C, F, F]."""
        heads = []
        for position in range(len(clients)):
            y = clients.labels("train", position)
            gaussians = Gaussians(means[position].double(), covariances[position].double())
            heads.append(torch.cat([part.flatten() for part in self.head(gaussians, self.priors(y))]))
        return torch.cat([theta[:, self.layout.body], torch.stack(heads).to(theta)], dim=1)


def folds(y: Tensor, stream: torch.Generator) -> Tensor:
    """Divide each class of labels [n] at random into halves: 0 or 1 for each sample, int64 [n]."""
    order = torch.randperm(len(y), generator=stream).to(y.device)
    is_class = one_hot(y[order])
    # the number of each sample among those of its class
    number = (is_class.cumsum(dim=0) * is_class).sum(dim=1)
    return torch.empty_like(y).index_copy_(0, order, number % 2)
