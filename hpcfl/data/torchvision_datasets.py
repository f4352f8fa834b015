"""The image sets that torchvision reads and downloads."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.errors import UserError, one_line
from hpcfl.torchvision_parts import torchvision_part

EMNIST_CLASSES = {"mnist": 10, "digits": 10, "letters": 26, "balanced": 47, "bymerge": 47, "byclass": 62}


@dataclass(frozen=True)
class _OnDisk:
    """Where torchvision expects the files of a set below the root."""

    class_name: str
    folder: str
    files: tuple[str, ...]


def _idx_files(*prefixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}-{kind}-ubyte" for prefix in prefixes for kind in ("images-idx3", "labels-idx1"))


_ON_DISK = {
    "mnist": _OnDisk("MNIST", "MNIST/raw", _idx_files("train", "t10k")),
    "fashionmnist": _OnDisk("FashionMNIST", "FashionMNIST/raw", _idx_files("train", "t10k")),
    "emnist": _OnDisk("EMNIST", "EMNIST/raw", _idx_files("emnist-{split}-train", "emnist-{split}-test")),
    "cifar10": _OnDisk(
        "CIFAR10",
        "cifar-10-batches-py",
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    ),
    "cifar100": _OnDisk("CIFAR100", "cifar-100-python", ("train", "test", "meta")),
}
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
    on_disk = _ON_DISK[name]
    folder = Path(root).expanduser() / on_disk.folder
    command = f"hpcfl data fetch {name} --root {shlex.quote(root)}"
    wanted = [file.format(split=split) for file in on_disk.files]
    missing = [file for file in wanted if not os.path.isfile(folder / file)]
    if missing:
        raise UserError(
            f"{name} is not in '{root}' (no file {on_disk.folder}/{missing[0]}): "
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
        raise UserError(
            f"{name} in '{folder}' is damaged ({one_line(error)}): delete that folder, then fetch it again "
            f"where there is a network with: {command}"
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
            f"delete '{Path(root) / _ON_DISK[name].folder}' if it exists, and run the command again"
        ) from error
    return Path(root).expanduser() / _ON_DISK[name].folder


def _read_part(name: str, root: str, split: str, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, H, W, C] and 0-based labels [n] of one part."""
    dataset = _dataset(name, root, split, train, download=False)
    images, labels = np.asarray(dataset.data), np.asarray(dataset.targets, dtype=np.int64)
    if name == "emnist" and split == "letters":
        labels = labels - 1
    return images if images.ndim == 4 else images[..., None], labels


def _check_labels(parts: list[tuple[np.ndarray, np.ndarray]], num_classes: int) -> None:
    for images, labels in parts:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= num_classes:
            raise ValueError(f"a label outside the {num_classes} classes")


def _dataset(name: str, root: str, split: str, train: bool, download: bool) -> Any:
    options = {"split": split} if name == "emnist" else {}
    dataset_class = getattr(torchvision_part("datasets"), _ON_DISK[name].class_name)
    return dataset_class(root, train=train, download=download, **options)
