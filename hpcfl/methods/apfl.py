"""APFL. Deng et al., Adaptive personalized federated learning, 2020.

With vbar = a_i v_i + (1 - a_i) w_i, a mini-batch does

    w_i <- w_i - lr g(w_i)                                                      (Algorithm 1)
    v_i <- v_i - lr a_i g(vbar)
    a_i <- a_i - lr_a <v_i - w_i, g(vbar)>, clipped to [0, 1]
    w   <- weighted mean of w_i, which start each round as the received w

Choices: APFL mixes weights, not logits. g(vbar) is computed once per mini-batch, after the step of w_i
(authors' code; in Algorithm 1 before it), and used for both v_i and a_i, each of which moves from where
both were before the mini-batch. The weights of the mean are training-set sizes (paper: uniform). a_i moves
only at the first mini-batch of a round, as in the authors' code, and without momentum. If a_i moved at
every mini-batch, w_i would soon be ahead of v_i, whose steps are scaled by a_i, and most a_i would fall to
0. Running statistics belong to vbar and stay with the client. The evaluated model is vbar after local
training; for an unsampled client it is the vbar of its last round, and before its first round the initial
model. The model after a download is w. One mini-batch costs two gradients. With a_i fixed at 1, v_i is
local training; with a_i fixed at 0, vbar is the client's copy of FedAvg's model. For a client that takes no
part in training v_i starts as the received w, and it does one round (not in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.methods._own_model import OwnBesideGlobal
from hpcfl.methods.base import Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.training.client_group import ClientGroup


class APFLParams(Params):
    alpha: float = Field(0.5, ge=0, le=1)
    """Initial a_i, the share of the client's own model. With `alpha_lr=0`, 1 means local training and 0 means
    the client's copy of the global model."""
    alpha_lr: float | None = Field(None, ge=0)
    """Learning rate of a_i, with the run's `train.lr_decay`; 0 keeps a_i fixed; default: `train.lr`, as in
    the paper."""
    alpha_moves: Literal["round", "step"] = "round"
    """Whether a_i moves once a round (authors' code) or with every mini-batch (Algorithm 1)."""


class APFL(OwnBesideGlobal):
    summary = "each client's own model and the global one, mixed by a learnt weight"
    privacy_units = ("client",)
    Params = APFLParams
    diagnostics = (
        Diagnostic(
            "alpha",
            ("client",),
            "Weight of each client's own model",
            "Mixing weight of the own model; 1 is local training, 0 the global model.",
            low=0,
            high=1,
        ),
    )
    params: APFLParams

    def client_state(self, clients: Sequence[int]) -> State:
        own = self.context.initial_parameters(clients)
        alpha = torch.full((len(clients),), self.params.alpha)
        return super().client_state(clients) | {"own": own, "alpha": alpha}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        shared, own = clients.descent(down["theta"]), clients.descent(clients["own"])
        alpha = clients["alpha"].clone()
        moves = torch.ones(len(clients), dtype=torch.bool, device=clients.device)
        alpha_lr = clients.lr if self.params.alpha_lr is None else self.params.alpha_lr * clients.lr_decay
        for batch in clients.batches():
            members = batch.members
            with clients.discarding_buffer_updates():
                gradient, _ = clients.plain_gradient(shared.theta[members], batch)
            shared.step(members, gradient)
            share, models = alpha[members], (own.theta[members], shared.theta[members])
            gradient, losses = clients.plain_gradient(self.mix(share, *models), batch)
            slope = ((models[0] - models[1]) * gradient).sum(dim=1)
            own.step(members, share.unsqueeze(1) * gradient)
            moved = (share - alpha_lr * slope).clamp(0.0, 1.0)
            alpha[members] = torch.where(moves[members], moved, share)
            # a tensor and not a number: a GPU waits for a number of the host
            moves[members] = torch.full_like(moves[members], self.params.alpha_moves == "step")
            clients.record(batch, losses)
        clients["own"], clients["alpha"] = own.theta, alpha
        clients["theta"] = self.mix(alpha, own.theta, shared.theta)
        return Message(per_client={"theta": shared.theta})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        with clients.temporary_state(own=down["theta"].clone(memory_format=torch.contiguous_format)):
            return super().new_client_model(clients, down)

    @staticmethod
    def mix(alpha: Tensor, own: Tensor, shared: Tensor) -> Tensor:
        """Return vbar [C, P] from a_i [C] and both models [C, P]."""
        return torch.lerp(shared, own, alpha.unsqueeze(1))
