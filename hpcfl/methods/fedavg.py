"""FedAvg. McMahan et al., Communication-efficient learning of deep networks from decentralized data, 2017.

    theta_i <- E epochs of SGD on L_i from w
    w       <- sum_{i in S} n_i theta_i / sum_{i in S} n_i     (Algorithm 1)

Choices: weights are training-set sizes, normalised over the sampled clients; running statistics are
averaged like parameters (`train.buffers=local` keeps them with the client); w is evaluated before training. A
client that takes no part in training fine-tunes w. So it does in the methods that are made from this one and
do not say otherwise.
"""

from __future__ import annotations

from typing import ClassVar

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import PrivacyUnit
from hpcfl.methods.base import Method, State, Traits
from hpcfl.training.client_group import ClientGroup


class FedAvg(Method):
    summary = "one global model, the weighted mean of the clients'"
    privacy_units: ClassVar[tuple[PrivacyUnit, ...]] = ("client", "sample")
    traits = Traits(averages=("theta",), has_global_model=True)

    def server_state(self) -> State:
        return {"theta": self.layout.flatten(self.network)[0]}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": clients.sgd(down["theta"]).theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        server["theta"] = weighted_mean(up, "theta", cohort.num_samples)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return down.only("theta")
