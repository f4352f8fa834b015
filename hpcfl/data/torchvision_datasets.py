"""The image sets that torchvision reads and downloads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.errors import UserError, one_line
from hpcfl.torchvision_parts import torchvision_part

EMNIST_CLASSES = {"mnist": 10, "digits": 10, "letters": 26, "balanced": 47, "bymerge": 47, "byclass": 62}
_ON_DISK = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashionmnist": ("FashionMNIST", "FashionMNIST/raw"),
    "emnist": ("EMNIST", "EMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
"""torchvision's class of each set, and its folder below the root."""
NAMES = tuple(_ON_DISK)
"""Sources that can be fetched."""


def read(name: str, root: str, split: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the train part followed by the test part; never downloads.

    Args:
        split: EMNIST's split; other sets ignore it.
        num_classes: labels are checked to lie in 0..num_classes-1.

    Returns:
        x uint8 [n, C, H, W] as stored (EMNIST's images are transposed on disk and stay so) and
        y int64 [n], 0-based.

    Raises:
        UserError: the files are missing, unreadable or inconsistent.
    """
    folder = _folder(name, root)
    command = f"hpcfl data fetch {name} --root {shlex.quote(root)}"
    if not folder.is_dir():
        raise UserError(
            f"{name} is not in '{root}' (no folder {_ON_DISK[name][1]}): "
            f"fetch it where there is a network with: {command}"
        )
    torchvision_part("datasets")
    try:
        parts = [_read_part(name, root, split, train) for train in (True, False)]
        x = np.concatenate([images for images, _ in parts])
        y = np.concatenate([labels for _, labels in parts])
        _check_labels(parts, num_classes)
    # a damaged file may raise anything
    except Exception as error:
        # torchvision's own advice names an argument that hpcfl does not have
        reason = one_line(error).partition(" You can use download=True")[0]
        raise UserError(
            f"{name} in '{folder}' is damaged or incomplete ({reason}): delete that folder, then "
            f"fetch it again where there is a network with: {command}"
        ) from error
    return x.transpose(0, 3, 1, 2), y


def download(name: str, root: str) -> Path:
    """Download a set unless it is there, and return its folder.

    Raises:
        UserError: with the reason of the failure.
    """
    torchvision_part("datasets")
    try:
        # the archive of EMNIST has all its splits
        _dataset(name, root, "mnist", train=True, download=True)
    # a network may raise anything
    except Exception as error:
        raise UserError(
            f"{name} could not be fetched into '{root}' ({one_line(error)}): check the network and the disk, "
            f"delete '{_folder(name, root)}' if it exists, and run the command again"
        ) from error
    return _folder(name, root)


def _folder(name: str, root: str) -> Path:
    return Path(root).expanduser() / _ON_DISK[name][1]


def _read_part(name: str, root: str, split: str, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, H, W, C] and 0-based labels [n] of one part."""
    dataset = _dataset(name, root, split, train, download=False)
    images, labels = np.asarray(dataset.data), np.asarray(dataset.targets, dtype=np.int64)
    if name == "emnist" and split == "letters":
        labels = labels - 1
    return images if images.ndim == 4 else images[..., None], labels


def _check_labels(parts: list[tuple[np.ndarray, np.ndarray]], num_classes: int) -> None:
    """Raise ValueError for labels that cannot be right: torchvision has no checksums of MNIST's raw files."""
    for images, labels in parts:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= num_classes:
            raise ValueError(f"a label outside the {num_classes} classes")


def _dataset(name: str, root: str, split: str, train: bool, download: bool) -> Any:
    options = {"split": split} if name == "emnist" else {}
    dataset_class = getattr(torchvision_part("datasets"), _ON_DISK[name][0])
    return dataset_class(root, train=train, download=download, **options)
