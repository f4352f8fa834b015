"""FedAS. Yang, Huang, Ye, FedAS: bridging inconsistency in personalized federated learning, CVPR 2024.

    phi    <- epochs of SGD on mean (phi(x) - C_i,y)^2 from the received phi
    (phi_i, h_i) <- E epochs of SGD on L_i from (phi, h_i), body and head together
    C_i,c   = mean of phi_i(x) over the client's samples of class c
    phi    <- sum_i w_i phi_i,  w_i in proportion to the trace of client i's Fisher information,
              sum over its samples of ||d log p(y | x; phi_i, h_i)||^2

The first line, the alignment, makes the received body produce features like those that the client's own body
had when it trained last, so that the client's head fits them.

Differs from the authors' code:
  information  gradients are those of each sample. (The authors square the gradients of mini-batches' means,
               so that their weights depend on the size of mini-batches.) As there, it is a sum over samples
               and no mean: clients with equal traces a sample count by their samples
  loss         a mean over samples and features. (The authors add up the means of each class of a mini-batch:
               with the same learning rate, this alignment is weaker.)
  who          the clients of the round's cohort alone compute it. (In the authors' code all clients do.)
  start        each client aligns the server's phi. (In the authors' code a client's alignment changes the
               server's model, from which the next client of the round starts.)
  evaluated    the newest phi after the alignment, with the client's own head. (The authors' code scores phi_i
               and h_i after the client's last training.) The next round aligns again, in the same order of
               samples

Choices:
  first round  a client that has not trained yet has no C_i,c that mean anything: it takes over phi as it is
               (the authors' code aligns to the means of the initial body)
  optimiser    the alignment has the run's momentum and weight decay (authors: none)
  BatchNorm    running statistics are updated in both phases; the server averages them by training-set sizes
  weights      the information is that of body and head, in evaluation mode. Clients send its mean over
               samples, which fits into codecs better than the sum. If it is 0 for all clients of a round,
               training-set sizes are the weights
  unseen       a client that takes no part in training learns a head under phi as it is, as in FedPer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._prototypes import distance, gradient_towards, prototypes
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedper import FedPer
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward

NUMBERS_AT_ONCE = 2**24
"""Most numbers of gradients by sample that are in memory at once, or one sample's."""


class FedASParams(Params):
    alignment_epochs: int = Field(1, ge=0)
    """Epochs that align the received body (authors: 1); 0 leaves it as it is."""
    alignment_lr: float = Field(0.01, gt=0)
    """Learning rate of the alignment (authors: 0.01), with the run's `train.lr_decay`."""


class FedAS(FedPer):
    summary = "a shared body that clients align to their own, weighed by Fisher information"
    Params = FedASParams
    traits = FedPer.traits.replace(linear_head=True)
    params: FedASParams

    def client_state(self, clients: Sequence[int]) -> State:
        count, classes = len(clients), self.context.num_classes
        return super().client_state(clients) | {
            "prototypes": torch.zeros(count, classes, self.context.network.num_features),
            "is_known": torch.zeros(count, classes, dtype=torch.uint8),
        }

    def train(self, clients: ClientGroup, down: Message) -> Message:
        up = super().train(clients, down)
        theta = up.per_client["theta"]
        found = prototypes(clients, theta, self.context.num_classes)
        clients["prototypes"], clients["is_known"] = found.means, found.is_held
        return up | Message(per_client={"information": information(clients, theta)}, num_clients=len(clients))

    def local_training(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        return super().local_training(clients, self.aligned(clients, theta))

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        weights = up.collect("information")["information"].double() * cohort.num_samples
        weights = weights if weights.any() else cohort.num_samples
        mean = weighted_mean(up, "theta", weights)
        server["theta"] = torch.where(self.is_own, server["theta"], mean)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.aligned(clients, self.merged(clients, down))})

    def aligned(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Train the bodies of models [C, P] towards their client's prototypes; new clients' stay."""
        targets, is_known = clients["prototypes"], clients["is_known"]
        has_trained = (is_known == 1).any(dim=1, keepdim=True)
        if not has_trained.any():
            return theta
        gradient = gradient_towards(clients, _distance_of_body, targets, is_known)
        lr = self.params.alignment_lr * clients.lr_decay
        descent = clients.descent(theta, lr=lr, trained=self.layout.body)
        with clients.discarding_buffer_updates(~has_trained):
            for batch in clients.batches("alignment", self.params.alignment_epochs):
                slope, _ = gradient(descent.theta[batch.members], batch)
                descent.step(batch.members, slope)
        return torch.where(has_trained, descent.theta, theta)


def information(clients: ClientGroup, theta: Tensor) -> Tensor:
    """Return the trace of each client's Fisher information [C], a mean over samples, of models [C, P]."""
    model = {"theta": theta, BUFFERS: clients.buffers}
    return torch.stack([found.mean() for found in clients.training_outputs(model, squared_gradients)])


def squared_gradients(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return ||d log p(y | x) / d weights||^2 of each sample [n].

    The network must be in evaluation mode: in training mode, BatchNorm lets samples depend on each other.
    """
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(network, weights, x.unsqueeze(0)), y.unsqueeze(0))

    at_once = max(1, NUMBERS_AT_ONCE // sum(weight.numel() for weight in weights.values()))
    try:
        return vmap(lambda *sample: _squared(grad(loss)(weights, *sample).values()), chunk_size=at_once)(x, y)
    except RuntimeError:
        # vmap has no rule for an LSTM, nor for a network of one's own that looks at its numbers
        return torch.stack([_squared_gradient(network, *sample) for sample in zip(x, y, strict=True)])


@torch.enable_grad()
def _squared_gradient(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(network(x.unsqueeze(0)), y.unsqueeze(0))
    return _squared(torch.autograd.grad(loss, [*network.parameters()]))


def _squared(slopes: Iterable[Tensor]) -> Tensor:
    return torch.stack([slope.square().sum() for slope in slopes]).sum()


def _distance_of_body(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    features = forward.features(tensors["theta"], batch.x)
    return distance(features, batch.y, tensors["targets"].detach(), tensors["is_known"].detach())
