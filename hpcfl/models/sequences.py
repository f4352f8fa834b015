"""Networks for series and text: a convolution network for text, an LSTM and a small transformer.

Shapes: n samples, L steps of a series or tokens of a text, W width of a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from hpcfl.config.keys import NetworkOptions
from hpcfl.models.networks import Model, Network
from hpcfl.samples import SampleType


class TextCnnOptions(NetworkOptions):
    """Options of `textcnn`."""

    embedding: int = Field(64, ge=1)
    """Width of a token's embedding."""
    filters: int = Field(64, ge=1)
    """Filters of each width."""


class TextConvolutions(nn.Module):
    """Convolutions of several widths over a text, each with ReLU and its maximum over all places."""

    def __init__(self, width: int, filters: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        for tokens in widths:
            self.add_module(f"width{tokens}", nn.Conv1d(width, filters, tokens))

    def forward(self, x: Tensor) -> Tensor:
        """Take [n, L, W] to [n, filters of all widths]."""
        x = x.transpose(1, 2)
        return torch.cat([convolution(x).amax(dim=2).relu() for convolution in self.children()], dim=1)


class TextCnn(Model):
    """Kim, Convolutional neural networks for sentence classification, 2014, without dropout."""

    options = TextCnnOptions
    kinds = ("tokens",)
    widths = (3, 4, 5)

    @property
    def smallest_side(self) -> int:
        return max(self.widths)

    def build(self, sample: SampleType, num_classes: int, options: TextCnnOptions) -> Network:
        assert sample.vocabulary is not None
        body: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=nn.Embedding(sample.vocabulary, options.embedding),
            conv=TextConvolutions(options.embedding, options.filters, self.widths),
        )
        head = nn.Linear(options.filters * len(self.widths), num_classes)
        return Network(body, OrderedDict(fc=head))


class LstmOptions(NetworkOptions):
    """Options of `lstm`."""

    embedding: int = Field(8, ge=1)
    """Width of a token's embedding; a series has none."""
    hidden: int = Field(256, ge=1)
    """Width of the state."""
    layers: int = Field(2, ge=1)
    """Layers of the LSTM."""


class LastState(nn.LSTM):
    """An LSTM that gives its last step's output, [n, L, W] to [n, hidden]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(x)[0]
        return output[:, -1]


class Lstm(Model):
    """An embedding and an LSTM, as LEAF has them for Shakespeare (Caldas et al., 2018); series go into the
    LSTM directly."""

    options = LstmOptions
    kinds = ("tokens", "series")
    has_batched_engine = False

    def build(self, sample: SampleType, num_classes: int, options: LstmOptions) -> Network:
        body: OrderedDict[str, nn.Module] = OrderedDict()
        if sample.vocabulary is None:
            width = sample.channels
            body["steps"] = StepsFirst()
        else:
            width = options.embedding
            body["embedding"] = nn.Embedding(sample.vocabulary, width)
        body["lstm"] = LastState(width, options.hidden, options.layers, batch_first=True)
        return Network(body, OrderedDict(fc=nn.Linear(options.hidden, num_classes)))


class TransformerOptions(NetworkOptions):
    """Options of `transformer`."""

    width: int = Field(64, ge=1)
    """Width of a step."""
    heads: int = Field(4, ge=1)
    """Heads of attention, which divide the width."""
    blocks: int = Field(2, ge=1)
    """Blocks of attention and two linear layers, whose inner width is 4 times the width."""

    def model_post_init(self, _: Any) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide width={self.width}")


class Transformer(Model):
    """An encoder of pre-normalised blocks without dropout, with learnt positions; the mean over steps is the
    feature.

    Vaswani et al., Attention is all you need, 2017; Xiong et al., On layer normalization in the transformer
    architecture, 2020.
    """

    options = TransformerOptions
    kinds = ("tokens", "series")

    def build(self, sample: SampleType, num_classes: int, options: TransformerOptions) -> Network:
        body: OrderedDict[str, nn.Module] = OrderedDict()
        if sample.vocabulary is None:
            body["steps"] = StepsFirst()
            body["embedding"] = nn.Linear(sample.channels, options.width)
        else:
            body["embedding"] = nn.Embedding(sample.vocabulary, options.width)
        body["positions"] = Positions(sample.shape[-1], options.width)
        for number in range(1, options.blocks + 1):
            body[f"block{number}"] = Block(options.width, options.heads)
        body["norm"] = nn.LayerNorm(options.width)
        body["mean"] = MeanOverSteps()
        return Network(body, OrderedDict(fc=nn.Linear(options.width, num_classes)))


class Positions(nn.Module):
    """Adds a learnt vector to each step of [n, L, W]."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(steps, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Block(nn.Module):
    """Attention and two linear layers, each normalised before and added to its input, on [n, L, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        # torch's own attention on a CPU has neither a rule for vmap nor a second derivative
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(dim=-1)
        x = x + self.out((weights @ value).transpose(-2, -3).flatten(-2))
        output: Tensor = x + self.fc2(self.fc1(self.norm2(x)).relu())
        return output


class StepsFirst(nn.Module):
    """Takes series [n, channels, L] to [n, L, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class MeanOverSteps(nn.Module):
    """Takes [n, L, W] to its mean over steps [n, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)
