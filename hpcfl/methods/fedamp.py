"""FedAMP. Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021.

    u_i     = (1 - sum_{j != i} xi_ij) theta_i + sum_{j != i} xi_ij theta_j
    theta_i <- E epochs of SGD on L_i(theta) + lambda / (2 alpha) ||theta - u_i||^2 from u_i    (Algorithm 1)

with xi_ij = alpha A'(||theta_i - theta_j||^2), A(x) = 1 - exp(-x / sigma), or in the heuristic variant
(HeurFedAMP, `method.weights=cosine`) xi_ij proportional to exp(sigma cos(theta_i, theta_j)).

Choices: squared distances are divided by their mean over all pairs of clients (`method.scale=none`: as they
are, where with a whole network's distances A' is soon 0 and FedAMP local training); theta_j of a client that
is not sampled is its last upload; training starts from u_i; the pull has a gradient (PFLlib's has none, so
that its FedAMP is local training); a diverged client trains alone and has no weight with others; running
statistics stay with the client; evaluated is theta_i after its last training. alpha (N - 1) / sigma above 1
would weigh a client's own model negatively and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hpcfl.clients import Clients
from hpcfl.errors import UserError
from hpcfl.messages import Cohort, Message
from hpcfl.methods._model_bank import ModelBank
from hpcfl.methods.base import Context, Params, State, pull_towards

LONGEST = 1e18
"""Length of a model from which on squared distances have no number in float32."""


class FedAMPParams(Params):
    """Hyper-parameters of FedAMP."""

    weights: Literal["distance", "cosine"] = "distance"
    """FedAMP's weights, or those of the heuristic variant."""
    sigma: float | None = Field(None, gt=0)
    """Reach of A in mean squared distances (default: 1), or the factor on cosines (default: 25, FLGo's)."""
    alpha: float | None = Field(None, gt=0)
    """Step alpha of `distance`: alpha / sigma is what an equal model weighs; default: sigma / N."""
    self_weight: float | None = Field(None, ge=0, le=1)
    """Share of the client's own model in `cosine`; 1 is local training with a pull, default: 1/N (FLGo)."""
    pull: float = Field(0.1, ge=0)
    """Strength lambda / alpha of the pull towards u_i; 0 trains freely from u_i."""
    scale: Literal["mean", "none"] = "mean"
    """Whether squared distances are divided by their mean."""


class FedAMP(ModelBank):
    name = "fedamp"
    summary = "each client's own model, pulled towards those of similar clients"
    Params = FedAMPParams
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
            # a diverged client stays alone: even a weight of 0 would spread what is no number
            others = models if sound.all() else models[sound]
            position = (sound.cumsum(0) - 1)[members[takes_part]]
            theta[takes_part] = self.attention(others, position.tolist()) @ others
        return Message(rows={"theta": theta})

    def train(self, clients: Clients, down: Message) -> Message:
        around = down["theta"]
        theta = clients.sgd(around, extra_gradient=pull_towards(around, self.params.pull)).theta
        clients["theta"] = theta
        return Message(rows={"theta": theta})

    def attention(self, models: Tensor, clients: Sequence[int]) -> Tensor:
        """Return the weights of all models in u_i, [S, N], rows that sum to 1."""
        rows = torch.arange(len(clients))
        if self.params.weights == "cosine":
            similarity = torch.stack([cosine_similarity(models, models[i : i + 1]) for i in clients])
            similarity[rows, list(clients)] = -torch.inf
            share = 1 / len(models) if self.params.self_weight is None else self.params.self_weight
            # a client alone has nobody to share with
            weights = (1 - share) * (self._sigma * similarity).softmax(dim=1).nan_to_num(0.0)
        else:
            squared = torch.stack([(models - models[i]).square().sum(dim=1) for i in clients])
            if self.params.scale == "mean":
                squared = squared / self._mean_distance(models)
            weights = self._alpha / self._sigma * (-squared / self._sigma).exp()
            weights[rows, list(clients)] = 0
        weights[rows, list(clients)] = 1 - weights.sum(dim=1)
        return weights

    @staticmethod
    def _mean_distance(models: Tensor) -> Tensor:
        """Return the mean squared distance of all pairs; 1 where all models are equal."""
        # over pairs, the mean is twice the variance summed over the numbers
        mean = 2 * models.var(dim=0).sum() if len(models) > 1 else models.new_zeros(())
        return torch.where(mean > 0, mean, 1.0)
