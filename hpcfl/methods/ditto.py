"""Ditto. Li et al., Ditto: fair and robust federated learning through personalization, ICML 2021.

    v_i     <- epochs of SGD on L_i(v) + lambda/2 ||v - w||^2 from v_i           (Algorithm 1)
    theta_i <- E epochs of SGD on L_i from w
    w       <- weighted mean of theta_i

Choices: v_i is pulled towards the received w, not towards the newly trained theta_i. The two passes are
independent and see the same mini-batches. The weights of the mean are training-set sizes (the authors use
uniform weights). Running statistics belong to v_i and stay with the client; theta_i trains on batch
statistics and keeps none. The evaluated model is v_i after its last training; the model after a download is w
with the running statistics of v_i. Training costs twice as much as FedAvg's (two gradients per mini-batch);
traffic is the same. With lambda = 0, v_i equals local training bit for bit. For a client that
takes no part in training v_i starts as w, and is trained as above (not in the paper).
"""

from __future__ import annotations

from pydantic import Field

from hpcfl.communication.messages import Message
from hpcfl.methods._own_model import OwnBesideGlobal
from hpcfl.methods.base import Params, proximal_gradient
from hpcfl.training.client_group import ClientGroup


class DittoParams(Params):
    pull: float = Field(1.0, ge=0)
    """Strength lambda of the pull towards w (the authors choose among 0.05, 0.1, 1 and 2); 0 is local
    training; training diverges if lr * lambda is above 2."""
    personal_epochs: int | None = Field(None, ge=0)
    """Epochs of v_i in a round; default: as many as `train.local_epochs`."""


class Ditto(OwnBesideGlobal):
    summary = "each client's own model, pulled towards a FedAvg model beside it"
    privacy_units = ("client",)
    Params = DittoParams
    params: DittoParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        w, epochs = down["theta"], self.params.personal_epochs
        pull = proximal_gradient(w, self.params.pull)
        clients["theta"] = clients.sgd(clients["theta"], epochs=epochs, extra_gradient=pull).theta
        with clients.discarding_buffer_updates():
            return Message(per_client={"theta": clients.sgd(w).theta})
