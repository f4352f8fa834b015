"""pFedGraph. Ye et al., Personalized federated learning with inferred collaboration graphs, ICML 2023.

    W_i     = argmin of sum_j W_ij d_ij + alpha ||W_i - p||^2 over weights >= 0 that sum to 1,
              d_ij = -cos(theta_i - x, theta_j - x)
    u_i     = sum_j W_ij theta_j
    theta_i <- E epochs of SGD on L_i(theta) - lambda cos(theta - x, u_i - x) from u_i

x is the common initial model and p_j client j's share of training samples. W_i is the point of the simplex
that is nearest to p - d_i / (2 alpha), which sorting finds; the authors call a solver for it.

Differs from the authors' code:
  sign         it adds the cosine to the loss, which drives theta away from u_i
  same models  its term of the loss compares theta with the models that it averages, each of length 1; here
               it is the d of the graph, so that both steps descend on one objective
  near models  it takes cosines above 0.9 for 1

Choices: of an unsampled client, theta_j is its last upload (the authors take the uploads of one round, and
the client starts from the mean of its own last round). A client that never uploaded has no part in the u_i
of others, and its own d is 0, so that it starts from the mean of all uploaded models by samples; so does a
client that takes no part in training, and one whose model is nan or infinite. In the first round u_i is x,
and the term of the loss has no gradient. Running statistics stay with the client. The evaluated model is
theta_i after its last training, and x before its first round; the model after a download is u_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods._model_bank import ModelBank, rows_among
from hpcfl.methods._simplex import project_to_simplex
from hpcfl.methods.base import Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.parameters import COLUMNS_AT_ONCE
from hpcfl.training.client_group import ClientGroup

SHORTEST = 1e-12
"""Least length that a cosine divides by: of a model that has not moved, the cosine is 0."""


class PFedGraphParams(Params):
    alpha: float = Field(0.8, gt=0)
    """How close weights stay to the shares of samples (authors: 0.8); large ones give the mean of FedAvg,
    those near 0 the client's own model."""
    pull: float = Field(0.01, ge=0)
    """Strength lambda of the term that turns theta towards u_i (authors: 0.01); 0 trains freely from u_i."""


class PFedGraph(ModelBank):
    summary = "each client's own model, mixed with those that moved the same way"
    privacy_units = ("sample",)
    Params = PFedGraphParams
    diagnostics = (
        Diagnostic(
            "collaboration",
            ("client", "client"),
            "Who collaborates with whom",
            "Weight that a client (row) gives to each client's model (column) in u_i; a row sums to 1.",
            low=0,
            high=1,
            of_server=lambda method, server: method.graph(server),
        ),
    )
    params: PFedGraphParams

    def download(self, server: State, cohort: Cohort) -> Message:
        known = self.known(server)
        if not len(known):
            return Message(shared={"theta": self.context.initial_parameters()})
        weights, read = self.weights(server["models"], known, cohort.clients), self.models_of(server, known)
        return Message(per_client={"theta": weights.to(read) @ read})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        u = down["theta"]
        start = self.context.initial_parameters().to(u)
        towards = u - start

        def pull(theta: Tensor, members: slice | Tensor) -> Tensor:
            return -self.params.pull * cosine_gradient(theta - start, towards[members])

        clients["theta"] = clients.sgd(u, extra_gradient=pull).theta
        return Message(per_client={"theta": clients["theta"]})

    def graph(self, server: State) -> Tensor:
        """Return the weights [N, N] of the next round, nan while there are none."""
        count, known = self.context.num_clients, self.known(server)
        graph = torch.full((count, count), 0.0 if len(known) else torch.nan)
        if len(known):
            graph[:, known] = self.weights(server["models"], known, range(count)).to(graph)
        return graph

    def weights(self, models: Tensor, known: Tensor, clients: Sequence[int]) -> Tensor:
        """Return the weights W [S, n], float64, of the models of known clients [n] in u of some clients.

        `models` [N, P] are all clients'; `clients` may be any ids.
        """
        shares = self.context.num_samples[known].double()
        positions, rows = rows_among(known, clients)
        target = (shares / shares.sum()).repeat(len(clients), 1)
        target[positions] += self._cosines(models, known, rows) / (2 * self.params.alpha)
        return project_to_simplex(target)

    def _cosines(self, models: Tensor, known: Tensor, rows: Tensor) -> Tensor:
        """Return the cosines [S, n] of the moves of some rows of known clients [n] with those of all.

        In pieces of columns, so that no temporary in float64 is as large as the models.
        """
        products = torch.zeros(len(rows), len(known), dtype=torch.float64)
        squares = products.new_zeros(len(known))
        start = self.context.initial_parameters()
        for part, of_start in zip(
            models.split(COLUMNS_AT_ONCE, dim=1), start.split(COLUMNS_AT_ONCE), strict=True
        ):
            moves = part[known].double() - of_start.double()
            products.addmm_(moves[rows], moves.T)
            squares += moves.square().sum(dim=1)
        lengths = squares.sqrt().clamp(min=SHORTEST)
        return products / (lengths[rows].unsqueeze(1) * lengths)


def cosine_gradient(moves: Tensor, towards: Tensor) -> Tensor:
    """Return the gradient of cos(moves, towards) by moves [C, P]; 0 where `towards` is 0."""
    length, other = (x.norm(dim=1, keepdim=True).clamp(min=SHORTEST) for x in (moves, towards))
    along, direction = moves / length, towards / other
    cosine = (along * direction).sum(dim=1, keepdim=True)
    return (direction - cosine * along) / length
