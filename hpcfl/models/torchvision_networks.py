"""ResNet18, MobileNetV2 and ViT of torchvision: its topology and names, with the last layer replaced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpcfl.errors import UserError, one_line
from hpcfl.models.networks import Model, Network, NetworkOptions, group_norm
from hpcfl.samples import SampleType
from hpcfl.torchvision_parts import torchvision_part


class TorchvisionOptions(NetworkOptions):
    """Options of torchvision's networks."""

    weights: str | None = None
    """File with torchvision's state dict, from which the body starts; null draws it at random."""
    groupnorm: int | None = Field(None, ge=1)
    """GroupNorm instead of BatchNorm, with this many groups of channels; null: BatchNorm."""


@dataclass(frozen=True)
class TorchvisionNet(Model):
    """One of torchvision's networks, which takes images of any size; it has BatchNorm or GroupNorm.

    Attributes:
        function: its name in torchvision.models.
        make_body: takes torchvision's network for RGB images to flat features.
        head: the name of its classifier, left out here.
        features: the width of the features.
    """

    options = TorchvisionOptions
    function: str
    make_body: Callable[[Any], OrderedDict[str, nn.Module]]
    head: str
    features: int

    def build(self, sample: SampleType, num_classes: int, options: TorchvisionOptions) -> Network:
        """See Model; raises UserError if torchvision or the weights are not available."""
        norms: dict[str, Any] = {}
        if options.groupnorm is not None:
            norms["norm_layer"] = partial(group_norm, options.groupnorm)
        made = getattr(torchvision_part("models"), self.function)(weights=None, num_classes=1, **norms)
        body = self.make_body(made)
        head: OrderedDict[str, nn.Module] = OrderedDict({self.head: nn.Linear(self.features, num_classes)})
        network = Network(body, head)
        if sample.channels != 3:
            _replace_first_convolution(network.body, sample.channels)
        if options.weights is not None:
            self._load(network.body, options.weights, sample)
        return network

    def _load(self, body: nn.Sequential, weights: str, sample: SampleType) -> None:
        """Fill a body from a file."""
        source = f"a state dict of torchvision's {self.function}"
        advice = (
            f"allowed: {source}; write one where there is a network with: "
            f"torch.save(torchvision.models.{self.function}(weights='DEFAULT').state_dict(), FILE)"
        )
        try:
            state = torch.load(Path(weights).expanduser(), map_location="cpu", weights_only=True)
        # a damaged file can raise any exception; torch's own messages advise to run code
        except Exception as error:
            reason = getattr(error, "strerror", None) or "not a file of torch.save with tensors"
            raise UserError(f"model.weights={weights} cannot be read ({reason}); {advice}") from error
        if not isinstance(state, dict):
            raise UserError(f"model.weights={weights} holds a {type(state).__name__}; {advice}")
        found = {str(name): t for name, t in state.items() if not str(name).startswith(f"{self.head}.")}
        first = found.get(f"{_first_convolution(body)[0]}.weight")
        if isinstance(first, Tensor) and first.dim() == 4 and first.shape[1] != sample.channels:
            raise UserError(
                f"model.weights={weights} is of a network for {first.shape[1]} channels, and the data are "
                f"{sample}; repeat the channel in a file of your own, or set model.weights=null"
            )
        try:
            body.load_state_dict(found)
        except RuntimeError as error:
            # it may name every tensor
            reason = shorten(one_line(error), 300)
            raise UserError(f"model.weights={weights} does not fit ({reason}); {advice}") from error


def _resnet18_body(network: Any) -> OrderedDict[str, nn.Module]:
    """Keep the stem, 7x7 with stride 2 and max-pooling, for small images too."""
    body = OrderedDict((name, module) for name, module in network.named_children() if name != "fc")
    return OrderedDict(body, flatten=nn.Flatten())


def _mobilenetv2_body(network: Any) -> OrderedDict[str, nn.Module]:
    """Leave out the dropout in front of the head: local training draws nothing but batches."""
    return OrderedDict(features=network.features, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())


class VitOptions(NetworkOptions):
    """Options of `vit`."""

    patch_size: int = Field(4, ge=1)
    """Pixels of a patch in both directions, which divide the image's."""
    width: int = Field(192, ge=1)
    """Width of a patch's embedding."""
    heads: int = Field(3, ge=1)
    """Heads of attention, which divide the width."""
    layers: int = Field(6, ge=1)
    """Layers of the encoder, whose inner width is 4 times the width."""

    def model_post_init(self, _: Any) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width={self.width}")


class Vit(Model):
    """torchvision's VisionTransformer without dropout, from a random start.

    Dosovitskiy et al., An image is worth 16x16 words, 2021.
    """

    options = VitOptions

    def build(self, sample: SampleType, num_classes: int, options: VitOptions) -> Network:
        """See Model; raises UserError if patches do not fit the image, or torchvision is not available."""
        channels, height, width = sample.shape
        if height != width or height % options.patch_size:
            raise UserError(
                f"model.name=vit needs square images whose side is a multiple of model.patch_size="
                f"{options.patch_size}, and the data are {sample}; set another model.patch_size"
            )
        vit = torchvision_part("models").VisionTransformer(
            height, options.patch_size, options.layers, options.heads, options.width, 4 * options.width
        )
        if channels != 3:
            vit.conv_proj = nn.Conv2d(channels, options.width, options.patch_size, options.patch_size)
        vit.heads = nn.Identity()
        head = nn.Linear(options.width, num_classes)
        return Network(OrderedDict(vit=_PlainAttention(vit)), OrderedDict(head=head))


class _PlainAttention(nn.Sequential):
    """Attention by products and softmax: torch's own on a CPU has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            features: Tensor = super().forward(x)
        return features


RESNET18 = TorchvisionNet(
    "torchvision's ResNet18, with BatchNorm", "resnet18", _resnet18_body, "fc", features=512
)
MOBILENETV2 = TorchvisionNet(
    "torchvision's MobileNetV2, with BatchNorm, without dropout",
    "mobilenet_v2",
    _mobilenetv2_body,
    "classifier",
    features=1280,
)


def _first_convolution(body: nn.Sequential) -> tuple[str, nn.Conv2d]:
    return next((n, m) for n, m in body.named_modules() if isinstance(m, nn.Conv2d))


def _replace_first_convolution(body: nn.Sequential, channels: int) -> None:
    """Let a body take images of another number of channels, drawn as torchvision draws convolutions."""
    name, rgb = _first_convolution(body)
    size, stride, padding = rgb.kernel_size, rgb.stride, rgb.padding
    other = nn.Conv2d(channels, rgb.out_channels, size, stride, padding, bias=False)  # type: ignore[arg-type]
    nn.init.kaiming_normal_(other.weight, mode="fan_out", nonlinearity="relu")
    parent, _, child = name.rpartition(".")
    setattr(body.get_submodule(parent), child, other)
