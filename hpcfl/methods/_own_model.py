"""What methods have in common whose clients keep a model of their own, which is the one evaluated."""

from __future__ import annotations

from collections.abc import Sequence

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Method, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.clients import Clients


class OwnModel(Method):
    """Each client keeps `theta` and its running statistics; without being sampled, as they are.

    Before its first round a client has the common initial model and is scored on it, as in the public codes:
    at low participation, read early accuracies beside the coverage of the run.
    """

    scored_moment = "training"
    buffer_policies = ("local",)

    def client_state(self, clients: Sequence[int]) -> State:
        return {"theta": self.context.initial_parameters(clients)}

    def personalised(self, clients: Clients, down: Message) -> Message:
        return Message(rows={"theta": clients["theta"]})


class OwnBesideGlobal(OwnModel, FedAvg):
    """Own models, which are evaluated, beside a global one `theta` of the server, which a download brings."""

    # whatever the order of the bases
    personalised = OwnModel.personalised

    def received(self, clients: Clients, down: Message) -> Message:
        return Message(rows={"theta": down["theta"]})
