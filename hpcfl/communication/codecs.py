"""Codecs: how the numbers of a tensor are compressed for sending.

Shapes: C clients, M models a client (1 unless a tensor is [C, ..., P]), W numbers of a model, L layers.

  float16   every number in 16 bits; what is beyond its range, 65,504, saturates
  int8      of each layer of each model a float32 scale, max |x| / 127, and x / scale rounded to the nearest
            of -127 ... 127 (ties to even); a tensor that does not consist of layers is one. Where a number
            is not finite, the whole layer arrives as nan
  topk      of each layer of each model the ceil(share * size) numbers of largest magnitude, in float32, with
            their int32 indices in the layer; of equal ones those of the lowest indices

In uploads, int8 codes the difference to the tensor of the same name and shape that the client received, if
there is one and the method's `traits.differences` has its name; layers that it did not receive count as zero.
topk codes this difference plus what is left of earlier ones, which the client keeps (`comm.error_feedback`);
layers that it did not receive travel as they are.

Such memory, error feedback (Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Stich et al.,
Sparsified SGD with memory, NeurIPS 2018), supposes a server that adds up what it is sent. pFedLA's does not:
it mixes a new start for each client, from which the client learns the same difference again, and the memory
makes it send other numbers of it each time. The products of these with the models, which pFedLA learns its
weights from, shrink towards zero, and the weights stay equal.

Integers are never compressed. Running statistics are compressed by float16 only. topk sends whole what
does not consist of layers, and what the client did not receive. Each client's row is compressed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Message, Piece, select_rows
from hpcfl.config.keys import CodecName, CommConfig, Direction
from hpcfl.parameters import Layer, Tensors, spread

UNSENT = "comm.unsent/"
"""Prefix of the client state in which topk keeps its unsent differences; names of methods' state have no
dot."""

_LARGEST_INT8 = 127


@dataclass(frozen=True)
class Frame:
    """Description of some clients' rows of a tensor; both ends know it before the numbers are sent."""

    name: str
    shape: tuple[int, ...]
    """Shape of one client's row."""
    dtype: torch.dtype
    models: int
    sizes: tuple[int, ...]
    """Numbers in each layer; a tensor that does not consist of layers counts as one layer."""
    has_layers: bool
    is_shared: bool = False
    """Whether one row is for all clients."""
    layer_mask: Tensor | None = None
    """Which layers are sent: bool [L], the same for all clients, or [C, L]; None: all."""
    received_layers: Tensor | None = None
    """Which layers the clients received before, bool [C, L]; None: no tensor of this name and shape."""

    @staticmethod
    def from_message(message: Message, name: str, layers: Sequence[Layer]) -> Frame:
        """Describe a tensor of a message, as if the clients received nothing before."""
        is_shared, mask = name in message.shared, message.layer_mask.get(name)
        tensor = message.shared[name] if is_shared else message.per_client[name]
        shape = tuple(tensor.shape if is_shared else tensor.shape[1:])
        has_layers = bool(shape) and shape[-1] == layers[-1].stop
        sizes = tuple(layer.size for layer in layers) if has_layers else (math.prod(shape),)
        models = math.prod(shape[:-1]) if has_layers else 1
        # a copy: of a view, pickle sends all that it is cut from
        mask = None if mask is None else mask.cpu().clone()
        return Frame(name, shape, tensor.dtype, models, sizes, has_layers, is_shared, mask)

    @property
    def has_own_masks(self) -> bool:
        """Whether each client has a mask of its own."""
        return self.layer_mask is not None and self.layer_mask.dim() == 2

    @property
    def as_sent(self) -> Frame:
        """The frame of what is sent: all of a shared tensor whose clients have masks of their own."""
        return replace(self, layer_mask=None) if self.is_shared and self.has_own_masks else self

    def rows_of(self, message: Message) -> Tensor:
        """Return the rows [C, ...] of this tensor in a message, or the only row [1, ...] if it is shared."""
        return message.shared[self.name].unsqueeze(0) if self.is_shared else message.per_client[self.name]

    def __getitem__(self, rows: slice | list[int] | Tensor) -> Frame:
        """Return the frame of some of the clients."""
        return replace(
            self,
            layer_mask=select_rows(self.layer_mask, rows),
            received_layers=select_rows(self.received_layers, rows),
        )

    def after(self, received: Message) -> Frame:
        """Return the frame with what the same clients received before."""
        if self.name not in received:
            return self
        rows = received[self.name]
        if rows.shape[1:] != self.shape or rows.dtype != self.dtype:
            return self
        received_layers = torch.ones(len(rows), len(self.sizes), dtype=torch.bool)
        for mask in (received.layer_mask.get(self.name), self.layer_mask):
            received_layers = received_layers if mask is None else received_layers & mask
        return replace(self, received_layers=received_layers)

    def base(self, received: Message) -> Tensor | None:
        """Return what the clients received before, [C, M, W]; zero in other layers, None if nothing."""
        if self.received_layers is None:
            return None
        return self.where(self.received_layers, self.by_model(received[self.name]), 0.0)

    def by_model(self, rows: Tensor) -> Tensor:
        """Return rows [C, ...] as [C, M, W]."""
        return rows.reshape(len(rows), self.models, sum(self.sizes))

    def where(self, mask: Tensor, numbers: Tensor, others: Tensor | float) -> Tensor:
        """Return [C, M, W]: `numbers` in the layers of a mask [C, L], and `others` elsewhere."""
        return numbers.where(spread(self.sizes, mask).unsqueeze(1), others)


