"""Sources: each is one pool of images and labels.

A source with a train and a test part is read as their concatenation, train first (pFedLA, section 4:
the clients' own split follows the partition). A run never downloads; `fetch` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path

import numpy as np

from hpcfl.config.key_errors import one_of
from hpcfl.config.keys import DataConfig
from hpcfl.config.own_code import OwnFile
from hpcfl.data import bundled, torchvision_datasets
from hpcfl.data.arrays import OF_MNIST, Arrays, Channels, arrays_of
from hpcfl.data.client_files import read_leaf, read_pfllib
from hpcfl.data.csv_tables import read_csv_table
from hpcfl.data.domains import read_domains
from hpcfl.data.npz import read_npz
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream


def _read_npz(data: DataConfig) -> Arrays:
    x, y, others = read_npz(str(data.path), data.layout)
    return arrays_of(x, y, f"data.path={data.path}", **others)


@dataclass(frozen=True)
class Source:
    """Properties of a source before it is read; None if the user's file decides.

    Attributes:
        path_names: what data.path must name, such as `FOLDER`; None if the source does not use it.
        partition: the default partition, if it differs from the general one.
        read: function of data.path (or None) that returns the samples; only sources of a user's own have it.
        reader: likewise of `data`, of the program's own sources.
        samples_overlap: whether samples of one client share numbers, as windows of one text do.
    """

    description: str
    mean: Channels | None = None
    std: Channels | None = None
    path_names: str | None = None
    partition: str | None = None
    read: Callable[[str | None], Arrays] | None = None
    reader: Callable[[DataConfig], Arrays] | None = None
    samples_overlap: bool = False


def _images(description: str, num_classes: int, mean: Channels, std: Channels) -> Source:
    """Return one of torchvision's sets; EMNIST's splits have numbers of classes of their own."""

    def read(data: DataConfig) -> Arrays:
        classes = _emnist_classes(data.split) if data.source == "emnist" else num_classes
        x, y = torchvision_datasets.read(data.source, data.root, data.split, classes)
        return Arrays(x, y, classes, 255.0, mean, std)

    return Source(description, mean, std, reader=read)


SOURCES: dict[str, Source] = {
    "digits": Source(
        "8x8 grey digits, 10 classes, 1797 images, bundled",
        *bundled.OF_DIGITS,
        reader=lambda _: bundled.digits(),
    ),
    "wine": Source(
        "13 features of wines, 3 classes, 178 samples, bundled",
        partition="dirichlet",
        reader=lambda _: bundled.features("wine_data.csv", 3),
    ),
    "breast_cancer": Source(
        "30 features of tumours, 2 classes, 569 samples, bundled",
        partition="dirichlet",
        reader=lambda _: bundled.features("breast_cancer.csv", 2),
    ),
    "topics": Source(
        "32 characters of Python's help texts, to predict the next one; each text is a client; bundled",
        partition="given",
        reader=lambda _: bundled.topics_by_client(),
        samples_overlap=True,
    ),
    "mnist": _images("28x28 grey digits, 10 classes, 70000 images", 10, *OF_MNIST),
    "fashionmnist": _images("28x28 grey clothes, 10 classes, 70000 images", 10, (0.2860,), (0.3530,)),
    "emnist": _images(
        "28x28 grey letters and digits; data.split: mnist (default), digits (10 classes), letters (26), "
        "balanced, bymerge (47), byclass (62)",
        10,
        *OF_MNIST,
    ),
    "cifar10": _images(
        "32x32 colour photos, 10 classes, 60000 images",
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
    ),
    "cifar100": _images(
        "32x32 colour photos, 100 classes, 60000 images",
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "npz": Source(
        "your own file: arrays x (images, series, features or tokens) and y (labels), and client; data.path, "
        "data.layout",
        path_names="FILE.npz",
        reader=_read_npz,
    ),
    "csv": Source(
        "your own table; data.path, data.target=column of the class, data.categorical, data.missing, "
        "data.client_column; needs pandas",
        path_names="FILE.csv",
        reader=read_csv_table,
        partition="dirichlet",
    ),
    "domains": Source(
        "your own images of several domains; data.path=folder of DOMAIN.npz (x, y), or of DOMAIN/CLASS/*.png "
        "or jpg; data.image_size",
        path_names="FOLDER",
        reader=lambda data: read_domains(str(data.path), data.layout, data.image_size),
        partition="iid",
    ),
    "femnist": Source(
        "28x28 letters and digits, 62 classes; a writer is a client; data.path=folder of LEAF's JSON files",
        *OF_MNIST,
        path_names="FOLDER",
        reader=lambda data: read_leaf(str(data.path)),
        partition="given",
    ),
    "pfllib": Source(
        "client files of PFLlib's dataset generators; data.path=folder of train and test",
        path_names="FOLDER",
        reader=lambda data: read_pfllib(str(data.path)),
        partition="given",
    ),
}


def read_source(data: DataConfig) -> Arrays:
    """Read a source from disk; never downloads.

    Raises:
        UserError: unknown split; missing, damaged or unfit files.
    """
    known = SOURCES[data.source]
    if known.path_names is not None and data.path is None:
        raise UserError(f"data.path is not set: data.source={data.source} needs data.path={known.path_names}")
    if known.read is not None:
        return _read_own(data.source, known.read, data.path)
    assert known.reader is not None
    return known.reader(data)


def fetch(source: str, root: str) -> Path:
    """Download a torchvision set into `root` and return its folder; EMNIST comes with all its splits.

    Raises:
        UserError: nothing to fetch for this source, or the download failed.
    """
    if source in SOURCES and source not in torchvision_datasets.NAMES:
        names = SOURCES[source].path_names
        why = "it is bundled" if names is None else f"name yours with data.path={names}"
        raise UserError(f"data.source={source}: there is nothing to fetch; {why}")
    return torchvision_datasets.download(one_of("data set", source, torchvision_datasets.NAMES), root)


def subset_per_class(y: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw `count` samples of every class that occurs; return their indices, int64, in increasing order.

    Raises:
        UserError: a class has fewer than `count`.
    """
    classes, sizes = np.unique(y, return_counts=True)
    if count > sizes.min():
        scarce = classes[sizes.argmin()]
        raise UserError(
            f"data.subset_per_class={count}: class {scarce} allows at most {sizes.min()}; lower it"
        )
    drawn = [
        numpy_stream(seed, f"subset/class{label}").permutation(np.flatnonzero(y == label))[:count]
        for label in classes
    ]
    return np.sort(np.concatenate(drawn))


