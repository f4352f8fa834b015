"""FedAMP. Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021.

    u_i     = (1 - sum_{j != i} xi_ij) theta_i + sum_{j != i} xi_ij theta_j
    theta_i <- E epochs of SGD on L_i(theta) + lambda / (2 alpha) ||theta - u_i||^2 from u_i    (Algorithm 1)

with xi_ij = alpha A'(||theta_i - theta_j||^2), A(x) = 1 - exp(-x / sigma), or in the heuristic variant
(HeurFedAMP, `method.weights=cosine`) xi_ij proportional to exp(sigma cos(theta_i, theta_j)).

Choices: squared distances are divided by their mean over all pairs of clients that have uploaded (if there
is one).
`method.scale=none` leaves them as they are; with the distances of a whole network A' is then soon 0, and
FedAMP becomes local training. For an unsampled client, theta_j is its last upload; a client that never
uploaded is not a neighbour of any client (the paper has full participation, PFLlib uses the uploads of one
round only). Training starts from u_i. The pull has a gradient; in PFLlib it has none, so PFLlib's FedAMP is
local training. A diverged client trains alone and has no weight in the u_i of others. Running statistics stay
with the client. The evaluated model is theta_i after its last training, and before its first round the
initial model; the model after a download is u_i. Values of alpha (N - 1) / sigma above 1 would give the
client's own model a negative weight and are refused. A client that takes no part in training has no model to
compare, and starts from the mean of all uploaded models instead of u_i (not in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import UserError
from hpcfl.methods._model_bank import ModelBank
from hpcfl.methods.base import Context, Params, State, proximal_gradient
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.parameters import COLUMNS_AT_ONCE
from hpcfl.training.client_group import ClientGroup

LONGEST = 1e18
"""Norm of a model from which on squared distances would overflow float32."""


class FedAMPParams(Params):
    weights: Literal["distance", "cosine"] = "distance"
    """FedAMP's weights, or those of the heuristic variant."""
    sigma: float | None = Field(None, gt=0)
    """With `distance`, the scale sigma in A, in units of the mean squared distance (default: 1); with
    `cosine`, the factor on cosines (default: 25, as in FLGo)."""
    alpha: float | None = Field(None, gt=0)
    """Learning rate alpha of `distance`; a model equal to the client's has weight alpha / sigma; default:
    sigma / N."""
    self_weight: float | None = Field(None, ge=0, le=1)
    """Weight of the client's own model in `cosine`; 1 is local training with a pull; default:
    1 / (1 + number of neighbours) (FLGo: 1/N)."""
    pull: float = Field(0.1, ge=0)
    """Strength lambda / alpha of the pull towards u_i; 0 trains freely from u_i."""
    scale: Literal["mean", "none"] = "mean"
    """Whether squared distances are divided by their mean."""


