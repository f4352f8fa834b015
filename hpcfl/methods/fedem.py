"""FedEM. Marfoq et al., Federated multi-task learning under a mixture of distributions, NeurIPS 2021.

For M components theta_m, losses l and each training sample s of the client,

    q_s(m)    proportional to pi_i(m) exp(-l(theta_m; s));  pi_i(m) <- mean over s of q_s(m)
    theta_m,i <- E epochs of SGD on mean over s of q_s(m) l(theta; s) from theta_m    (Algorithm 1)
    theta_m   <- weighted mean of theta_m,i

All components go down and up; pi_i stays with the client. The evaluated prediction is
argmax sum_m pi_i(m) softmax(f_m(x)), with the newest components and the client's last pi_i. For a client that
was never sampled, each evaluation computes pi_i by one step of the first line from 1/M and then discards it,
as the authors do for unseen clients.

A client that takes no part in training learns pi_i alone, by one step of the first line per local epoch, with
the components as they are (the paper's answer to clients unseen at training time).

Choices: q is computed once per round, before any component is trained, with all received components in
evaluation mode. Every component sees the same mini-batches. The first component is the common initial model,
the others are independent draws (equal components would stay equal). Each component averages its own running
statistics. q sums to 1 over the components, and the loss is a mean over the mini-batch, so a step of one
component is about lr / M. Hence `train.lr` is not comparable with other methods, and its default is three
times the general default (digits, one local epoch, 30 rounds, one seed: 90 % accuracy, and 76 % with 0.05).
One mini-batch costs M gradients. `train.finetune_epochs` trains the components on q, and leaves pi_i as it
is. With M = 1 the method equals FedAvg bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.methods.base import Context, Params, State, Traits
from hpcfl.methods.checks import check_equal_starts
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import class_probabilities, sample_losses


class FedEMParams(Params):
    components: int = Field(3, ge=1)
    """Number of components M (authors: 3); 1 is FedAvg."""


class FedEM(FedAvg):
    summary = "a mixture of global models, weighed by each client"
    Params = FedEMParams
    traits = Traits(
        averages=("theta",),
        buffers=("average",),
        predicts_by="module",
        train_defaults={"lr": 0.15},
        refuses={"label_smoothing": "whose losses are likelihoods"},
    )
    diagnostics = (
        Diagnostic(
            "weights",
            ("client", "component"),
            "Which components each client is a mixture of",
            "Weight of each component (column) for each client (row), of its last round; a row sums to 1. A "
            "client that was never sampled has equal ones here, and is scored with those of an E-step.",
            low=0,
            high=1,
        ),
    )
    params: FedEMParams

    def __init__(self, context: Context, params: FedEMParams) -> None:
        super().__init__(context, params)
        check_equal_starts(context, "components", params.components)
        self.buffers = self.buffers.of_models(params.components)

    def server_state(self) -> State:
        return {"theta": self.context.different_starts(self.params.components)}

    def client_state(self, clients: Sequence[int]) -> State:
        num_components = self.params.components
        return {
            "weights": torch.full((len(clients), num_components), 1 / num_components),
            "has_trained": torch.zeros(len(clients), dtype=torch.bool),
        }

    def train(self, clients: ClientGroup, down: Message) -> Message:
        shares = self.sample_shares(clients, down["theta"])
        clients["weights"] = self._mean_shares(clients, shares)
        clients["has_trained"] = torch.ones_like(clients["has_trained"])
        return Message(per_client={"theta": self._maximise(clients, down["theta"], shares)})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        weights = self._scored_weights(clients, down["theta"])
        return Message({"theta": down.shared["theta"]}, {"weights": weights})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        losses, weights = self._losses(clients, down["theta"]), clients["weights"]
        for _ in range(clients.local_epochs):
            weights = self._mean_shares(clients, self._shares(clients, losses, weights))
        return Message({"theta": down.shared["theta"]}, {"weights": weights})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": up.per_client["theta"], "weights": clients["weights"]})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        shares = self.sample_shares(clients, down["theta"])
        weights = self._scored_weights(clients, down["theta"])
        theta = self._maximise(clients, down["theta"], shares, epochs, "finetune")
        return Message(per_client={"theta": theta, "weights": weights})

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        """Return the mixture's probabilities [n, K]: of `theta` [C, M, P] with `weights` [C, M]."""
        scores = [
            clients.outputs({"theta": theta, BUFFERS: buffers}, position, class_probabilities, x)
            for theta, buffers in zip(model["theta"].unbind(1), model[BUFFERS].unbind(1), strict=True)
        ]
        return torch.einsum("m,mnk->nk", model["weights"][position], torch.stack(scores))

    def as_module(self, model: Tensors) -> Mixture:
        pairs = zip(model["theta"], model[BUFFERS], strict=True)
        return Mixture((self.layout.filled(self.network, *pair) for pair in pairs), model["weights"])

    def sample_shares(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Return q [C, most samples, M] for components [C, M, P]; zero beyond a client's samples."""
        return self._shares(clients, self._losses(clients, theta), clients["weights"])

    def _losses(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Return the losses [C, most samples, M] of components [C, M, P] on the training samples."""
        losses = [
            clients.over_training_set({"theta": theta[:, m], BUFFERS: clients.buffers[:, m]}, sample_losses)
            for m in range(self.params.components)
        ]
        return torch.stack(losses, dim=2)

    @staticmethod
    def _shares(clients: ClientGroup, losses: Tensor, weights: Tensor) -> Tensor:
        scores = weights.log().unsqueeze(1) - losses
        is_sample = torch.arange(scores.shape[1]) < clients.num_samples.unsqueeze(1)
        return scores.softmax(dim=2) * is_sample.to(scores.device).unsqueeze(2)

    @staticmethod
    def _mean_shares(clients: ClientGroup, shares: Tensor) -> Tensor:
        """Return pi [C, M] from q [C, most samples, M]."""
        return shares.sum(dim=1) / clients.num_samples.to(shares.device).view(-1, 1)

    def _scored_weights(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Return pi [C, M] to evaluate components [C, M, P] with."""
        weights, has_trained = clients["weights"], clients["has_trained"].unsqueeze(1)
        if has_trained.all():
            return weights
        of_new = self._mean_shares(clients, self.sample_shares(clients, theta))
        return torch.where(has_trained, weights, of_new)

    def _maximise(
        self,
        clients: ClientGroup,
        theta: Tensor,
        shares: Tensor,
        epochs: int | None = None,
        purpose: str = "batches",
    ) -> Tensor:
        """Train the components [C, M, P] on their shares of the samples."""
        trained = []
        for m in range(self.params.components):

            def gradient(
                weights: Tensor, batch: Batch, share: Tensor = shares[..., m]
            ) -> tuple[Tensor, Tensor]:
                tensors = {"theta": weights, "share": batch.pick(share)}
                gradients, losses = clients.gradient(_weighted_loss, tensors, batch)
                # the recorded loss is a mean over M passes, the mixture's loss is their sum
                return gradients["theta"], losses * self.params.components

            with clients.buffers_of_model(m):
                component = clients.sgd(theta[:, m], gradient=gradient, epochs=epochs, purpose=purpose)
            trained.append(component.theta)
        return torch.stack(trained, dim=1)


def _weighted_loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    losses = cross_entropy(forward.logits(tensors["theta"], batch.x), batch.y, reduction="none")
    return (tensors["share"].detach() * losses).mean()


class Mixture(nn.Module):
    """Networks with weights [M] that sum to 1; logits are the logarithm of the mixed probabilities."""

    parts = (
        "class probabilities are the sum over m of weights[m] * softmax(components.m(x)); the logits are "
        "their logarithm"
    )

    def __init__(self, components: Iterable[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack([component(x).softmax(dim=1) for component in self.components])
        return torch.einsum("m,mnk->nk", self.get_buffer("weights"), scores).log()
