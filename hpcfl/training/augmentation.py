"""Random crops and flips of the images that clients train on.

Shapes: C clients, B samples of a mini-batch, K channels, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfl.config.keys import Change

DRAWS = 3
"""Numbers that an image takes from its client's stream: how far down, how far right, and if mirrored."""


class Augmentation:
    """The changes of `train.augment`, made in the order of torchvision's RandomCrop and RandomHorizontalFlip.

    Args:
        black: what pixels of value 0 are once they are normalised, [K]; crops are padded with it.
    """

    def __init__(self, changes: Sequence[Change], black: Tensor) -> None:
        self._crops, self._flips = "crop" in changes, "flip" in changes
        self._black = black

    def __call__(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Return changed images [C, B, K, H, W], from numbers in (0, 1) [C, B, DRAWS]."""
        images, (down, right, mirrored) = x.flatten(end_dim=1), drawn.flatten(end_dim=1).T
        height, width = x.shape[-2:]
        rows = torch.arange(height, device=x.device).expand(len(images), -1)
        columns = torch.arange(width, device=x.device).expand(len(images), -1)
        if self._flips:
            columns = torch.where(mirrored.unsqueeze(1) < 0.5, columns.flip(1), columns)
        if self._crops:
            rows = rows + _shift(down, height)
            columns = columns + _shift(right, width)
        number = torch.arange(len(images), device=x.device)[:, None, None]
        inside = (rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :])
        # channels last, as shards have them
        found = images.permute(0, 2, 3, 1)[number, inside[0], inside[1]]
        if self._crops:
            is_row, is_column = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
            is_image = is_row[:, :, None] & is_column[:, None, :]
            found = torch.where(is_image.unsqueeze(3), found, self._black.to(found))
        return found.permute(0, 3, 1, 2).unflatten(0, x.shape[:2])


def padding(side: int) -> int:
    """Return how many pixels crops add at each end of a side: an eighth of it, rounded up."""
    return math.ceil(side / 8)


def _shift(drawn: Tensor, side: int) -> Tensor:
    """Return by how many pixels images [n] move, [n, 1], from -padding to padding, all equally likely."""
    most = padding(side)
    return (drawn * (2 * most + 1)).floor().long().clamp(max=2 * most).unsqueeze(1) - most
