"""FedALA. Zhang et al., FedALA: adaptive local aggregation for personalized federated learning, AAAI 2023.

    hat_i   = w in the lower layers, theta_i + (w - theta_i) * W_i in the top ones
    W_i    <- clip(W_i - lr_W dL_i/dhat_i * (w - theta_i), 0, 1), on a random part of the data   (Algorithm 1)
    theta_i <- E epochs of SGD on L_i from hat_i
    w       <- weighted mean of theta_i

theta_i is the client's model after its last training, * is elementwise. W_i starts at 1, which is FedAvg, and
is kept from round to round. The first time, W_i is learnt until the losses of the last passes hardly differ;
in later rounds it is learnt for one pass.

A client that takes no part in training does its first round: W_i is 1, so that theta_i starts as w.

Choices: the top is counted in layers (the authors' code counts tensors). The part of the data is drawn sample
by sample (code: one piece of it), and the loss of a pass is the mean over it (code: of its last mini-batch).
The first learning can end with pass `method.last_passes` (code: with the next at the earliest). A client that
has not trained yet takes over w unchanged. A client whose theta_i equals w does not learn W_i in that round,
since no W_i would change hat_i. W_i is learnt on batch statistics, and the running statistics do not move.
The evaluated model is hat_i from the newest w, for unsampled clients too. For each evaluation W_i is learnt
by this round's passes (those of the first time, if the client has trained only once), and then discarded; in
the authors' code, unsampled clients keep hat_i and W_i. The next round repeats these passes, because only the
state is kept between the evaluation and the round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Context, Params, State
from hpcfl.methods.checks import check_num_layers
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward

NEW, TRAINED, HAS_LEARNT = 0, 1, 2
"""Stages of a client: it has not trained yet, it has trained, it has learnt W_i at least once."""


class FedALAParams(Params):
    adaptive_layers: int = Field(1, ge=1)
    """Top layers with weights of their own (authors: p = 1, the last layer)."""
    weights_lr: float = Field(1.0, ge=0)
    """Learning rate of W_i (authors: 1); 0 never learns it, which is FedAvg."""
    share: float = Field(0.8, gt=0, le=1)
    """Share s of the training data that a round learns W_i on (authors: 0.8)."""
    threshold: float = Field(0.1, ge=0)
    """The first learning of W_i ends when the standard deviation of the losses of the last passes is below
    this (paper: 0.01, code: 0.1)."""
    last_passes: int = Field(10, ge=2)
    """Number of last passes in the standard deviation of `threshold` (code: 10)."""
    most_passes: int = Field(50, ge=1)
    """Largest number of passes of the first learning (the authors set no limit)."""


class FedALA(FedAvg):
    summary = "FedAvg whose clients learn, weight by weight, how much of it to take over"
    privacy_units = ("client",)
    Params = FedALAParams
    params: FedALAParams

    def __init__(self, context: Context, params: FedALAParams) -> None:
        super().__init__(context, params)
        check_num_layers(self.layers, "adaptive_layers", params.adaptive_layers)
        self._top = slice(self.layers[-params.adaptive_layers].start, self.layout.size)

    def client_state(self, clients: Sequence[int]) -> State:
        theta = self.context.initial_parameters(clients)
        stage = torch.full((len(clients),), NEW)
        return {"theta": theta, "weights": torch.ones_like(theta[:, self._top]), "stage": stage}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        clients["weights"], stage = self._learn(clients, down["theta"])
        clients["stage"] = stage.clamp(min=TRAINED)
        start = self.combined(clients["weights"], clients["theta"], down["theta"])
        clients["theta"] = clients.sgd(start).theta
        return Message(per_client={"theta": clients["theta"]})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        weights, _ = self._learn(clients, down["theta"])
        return Message(per_client={"theta": self.combined(weights, clients["theta"], down["theta"])})

    def combined(self, weights: Tensor, own: Tensor, shared: Tensor) -> Tensor:
        """Return hat_i [C, P] from W_i [C, numbers of the top], own and received models [C, P]."""
        theta = shared.clone(memory_format=torch.contiguous_format)
        theta[:, self._top] = torch.lerp(own[:, self._top], shared[:, self._top], weights)
        return theta

    def _learn(self, clients: ClientGroup, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return W_i [C, numbers of the top] after this round's passes, and how far clients have come [C]."""
        own, weights, stage = clients["theta"], clients["weights"].clone(), clients["stage"]
        apart = (shared - own)[:, self._top]
        learns = (apart != 0).any(dim=1) & (stage >= TRAINED)
        active = learns
        chosen, _ = clients.divided(
            "adaptive aggregation",
            self.params.share,
            fewest=(self.context.fewest_samples, 0),
            round=clients.round,
        )
        losses: list[Tensor] = []
        while active.any() and len(losses) < self.params.most_passes:
            total, seen = torch.zeros(2, len(clients), dtype=torch.float64, device=apart.device)
            purpose = f"adaptive aggregation/{len(losses) + 1}"
            for batch in clients.batches(purpose, 1, samples=chosen):
                members = batch.members
                parts = {
                    "lower": shared[members, : self._top.start],
                    "top": torch.lerp(own[members, self._top], shared[members, self._top], weights[members]),
                }
                with clients.discarding_buffer_updates():
                    gradients, values = clients.gradient(_loss_of_top, parts, batch)
                slope = gradients["top"] * apart[members]
                moved = (weights[members] - self.params.weights_lr * slope).clamp(0, 1)
                weights[members] = torch.where(active[members].unsqueeze(1), moved, weights[members])
                total[members] += values * batch.y.shape[1]
                seen[members] += batch.y.shape[1]
            losses.append(total / seen)
            active = active & (stage < HAS_LEARNT) & ~self._is_settled(losses)
        return weights, torch.where(learns, HAS_LEARNT, stage)

    def _is_settled(self, losses: list[Tensor]) -> Tensor:
        """Return bool [C]: True for each client whose mean losses [C] of the last passes hardly differ.

        All are False while there are fewer than `last_passes` passes.
        """
        last = torch.stack(losses[-self.params.last_passes :])
        if len(last) < self.params.last_passes:
            return torch.zeros(last.shape[1], dtype=torch.bool, device=last.device)
        return last.std(dim=0, correction=0) < self.params.threshold


def _loss_of_top(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Return the mean cross-entropy as a function of the top alone, which saves all other gradients."""
    logits = forward.logits_of_parts(tensors["lower"].detach(), tensors["top"], batch.x)
    return forward.cross_entropy(logits, batch.y)
