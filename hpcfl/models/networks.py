"""The convolutional networks of the papers, each a `body` (feature extractor) and a `head`.

Max-pooling stands before ReLU: the two commute, so the function is the papers', at a quarter of ReLU's cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from hpcfl.errors import UserError
from hpcfl.randomness import stream_seed


class NetworkOptions(BaseModel):
    """Options under `model.*` beside the name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    batchnorm: bool = False
    """A BatchNorm module after every convolution (pFedLA uses it for CIFAR only)."""


class Network(nn.Module):
    """A body that maps images to features [n, F] and a head that maps features to logits [n, K]."""

    def __init__(self, body: OrderedDict[str, nn.Module], head: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(body)
        self.head = nn.Sequential(head)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@dataclass(frozen=True)
class ConvNet:
    """Two convolutions with pooling, then fully connected layers; the last of them is the head."""

    description: str
    channels: tuple[int, int]
    kernel: int
    padding: int
    hidden: tuple[int, ...]

    def build(
        self, name: str, shape: tuple[int, int, int], num_classes: int, options: NetworkOptions
    ) -> Network:
        """Build for images [C, H, W]; UserError, naming the network, if they are too small."""
        in_channels, height, width = shape
        body: OrderedDict[str, nn.Module] = OrderedDict()
        for number, out_channels in enumerate(self.channels, start=1):
            body[f"conv{number}"] = nn.Conv2d(in_channels, out_channels, self.kernel, padding=self.padding)
            if options.batchnorm:
                body[f"bn{number}"] = nn.BatchNorm2d(out_channels)
            body[f"pool{number}"] = nn.MaxPool2d(2)
            body[f"relu{number}"] = nn.ReLU()
            height, width = (
                (side + 2 * self.padding - self.kernel + 1) // 2 if side else 0 for side in (height, width)
            )
            in_channels = out_channels
        if height < 1 or width < 1:
            raise UserError(
                f"model.name={name} needs images larger than {shape[1]}x{shape[2]}; allowed for 4x4 and up: "
                "digits_cnn, for 16x16 and up: all"
            )
        body["flatten"] = nn.Flatten()
        features = in_channels * height * width
        for number, out_features in enumerate(self.hidden, start=1):
            body[f"fc{number}"] = nn.Linear(features, out_features)
            body[f"fc{number}_relu"] = nn.ReLU()
            features = out_features
        last = f"fc{len(self.hidden) + 1}"
        return Network(body, OrderedDict({last: nn.Linear(features, num_classes)}))


MODELS: dict[str, ConvNet] = {
    "digits_cnn": ConvNet("small CNN for 8x8 images: conv 16/32 3x3, fc 64", (16, 32), 3, 1, (64,)),
    "lenet": ConvNet(
        "LeNet-16/32 of pFedHN and pFedLA: conv 16/32 5x5, fc 120/84", (16, 32), 5, 0, (120, 84)
    ),
    "lenet_small": ConvNet(
        "LeNet-6/16 of FedFomo and pFedMB: conv 6/16 5x5, fc 120/84", (6, 16), 5, 0, (120, 84)
    ),
    "fedavgcnn": ConvNet("PFLlib's FedAvgCNN: conv 32/64 5x5, fc 512", (32, 64), 5, 0, (512,)),
}


def build_network(
    name: str,
    shape: tuple[int, int, int],
    num_classes: int,
    options: NetworkOptions,
    seed: int,
    client: int = -1,
) -> Network:
    """Build a network whose weights depend on (seed, client) alone; client -1 is the common start."""
    builder: Callable[..., Network] = MODELS[name].build
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "initial weights", 0, client))
        return builder(name, shape, num_classes, options)
