"""What methods have in common whose clients keep some layers to themselves and share the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpcfl.communication.channel import Upload
from hpcfl.communication.means import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods.base import Context, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import columns
from hpcfl.training.clients import Clients


class OwnLayers(FedAvg):
    """FedAvg of the layers `travels`; the rest of each client's model, and nothing else, is its state.

    Before its first round a client is scored with its initial layers: own layers never travel, so that there
    is no average of them to fall back on (FedRep's authors, whose code averages heads by an alias, have one).
    At low participation, read early accuracies beside the coverage of the run.
    """

    own_part: ClassVar[str]
    """What the layers are called that stay, in checkpoints."""

    def __init__(self, context: Context, params: Any) -> None:
        super().__init__(context, params)
        self.travels = self.shared_layers()
        self.is_own = columns(self.layers, ~self.travels)

    def shared_layers(self) -> Tensor:
        """Return which layers travel, bool [L]."""
        raise NotImplementedError

    def client_state(self, clients: Sequence[int]) -> State:
        return {self.own_part: self.context.initial_parameters(clients)[:, self.is_own]}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]}, keep={"theta": self.travels})

    def train(self, clients: Clients, down: Message) -> Message:
        theta = self.local_training(clients, self.merged(clients, down))
        clients[self.own_part] = theta[:, self.is_own]
        return Message(rows={"theta": theta}, keep={"theta": self.travels})

    def local_training(self, clients: Clients, theta: Tensor) -> Tensor:
        """Train whole models [C, P] and return them; default: plain SGD on all layers."""
        return clients.sgd(theta).theta

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        mean = weighted_mean(up, "theta", cohort.num_samples)
        server["theta"] = torch.where(self.is_own, server["theta"], mean)

    def personalised(self, clients: Clients, down: Message) -> Message:
        return Message(rows={"theta": self.merged(clients, down)})

    def merged(self, clients: Clients, down: Message) -> Tensor:
        """Return the downloaded layers with each client's own ones put in, [C, P]."""
        theta = down["theta"].clone(memory_format=torch.contiguous_format)
        theta[:, self.is_own] = clients[self.own_part]
        return theta