class FedAMP(ModelBank):
    summary = "each client's own model, pulled towards those of similar clients"
    privacy_units = ("sample",)
    Params = FedAMPParams
    diagnostics = (
        Diagnostic(
            "attention",
            ("client", "client"),
            "Attention between clients",
            "Weight that a client (row) gives to each client's model (column) in u_i; a row sums to 1.",
            low=0,
            high=1,
            of_server=lambda method, server: method.all_weights(server),
        ),
    )
    params: FedAMPParams

    def __init__(self, context: Context, params: FedAMPParams) -> None:
        super().__init__(context, params)
        others = context.num_clients - 1
        self._sigma = params.sigma or {"distance": 1.0, "cosine": 25.0}[params.weights]
        self._alpha = self._sigma / context.num_clients if params.alpha is None else params.alpha
        if params.weights == "distance" and self._alpha * others > self._sigma:
            raise UserError(
                f"method.alpha={params.alpha} weighs a client's own model negatively among "
                f"{context.num_clients} clients; allowed: up to method.sigma / {others}"
            )

    def download(self, server: State, cohort: Cohort) -> Message:
        models, members = server["models"], torch.tensor(cohort.clients)
        theta, sound = models[members], models.norm(dim=1) < LONGEST
        takes_part = sound[members]
        if takes_part.any():
            # a diverged client stays alone: its nan or inf would spread even with a weight of 0
            is_known = server["is_known"] == 1
            is_read = sound & is_known.index_fill(0, members, True)
            read = models if is_read.all() else models[is_read]
            position = (is_read.cumsum(0) - 1)[members[takes_part]]
            theta[takes_part] = self.attention(read, position.tolist(), is_known[is_read]) @ read
        return Message(per_client={"theta": theta})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        around = down["theta"]
        theta = clients.sgd(around, extra_gradient=proximal_gradient(around, self.params.pull)).theta
        clients["theta"] = theta
        return Message(per_client={"theta": theta})

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": self.mean_of_models(server)})

    def all_weights(self, server: State) -> Tensor:
        """Return the weights [N, N] of the next round."""
        models = server["models"]
        weights, sound = torch.eye(len(models)), (models.norm(dim=1) < LONGEST).nonzero().squeeze(1)
        if len(sound):
            is_known = server["is_known"][sound] == 1
            weights[sound[:, None], sound] = self.attention(models[sound], range(len(sound)), is_known)
        return weights

    def attention(self, models: Tensor, clients: Sequence[int], is_known: Tensor) -> Tensor:
        """Return the weights [S, n] of the models [n, P] in the u_i of some clients; each row sums to 1.

        `clients` are the S rows of `models` that belong to these clients. `is_known`, bool [n], says which
        models have been uploaded; the neighbours of a client are the known models of the other clients.
        """
        rows, own = torch.arange(len(clients)), list(clients)
        is_neighbour = is_known.repeat(len(own), 1)
        is_neighbour[rows, own] = False
        if self.params.weights == "cosine":
            similarity = _cosines(models, own).where(is_neighbour, -torch.inf)
            share = torch.full((len(own), 1), self.params.self_weight or 0.0)
            if self.params.self_weight is None:
                share = 1 / (1 + is_neighbour.sum(dim=1, keepdim=True))
            # softmax over no neighbours is nan: such a client keeps the whole weight
            weights = (1 - share) * (self._sigma * similarity).softmax(dim=1).nan_to_num(0.0)
        else:
            squared, mean = _squared_distances(models, own, is_known)
            if self.params.scale == "mean":
                squared = squared / (mean or 1.0)
            weights = self._alpha / self._sigma * (-squared / self._sigma).exp() * is_neighbour
        weights[rows, own] = 1 - weights.sum(dim=1)
        return weights.to(models)


def _squared_distances(models: Tensor, rows: Sequence[int], is_known: Tensor) -> tuple[Tensor, float]:
    """Return squared distances [S, n] of some rows from all models [n, P], and their mean over known pairs.

    The distances come from inner products of differences from the first model, so that rounding does not hide
    small distances. The products are computed in float64 and in pieces of columns, so that no temporary is as
    large as the models. The mean is 0 with fewer than two known models.
    """
    products = torch.zeros(len(rows), len(models), dtype=torch.float64)
    squares, pairs, spread = products.new_zeros(len(models)), int(is_known.sum()) - 1, 0.0
    for part in models.split(COLUMNS_AT_ONCE, dim=1):
        apart = part.double() - part[0].double()
        products.addmm_(apart[rows], apart.T)
        squares += apart.square().sum(dim=1)
        if pairs > 0:
            known = apart[is_known]
            # the mean over pairs is twice the sample variance, summed over the elements of a model
            spread += 2 / pairs * float((known - known.mean(dim=0)).square().sum())
    squared = squares[rows].unsqueeze(1) + squares - 2 * products
    return squared.clamp(min=0), spread


def _cosines(models: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the cosine similarity [S, n] of some rows with all models [n, P]."""
    products = torch.zeros(len(rows), len(models), dtype=torch.float64)
    for part in models.split(COLUMNS_AT_ONCE, dim=1):
        products.addmm_(part[rows].double(), part.T.double())
    lengths = models.norm(dim=1).double().clamp(min=1e-8)
    return products / (lengths[rows].unsqueeze(1) * lengths)
