"""Local training: every client by itself, the yardstick of all personalisation.

    theta_i <- E epochs of SGD on L_i from theta_i            (no server, no traffic)

Choices: all clients start from the common initial weights; a client trains when it is sampled, so that
partial participation costs Local the same training as everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcfl.clients import Clients
from hpcfl.messages import Message
from hpcfl.methods.base import Method, State


class Local(Method):
    name = "local"
    summary = "every client trains alone"
    buffer_policies = ("local",)

    def client_state(self, clients: Sequence[int]) -> State:
        return {"theta": self.context.initial_parameters(clients)}

    def train(self, clients: Clients, down: Message) -> Message:
        clients["theta"] = clients.sgd(clients["theta"]).theta
        return Message()

    def personalised(self, clients: Clients, down: Message) -> State:
        return {"theta": clients["theta"]}
