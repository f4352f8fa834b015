"""FedBN. Li et al., FedBN: federated learning on non-IID features via local batch normalization, 2021.

    theta_i <- E epochs of SGD on L_i from {w without BatchNorm, own BatchNorm}
    w       <- weighted mean of theta_i, BatchNorm left out

Choices: BatchNorm is found by module type, so ResNet's downsampling is included; its weights, biases and
running statistics never travel; weights of the mean are training-set sizes (the authors' script: uniform).
Without BatchNorm this is FedAvg, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcfl.clients import Clients
from hpcfl.messages import Cohort, Message, Upload
from hpcfl.methods.base import Context, State, weighted_mean
from hpcfl.methods.fedavg import FedAvg


class FedBN(FedAvg):
    name = "fedbn"
    summary = "FedAvg whose BatchNorm stays with the client"
    shared_parts = ()
    buffer_policies = ("local",)

    def __init__(self, context: Context, params: Any) -> None:
        super().__init__(context, params)
        self._is_batchnorm = self.layout.is_batchnorm()
        names = self.layout.batchnorm_modules
        self._travels = torch.tensor([layer.name not in names for layer in self.layers])
        if not names:
            warnings.warn(
                f"model.name={context.model_name} has no BatchNorm, so fedbn is fedavg here; "
                "model.batchnorm=true adds it",
                stacklevel=1,
            )

    def client_state(self, clients: Sequence[int]) -> State:
        return {"batchnorm": self.context.initial_parameters(clients)[:, self._is_batchnorm]}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]}, keep={"theta": self._travels})

    def train(self, clients: Clients, down: Message) -> Message:
        theta = clients.sgd(self._merge(clients, down)).theta
        clients["batchnorm"] = theta[:, self._is_batchnorm]
        return Message(rows={"theta": theta}, keep={"theta": self._travels})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        mean = weighted_mean(up, "theta", cohort.num_samples)
        server["theta"] = torch.where(self._is_batchnorm, server["theta"], mean)

    def personalised(self, clients: Clients, down: Message) -> State:
        return {"theta": self._merge(clients, down)}

    def _merge(self, clients: Clients, down: Message) -> Tensor:
        theta = down["theta"].clone(memory_format=torch.contiguous_format)
        theta[:, self._is_batchnorm] = clients["batchnorm"]
        return theta
