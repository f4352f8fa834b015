"""Local training: every client by itself, the yardstick of all personalisation.

    theta_i <- E epochs of SGD on L_i from theta_i            (no server, no traffic)

Choices: all clients start from the common initial weights; a client trains when it is sampled, so that
partial participation costs Local the same training as everybody else.
"""

from __future__ import annotations

from hpcfl.communication.messages import Message
from hpcfl.methods._own_model import OwnModel
from hpcfl.training.clients import Clients


class Local(OwnModel):
    name = "local"
    summary = "every client trains alone"

    def train(self, clients: Clients, down: Message) -> Message:
        clients["theta"] = clients.sgd(clients["theta"]).theta
        return Message()
