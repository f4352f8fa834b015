"""HeurpFedLA. Ma et al., Layer-wised model aggregation for personalized federated learning, CVPR 2022.

    R_i         = the k layers with the largest self-weight alpha_i^{l,i}            (eq. 12)
    theta_i^l  <- theta_bar_i^l for l not in R_i, the client's own theta_i^l else    (Algorithm 2)
    then pFedLA's training; theta_i of all layers goes up

Choices the paper leaves open:
  ties         a layer is not retained if one that is not among the k has the same weight. So with
               `method.head_init=zero` none is until a client has taken part twice, and its weights have
               moved; other heads have different weights from the start, and choose k layers at random
  retained     a retained layer gives no gradient and its head does not move; embedding and trunk still do
  traffic      only the download shrinks, as the paper's table 3 has it: others need theta_i^l
  step         the choice compares self-weights of different layers, so it depends on how far the heads of
               different layers move: as far as eq. 10 and 11 say with `method.optimiser=scaled` and `sgd`,
               about equally far with Adam
  BatchNorm    a BatchNorm layer can be retained alone; with `method.layer=block` it is part of the layer of
               its convolution
  unseen       a client that takes no part in training has no layer to retain, and adapts as in pFedLA
  k = 0        equals pFedLA bit for bit; k = number of layers is Local
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Context, State
from hpcfl.methods.checks import check_num_layers
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.pfedla import PFedLA, PFedLAParams
from hpcfl.parameters import columns
from hpcfl.training.client_group import ClientGroup

OF_RETAINED = (
    "These are the hypernetwork's weights, by which k layers are chosen; a retained layer is the "
    "client's own."
)


class HeurpFedLAParams(PFedLAParams):
    """Hyper-parameters of HeurpFedLA: those of pFedLA and k."""

    k: int = Field(1, ge=0)
    """Layers retained by each client (paper: 1 in tables 1 and 2); 0 is pFedLA, all layers is Local."""


class HeurpFedLA(PFedLA):
    summary = "pFedLA whose clients keep the k layers they weigh highest"
    privacy_units = ("sample",)
    Params = HeurpFedLAParams
    diagnostics = (
        *(replace(one, caption=f"{one.caption} {OF_RETAINED}") for one in PFedLA.diagnostics),
        Diagnostic(
            "retained_rounds",
            ("client", "layer"),
            "How often each layer stays with its client",
            "Rounds in which a client kept its own layer, of the rounds so far (Algorithm 2: the k layers of "
            "highest self-weight).",
            low=0,
        ),
    )
    params: HeurpFedLAParams

    def __init__(self, context: Context, params: HeurpFedLAParams) -> None:
        super().__init__(context, params)
        check_num_layers(self.layers, "k", params.k)
        if not params.k:
            self.diagnostics = PFedLA.diagnostics

    def client_state(self, clients: Sequence[int]) -> State:
        own = {self._own: self._initial_models(clients)} if self.params.k else {}
        return super().client_state(clients) | own

    @property
    def _own(self) -> str:
        """Name of each client's own model in its state; `theta` of a sharded server is what it received."""
        return "theta" if self.params.server == "whole" else "own"

    def server_state(self) -> State:
        rounds = torch.zeros(self.context.num_clients, len(self.layers), dtype=torch.int64)
        return super().server_state() | ({"retained_rounds": rounds} if self.params.k else {})

    def download(self, server: State, cohort: Cohort) -> Message:
        message = super().download(server, cohort)
        if self.params.k:
            alpha = self.alpha(server, cohort.clients)
            message.layer_mask = {"theta": ~self.retained(alpha, cohort.clients)}
        return message

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = clients.sgd(self._merge(clients, down)).theta
        if self.params.k:
            clients[self._own] = theta
        return Message(per_client={"theta": theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        if self.params.k:
            retained = self.retained(self.alpha(server, cohort.clients), cohort.clients)
            server["retained_rounds"][list(cohort.clients)] += retained
        super().aggregate(server, cohort, up)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self._merge(clients, down)})

    def retained(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        """Return the k layers of largest self-weight, bool [S, L] (eq. 12)."""
        own = torch.tensor(list(clients)).view(-1, 1, 1).expand(-1, alpha.shape[1], 1)
        # sort by the weight of all other clients: it distinguishes self-weights that round to 1
        others = alpha.scatter(2, own, 0.0).sum(dim=2)
        if self.params.k == len(self.layers):
            return torch.ones_like(others, dtype=torch.bool)
        self_weight = alpha.gather(2, own).squeeze(2)
        next_place = others.argsort(dim=1, stable=True)[:, self.params.k, None]
        # equal self-weights tie, though sums of the others' weights may differ in their last bits
        ties = (self_weight == self_weight.gather(1, next_place)) & (self_weight < 0.5)
        return (others < others.gather(1, next_place)) & ~ties

    def _merge(self, clients: ClientGroup, down: Message) -> Tensor:
        """Put the client's own retained layers into the download, [C, P]."""
        if not self.params.k:
            return down["theta"]
        arrived = columns(self.layers, down.layer_mask["theta"])
        return torch.where(arrived, down["theta"], clients[self._own])
