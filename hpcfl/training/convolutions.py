"""Two ways to convolve the images of many clients, each with its own weights; and a CPU's way for one client.

Under vmap over clients, PyTorch makes one grouped convolution of many. The other way unfolds images to
columns and multiplies each client's by its weights, one batched product. On a CPU, the loop engine computes
convolutions of few channels for two columns at once.
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, unfold

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


NARROW = 8
"""Output channels up to which neighbouring pixels are convolved as one."""


class PairedConv2d(nn.Conv2d):
    """A convolution of few output channels, two neighbouring columns at once; it gives NARROW channels.

    A row of pixels in channels_last order is also a row of half as many pixels of twice the channels. On
    those, a kernel of half the width (and a column more) gives both columns of a pair: 2 x NARROW numbers,
    which fill a register of AVX-512 that one column leaves more than half empty. Channels beyond the module's
    own are zero. Equal to nn.Conv2d but for rounding.
    """

    def forward(self, input: Tensor) -> Tensor:
        assert not isinstance(self.padding, str)
        top, left = self.padding
        samples, channels, _, width = input.shape
        out_width = width + 2 * left - self.kernel_size[1] + 1
        out_pairs, kernel_pairs = _pairs(out_width), _pairs(self.kernel_size[1] + 1)
        pairs = out_pairs + kernel_pairs - 1
        right = 2 * pairs - width - left
        if left or right:
            input = pad(input, (left, right))
        paired = input.permute(0, 2, 3, 1).reshape(samples, input.shape[2], pairs, 2 * channels)
        bias = [] if self.bias is None else [self.bias]
        numbers = torch.cat([self.weight.flatten(), *bias, self.weight.new_zeros(1)])
        places, size = _places(tuple(self.weight.shape), self.bias is not None)
        wide = numbers.index_select(0, places)
        weight = wide[:size].view(2 * NARROW, self.kernel_size[0], kernel_pairs, 2 * channels)
        wide_bias = wide[size:] if bias else None
        paired, weight = paired.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)
        output = conv2d(paired, weight, wide_bias, padding=(top, 0)).permute(0, 2, 3, 1)
        output = output.reshape(samples, output.shape[1], 2 * out_pairs, NARROW).permute(0, 3, 1, 2)
        return output[..., :-1] if out_width % 2 else output


class FirstChannelsPool2d(nn.MaxPool2d):
    """Max-pooling behind a PairedConv2d, which drops the channels beyond its own."""

    channels: int

    def forward(self, input: Tensor) -> Tensor:
        # sliced as channels last, so that the gradient is laid out that way too
        output = super().forward(input).permute(0, 2, 3, 1)
        return output[..., : self.channels].permute(0, 3, 1, 2)


def pair_columns(network: nn.Module) -> None:
    """Let a network's narrow convolutions that max-pooling follows compute two columns at once, in place."""
    for sequence in network.modules():
        if not isinstance(sequence, nn.Sequential):
            continue
        for module, following in itertools.pairwise(sequence):
            if _is_narrow(module) and type(following) is nn.MaxPool2d:
                following.channels = module.out_channels
                module.__class__, following.__class__ = PairedConv2d, FirstChannelsPool2d


def _is_narrow(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and _is_covered(module)
        and module.out_channels <= NARROW
        and module.kernel_size[1] > 1
        and module.stride == module.dilation == (1, 1)
    )


def _pairs(columns: int) -> int:
    """Return how many pairs hold so many columns."""
    return (columns + 1) // 2


@cache
def _places(shape: tuple[int, ...], has_bias: bool) -> tuple[Tensor, int]:
    """Return where the numbers of a kernel on pairs stand in [weight, bias, zero], and how many are weights.

    For the first column of a pair the kernel begins at the first column, for the second at the second.
    """
    outputs, kernel, size = shape[0], shape[-1], math.prod(shape)
    zero = size + outputs * has_bias
    weight = torch.full((2, NARROW, *shape[1:-1], 2 * _pairs(kernel + 1)), zero)
    for column in range(2):
        weight[column, :outputs, ..., column : column + kernel] = torch.arange(size).view(shape)
    weight = weight.unflatten(-1, (-1, 2)).permute(0, 1, 3, 4, 5, 2).flatten()
    bias = torch.full((2, NARROW), zero)
    bias[:, :outputs] = size + torch.arange(outputs)
    return torch.cat([weight, bias.flatten()]) if has_bias else weight, len(weight)
