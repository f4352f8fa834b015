"""A shard: the normalised samples of one rank's clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl.data.arrays import Arrays, Channels
from hpcfl.data.label_noise import LabelNoise
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shift import Shift
from hpcfl.data.sources import SOURCES
from hpcfl.errors import UserError

SPLITS = ("train", "val", "test")


@dataclass(eq=False)
class Shard:
    """The normalised samples of some clients, on one device.

    Attributes:
        clients: the global ids; local client i is clients[i].
        x: float32 [total, ...], images channels last in memory; tokens int64 [total, L].
        y: int64 [total].
        offset, count: for each of `SPLITS` an int64 tensor [local clients] on the CPU: where a client's
            samples start in x and y, and how many they are.
    """

    clients: Sequence[int]
    x: torch.Tensor
    y: torch.Tensor
    offset: Mapping[str, torch.Tensor]
    count: Mapping[str, torch.Tensor]

    @classmethod
    def build(
        cls,
        arrays: Arrays,
        parts: Sequence[ClientIndices],
        clients: Sequence[int],
        mean: Channels,
        std: Channels,
        device: torch.device | str,
        shift: Shift | None = None,
        noise: LabelNoise | None = None,
    ) -> Shard:
        """Copy the samples of `clients` out of the pool; all training parts come first, then val, then test.

        Args:
            parts: the indices of every client of the run.
            mean, std: a channel or feature each; x becomes (raw / scale - mean) / std, tokens stay.
            shift: changes each client's raw / scale.
            noise: which training labels become wrong ones; None: all stay.
        """
        pieces = [getattr(parts[client], split) for split in SPLITS for client in clients]
        offset, count = _places([len(piece) for piece in pieces], len(clients))
        indices = np.concatenate([np.empty(0, dtype=np.int64), *pieces])
        # Normalised on the CPU, so that every device trains on the same bits.
        sample = arrays.sample
        x = torch.from_numpy(arrays.x[indices])
        if sample.kind != "tokens":
            x = _channels_last(x.to(torch.float32)).div_(arrays.scale)
        if shift is not None:
            for part, client, samples in zip(
                x.split([len(piece) for piece in pieces]), [*clients] * len(SPLITS), pieces, strict=True
            ):
                # aligned in memory in the same way wherever the client is: the last bits may depend on it
                images = part.clone(memory_format=torch.contiguous_format)
                part.copy_(shift.changed(images, client, samples))
        if sample.kind != "tokens":
            x.sub_(sample.by_channel(mean)).div_(sample.by_channel(std))
        labels = arrays.y[indices]
        if noise is not None:
            # the training parts come first
            of_clients = np.split(labels, count["train"].cumsum(0).tolist())
            for client, right in zip(clients, of_clients[:-1], strict=True):
                right[:] = noise.noisy(right, client)
        y = torch.from_numpy(labels)
        return cls(clients, x.to(device), y.to(device), offset, count)

    def of_others(
        self, clients: Sequence[int], samples: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]
    ) -> Shard:
        """Return a shard of other clients on this device, given each one's (x, y) by split."""
        pieces = [pair for split in SPLITS for pair in samples[split]]
        device = self.x.device
        x = _channels_last(torch.cat([self.x[:0], *(x.to(device) for x, _ in pieces)]))
        y = torch.cat([self.y[:0], *(y.to(device) for _, y in pieces)])
        return Shard(clients, x, y, *_places([len(y) for _, y in pieces], len(clients)))

    def samples(self, split: str, local_client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one client's part, a copy of x [n, ...] and a view of y [n]."""
        # the last bits of products depend on where x begins in memory, and that on the clients before
        return self.x[self._part(split, local_client)].clone(), self.labels(split, local_client)

    def labels(self, split: str, local_client: int) -> torch.Tensor:
        """Return y [n] of `samples`, without the copy of x."""
        return self.y[self._part(split, local_client)]

    def _part(self, split: str, local_client: int) -> slice:
        if split not in self.offset:
            raise ValueError(f"clients have no samples of {split!r}; allowed: {', '.join(self.offset)}")
        start = int(self.offset[split][local_client])
        return slice(start, start + int(self.count[split][local_client]))

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions [B], x [B, ...], images channels last in memory."""
        if self.x.dim() != 4:
            return self.x.index_select(0, positions)
        return self.x.permute(0, 2, 3, 1).index_select(0, positions).permute(0, 3, 1, 2)


def _places(
    sizes: Sequence[int], num_clients: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return `Shard.offset` and `Shard.count` for pieces in order of split, then client."""
    counts = torch.tensor(sizes, dtype=torch.int64)
    table = torch.stack([counts.cumsum(0) - counts, counts]).view(2, len(SPLITS), num_clients)
    offset, count = (dict(zip(SPLITS, rows, strict=True)) for rows in table)
    return offset, count


def is_normalised_by_training(arrays: Arrays, setting: str | Sequence[Sequence[float]]) -> bool:
    """Whether means and deviations come from the training samples."""
    is_asked = setting == "standard" or (setting == "auto" and not arrays.mean)
    return is_asked and arrays.sample.kind != "tokens"


def resolve_normalisation(
    arrays: Arrays, setting: str | Sequence[Sequence[float]], train: np.ndarray
) -> tuple[Channels, Channels]:
    """Return (mean, std), a number a channel or feature, for values divided by `arrays.scale`.

    Tokens have none.

    Args:
        setting: `auto` (the source's constants, or `standard` if it has none), `standard` (mean and deviation
            of the training samples), `none` (0 and 1), `half` (0.5 and 0.5), the name of another source, or
            [[means], [stds]].
        train: indices of the training samples.

    Raises:
        UserError: unknown setting, another number of channels, or a std that is not positive.
    """
    num_channels = arrays.sample.channels
    if is_normalised_by_training(arrays, setting):
        mean, std = _of_samples(arrays, train)
    elif isinstance(setting, str):
        mean, std = _named_normalisation(arrays, setting)
    else:
        mean, std = _explicit_normalisation(setting)
    if len(mean) != num_channels or len(std) != num_channels:
        raise UserError(
            f"data.normalise={setting}: has {len(mean)} means and {len(std)} stds, "
            f"the data, {arrays.sample}, have {num_channels} channels; give one mean and one std for each "
            f"channel, such as {[[0.5] * num_channels, [0.25] * num_channels]}"
        )
    return mean, std


def _of_samples(arrays: Arrays, train: np.ndarray) -> tuple[Channels, Channels]:
    """Return mean and deviation of each channel over some samples; a constant channel has deviation 1."""
    mean, std = [], []
    for channel in range(arrays.sample.channels):
        values = arrays.x[train, channel].astype(np.float64) / arrays.scale
        mean.append(float(values.mean()))
        # computed, the deviation of equal values need not be 0
        std.append(1.0 if values.min() == values.max() else float(values.std()) or 1.0)
    return tuple(mean), tuple(std)


def _named_normalisation(arrays: Arrays, setting: str) -> tuple[Channels, Channels]:
    num_channels = arrays.sample.channels
    named = {
        "auto": (arrays.mean, arrays.std),
        "standard": ((), ()),
        "none": ((0.0,) * num_channels, (1.0,) * num_channels),
        "half": ((0.5,) * num_channels, (0.5,) * num_channels),
    }
    for name, source in SOURCES.items():
        if source.mean is not None and source.std is not None:
            named[name] = (source.mean, source.std)
    if setting not in named:
        raise UserError(
            f"data.normalise={setting}: unknown; allowed: {', '.join(named)}, or [[means], [stds]]"
        )
    return named[setting]


def _explicit_normalisation(setting: Sequence[Sequence[float]]) -> tuple[Channels, Channels]:
    mean, std = map(tuple, setting) if len(setting) == 2 else ((), ())
    if not std or not np.isfinite(mean + std).all() or min(std) <= 0:
        raise UserError(
            f"data.normalise={setting}: must be [[means], [stds]], finite numbers and positive stds, one a "
            "channel, such as [[0.5,0.5,0.5],[0.25,0.25,0.25]]"
        )
    return mean, std


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
