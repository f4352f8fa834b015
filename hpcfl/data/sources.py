"""Where the samples come from: one pool of images and labels a source.

A source with a train and a test part is read as their concatenation, train first (pFedLA, section 4:
the clients' own split follows the partition). A run never downloads; `fetch` does.
"""

from __future__ import annotations

import importlib.util
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl.data import torchvision_datasets
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream

Channels = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Arrays:
    """One pool of samples, as stored.

    Attributes:
        x: uint8 or float32 [n, C, H, W]; may be a view of another layout.
        y: int64 [n], classes 0..num_classes-1.
        scale: what x is divided by to lie in [0, 1]; 1 for floats.
        mean, std: constants a channel, for scaled values.
    """

    x: np.ndarray
    y: np.ndarray
    num_classes: int
    scale: float
    mean: Channels
    std: Channels


@dataclass(frozen=True)
class Source:
    """What is known of a source before it is read; None where the user's file decides."""

    description: str
    num_classes: int | None = None
    mean: Channels | None = None
    std: Channels | None = None


_MNIST = (0.1307,), (0.3081,)

SOURCES: dict[str, Source] = {
    "digits": Source("8x8 grey digits, 10 classes, 1797 images, bundled", 10, (0.3053,), (0.3760,)),
    "mnist": Source("28x28 grey digits, 10 classes, 70000 images", 10, *_MNIST),
    "fashionmnist": Source("28x28 grey clothes, 10 classes, 70000 images", 10, (0.2860,), (0.3530,)),
    "emnist": Source(
        "28x28 grey letters and digits; data.split: mnist (default), digits (10 classes), letters (26), "
        "balanced, bymerge (47), byclass (62)",
        10,
        *_MNIST,
    ),
    "cifar10": Source(
        "32x32 colour photos, 10 classes, 60000 images",
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Source(
        "32x32 colour photos, 100 classes, 60000 images",
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "npz": Source("your own file: arrays x (images) and y (labels); data.path, data.layout=NHWC or NCHW"),
}


def load_arrays(
    source: str, *, root: str, path: str | None = None, layout: str | None = None, split: str = "mnist"
) -> Arrays:
    """Read a source from disk; never downloads.

    Args:
        root: folder of the torchvision sets.
        path: the file of source `npz`.
        layout: `NHWC` or `NCHW`, for a four-dimensional x of source `npz`.
        split: EMNIST's split; `mnist` has ten classes, as pFedLA's Table 3 implies.

    Raises:
        UserError: unknown source or split; missing, damaged or unfit files.
    """
    known = _known(source)
    if source == "digits":
        return _load_digits()
    if source == "npz":
        return _load_npz(path, layout)
    num_classes = _emnist_classes(split) if source == "emnist" else known.num_classes
    assert num_classes is not None
    assert known.mean is not None
    assert known.std is not None
    x, y = torchvision_datasets.read(source, root, split, num_classes)
    return Arrays(x, y, num_classes, 255.0, known.mean, known.std)


def fetch(source: str, root: str, split: str = "mnist") -> Path:
    """Download a torchvision set into `root` and return its folder; EMNIST comes with all its splits.

    Raises:
        UserError: nothing to fetch for this source, or the download failed.
    """
    _known(source)
    if source == "digits":
        raise UserError("data.source=digits: bundled with scikit-learn, there is nothing to fetch")
    if source == "npz":
        raise UserError(
            "data.source=npz: your own file, there is nothing to fetch; name it with data.path=FILE"
        )
    if source == "emnist":
        _emnist_classes(split)
    return torchvision_datasets.download(source, root, split)


def subset_per_class(y: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw `count` samples of every class that occurs; return their indices, int64, in increasing order.

    Raises:
        UserError: a class has fewer than `count`.
    """
    classes, sizes = np.unique(y, return_counts=True)
    if count > sizes.min():
        scarce = classes[sizes.argmin()]
        raise UserError(f"data.subset_per_class={count}: class {scarce} allows at most {sizes.min()}")
    drawn = [
        numpy_stream(seed, f"subset/class{label}").permutation(np.flatnonzero(y == label))[:count]
        for label in classes
    ]
    return np.sort(np.concatenate(drawn))


def _known(source: str) -> Source:
    if source not in SOURCES:
        raise UserError(f"data.source={source}: unknown; allowed: {', '.join(SOURCES)}")
    return SOURCES[source]


def _emnist_classes(split: str) -> int:
    classes = torchvision_datasets.EMNIST_CLASSES
    if split not in classes:
        raise UserError(f"data.split={split}: EMNIST has no such split; allowed: {', '.join(classes)}")
    return classes[split]


def _load_digits() -> Arrays:
    """Read the file of scikit-learn's load_digits: importing scikit-learn in every rank costs seconds."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    known = SOURCES["digits"]
    assert known.mean is not None
    assert known.std is not None
    return Arrays(x, table[:, -1].astype(np.int64), 10, 16.0, known.mean, known.std)


def _load_npz(path: str | None, layout: str | None) -> Arrays:
    if path is None:
        raise UserError("data.path is not set: data.source=npz needs data.path=FILE.npz")
    x, y = _read_npz(path)
    x = _as_pixels(_as_channels_first(x, path, layout), path)
    y = _as_labels(y, path, len(x))
    num_channels = x.shape[1]
    is_bytes = x.dtype == np.uint8
    mean = (0.5 if is_bytes else 0.0,) * num_channels
    std = (0.5 if is_bytes else 1.0,) * num_channels
    return Arrays(x, y, int(y.max()) + 1, 255.0 if is_bytes else 1.0, mean, std)


def _read_npz(path: str) -> tuple[np.ndarray, np.ndarray]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"data.path={path}: no such file")
    not_npz = f"data.path={path}: cannot be read as an npz file; write it with numpy.savez(FILE, x=x, y=y)"
    try:
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(not_npz)
            absent = [key for key in ("x", "y") if key not in archive]
            if absent:
                raise UserError(
                    f"data.path={path}: has no array '{absent[0]}' (it holds {', '.join(archive.files)}); "
                    "x and y are needed"
                )
            return archive["x"], archive["y"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{not_npz} ({' '.join(str(error).split())})") from error


def _as_channels_first(x: np.ndarray, path: str, layout: str | None) -> np.ndarray:
    """Return x as a view [n, C, H, W]."""
    if x.ndim not in (3, 4):
        raise UserError(
            f"data.path={path}: x has {x.ndim} dimensions; allowed: 4, or 3 for grey images [n, H, W]"
        )
    if x.size == 0:
        raise UserError(f"data.path={path}: x is empty, its shape is {x.shape}")
    if x.ndim == 3:
        return x[:, None]
    if layout not in ("NHWC", "NCHW"):
        raise UserError(
            f"data.layout={layout}: x has shape {x.shape}; set data.layout=NHWC or data.layout=NCHW"
        )
    return x.transpose(0, 3, 1, 2) if layout == "NHWC" else x


def _as_pixels(x: np.ndarray, path: str) -> np.ndarray:
    """Return x as uint8 or float32."""
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        raise UserError(f"data.path={path}: x has type {x.dtype}; allowed: uint8 (0..255) or float")
    with np.errstate(over="ignore"):
        pixels = x.astype(np.float32)
    if not np.isfinite(pixels).all():
        raise UserError(
            f"data.path={path}: x holds values that are not finite in float32; clean or rescale them"
        )
    return pixels


def _as_labels(y: np.ndarray, path: str, num_samples: int) -> np.ndarray:
    """Return y as int64 [n]."""
    if y.ndim != 1 or len(y) != num_samples:
        raise UserError(
            f"data.path={path}: y has shape {y.shape}, x has {num_samples} samples; y must be [n]"
        )
    if y.dtype.kind not in "iu":
        raise UserError(f"data.path={path}: y has type {y.dtype}; labels must be integers 0, 1, ...")
    if y.min() < 0 or y.max() >= num_samples:
        raise UserError(
            f"data.path={path}: y holds labels {y.min()}..{y.max()}; allowed: 0..K-1 with at most "
            f"as many classes as samples ({num_samples})"
        )
    return y.astype(np.int64)
