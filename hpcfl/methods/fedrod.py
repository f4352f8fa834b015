"""FedRoD. Chen and Chao, On bridging generic and personalized federated learning for image classification,
ICLR 2022.

    G = g(z), z = phi(x);   phi, g <- SGD on CE(G + log n_c, y)         balanced softmax
    personal logits = stopgrad(G) + p_i(stopgrad(z));  p_i <- SGD on their CE
    phi, g <- weighted mean of the clients'

n_c is the number of the client's training samples of class c. The evaluated prediction is argmax G + p_i(z),
without log n_c, from the newest phi and g. Heads are linear, so this is one network with the head g + p_i.

Choices: both losses share a mini-batch, a forward pass and a learning rate. p_i starts as a copy of g's
initial weights (PFLlib) and stays with the client; before its first round, a client's p_i is this initial
head. `method.hyper_head` makes p_i = H(share of each class; psi), where H is a network with one hidden layer;
psi travels and is averaged like phi and g. A class without samples at the client has log n_c = -inf, so it
does not compete; n_c counts all training samples, so this class is never the label. A client with samples of
one class only has a balanced loss of 0 and returns phi and g unchanged, except for weight decay. It keeps its
weight in the mean, as in the paper: this shortens the server's step but does not change its direction. If all
clients have one class only, only the personal heads learn. A client that takes no part in training learns
p_i alone, beside phi and g as they are, from its start or, with `method.hyper_head`, from what H makes;
weight decay then acts on g + p_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from hpcfl.communication.aggregation import weighted_means
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Context, Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.randomness import draw_linear, torch_stream
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward


class FedRoDParams(Params):
    hyper_head: bool = False
    """Whether a shared network makes personal heads from class shares (the paper's hypernetwork variant)."""
    hidden: int = Field(32, ge=1)
    """Width of the hidden layer of `hyper_head`'s network (FL-bench: 32)."""


class FedRoD(FedAvg):
    summary = "a generic model by balanced softmax, plus each client's own head"
    privacy_units = ("client",)
    Params = FedRoDParams
    traits = FedAvg.traits.replace(
        averages=("theta", "hypernetwork"),
        differences=("theta", "hypernetwork"),
        linear_head=True,
        refuses={"label_smoothing": "whose loss leaves out the classes that a client does not have"},
    )
    params: FedRoDParams

    def __init__(self, context: Context, params: FedRoDParams) -> None:
        super().__init__(context, params)
        head, hidden = self.layout.head.stop - self.layout.head.start, params.hidden
        self._shapes = [(hidden, context.num_classes), (hidden,), (head, hidden), (head,)]

    def server_state(self) -> State:
        psi = {"hypernetwork": self._first_psi()} if self.params.hyper_head else {}
        return super().server_state() | psi

    def client_state(self, clients: Sequence[int]) -> State:
        if self.params.hyper_head:
            return {}
        return {"head": self.context.initial_parameters(clients)[:, self.layout.head]}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={name: server[name] for name in ("theta", "hypernetwork") if name in server})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        # what makes the personal head: the head itself, or the network that generates it
        own = "hypernetwork" if self.params.hyper_head else "head"
        counts = clients.class_counts(self.context.num_classes)
        generic = clients.descent(down["theta"])
        personal = clients.descent(down[own] if own in down else clients[own])
        for batch in clients.batches():
            members = batch.members
            tensors = {"theta": generic.theta[members], own: personal.theta[members]}
            gradients, losses = clients.gradient(self._loss, tensors | {"counts": counts[members]}, batch)
            generic.step(members, gradients["theta"])
            personal.step(members, gradients[own])
            clients.record(batch, losses)
        if own in down:
            return Message(per_client={"theta": generic.theta, own: personal.theta})
        clients[own] = personal.theta
        return Message(per_client={"theta": generic.theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        names = [name for name in ("theta", "hypernetwork") if name in server]
        server.update(weighted_means(up, dict.fromkeys(names, cohort.num_samples)))

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self._with_both_heads(clients, down)})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        theta, head = self._with_both_heads(clients, down), self.layout.head
        with self.buffers.keeping_averages(clients):
            return Message(per_client={"theta": clients.sgd(theta, trained=head, purpose="finetune").theta})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": self._with_both_heads(clients, up)})

    def generated(self, psi: Tensor, counts: Tensor) -> Tensor:
        """Return the personal head [numbers of the head] that H(share of each class [K]; psi) makes."""
        parts = psi.split([math.prod(shape) for shape in self._shapes])
        weight1, bias1, weight2, bias2 = (p.view(s) for p, s in zip(parts, self._shapes, strict=True))
        return weight2 @ (weight1 @ (counts / counts.sum()) + bias1).relu() + bias2

    def _with_both_heads(self, clients: ClientGroup, generic: Message) -> Tensor:
        """Return the networks [C, P] whose head is g + p_i, of the generic part as it was sent or trained."""
        theta = generic["theta"].clone(memory_format=torch.contiguous_format)
        if self.params.hyper_head:
            own = vmap(self.generated)(
                generic["hypernetwork"], clients.class_counts(self.context.num_classes)
            )
        else:
            own = clients["head"]
        theta[:, self.layout.head] += own
        return theta

    def _first_psi(self) -> Tensor:
        """Draw psi as PyTorch draws linear layers."""
        stream = torch_stream(self.context.seed, "hyper head")
        inputs = [self.context.num_classes] * 2 + [self.params.hidden] * 2
        drawn = [
            draw_linear((math.prod(shape),), n, stream) for shape, n in zip(self._shapes, inputs, strict=True)
        ]
        return torch.cat(drawn)

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        theta, counts = tensors["theta"], tensors["counts"].detach()
        features = forward.features(theta, batch.x)
        generic = forward.head(theta, features)
        head = tensors["head"] if "head" in tensors else self.generated(tensors["hypernetwork"], counts)
        with_head = torch.cat([theta.detach()[self.layout.body], head])
        personal = generic.detach() + forward.head(with_head, features.detach())
        balanced = generic + counts.log()
        return cross_entropy(balanced, batch.y) + cross_entropy(personal, batch.y)
