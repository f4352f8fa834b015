"""FedAFK. Personalized federated learning with adaptive feature aggregation and knowledge transfer,
AAMAS 2025.

    phi_g,i <- SGD on CE(h_0(phi_g,i(x)), y) from the global phi_g                             (eq. 4)
    phi_i   <- SGD on CE(h_i(phi_i(x)), y) + lambda KL(softmax phi_g,i(x) || softmax phi_i(x))  (eq. 5, 8, 9)
    a_i     <- SGD on CE(h_i(phi_p(x)), y),  phi_p = a_i phi_i + (1 - a_i) phi_g,i             (eq. 3, 6)
    h_i     <- one epoch of SGD on CE(h_i(phi_p(x)), y)                                        (eq. 7)
    phi_i   <- phi_p
    phi_g   <- weighted mean of phi_g,i

Only extractors travel. h_0 is one random head for all clients and rounds, drawn from the run's seed.

Differs from the paper:
  pull         not by default: `method.coefficient_pull` adds rho/2 (a_i - a)^2 to the loss of a_i, with the
               first value a (differs from eq. 6), and a_i settles at a - (d CE / d a) / rho. On validation
               samples it cannot be told from eq. 6 with the default step (fedafk_tuning.yaml)

Choices the paper leaves open:
  schedule     the first three updates take turns batch by batch; `method.schedule=sequential` runs each of
               them for `train.local_epochs` before the next
  coefficient  a_i multiplies the local extractor; d CE / d a = <d CE / d phi_p, phi_i - phi_g,i> takes a
               gradient of its own; a_i is clipped to [0, 1] after each step and kept from round to round
  step of a_i  h_i is fitted to phi_i, and phi_g,i to another head, so CE falls as a_i grows, and a_i goes to
               1, which is local training: with a step of 0.01 it is 0.98 after 60 rounds of our validation
               runs, with the default 0.74, and 0.93 with five times the images
  transfer     mean over the batch of KL between softmaxed features; phi_g,i gets no gradient from it
  BatchNorm    running statistics stay with the client. They belong to phi_i, then to phi_p: the epoch of the
               head updates them. phi_g,i trains on batch statistics and keeps none
  evaluated    h_i(phi_p) after local training; for an unsampled client, the model of its last round
  unseen       a client that takes no part in training takes over phi_g as its phi_i, and does one round
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.methods._own_layers import SharedLayers
from hpcfl.methods._own_model import OwnBesideGlobal
from hpcfl.methods.base import Context, Params, State, Traits
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import distillation_loss

FIXED_HEAD = -2
"""Number of the draw whose head is h_0; clients have the draws from 0 on, the common initial model is -1."""


class FedAFKParams(Params):
    coefficient: float = Field(0.5, ge=0, le=1)
    """First a_i (paper: 0.5); 1 is the local extractor alone, 0 the global one."""
    coefficient_lr: float = Field(0.001, ge=0)
    """Learning rate of a_i, with the run's `train.lr_decay` (the paper names none; of 0, 0.001 and 0.01,
    0.001 was best on validation samples); 0 keeps it as it is."""
    coefficient_pull: float = Field(0.0, ge=0)
    """Strength rho of a pull of a_i towards its first value (differs from eq. 6); 0 is eq. 6."""
    transfer: float = Field(0.1, ge=0)
    """Factor lambda of the transfer term; 0 is the paper's row without transfer. The paper's value is lost in
    the text, but it is the third of table 1's seven. The first is not 0, and accuracies change little from
    the third on: if the seven are 0.01, 0.05, 0.1, 0.5, 1, 5 and 10, the third is 0.1."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the transfer term: divides the features before softmax; the term is multiplied by its
    square."""
    mixing: bool = True
    """Whether extractors are mixed; false is the paper's row without mixing, a_i = 1."""
    schedule: Literal["interleaved", "sequential"] = "interleaved"
    """Whether the three updates take turns batch by batch, or one runs after the other."""
    head_epochs: int = Field(1, ge=0)
    """Epochs of the head (paper: 1)."""


