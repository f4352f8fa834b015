"""Base of methods in which each client keeps its own model, and this model is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Method, State, Traits
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup


class OwnModel(Method):
    """Each client keeps `theta` and its running statistics; both change only in rounds that sample it.

    Before its first round, a client has the common initial model and is evaluated with it, as in public code.
    At low participation, interpret early accuracies together with the run's coverage, the share of clients
    that were sampled at least once.
    """

    traits = Traits(eval_after="training", buffers=("local",))

    def client_state(self, clients: Sequence[int]) -> State:
        return {"theta": self.context.initial_parameters(clients)}

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": clients["theta"]})


class OwnBesideGlobal(OwnModel, FedAvg):
    """Each client keeps its own model, which is evaluated; the server sends a global model `theta`."""

    traits = OwnModel.traits.replace(averages=("theta",), has_global_model=True)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Let a new client's own model start as it is after the download, and do its first round."""
        theta = self.model_after_download(clients, down).per_client["theta"]
        with clients.temporary_state(theta=theta.clone(memory_format=torch.contiguous_format)):
            return super().new_client_model(clients, down)

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"]})