class Codec:
    """Sends tensors without compression."""

    description: ClassVar[str] = "no compression"

    def __init__(self, settings: CommConfig) -> None:
        self.settings = settings

    @property
    def uses_error_feedback(self) -> bool:
        """Whether clients keep the compression error (error feedback)."""
        return False

    def takes(self, frame: Frame) -> bool:
        """Return whether this codec compresses a tensor of floating-point numbers."""
        return False

    def for_frame(self, frame: Frame) -> Codec:
        """Return the codec of a tensor: this one, or `IDENTITY`."""
        is_possible = frame.dtype.is_floating_point and frame.models * sum(frame.sizes) > 0
        return self if is_possible and self.takes(frame) else IDENTITY

    def pieces(self, frame: Frame) -> list[Piece]:
        """Return the pieces that a tensor is sent as."""
        return [Piece(frame.dtype, frame.models, frame.sizes, frame.layer_mask)]

    def encode(
        self, numbers: Tensor, frame: Frame, base: Tensor | None = None, unsent: Tensor | None = None
    ) -> list[Tensor]:
        """Return the pieces [C, M, ...] of numbers [C, M, W]; layers that are not sent may hold anything.
        `base` is what the clients received, according to the frame. A codec with error feedback updates
        `unsent` [C, M, W], in the layers that are sent as a difference.
        """
        return [numbers]

    def decode(self, pieces: Sequence[Tensor], frame: Frame, base: Tensor | None = None) -> Tensor:
        """Return numbers [C, M, W] from their pieces, which are zero in layers that are not sent."""
        return pieces[0]


IDENTITY = Codec(CommConfig())


class Float16(Codec):
    description = "numbers in 16 bits"

    def takes(self, frame: Frame) -> bool:
        return True

    def pieces(self, frame: Frame) -> list[Piece]:
        return [Piece(torch.float16, frame.models, frame.sizes, frame.layer_mask)]

    def encode(
        self, numbers: Tensor, frame: Frame, base: Tensor | None = None, unsent: Tensor | None = None
    ) -> list[Tensor]:
        largest = torch.finfo(torch.float16).max
        return [numbers.clamp(-largest, largest).half()]

    def decode(self, pieces: Sequence[Tensor], frame: Frame, base: Tensor | None = None) -> Tensor:
        return pieces[0].to(frame.dtype)


class Int8(Codec):
    description = "numbers in 8 bits with a scale for each layer; uploads as differences to the download"

    def takes(self, frame: Frame) -> bool:
        return frame.name != BUFFERS

    def pieces(self, frame: Frame) -> list[Piece]:
        ones = (1,) * len(frame.sizes)
        return [
            Piece(torch.int8, frame.models, frame.sizes, frame.layer_mask),
            Piece(torch.float32, frame.models, ones, frame.layer_mask),
        ]

    def encode(
        self, numbers: Tensor, frame: Frame, base: Tensor | None = None, unsent: Tensor | None = None
    ) -> list[Tensor]:
        if base is not None:
            numbers = numbers - base
        largest = [layer.abs().amax(dim=-1) for layer in numbers.split(frame.sizes, dim=-1)]
        scales = (torch.stack(largest, dim=-1) / _LARGEST_INT8).float()
        # a layer of zeros, or of numbers too small for a scale
        divisors = scales.where(scales != 0, 1.0).to(numbers.dtype)
        steps = (numbers / spread(frame.sizes, divisors)).round().nan_to_num(nan=0.0)
        return [steps.clamp(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8), scales]

    def decode(self, pieces: Sequence[Tensor], frame: Frame, base: Tensor | None = None) -> Tensor:
        steps, scales = (piece.to(frame.dtype) for piece in pieces)
        numbers = steps * spread(frame.sizes, scales)
        return numbers if base is None else base + numbers


