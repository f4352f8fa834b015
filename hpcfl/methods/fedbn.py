"""FedBN. Li et al., FedBN: federated learning on non-IID features via local batch normalization, 2021.

    theta_i <- E epochs of SGD on L_i from {w without BatchNorm, own BatchNorm}
    w       <- weighted mean of theta_i, BatchNorm left out

Choices: BatchNorm layers are found by module type, so those of ResNet's downsampling are included. Their
weights, biases and running statistics never travel. The weights of the mean are training-set sizes (the
authors' script uses uniform weights). A client that takes no part in training learns BatchNorm alone. For a
network without BatchNorm, the method trains as FedAvg does and warns.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from hpcfl.methods._own_layers import OwnLayers
from hpcfl.methods.base import Context

LOG = logging.getLogger(__name__)


class FedBN(OwnLayers):
    summary = "FedAvg whose BatchNorm stays with the client"
    privacy_units = ("client",)
    own_part = "batchnorm"
    traits = OwnLayers.traits.replace(buffers=("local",))

    def __init__(self, context: Context, params: Any) -> None:
        super().__init__(context, params)
        if not self.layout.batchnorm_modules:
            LOG.warning(
                f"model.name={context.model_name} has no BatchNorm, so fedbn trains as fedavg does; "
                "networks with convolutions may have it (model.batchnorm=true)"
            )

    def shared_layers(self) -> Tensor:
        names = self.layout.batchnorm_modules
        return torch.tensor([layer.name not in names for layer in self.layers])
