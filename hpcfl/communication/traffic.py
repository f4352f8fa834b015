"""The bytes of a message, by client and layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl.communication.channel import Upload
from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.parameters import Layer

INDEX_BYTES = 8
"""What naming one layer that was left out costs on the wire."""


@dataclass
class Traffic:
    """Bytes addressed to, or sent by, each client of a cohort; int64 throughout."""

    parameters: np.ndarray
    """[S, labels]: trainable numbers by layer; a tensor not made of layers has a label of its own."""
    buffers: np.ndarray
    """[S]: running statistics."""
    indices: np.ndarray
    """[S]: names of layers left out, and whole-number tensors."""

    def add(self, positions: slice, other: Traffic) -> None:
        """Add the bytes of the clients at these positions of the cohort."""
        for mine, others in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[positions] += others


def count_bytes(
    message: Message, layers: Sequence[Layer], labels: Sequence[str], names_layers: bool = True
) -> Traffic:
    """Count a message's bytes for each of its clients: a shared tensor once for each of them.

    `names_layers` says whether leaving out layers client by client costs their names.
    """
    clients = message.num_clients
    traffic = Traffic(
        np.zeros((clients, len(labels)), np.int64), np.zeros(clients, np.int64), np.zeros(clients, np.int64)
    )
    for name in [*message.shared, *message.rows]:
        tensor = message.rows[name][:1] if name in message.rows else message.shared[name].unsqueeze(0)
        item = tensor.element_size()
        shape = tensor.shape[1:]
        if name == BUFFERS:
            traffic.buffers += item * shape.numel()
        elif not tensor.is_floating_point():
            traffic.indices += item * shape.numel()
        elif shape and shape[-1] == layers[-1].stop:
            sizes = np.array([layer.size for layer in layers])
            keep = message.keep.get(name, torch.ones(len(layers), dtype=torch.bool)).numpy()
            traffic.parameters[:, : len(layers)] += keep * sizes * (item * math.prod(shape[:-1]))
            if keep.ndim == 2 and names_layers:
                traffic.indices += INDEX_BYTES * (~keep).sum(axis=1)
        elif name in labels:
            traffic.parameters[:, labels.index(name)] += item * shape.numel()
        else:
            raise ValueError(
                f"{name!r} travels and is not made of the network's layers: add it to the method's "
                f"extra_labels; known are {', '.join(labels)}"
            )
    return traffic


class RoundTraffic:
    """The bytes of a round on the server, down and up, by client of the cohort.

    `names_layers`: see `count_bytes`.
    """

    def __init__(
        self, num_clients: int, layers: Sequence[Layer], labels: Sequence[str], names_layers: bool
    ) -> None:
        self._layers, self._labels, self._names_layers = layers, labels, names_layers
        self.down, self.up = (
            Traffic(np.zeros((num_clients, len(labels)), np.int64), *np.zeros((2, num_clients), np.int64))
            for _ in range(2)
        )

    def count_down(self, message: Message | None) -> None:
        """Count what was sent to the whole cohort; None on other ranks than the server."""
        if message is not None:
            self.down.add(slice(None), self._count(message))

    def counting_up(self, upload: Upload) -> Upload:
        """Return an upload whose blocks are counted as they are read."""
        upload.observe(lambda positions, block: self.up.add(positions, self._count(block)))
        return upload

    def _count(self, message: Message) -> Traffic:
        return count_bytes(message, self._layers, self._labels, self._names_layers)
