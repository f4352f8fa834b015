"""Two ways to convolve the images of many clients, each with its own weights.

Under vmap over clients, PyTorch makes one grouped convolution of many. The other way unfolds images to
columns and multiplies each client's by its weights, one batched product.
"""

from __future__ import annotations

import copy
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import unfold

ConvolutionKind = Literal["grouped", "unfold"]


class UnfoldedConv2d(nn.Conv2d):
    """A convolution as unfold and a product; equal to nn.Conv2d but for rounding."""

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride, padding, dilation = self.kernel_size, self.stride, self.padding, self.dilation
        assert not isinstance(padding, str)
        columns = unfold(input, kernel, dilation, padding, stride)
        product = self.weight.flatten(start_dim=1) @ columns
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
    network = copy.deepcopy(network)
    for module in network.modules():
        if type(module) is nn.Conv2d and _is_covered(module):
            module.__class__ = UnfoldedConv2d
    return network


def _is_covered(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