class TopK(Codec):
    description = "uploads: only the largest differences to the download; clients keep the rest for later"

    @property
    def uses_error_feedback(self) -> bool:
        return self.settings.uses_error_feedback

    def takes(self, frame: Frame) -> bool:
        return frame.name != BUFFERS and frame.has_layers and frame.received_layers is not None

    def pieces(self, frame: Frame) -> list[Piece]:
        counts, received = tuple(map(self._count, frame.sizes)), frame.received_layers
        assert received is not None
        as_they_are = ~received if frame.layer_mask is None else frame.layer_mask & ~received
        return [
            Piece(frame.dtype, frame.models, frame.sizes, as_they_are),
            Piece(torch.float32, frame.models, counts, received),
            Piece(torch.int32, frame.models, counts, received, is_index=True),
        ]

    def encode(
        self, numbers: Tensor, frame: Frame, base: Tensor | None = None, unsent: Tensor | None = None
    ) -> list[Tensor]:
        assert base is not None
        assert frame.received_layers is not None
        wanted = numbers - base if unsent is None else numbers - base + unsent
        values, indices = [], []
        for layer in wanted.split(frame.sizes, dim=-1):
            is_chosen = _largest(layer, self._count(layer.shape[-1]))
            place = is_chosen.nonzero()[:, -1].view(*layer.shape[:-1], -1)
            values.append(layer.gather(-1, place).float())
            indices.append(place.int())
        pieces = [numbers, torch.cat(values, dim=-1), torch.cat(indices, dim=-1)]
        if unsent is not None:
            left = wanted - self._laid_out(pieces[1], pieces[2], frame)
            unsent.copy_(frame.where(frame.received_layers, left, unsent))
        return pieces

    def decode(self, pieces: Sequence[Tensor], frame: Frame, base: Tensor | None = None) -> Tensor:
        assert base is not None
        assert frame.received_layers is not None
        whole, values, indices = pieces
        return frame.where(frame.received_layers, base + self._laid_out(values, indices, frame), whole)

    def _count(self, size: int) -> int:
        # the decimal value: 0.07 * 100 is more than 7 in binary
        return math.ceil(Fraction(str(self.settings.share)) * size)

    def _laid_out(self, values: Tensor, indices: Tensor, frame: Frame) -> Tensor:
        """Place the values of all layers at their indices, [C, M, W]; zeros elsewhere."""
        numbers = torch.zeros(*values.shape[:-1], sum(frame.sizes), dtype=frame.dtype)
        counts = list(map(self._count, frame.sizes))
        of_layers = zip(values.split(counts, -1), indices.split(counts, -1), strict=True)
        for layer, (value, index) in zip(numbers.split(frame.sizes, dim=-1), of_layers, strict=True):
            layer.scatter_(-1, index.long(), value.to(frame.dtype))
        return numbers


CODECS: dict[CodecName, type[Codec]] = {"none": Codec, "float16": Float16, "int8": Int8, "topk": TopK}


def codec_of(settings: CommConfig, direction: Direction) -> Codec:
    """Return the codec of a run's messages in a direction."""
    return CODECS[settings.codec](settings) if settings.codes(direction) else IDENTITY


class ErrorFeedback:
    """The compression errors of some clients' tensors, stored on the CPU in the states of a rank's clients.

    `states` are these states, each with its number of clients; `rows` give for each member of the cohort on
    this rank its state, and its row there.
    """

    def __init__(self, states: Sequence[tuple[Tensors, int]], rows: Sequence[tuple[Tensors, int]]) -> None:
        self._states, self._rows = states, rows

    def begin(self, frame: Frame) -> None:
        """Allocate the state of a tensor; every rank does it, so that all have the same states."""
        for state, count in self._states:
            if UNSENT + frame.name not in state:
                state[UNSENT + frame.name] = torch.zeros(count, *frame.shape, dtype=frame.dtype)

    def read(self, name: str, part: slice) -> Tensor:
        """Return a copy of the rows [C, ...] of some of the members."""
        return torch.stack([state[UNSENT + name][row] for state, row in self._rows[part]])

    def write(self, name: str, part: slice, rows: Tensor) -> None:
        """Replace the rows of some of the members."""
        for (state, row), value in zip(self._rows[part], rows, strict=True):
            stored = state[UNSENT + name]
            stored[row] = value.view(stored.shape[1:])


@dataclass(frozen=True)
class UploadCoding:
    """How an upload is compressed: the codec, and what its clients received before."""

    codec: Codec
    received: Message
    """The message that this rank's members of the cohort received."""
    differences: tuple[str, ...]
    """Names of tensors that may travel as differences to those of the same name and shape in `received`."""
    unsent: ErrorFeedback


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Return which `count` numbers of each last axis have the largest magnitude, in order of index; bool."""
    # nan is sent first
    magnitude = numbers.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    last = magnitude.kthvalue(numbers.shape[-1] - count + 1, dim=-1, keepdim=True).values
    is_above, is_equal = magnitude > last, magnitude == last
    missing = count - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(dim=-1) <= missing))
