"""Local training: every client trains alone. It is the baseline of all personalised methods.

    theta_i <- E epochs of SGD on L_i from theta_i            (no server, no traffic)

Choices: all clients start from the common initial weights. A client trains only in rounds that sample it, so
under partial participation it trains as often as with any other method. A client that takes no part in the
rounds trains for `train.unseen_epochs` from the common initial weights.
"""

from __future__ import annotations

from hpcfl.communication.messages import Message
from hpcfl.methods._own_model import OwnModel
from hpcfl.training.client_group import ClientGroup


class Local(OwnModel):
    summary = "every client trains alone"
    privacy_units = ("sample",)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        clients["theta"] = clients.sgd(clients["theta"]).theta
        return Message()
