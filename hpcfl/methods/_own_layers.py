"""Base of methods in which each client keeps some layers private and shares the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Context, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import columns
from hpcfl.training.client_group import ClientGroup, GradientOf


class SharedLayers(FedAvg):
    """FedAvg of the layers in `layer_mask`; the server keeps all others as they were at the start."""

    def __init__(self, context: Context, params: Any) -> None:
        super().__init__(context, params)
        self.layer_mask = self.shared_layers()
        self.is_own = columns(self.layers, ~self.layer_mask)

    def shared_layers(self) -> Tensor:
        """Return which layers travel, bool [L]; default: those of the body."""
        return self.body_layers

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]}, layer_mask={"theta": self.layer_mask})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        mean = weighted_mean(up, "theta", cohort.num_samples)
        server["theta"] = torch.where(self.is_own, server["theta"], mean)


class OwnLayers(SharedLayers):
    """Each client's state holds only the layers of its model that do not travel.

    Private layers never travel, so the server has no average of them: before its first round, a client is
    evaluated with its initial private layers. (The code of FedRep's authors has an average of the heads,
    because of an aliased tensor.) At low participation, interpret early accuracies together with the run's
    coverage, the share of clients that were sampled at least once.
    """

    traits = FedAvg.traits.replace(has_global_model=False)
    own_part: ClassVar[str]
    """Name of the private layers in the client state and in checkpoints."""
    trained_part: slice = slice(None)
    """The numbers of models [P] that rounds and fine-tuning train; default: all."""

    def client_state(self, clients: Sequence[int]) -> State:
        initial = self.layout.flatten(self.network)[0]
        return {self.own_part: initial[self.is_own].repeat(len(clients), 1)}

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = self.local_training(clients, self.merged(clients, down))
        clients[self.own_part] = theta[:, self.is_own]
        return Message(per_client={"theta": theta}, layer_mask={"theta": self.layer_mask})

    def local_training(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        """Train models [C, P] and return them; default: SGD on `trained_part` by `training_gradient`."""
        gradient = self.training_gradient(clients, Message(per_client={"theta": theta}))
        return clients.sgd(theta, gradient=gradient, trained=self.trained_part).theta

    def training_gradient(self, clients: ClientGroup, model: Message) -> GradientOf | None:
        """Return the `gradient` for `ClientGroup.sgd` of all local training, which starts from the evaluated
        models `model`; default: None, that of the cross-entropy."""
        return None

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.merged(clients, down)})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        model = self.eval_model(clients, down)
        gradient = self.training_gradient(clients, model)
        return self._finetuned(clients, model, epochs, gradient=gradient, trained=self.trained_part)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Train a new client's private layers, from their start, beside the server's layers."""
        model = self.eval_model(clients, down)
        theta, gradient = model["theta"], self.training_gradient(clients, model) or clients.plain_gradient
        # by index and not by mask: a mask would make a GPU wait for the host
        places = self.is_own.nonzero().squeeze(1).to(clients.device)
        own = clients.descent(theta[:, places])
        with self.buffers.keeping_averages(clients):
            for batch in clients.batches("finetune"):
                theta[:, places] = own.theta
                slopes, losses = gradient(theta[batch.members], batch)
                own.step(batch.members, slopes[:, places])
                clients.record(batch, losses)
        theta[:, places] = own.theta
        return model

    def merged(self, clients: ClientGroup, down: Message) -> Tensor:
        """Return whole models [C, P]: the downloaded layers and each client's own private layers."""
        theta = down["theta"].clone(memory_format=torch.contiguous_format)
        theta[:, self.is_own] = clients[self.own_part]
        return theta
