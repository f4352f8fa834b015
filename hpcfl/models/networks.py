"""What a model is, the convolutional networks of the papers and a multilayer perceptron.

Max-pooling comes before ReLU: the two commute, so the function is the papers', at a quarter of ReLU's cost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt, Strict
from torch import Tensor, nn

from hpcfl.config.keys import NetworkOptions

ImageShape = tuple[int, int, int]
"""Channels, height and width."""


class Network(nn.Module):
    """A body that maps images to features [n, F] and a head that maps features to logits [n, K]."""

    def __init__(self, body: OrderedDict[str, nn.Module], head: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(body)
        self.head = nn.Sequential(head)

    @property
    def num_features(self) -> int:
        """Width F of the features."""
        (last,) = self.head.children()
        assert isinstance(last, nn.Linear)
        return last.in_features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@dataclass(frozen=True)
class Model:
    """A family of networks, one for each image shape, number of classes and choice of options."""

    options: ClassVar[type[NetworkOptions]]
    description: str

    @property
    def smallest_side(self) -> int:
        """Pixels that an image needs in both directions."""
        return 1

    def build(self, shape: ImageShape, num_classes: int, options: Any) -> Network:
        """Build with weights from torch's generator; `options` are of this model's class."""
        raise NotImplementedError


class ConvNetOptions(NetworkOptions):
    """Options of the convolutional networks."""

    batchnorm: bool = False
    """A BatchNorm module after every convolution (pFedLA uses it for CIFAR only)."""


@dataclass(frozen=True)
class ConvNet(Model):
    """Convolutions with pooling, then fully connected layers; the last of them is the head."""

    options = ConvNetOptions
    channels: tuple[int, ...]
    kernel: int
    padding: int
    hidden: tuple[int, ...]

    @property
    def smallest_side(self) -> int:
        side = 1
        for _ in self.channels:
            side = 2 * side + self.kernel - 1 - 2 * self.padding
        return side

    def build(self, shape: ImageShape, num_classes: int, options: ConvNetOptions) -> Network:
        in_channels, height, width = shape
        body: OrderedDict[str, nn.Module] = OrderedDict()
        for number, out_channels in enumerate(self.channels, start=1):
            body[f"conv{number}"] = nn.Conv2d(in_channels, out_channels, self.kernel, padding=self.padding)
            if options.batchnorm:
                body[f"bn{number}"] = nn.BatchNorm2d(out_channels)
            body[f"pool{number}"] = nn.MaxPool2d(2)
            body[f"relu{number}"] = nn.ReLU()
            height, width = ((side + 2 * self.padding - self.kernel + 1) // 2 for side in (height, width))
            in_channels = out_channels
        return _with_linear_layers(body, in_channels * height * width, self.hidden, num_classes)


class MlpOptions(NetworkOptions):
    """Options of `mlp`."""

    hidden: list[Annotated[PositiveInt, Strict()]] = Field([256])
    """Widths of the hidden layers; [] is a linear model."""


class Mlp(Model):
    """Fully connected layers on flattened images; the last of them is the head."""

    options = MlpOptions

    def build(self, shape: ImageShape, num_classes: int, options: MlpOptions) -> Network:
        channels, height, width = shape
        return _with_linear_layers(OrderedDict(), channels * height * width, options.hidden, num_classes)


def _with_linear_layers(
    body: OrderedDict[str, nn.Module], features: int, hidden: tuple[int, ...] | list[int], num_classes: int
) -> Network:
    """Put flatten and hidden layers on top of a body that ends in `features` numbers, then the head."""
    body["flatten"] = nn.Flatten()
    for number, out_features in enumerate(hidden, start=1):
        body[f"fc{number}"] = nn.Linear(features, out_features)
        body[f"fc{number}_relu"] = nn.ReLU()
        features = out_features
    return Network(body, OrderedDict({f"fc{len(hidden) + 1}": nn.Linear(features, num_classes)}))