class FedAFK(OwnBesideGlobal, SharedLayers):
    summary = "a local and a global feature extractor, mixed by a learnt coefficient"
    privacy_units = ("client",)
    Params = FedAFKParams
    traits = Traits(averages=("theta",), eval_after="training", buffers=("local",), needs_body=True)
    diagnostics = (
        Diagnostic(
            "coefficient",
            ("client",),
            "Weight of each client's own extractor",
            "Coefficient that mixes the extractors; 1 is the local one alone, 0 the global one (eq. 3).",
            low=0,
            high=1,
        ),
    )
    params: FedAFKParams

    def __init__(self, context: Context, params: FedAFKParams) -> None:
        super().__init__(context, params)
        self._fixed_head = context.initial_parameters([FIXED_HEAD], own=True)[0, self.layout.head]

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        theta[self.layout.head] = self._fixed_head
        return {"theta": theta}

    def client_state(self, clients: Sequence[int]) -> State:
        start = self.params.coefficient if self.params.mixing else 1.0
        theta = self.context.initial_parameters(clients)
        return {"theta": theta, "coefficient": torch.full((len(clients),), start)}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        arrived = self.layout.with_head(down["theta"], self._fixed_head.to(down["theta"]))
        shared = clients.descent(arrived, trained=self.layout.body)
        local = clients.descent(clients["theta"], trained=self.layout.body)
        coefficient = clients["coefficient"].clone()

        def update_shared(batch: Batch) -> Tensor:
            with clients.discarding_buffer_updates():
                gradient, losses = clients.plain_gradient(shared.theta[batch.members], batch)
            shared.step(batch.members, gradient)
            return losses

        def update_local(batch: Batch) -> Tensor:
            models = {"theta": local.theta[batch.members], "teacher": shared.theta[batch.members]}
            if not self.params.transfer:
                del models["teacher"]
            gradients, losses = clients.gradient(self._local_loss, models, batch)
            local.step(batch.members, gradients["theta"])
            return losses

        def update_coefficient(batch: Batch) -> Tensor:
            models = local.theta[batch.members], shared.theta[batch.members]
            now = coefficient[batch.members]
            with clients.discarding_buffer_updates():
                gradient, losses = clients.plain_gradient(self.mix(now, *models), batch)
            slope = self.coefficient_gradient(gradient, *models)
            slope += self.params.coefficient_pull * (now - self.params.coefficient)
            lr = self.params.coefficient_lr * clients.lr_decay
            coefficient[batch.members] = (now - lr * slope).clamp(0.0, 1.0)
            return losses

        updates = [update_shared, update_local] + [update_coefficient] * self.params.mixing
        passes = [updates] if self.params.schedule == "interleaved" else [[update] for update in updates]
        for number, together in enumerate(passes):
            for batch in clients.batches(f"batches{number or ''}"):
                losses = [update(batch) for update in together]
                clients.record(batch, losses[-1])
        mixed = self.mix(coefficient, local.theta, shared.theta)
        head = clients.sgd(mixed, trained=self.layout.head, epochs=self.params.head_epochs, purpose="head")
        clients["theta"], clients["coefficient"] = head.theta, coefficient
        return Message(per_client={"theta": shared.theta}, layer_mask={"theta": self.body_layers})

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        head = clients["theta"][:, self.layout.head]
        return Message(per_client={"theta": self.layout.with_head(down["theta"], head)})

    def mix(self, coefficient: Tensor, local: Tensor, shared: Tensor) -> Tensor:
        """Return phi_p with the local head [C, P] from a [C], local and shared models [C, P] (eq. 3)."""
        body = self.layout.body
        mixed = local.clone()
        mixed[:, body] = torch.lerp(shared[:, body], local[:, body], coefficient.unsqueeze(1))
        return mixed

    def coefficient_gradient(self, gradient: Tensor, local: Tensor, shared: Tensor) -> Tensor:
        """Return d CE / d a [C] from the mixed model's gradient [C, P]; the extractors are constants."""
        body = self.layout.body
        return (gradient[:, body] * (local[:, body] - shared[:, body])).sum(dim=1)

    def _local_loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        features = forward.features(tensors["theta"], batch.x)
        loss = forward.cross_entropy(forward.head(tensors["theta"], features), batch.y)
        if "teacher" in tensors:
            teacher = forward.features(tensors["teacher"].detach(), batch.x, forward.buffers_copy())
            apart = distillation_loss(teacher.detach(), features, self.params.temperature)
            loss = loss + self.params.transfer * apart
        return loss
