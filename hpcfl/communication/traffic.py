"""Byte counts: the bytes of a message, by client and layer. All traffic of a run is counted here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcfl.communication.codecs import IDENTITY, Frame
from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.communication.upload import Upload
from hpcfl.parameters import Layer

INDEX_BYTES = 8
"""Bytes counted for the index of one layer that a message leaves out for a client."""


@dataclass
class Traffic:
    """Bytes addressed to, or sent by, each client of a cohort; int64 throughout."""

    layers: np.ndarray
    """[S, L]: trainable numbers by layer, with the scales of a codec."""
    others: dict[str, np.ndarray]
    """[S] per tensor name: floating-point tensors that do not consist of the network's layers."""
    buffers: np.ndarray
    """[S]: running statistics."""
    indices: np.ndarray
    """[S]: indices of layers left out, a codec's indices, and integer tensors."""

    @staticmethod
    def nothing(num_clients: int, num_layers: int) -> Traffic:
        """Return zero traffic for a cohort."""
        return Traffic(
            np.zeros((num_clients, num_layers), np.int64), {}, *np.zeros((2, num_clients), np.int64)
        )

    @property
    def of_numbers(self) -> np.ndarray:
        """[S]: all but running statistics and indices."""
        return sum(self.others.values(), start=self.layers.sum(axis=1))

    @property
    def total(self) -> np.ndarray:
        """[S]: all of them."""
        return self.of_numbers + self.buffers + self.indices

    def add(self, positions: np.ndarray, other: Traffic) -> None:
        """Add the bytes of the clients at these positions of the cohort."""
        self.layers[positions] += other.layers
        self.buffers[positions] += other.buffers
        self.indices[positions] += other.indices
        for name, count in other.others.items():
            self.others.setdefault(name, np.zeros_like(self.buffers))[positions] += count


def count_bytes(message: Message, layers: Sequence[Layer], names_layers: bool = True) -> Traffic:
    """Count a message's bytes for each of its clients: a shared tensor once for each of them.

    Of a compressed message, the compressed bytes count.

    With `names_layers`, each layer that is left out for a single client costs its index, INDEX_BYTES.
    """
    traffic = Traffic.nothing(message.num_clients, len(layers))
    for name in message.names:
        frame = Frame.from_message(message, name, layers)
        for piece in message.pieces.get(name) or IDENTITY.pieces(frame):
            count = piece.dtype.itemsize * piece.numbers().numpy()
            if name == BUFFERS:
                traffic.buffers += count.sum(axis=-1)
            elif piece.is_index or not frame.dtype.is_floating_point:
                traffic.indices += count.sum(axis=-1)
            elif frame.has_layers:
                traffic.layers += count
            else:
                traffic.others[name] = traffic.others.get(name, 0) + np.full(message.num_clients, count.sum())
        if names_layers and frame.has_layers and frame.layer_mask is not None and frame.layer_mask.dim() == 2:
            traffic.indices += INDEX_BYTES * (~frame.layer_mask).sum(dim=1).numpy()
    return traffic


class RoundTraffic:
    """The bytes of a round on the server, down and up, by client of the cohort.

    `names_layers`: see `count_bytes`.
    """

    def __init__(self, num_clients: int, layers: Sequence[Layer], names_layers: bool) -> None:
        self._layers, self._names_layers = layers, names_layers
        self._members = np.arange(num_clients)
        self.down, self.up = (Traffic.nothing(num_clients, len(layers)) for _ in range(2))

    def keep(self, places: Sequence[int]) -> None:
        """Leave out members: those at these positions, of those so far, have all later messages."""
        self._members = self._members[list(places)]

    def count_down(self, message: Message | None) -> None:
        """Count a message to the members; None on ranks other than the server."""
        if message is not None:
            self.down.add(self._members, self._count(message))

    def count_up(self, upload: Upload) -> None:
        """Count an upload of the members."""
        self.up.add(self._members, self._count(upload.outline))

    @property
    def moved(self) -> np.ndarray:
        """Bytes so far of each member, both ways, int64."""
        return (self.down.total + self.up.total)[self._members]

    def _count(self, message: Message) -> Traffic:
        return count_bytes(message, self._layers, self._names_layers)
