"""Messages between server and clients: named tensors, and the layers of them that are sent.

Shapes: S clients of the cohort, C clients of a block or rank, P trainable numbers, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hpcfl.errors import DifferentTensorsError

BUFFERS = "buffers"
"""Name of the running statistics in a message; their bytes have a column of their own."""


def select_rows(mask: Tensor | None, rows: slice | list[int] | Tensor) -> Tensor | None:
    """Return the mask of some clients; a mask [L] is the same for all."""
    return mask if mask is None or mask.dim() == 1 else mask[rows]


@dataclass(frozen=True)
class Piece:
    """A tensor as it is sent, for each client [models, sum of the sizes].

    The channel packs the numbers of the layers that are sent, and `traffic.py` counts their bytes.
    """

    dtype: torch.dtype
    models: int
    sizes: tuple[int, ...]
    """Numbers of each layer in each model; a tensor that does not consist of layers counts as one layer."""
    layer_mask: Tensor | None = None
    """Which layers are sent, bool [C, L] or [L]; None: all."""
    is_index: bool = False
    """Whether they are counted as indices."""

    def numbers(self) -> Tensor:
        """Return how many numbers of each layer are sent, int64 [C, L] or [L]."""
        counts = self.models * torch.tensor(self.sizes)
        return counts if self.layer_mask is None else self.layer_mask * counts

    def __getitem__(self, rows: slice | list[int] | Tensor) -> Piece:
        """Return the piece of some of the clients."""
        return replace(self, layer_mask=select_rows(self.layer_mask, rows))


@dataclass(frozen=True)
class Cohort:
    """The clients of one round, in ascending order of id."""

    round: int
    clients: tuple[int, ...]
    num_samples: Tensor
    """Training samples of each client, int64 [S]."""
    workers: tuple[int, ...] | None = None
    """The worker that each client trains on in this round, [S]; None: the worker whose shard it is in."""

    def __len__(self) -> int:
        return len(self.clients)

    def select(self, positions: Sequence[int]) -> Cohort:
        """Return the cohort of the members at these positions, in ascending order."""
        workers = None if self.workers is None else tuple(self.workers[position] for position in positions)
        clients = tuple(self.clients[position] for position in positions)
        return Cohort(self.round, clients, self.num_samples[list(positions)], workers)


@dataclass
class Message:
    """Named tensors for a group of clients.

    `shared` tensors [...] are the same for every client, `per_client` [C, ...] have one row for each.
    `layer_mask[name]` is the mask of the layers of a tensor [..., P] that are sent: bool [L], the same for
    all, or bool [C, L], client by client; without it all are sent. Layers that are not sent arrive as zero,
    except in a shared tensor with a mask for each client: it arrives whole.
    """

    shared: dict[str, Tensor] = field(default_factory=dict)
    per_client: dict[str, Tensor] = field(default_factory=dict)
    layer_mask: dict[str, Tensor] = field(default_factory=dict)
    num_clients: int = 1
    pieces: dict[str, Sequence[Piece]] = field(default_factory=dict)
    """The compressed pieces that a codec sent for this message, by name, for counting; empty without a codec.
    Messages made from this one do not have it."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor with its client axis, [C, ...]; a shared one is expanded without a copy."""
        if name in self.per_client:
            return self.per_client[name]
        if name not in self.shared:
            raise KeyError(f"this message has no tensor {name!r}; it has {', '.join(self.names) or 'none'}")
        shared = self.shared[name]
        return shared.expand(self.num_clients, *shared.shape)

    def __contains__(self, name: str) -> bool:
        return name in self.per_client or name in self.shared

    def __bool__(self) -> bool:
        """Whether it has a tensor."""
        return bool(self.shared or self.per_client)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, shared ones first."""
        return [*self.shared, *self.per_client]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors as they are stored, shared ones without a client axis."""
        return self.shared | self.per_client

    def row_kinds(self) -> dict[str, str]:
        """Describe a client's row of each tensor: its type, its shape, and which layers of it are sent."""
        found = {}
        for name, rows in self.per_client.items():
            found[name] = f"{rows.dtype} {[*rows.shape[1:]]}"
            if (mask := self.layer_mask.get(name)) is not None:
                own = "that each client chooses" if mask.dim() == 2 else mask.nonzero().flatten().tolist()
                found[name] += f" with the layers {own}"
        return found

    def with_clients(self, num_clients: int) -> Message:
        """Return a message with the same tensors for `num_clients` clients."""
        return Message(dict(self.shared), dict(self.per_client), dict(self.layer_mask), num_clients)

    def only(self, name: str) -> Message:
        """Return the message of one tensor, shared or not as it is here."""
        shared, rows = (
            {name: tensors[name]} if name in tensors else {} for tensors in (self.shared, self.per_client)
        )
        return Message(shared, rows, num_clients=self.num_clients)

    def to(self, device: torch.device) -> Message:
        """Return the message with its tensors on a device; masks too."""
        shared, rows, masks = (
            {name: tensor.to(device) for name, tensor in tensors.items()}
            for tensors in (self.shared, self.per_client, self.layer_mask)
        )
        return Message(shared, rows, masks, self.num_clients)

    def select(self, part: slice | list[int]) -> Message:
        """Return the message of some of its clients; without copying, if they are a slice."""
        masks = {name: mask if mask.dim() == 1 else mask[part] for name, mask in self.layer_mask.items()}
        count = len(part) if isinstance(part, list) else len(range(self.num_clients)[part])
        rows = {name: rows[part] for name, rows in self.per_client.items()}
        return Message(self.shared, rows, masks, count)

    def __or__(self, other: Message) -> Message:
        """Return both messages of the same clients as one; where a name is in both, the other's tensor."""
        return Message(
            self.shared | other.shared,
            self.per_client | other.per_client,
            self.layer_mask | other.layer_mask,
            self.num_clients,
        )


class SameKinds:
    """Checks that clients' messages have the same tensors; the first one decides which."""

    def __init__(self) -> None:
        self._first: tuple[int, Mapping[str, str]] | None = None

    def check(self, client: int, kinds: Mapping[str, str]) -> None:
        """Raise DifferentTensorsError unless a client's `Message.row_kinds` are those of the first client."""
        self._first = self._first or (client, kinds)
        one, known = self._first
        for name in [*known, *kinds]:
            if known.get(name) != kinds.get(name):
                here, there = (of_one.get(name, "missing") for of_one in (known, kinds))
                raise DifferentTensorsError(
                    f"hooks must return the same tensors for all clients, and {name!r} of client {one} is "
                    f"{here}, of client {client} {there}"
                )


def packed(bits: Tensor) -> Tensor:
    """Return bits, bool [C, n], as bytes, uint8 [C, ceil(n / 8)], on the CPU; a byte's first bit is its
    highest."""
    return torch.from_numpy(np.packbits(bits.cpu().numpy(), axis=1))


def unpacked(packed: Tensor) -> Tensor:
    """Undo `packed`: bool [C, 8 times the bytes], filled up with zeros."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1)).bool()
