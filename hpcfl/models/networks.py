"""What a model is, the convolutional networks of the papers and a multilayer perceptron.

Max-pooling comes before ReLU: the two commute, so the function is the papers', at a quarter of ReLU's cost.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt, Strict
from torch import Tensor, nn

from hpcfl.config.keys import NetworkOptions
from hpcfl.errors import UserError
from hpcfl.samples import SampleKind, SampleType


class Network(nn.Module):
    """A body that maps samples to features [n, F] and a head that maps features to logits [n, K]."""

    def __init__(self, body: OrderedDict[str, nn.Module], head: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(body)
        self.head = nn.Sequential(head)

    @property
    def num_features(self) -> int:
        """Width F of the features: what the head's first linear layer takes. UserError without one."""
        for module in self.head.modules():
            if isinstance(module, nn.Linear):
                return module.in_features
        raise UserError("this method needs a model whose head has a linear layer (torch.nn.Linear)")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@dataclass(frozen=True)
class Model:
    """A family of networks, one for each type of samples, number of classes and choice of options.

    `kinds` are the kinds of samples that the family takes; `has_batched_engine` is False if torch.func.vmap
    cannot follow its networks.
    """

    options: ClassVar[type[NetworkOptions]]
    kinds: ClassVar[tuple[SampleKind, ...]] = ("images",)
    has_batched_engine: ClassVar[bool] = True
    description: str

    @property
    def smallest_side(self) -> int:
        """Pixels that an image needs in both directions, or steps that a series needs."""
        return 1

    def build(self, sample: SampleType, num_classes: int, options: Any) -> Network:
        """Build with weights from torch's generator; `options` are of this model's class."""
        raise NotImplementedError


class ConvNetOptions(NetworkOptions):
    """Options of the convolutional networks."""

    batchnorm: bool = False
    """A BatchNorm module after every convolution (pFedLA uses it for CIFAR only)."""
    groupnorm: int | None = Field(None, ge=1)
    """GroupNorm instead of BatchNorm, with this many groups of channels; null: none. It keeps no running
    statistics."""

    def model_post_init(self, _: Any) -> None:
        if self.batchnorm and self.groupnorm is not None:
            raise ValueError("batchnorm and groupnorm exclude each other; set one of them to false or null")


@dataclass(frozen=True)
class ConvNet(Model):
    """Convolutions with pooling, then fully connected layers; the last of them is the head."""

    options = ConvNetOptions
    parts: ClassVar[tuple[Callable[..., nn.Module], ...]] = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)
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

    def build(self, sample: SampleType, num_classes: int, options: ConvNetOptions) -> Network:
        in_channels, *sides = sample.shape
        convolution, norm, pool = self.parts
        body: OrderedDict[str, nn.Module] = OrderedDict()
        for number, out_channels in enumerate(self.channels, start=1):
            body[f"conv{number}"] = convolution(in_channels, out_channels, self.kernel, padding=self.padding)
            if options.batchnorm:
                body[f"bn{number}"] = norm(out_channels)
            if options.groupnorm is not None:
                body[f"gn{number}"] = group_norm(options.groupnorm, out_channels)
            body[f"pool{number}"] = pool(2)
            body[f"relu{number}"] = nn.ReLU()
            sides = [(side + 2 * self.padding - self.kernel + 1) // 2 for side in sides]
            in_channels = out_channels
        return with_linear_layers(body, in_channels * math.prod(sides), self.hidden, num_classes)


@dataclass(frozen=True)
class SeriesConvNet(ConvNet):
    """The same over the steps of a series."""

    kinds = ("series",)
    parts = (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d)


class MlpOptions(NetworkOptions):
    """Options of `mlp`."""

    hidden: list[Annotated[PositiveInt, Strict()]] = Field([256])
    """Widths of the hidden layers; [] is a linear model."""


class Mlp(Model):
    """Fully connected layers on flattened samples; the last of them is the head."""

    options = MlpOptions
    kinds = ("images", "series", "features")

    def build(self, sample: SampleType, num_classes: int, options: MlpOptions) -> Network:
        return with_linear_layers(OrderedDict(), math.prod(sample.shape), options.hidden, num_classes)


def group_norm(groups: int, channels: int) -> nn.GroupNorm:
    """Return a GroupNorm module; UserError if the groups do not divide the channels."""
    if channels % groups:
        raise UserError(
            f"model.groupnorm={groups} does not divide a layer's {channels} channels; set another number"
        )
    return nn.GroupNorm(groups, channels)


def with_linear_layers(
    body: OrderedDict[str, nn.Module], features: int, hidden: tuple[int, ...] | list[int], num_classes: int
) -> Network:
    """Put flatten and hidden layers on top of a body that ends in `features` numbers, then the head."""
    body["flatten"] = nn.Flatten()
    for number, out_features in enumerate(hidden, start=1):
        body[f"fc{number}"] = nn.Linear(features, out_features)
        body[f"fc{number}_relu"] = nn.ReLU()
        features = out_features
    return Network(body, OrderedDict({f"fc{len(hidden) + 1}": nn.Linear(features, num_classes)}))
