"""pFedHN. Shamsian et al., Personalized federated learning using hypernetworks, ICML 2021.

    theta_i = H(v_i; phi)
    Delta_i = theta_i - (theta_i after E epochs of SGD on L_i)
    phi    <- phi - lr_h (d theta_i / d phi)^T Delta_i, v_i likewise            (Algorithm 1)

H and the embeddings v_i stay on the server. Evaluated is theta_i as generated, before any local training. In
the variant pFedHN-PC (`method.private_head`) H generates the body, and each client keeps a head of its own
(in the authors' code with its optimiser's momentum; here momentum starts anew in each round).

Choices: in the paper, each round has one client, for which the server takes one step. Here the server takes
one step per round, with Delta_i divided by the size of the cohort in the gradients of phi and of v_i alike.
`method.server_step=sequential` takes one step per client instead, in client order, with the Delta_i of the
models that were sent; with ten clients and momentum this diverges at the same lr_h. Gradients are clipped on
the server only (the authors also clip them in clients). Momentum and weight decay of an embedding act only in
rounds that sample its client. Running statistics cannot be generated and stay with the client. At the start,
the generator returns the common initial weights for every client. In the authors' code the head of the
generator is drawn instead (`method.start=drawn`); drawn scales of BatchNorm would be near zero.

A client that takes no part in training learns its embedding alone, as the paper does for novel clients. Each
local epoch is a round of Algorithm 1 with this client as the cohort, in which phi stays as it is. v_i starts
at the mean of the others' embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.methods.base import Context, Method, Params, State, Traits
from hpcfl.methods.checks import check_body
from hpcfl.models.generators import EMBEDDING, HEAD_WEIGHT, Generator
from hpcfl.parameters import COLUMNS_AT_ONCE, under
from hpcfl.training.client_group import ClientGroup

HYPERNETWORK, VELOCITY = "hypernetwork/", "velocity/"


class PFedHNParams(Params):
    private_head: bool = False
    """Whether each client keeps its own head and only the body is generated (pFedHN-PC)."""
    embedding: int | None = Field(None, ge=1)
    """Length of v_i; default: 1 + N // 4 (authors)."""
    hidden: int = Field(100, ge=1)
    """Width of the hypernetwork (authors: 100)."""
    hidden_layers: int = Field(3, ge=0)
    """Hidden layers after the first (authors: 3)."""
    hypernetwork_lr: float = Field(0.1, ge=0)
    """Learning rate lr_h (authors: 0.01, with one client per step). Steps with the mean of ten clients allow
    up to 1, steps of single clients diverge at 0.3; 0 keeps all models at their initial weights."""
    hypernetwork_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the server's SGD (authors: 0.9)."""
    hypernetwork_weight_decay: float = Field(0.001, ge=0)
    """Weight decay of the server's SGD (authors: 0.001). When clients know their training samples by heart,
    nothing counteracts it: in long runs accuracy falls, and with 0 it does not."""
    clip: float = Field(50.0, gt=0)
    """Longest gradient of the hypernetwork (authors: 50)."""
    server_step: Literal["mean", "sequential"] = "mean"
    """One step with the mean of the cohort's gradients, or one a client, which needs a smaller lr_h."""
    start: Literal["common", "drawn"] = "common"
    """Whether all models begin with the common initial weights, or as a drawn generator makes them."""


