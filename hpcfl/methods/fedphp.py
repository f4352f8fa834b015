"""FedPHP. Li et al., FedPHP: federated personalization with inherited private models, ECML PKDD 2021.

    theta_i <- E epochs of SGD on (1 - lambda) L_i(theta) + lambda R(theta, p_i) from w
    p_i     <- mu_i p_i + (1 - mu_i) theta_i,  mu_i = min(0.9, 0.9 c_i / (p T))    (Algorithm 1)
    w       <- weighted mean of theta_i

c_i is the number of earlier rounds that sampled client i, p T the expected number of such rounds in the run.
R is the maximum mean discrepancy between the features of theta and of p_i (Gaussian kernels), or the
distillation loss with p_i's logits.

Choices: p_i gets no gradient and is in evaluation mode. It has its own running statistics, which are mixed
by mu_i like its weights; the running statistics of theta_i start from them. Kernels have fixed bandwidths
(PFLlib's; the first author's FedRepo takes them from the mini-batch's distances). Distillation has the same
temperature on both sides, and its loss is multiplied by the squared temperature (FedRepo: on p_i's side
only, and no factor). In a client's first round there is no p_i: lambda is 0, and p_i becomes theta_i
(FedRepo starts p_i as the initial model). Features are not normalised. The evaluated model is p_i after the
client's last training (PFLlib evaluates theta_i), and the initial model before its first round; the model
after a download is w. A client that takes no part in training does its first round (not in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods._own_model import OwnBesideGlobal
from hpcfl.methods.base import Params, State
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import body_features, discrepancy, distillation_loss

MOST = 0.9
"""Largest share that a private model keeps of itself in a round."""


class FedPHPParams(Params):
    transfer: float = Field(0.1, ge=0, le=1)
    """Share lambda of R in the loss (authors: 0.05, 0.1); 0 trains as FedAvg does, 1 on R alone."""
    regulariser: Literal["mmd", "distillation"] = "mmd"
    """What R compares: features by maximum mean discrepancy, or logits by distillation."""
    bandwidths: list[PositiveFloat] = Field([10.0, 15.0, 20.0, 50.0], min_length=1)
    """Widths of the Gaussian kernels of `mmd`; widths far below the squared distances make R constant."""
    temperature: float = Field(4.0, gt=0)
    """Temperature of the softmax in `distillation`."""


class FedPHP(OwnBesideGlobal):
    summary = "each client's moving average of its models, the teacher of its next model"
    privacy_units = ("client",)
    Params = FedPHPParams
    traits = OwnBesideGlobal.traits.replace(
        uses_total_rounds=True,
        needs_body=True,
        refuses={"augment": "whose teachers see the images themselves"},
    )
    params: FedPHPParams

    def client_state(self, clients: Sequence[int]) -> State:
        return super().client_state(clients) | {"count": torch.zeros(len(clients), dtype=torch.int64)}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        private, buffers = clients["theta"], clients.buffers.clone()
        count = clients["count"]
        of_features = self.params.regulariser == "mmd"
        teach = body_features if of_features else lambda network, x, y: network(x)
        taught = clients.over_training_set({"theta": private, BUFFERS: buffers}, teach)
        share = self.params.transfer * (count > 0)

        def known(batch: Batch) -> Tensors:
            return {"taught": batch.pick(taught), "share": share[batch.members]}

        theta = clients.sgd(down["theta"], gradient=clients.gradient_with_constants(self._loss, known)).theta
        kept = (MOST * count / self._rounds_of_a_client).clamp(max=MOST).unsqueeze(1).to(theta)
        clients["theta"] = torch.lerp(theta, private, kept)
        clients.buffers = torch.lerp(clients.buffers, buffers, kept)
        clients["count"] = count + 1
        return Message(per_client={"theta": theta})

    @property
    def _rounds_of_a_client(self) -> float:
        """Return p T, in how many rounds of the run a client is sampled in expectation."""
        train, clients = self.context.train, self.context.num_clients
        if self.context.privacy.unit == "client":
            return train.rounds * train.participation
        return train.rounds * train.cohort_size(clients) / clients

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        features = forward.features(tensors["theta"], batch.x)
        logits = forward.head(tensors["theta"], features)
        taught, share = tensors["taught"].detach(), tensors["share"].detach()
        if self.params.regulariser == "mmd":
            away = discrepancy(features, taught, self.params.bandwidths)
        else:
            away = distillation_loss(taught, logits, self.params.temperature)
        return (1 - share) * forward.cross_entropy(logits, batch.y) + share * away
