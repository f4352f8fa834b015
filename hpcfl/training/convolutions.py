"""Two ways to convolve the images of many clients, each with its own weights.

Under vmap over clients, PyTorch makes one grouped convolution of many. The other way unfolds images to
columns and multiplies each client's by its weights, one batched product.
"""

from __future__ import annotations

import copy
from typing import Literal, Self

from torch import Tensor, nn
from torch.nn.functional import unfold

ConvolutionKind = Literal["grouped", "unfold"]


def unfolded(module: nn.Conv2d, images: Tensor) -> Tensor:
    """Return what a convolution multiplies by its weights at each place, [n, numbers of a patch, places]."""
    assert not isinstance(module.padding, str)
    return unfold(images, module.kernel_size, module.dilation, module.padding, module.stride)


class UnfoldedConv2d(nn.Conv2d):
    """A convolution as unfold and a product; equal to nn.Conv2d but for rounding."""

    @classmethod
    def from_module(cls, module: nn.Conv2d) -> Self:
        """Return a module that shares the parameters of another."""
        twin = cls(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            module.dilation,  # type: ignore[arg-type]
            bias=module.bias is not None,
        )
        twin.weight, twin.bias = module.weight, module.bias
        return twin

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride, padding, dilation = self.kernel_size, self.stride, self.padding, self.dilation
        assert not isinstance(padding, str)
        product = self.weight.flatten(start_dim=1) @ unfolded(self, input)
        sides = [
            (input.shape[-2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1)
            // stride[axis]
            + 1
            for axis in range(2)
        ]
        output = product.unflatten(-1, sides)
        return output if self.bias is None else output + self.bias.view(-1, 1, 1)


def with_convolutions(network: nn.Module, kind: ConvolutionKind) -> nn.Module:
    """Return a network that convolves in one of the two ways: the network itself, or a copy of it.

    Convolutions that unfold does not cover stay as they are: those in groups, and padding by name or by other
    values than zero.
    """
    if kind == "grouped":
        return network
    network = nn.Sequential(copy.deepcopy(network))
    for name, module in list(network.named_modules()):
        if type(module) is nn.Conv2d and is_unfoldable(module):
            network.set_submodule(name, UnfoldedConv2d.from_module(module))
    return network[0]


def is_unfoldable(module: nn.Conv2d) -> bool:
    """Whether a convolution is a product of its weights and the unfolded images: see `with_convolutions`."""
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