class PFedHN(Method):
    summary = "a hypernetwork on the server generates each client's model"
    privacy_units = ("sample",)
    Params = PFedHNParams
    traits = Traits(buffers=("local",))
    params: PFedHNParams

    def __init__(self, context: Context, params: PFedHNParams) -> None:
        super().__init__(context, params)
        if context.weights_are_given and params.start == "drawn":
            raise UserError(
                f"method.start=drawn lets method.name={self.name} draw all weights; drop model.weights, or "
                "use method.start=common"
            )
        if params.private_head:
            check_body(self.name, context)
        self._generated = self.layout.body if params.private_head else slice(0, self.layout.size)
        embedding = 1 + context.num_clients // 4 if params.embedding is None else params.embedding
        self.generator = Generator(
            context.num_clients, self._generated.stop, embedding, params.hidden, params.hidden_layers
        )

    def server_state(self) -> State:
        start = self.context.initial_parameters()[self._generated] if self.params.start == "common" else None
        state = self.generator.initial(self.context.seed, start)
        velocity = {VELOCITY + name: torch.zeros_like(tensor) for name, tensor in state.items()}
        return {HYPERNETWORK + name: tensor for name, tensor in state.items()} | velocity

    def client_state(self, clients: Sequence[int]) -> State:
        head = self.context.initial_parameters(clients)[:, self.layout.head]
        return {"head": head} if self.params.private_head else {}

    def download(self, server: State, cohort: Cohort) -> Message:
        theta = torch.zeros(len(cohort), self.layout.size)
        theta[:, self._generated] = self.generator.generate(under(server, HYPERNETWORK), cohort.clients)
        return Message(per_client={"theta": theta}, layer_mask=self._layer_mask("theta"))

    def train(self, clients: ClientGroup, down: Message) -> Message:
        start = self._with_head(clients, down)
        theta = clients.sgd(start).theta
        if self.params.private_head:
            clients["head"] = theta[:, self.layout.head]
        return Message(per_client={"update": start - theta}, layer_mask=self._layer_mask("update"))

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        if self.params.server_step == "mean":
            self._step(server, cohort.clients, up.collect()["update"] / len(cohort))
            return
        for positions, block in up:
            for client, delta in zip(cohort.clients[positions], block.per_client["update"], strict=True):
                self._step(server, [client], delta.unsqueeze(0))

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self._with_head(clients, down)})

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        weights = under(server, HYPERNETWORK)
        return Message(shared=weights | {EMBEDDING: weights[EMBEDDING].mean(dim=0)})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Learn a new client's embedding, from the mean one, under the hypernetwork as it is."""
        embedding = down[EMBEDDING].clone(memory_format=torch.contiguous_format)
        weights, velocity = down.shared | {EMBEDDING: embedding}, torch.zeros_like(embedding)
        everyone = range(len(clients))

        def generated() -> Message:
            theta = torch.zeros(len(clients), self.layout.size, device=clients.device)
            theta[:, self._generated] = self.generator.generate(weights, everyone)
            return Message(per_client={"theta": theta})

        for epoch in range(clients.local_epochs):
            start = self._with_head(clients, generated())
            theta = clients.sgd(start, epochs=1, purpose=f"finetune/{epoch}").theta
            if self.params.private_head:
                with clients.temporary_state():
                    clients["head"] = theta[:, self.layout.head]
            delta = (start - theta)[:, self._generated]
            slope = self.generator.gradients(weights, everyone, delta).others[EMBEDDING]
            shrink = (self.params.clip / slope.norm(dim=1, keepdim=True)).clamp(max=1.0)
            velocity.mul_(self.params.hypernetwork_momentum).add_(slope * shrink)
            self._move(embedding, velocity)
        return Message(per_client={"theta": self._with_head(clients, generated())})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        # start - (start - trained) is the trained model; a private head comes from the client's state
        theta = down["theta"] - up.per_client["update"]
        return Message(per_client={"theta": self._with_head(clients, Message(per_client={"theta": theta}))})

    def _layer_mask(self, name: str) -> State:
        return {name: self.body_layers} if self.params.private_head else {}

    def _with_head(self, clients: ClientGroup, down: Message) -> Tensor:
        if not self.params.private_head:
            return down["theta"]
        return torch.cat([down["theta"][:, self.layout.body], clients["head"]], dim=1)

    def _step(self, server: State, clients: Sequence[int], deltas: Tensor) -> None:
        """Move the hypernetwork and some clients' embeddings against deltas [S, P], by clipped SGD."""
        weights, velocity = under(server, HYPERNETWORK), under(server, VELOCITY)
        gradients = self.generator.gradients(weights, clients, deltas[:, self._generated])
        shrink = (self.params.clip / gradients.norm()).clamp(max=1.0)
        for name, gradient in gradients.others.items():
            rows = list(clients) if name == EMBEDDING else slice(None)
            weight, moved = weights[name][rows], velocity[name][rows]
            moved.mul_(self.params.hypernetwork_momentum).add_(gradient.mul_(shrink))
            self._move(weight, moved)
            if name == EMBEDDING:
                # rows chosen by a list are copies
                weights[name][rows], velocity[name][rows] = weight, moved
        # the head outweighs a model a hundredfold: it is read once, in pieces that fit a processor's cache
        features = gradients.features * shrink
        pieces = (tensor.split(COLUMNS_AT_ONCE) for tensor in (weights[HEAD_WEIGHT], velocity[HEAD_WEIGHT]))
        for weight, moved, slopes in zip(*pieces, gradients.slopes.T.split(COLUMNS_AT_ONCE), strict=True):
            moved.addmm_(slopes, features, beta=self.params.hypernetwork_momentum)
            self._move(weight, moved)

    def _move(self, weight: Tensor, velocity: Tensor) -> None:
        """Finish a step in place: weight decay to the velocity, and the velocity to the weight."""
        velocity.add_(weight, alpha=self.params.hypernetwork_weight_decay)
        weight.sub_(velocity, alpha=self.params.hypernetwork_lr)
