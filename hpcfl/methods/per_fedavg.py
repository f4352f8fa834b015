"""Per-FedAvg. Fallah et al., Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach, NeurIPS 2020.

With independent mini-batches A, B and C, a client does from w

    u <- w - alpha g(w; A),  d = g(u; B)
    w <- w - beta (d - alpha H d),  H the Hessian of the loss at w on C         (Algorithm 1; `exact`)
         H d = (g(w + delta d; C) - g(w - delta d; C)) / (2 delta)              (`hessian_free`)
         H = 0                                                                  (`first_order`)

and the server takes the weighted mean. Where the curvature is above 1 / alpha, the adaptation goes beyond the
minimum, d has the wrong sign, and the first-order step goes uphill; with alpha of the size of beta, w can end
where all samples get one class. The evaluated model is w after `method.adaptation_steps` steps of size alpha
on mini-batches of the client's training data, never of its test data; it is discarded afterwards.

Choices: beta is `train.lr` and decays with it; alpha stays as it is. A, B and C each pass through the
training data in an order of their own; a local epoch is one pass of B. The weights of the mean are
training-set sizes (the paper uses uniform weights). Running statistics are those of g(u; B); the adaptation
before an evaluation leaves them as they are. Momentum and weight decay of `train.*` act on w, in training and
in the adaptation; they do not act on u. The model after a download is the adapted w; the model after local
training is the client's new w without adaptation. `train.finetune_epochs` replaces the adaptation by whole
epochs with learning rate alpha, which update the running statistics. With alpha = 0 the method equals FedAvg
on B bit for bit.
A client that takes no part in training adapts in the same way: the paper trains w for any such client.
"""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import Field
from torch import Tensor
from torch.func import grad

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Context, Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward

LOG = logging.getLogger(__name__)


class PerFedAvgParams(Params):
    """Hyper-parameters of Per-FedAvg; `train.lr` is beta."""

    variant: Literal["hessian_free", "exact", "first_order"] = "hessian_free"
    """Whether the product with the Hessian is a difference of gradients, is exact, or is left out (all three
    are the paper's); `first_order` needs alpha below `train.lr`."""
    alpha: float = Field(0.01, ge=0)
    """Learning rate of the adaptation (paper: 0.01); 0 is FedAvg."""
    delta: float = Field(0.001, gt=0)
    """How far from w `hessian_free` takes its differences; the smaller, the noisier they are, because of
    rounding and of the kinks of ReLU."""
    adaptation_steps: int = Field(1, ge=0)
    """Steps before an evaluation (paper: 1); 0 scores w itself."""


class PerFedAvg(FedAvg):
    summary = "a global initialisation for one local step of adaptation (MAML)"
    privacy_units = ("client",)
    Params = PerFedAvgParams
    traits = FedAvg.traits.replace(
        refuses=dict.fromkeys(("optimiser", "clip"), "which learns a start for steps of plain gradients")
    )
    params: PerFedAvgParams

    def __init__(self, context: Context, params: PerFedAvgParams) -> None:
        super().__init__(context, params)
        if params.variant == "first_order" and params.alpha >= context.train.lr:
            LOG.warning(
                f"method.variant=first_order with method.alpha={params.alpha:g}, not below train.lr="
                f"{context.train.lr:g}, can end with one class for all samples; set method.variant="
                "hessian_free, or a smaller method.alpha"
            )

    def train(self, clients: ClientGroup, down: Message) -> Message:
        outer = clients.descent(down["theta"])
        orders = [clients.batches("adaptation"), clients.batches()]
        if self.params.variant != "first_order":
            orders.append(clients.batches("curvature"))
        for adaptation, batch, *curvature in zip(*orders, strict=True):
            w = outer.theta[batch.members]
            adapted = w - self.params.alpha * self._slope(clients, w, adaptation)
            slope, losses = clients.plain_gradient(adapted, batch)
            if curvature:
                slope = slope - self.params.alpha * self._hessian_times(slope, clients, w, curvature[0])
            outer.step(batch.members, slope)
            clients.record(batch, losses)
        return Message(per_client={"theta": outer.theta})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        adapted = clients.descent(down["theta"], lr=self.params.alpha)
        for batch in clients.batches("evaluation", steps=self.params.adaptation_steps):
            adapted.step(batch.members, self._slope(clients, adapted.theta[batch.members], batch))
        return Message(per_client={"theta": adapted.theta})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        if self.buffers.has_policy("local"):
            clients.find_statistics(down["theta"])
        return self.eval_model(clients, down)

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        return self._finetuned(clients, down.only("theta"), epochs, lr=self.params.alpha)

    @staticmethod
    def _slope(clients: ClientGroup, theta: Tensor, batch: Batch) -> Tensor:
        with clients.discarding_buffer_updates():
            return clients.plain_gradient(theta, batch)[0]

    def _hessian_times(self, direction: Tensor, clients: ClientGroup, w: Tensor, batch: Batch) -> Tensor:
        if self.params.variant == "exact":
            return clients.gradient(_slope_along, {"theta": w, "direction": direction}, batch)[0]["theta"]
        step = self.params.delta * direction
        ahead = self._slope(clients, w + step, batch)
        return (ahead - self._slope(clients, w - step, batch)) / (2 * self.params.delta)


def _slope_along(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Return <g(theta), direction>, whose gradient is the Hessian times the direction."""

    def loss(theta: Tensor, buffers: Tensor) -> Tensor:
        return forward.cross_entropy(forward.logits(theta, batch.x, buffers), batch.y)

    # the running statistics are an argument, since torch.func changes nothing in place that is not
    slope: Tensor = grad(loss)(tensors["theta"], forward.buffers_copy())
    return (slope * tensors["direction"].detach()).sum()
