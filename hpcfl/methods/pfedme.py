"""pFedMe. Dinh et al., Personalized federated learning with Moreau envelopes, NeurIPS 2020.

From w_i = theta_i = w, each mini-batch D of the client does

    theta_i <- theta_i - lr_p (g(theta_i; D) + lambda (theta_i - w_i)), K times
    w_i     <- w_i - lr lambda (w_i - theta_i)                                   (Algorithm 1)
    w       <- (1 - beta) w + beta weighted mean of w_i

With lr lambda = 1, w_i is at theta_i after each step; it is beyond theta_i with more, and diverges from 2 on.

Choices: the paper's R inner rounds are the mini-batches of `train.local_epochs`. theta_i starts each round at
w and continues from one mini-batch to the next. There is no extra weight decay (the authors' code adds
0.001). Momentum and weight decay of `train.*` act on theta_i. lr_p decays as `train.lr` does. Only sampled
clients train (in the paper all clients train, and the sampled ones send w_i). The weights of the mean are
training-set sizes (the paper uses uniform weights). The evaluated model is theta_i with its own running
statistics (public code evaluates w_i, because of an aliased tensor). `train.finetune_epochs` adapts theta_i
with the learning rate lr_p and without the pull. One mini-batch costs K gradients. A client that takes no
part in training has the theta_i of one round (not in the paper).
"""

from __future__ import annotations

import logging

import torch
from pydantic import Field

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.methods._own_model import OwnBesideGlobal
from hpcfl.methods.base import Context, Params, State, proximal_gradient
from hpcfl.training.client_group import ClientGroup

LOG = logging.getLogger(__name__)


class PFedMeParams(Params):
    """Hyper-parameters of pFedMe; `train.lr` is the learning rate of w_i."""

    pull: float = Field(15.0, ge=0)
    """Strength lambda of the envelope (authors: 15): small lets theta_i go its own way, 0 never moves w."""
    steps: int = Field(5, ge=0)
    """Inner steps K on one mini-batch (authors: 5); with 0 nothing ever moves."""
    personal_lr: float = Field(0.05, gt=0)
    """Learning rate lr_p of theta_i (authors: 0.09 and 0.1), with the run's `train.lr_decay`; lr_p lambda
    above 2 diverges."""
    beta: float = Field(1.0, gt=0)
    """Server's step (authors: 1 and 2); 1 is the mean of w_i."""


class PFedMe(OwnBesideGlobal):
    summary = "each client's own model with a proximal term to the global one (Moreau envelope)"
    Params = PFedMeParams
    # lr lambda is how far w_i follows theta_i in one mini-batch
    traits = OwnBesideGlobal.traits.replace(train_defaults={"lr": 0.005})
    params: PFedMeParams

    def __init__(self, context: Context, params: PFedMeParams) -> None:
        super().__init__(context, params)
        share = context.train.lr * params.pull
        if share < 1:
            return
        problem = (
            f"train.lr={context.train.lr:g} times method.pull={params.pull:g} is {share:g}, how far w_i "
            "follows theta_i in one mini-batch: "
        )
        advice = f"set train.lr below {1 / params.pull:.3g}, or method.pull below {1 / context.train.lr:.3g}"
        if share >= 2:
            raise UserError(f"{problem}from 2 on it diverges; {advice}")
        LOG.warning(f"{problem}from 1 on it is not between w_i and theta_i; {advice}")

    def train(self, clients: ClientGroup, down: Message) -> Message:
        w = down["theta"].clone(memory_format=torch.contiguous_format)
        own = clients.descent(w, lr=self.params.personal_lr * clients.lr_decay)
        pull = proximal_gradient(w, self.params.pull)
        for batch in clients.batches():
            for _ in range(self.params.steps):
                theta = own.theta[batch.members]
                gradient, losses = clients.plain_gradient(theta, batch)
                own.step(batch.members, gradient + pull(theta, batch.members))
                clients.record(batch, losses)
            # the pull on w_i is the opposite of that on theta_i
            w[batch.members] += clients.lr * pull(own.theta[batch.members], batch.members)
        clients["theta"] = own.theta
        return Message(per_client={"theta": w})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        mean = weighted_mean(up, "theta", cohort.num_samples)
        server["theta"] = torch.lerp(up.received("theta"), mean, self.params.beta)

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        lr = self.params.personal_lr * clients.lr_decay
        return self._finetuned(clients, self.eval_model(clients, down), epochs, lr=lr)
