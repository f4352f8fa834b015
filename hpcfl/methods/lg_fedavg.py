"""LG-FedAvg. Liang et al., Think locally, act globally: federated learning with local and global
representations, 2020.

    theta_i    <- E epochs of SGD on L_i from {own lower layers, received upper layers}, all together
    upper part <- weighted mean of the clients' upper layers                    (Algorithm 1)

Choices: the upper layers are the last `method.global_layers` layers, those nearest to the output. Running
statistics stay with the client, as its lower layers do. Clients start from the common initial weights; in the
authors' experiments they start from a model that FedAvg has trained. The evaluated model has the client's own
lower layers and the newest upper layers. A client that takes no part in training learns its lower layers,
from the initial ones, under the upper layers as they are (the paper's test on new devices averages the
predictions of all old ones instead).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.methods._own_layers import OwnLayers
from hpcfl.methods.base import Context, Params
from hpcfl.methods.checks import check_num_layers


class LGFedAvgParams(Params):
    global_layers: int = Field(2, ge=1)
    """Layers that travel, counted from the output (FedRep's authors: the last 2); all of them is FedAvg
    but for running statistics."""


class LGFedAvg(OwnLayers):
    summary = "each client's own lower layers under shared upper ones"
    privacy_units = ("client", "sample")
    Params = LGFedAvgParams
    own_part = "lower_layers"
    traits = OwnLayers.traits.replace(buffers=("local", "average"))
    params: LGFedAvgParams

    def __init__(self, context: Context, params: LGFedAvgParams) -> None:
        super().__init__(context, params)
        check_num_layers(self.layers, "global_layers", params.global_layers)

    def shared_layers(self) -> Tensor:
        number = torch.arange(len(self.layers))
        return number >= len(self.layers) - self.params.global_layers