def _emnist_classes(split: str) -> int:
    classes = torchvision_datasets.EMNIST_CLASSES
    if split not in classes:
        raise UserError(f"data.split={split}: EMNIST has no such split; allowed: {', '.join(classes)}")
    return classes[split]


def own_source(file: OwnFile) -> Source:
    """Return the one Source with a `read` that a user's Python file makes; UserError otherwise."""
    source: Source = file.only(
        lambda value: isinstance(value, Source) and value.read is not None, "instances of Source with a read"
    )
    return source


def _read_own(source: str, read: Callable[[str | None], Arrays], path: str | None) -> Arrays:
    """Return the result of a user's own `read`; UserError if it is not a pool of samples."""
    where = f"data.source={source}"
    try:
        signature(read).bind(path)
    except TypeError as error:
        raise UserError(
            f"{where}: its read is called with data.path: {error}; write def read(path):"
        ) from error
    try:
        arrays = read(path)
    except OSError as error:
        raise UserError(
            f"{where}: its read failed: {error}; name what it reads with data.path=..., or fix data.reader"
        ) from error
    if not isinstance(arrays, Arrays):
        raise UserError(
            f"{where}: its read returned a {type(arrays).__name__}; return arrays_of(x, y, name), or Arrays"
        )
    checked = arrays_of(arrays.x, arrays.y, where, vocabulary=arrays.vocabulary)
    if arrays.num_classes < checked.num_classes:
        raise UserError(
            f"{where}: y holds labels 0..{checked.num_classes - 1}, and num_classes is {arrays.num_classes}; "
            "raise it in the file of data.reader"
        )
    arrays = replace(arrays, names=tuple(map(str, arrays.names)))
    owner, is_test = _checked_clients(arrays, where)
    mean, std = (tuple(np.ravel(numbers).astype(float).tolist()) for numbers in (arrays.mean, arrays.std))
    if (
        len(mean) != len(std)
        or not np.isfinite(mean).all()
        or not all(0 < number < math.inf for number in (*std, arrays.scale))
    ):
        raise UserError(
            f"{where}: mean is {arrays.mean}, std {arrays.std} and scale {arrays.scale}; needed: as many "
            "means as deviations, and deviations and a scale above 0"
        )
    return replace(
        arrays,
        x=checked.x,
        y=checked.y,
        vocabulary=checked.vocabulary,
        owner=owner,
        is_test=is_test,
        mean=mean,
        std=std,
    )


def _checked_clients(arrays: Arrays, where: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return `owner`, int64 [n], and `is_test`, bool [n], of a user's own source; UserError for others."""
    num_samples = len(arrays.y)
    owner, is_test = arrays.owner, arrays.is_test
    if owner is not None:
        owner = np.asarray(owner)
        if owner.shape != (num_samples,) or owner.dtype.kind not in "iu":
            raise UserError(
                f"{where}: owner has shape {owner.shape} and type {owner.dtype}; it needs the number of each "
                f"sample's client, for {num_samples} samples (arrays_of(..., client=...) takes names too)"
            )
        owner, known = owner.astype(np.int64), np.unique(owner)
        if not np.array_equal(known, np.arange(len(known))):
            raise UserError(
                f"{where}: owner has {len(known)} clients, and numbers up to {known[-1]}; number them from 0"
            )
        if 0 < len(arrays.owner_names) < len(known):
            raise UserError(
                f"{where}: owner has {len(known)} clients or domains, and {len(arrays.owner_names)} have "
                "names"
            )
    if is_test is not None:
        is_test = np.asarray(is_test)
        if is_test.shape != (num_samples,) or not np.isin(is_test, (0, 1)).all():
            raise UserError(
                f"{where}: is_test has shape {is_test.shape} and type {is_test.dtype}; it needs true or "
                f"false for {num_samples} samples"
            )
        is_test = is_test.astype(bool)
    return owner, is_test


def subset_fraction(num_samples: int, fraction: float, seed: int) -> np.ndarray:
    """Draw floor(fraction * num_samples) of all samples; return their indices, int64, in increasing order.

    Raises:
        UserError: that would be none.
    """
    # a product such as 0.29 * 100 may be just below the intended integer
    count = math.floor(fraction * num_samples + 1e-9)
    if count == 0:
        raise UserError(
            f"data.subset_fraction={fraction:g} leaves none of {num_samples} samples; "
            f"allowed: {1 / num_samples:.2g} to 1"
        )
    return np.sort(numpy_stream(seed, "subset/fraction").permutation(num_samples)[:count])
