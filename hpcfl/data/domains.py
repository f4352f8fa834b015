"""Images of several domains, such as photos and sketches of the same things: a folder, or an npz file, each.

Layouts: FOLDER/DOMAIN.npz, or FOLDER/DOMAIN/CLASS/*.png or *.jpg, as PACS, Office-Caltech and DomainNet come.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hpcfl.data.arrays import Arrays, pool_of
from hpcfl.data.npz import as_labels, as_pixels, existing, read_npz
from hpcfl.errors import UserError, one_line
from hpcfl.torchvision_parts import torchvision_part

LOG = logging.getLogger(__name__)

ENDINGS = (".png", ".jpg", ".jpeg")
_LAYOUTS = "it must have DOMAIN.npz files (x, y), or folders DOMAIN/CLASS of png and jpg files"


def read_domains(path: str, layout: str | None, image_size: int | None) -> Arrays:
    """Read the domains in a folder, in alphabetical order, as are the classes of folders.

    Args:
        layout: the axes of x in npz files, see `data.layout`.
        image_size: height and width to which all images are brought; None leaves them, if they are alike.

    Grey images become colour images where others are these.

    Raises:
        UserError: missing, damaged or unfit files.
    """
    where = f"data.path={path}"
    folder = existing(path, where, "folder", _LAYOUTS)
    there = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in there if entry.suffix == ".npz" and entry.is_file()]
    folders = [entry for entry in there if entry.is_dir()]
    if not files and not folders:
        raise UserError(f"{where}: has no domains; {_LAYOUTS}")
    if files and folders:
        raise UserError(f"{where}: has npz files and folders; {_LAYOUTS}, not both")
    classes = _classes(folders, where) if folders else None
    domains = {entry.stem if files else entry.name: entry for entry in files or folders}
    names = tuple(sorted(domains))
    images, labels = [], []
    for name in names:
        x, y = _read_file(domains[name], layout) if classes is None else _read_folder(domains[name], classes)
        images.append(x)
        labels.append(y)
    whole = _alike(images, names, image_size, where)
    domain = np.repeat(np.arange(len(names), dtype=np.int64), [len(y) for y in labels])
    arrays = pool_of(whole, np.concatenate(labels), where, owner=domain)
    return replace(arrays, num_classes=len(classes) if classes else arrays.num_classes, domains=names)


def _read_file(file: Path, layout: str | None) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one domain's images, [n, C, H, W] in one piece, and their labels [n]."""
    where = f"data.path={file}"
    x, y, others = read_npz(str(file), layout)
    if others:
        raise UserError(
            f"{where}: data.source=domains has no use for its array {next(iter(others))}; save the file "
            "with x and y alone (data.partition.name makes the clients)"
        )
    if x.ndim != 4:
        raise UserError(
            f"{where}: x has shape {x.shape}; domains are of images, [n, height, width, channels]"
        )
    return [as_pixels(x, where)], as_labels(y, where, len(x))


def _classes(folders: Sequence[Path], where: str) -> list[str]:
    """Return the names of the class folders, which all domains have, in alphabetical order."""
    found = [
        {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
        for folder in folders
    ]
    for folder, names in zip(folders, found, strict=True):
        if not names:
            raise UserError(f"{where}: domain {folder.name} has no folders of classes; {_LAYOUTS}")
        if absent := sorted(set().union(*found) - names):
            raise UserError(
                f"{where}: domain {folder.name} has no folder of class {absent[0]}, which others have; all "
                "domains need the same classes: rename it, or make an empty folder"
            )
    return sorted(found[0])


def _read_folder(folder: Path, classes: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one domain's images, each uint8 [1, C, H, W], and their labels [n]."""
    images, labels, others = [], [], list[Path]()
    for label, name in enumerate(classes):
        for file in sorted((folder / name).iterdir()):
            if file.name.startswith("."):
                continue
            if file.suffix.lower() in ENDINGS:
                images.append(_read_image(file))
                labels.append(label)
            else:
                others.append(file)
    if others:
        LOG.warning(
            f"data.path={folder}: files that are not images ({', '.join(ENDINGS)}) are left out: "
            f"{len(others)}, such as {others[0].relative_to(folder)}"
        )
    if not images:
        raise UserError(f"data.path={folder}: has no images; allowed: {', '.join(ENDINGS)}")
    return images, np.array(labels, dtype=np.int64)


def _read_image(file: Path) -> np.ndarray:
    """Return an image as uint8 [1, C, H, W], of one channel if the file is grey, else of three."""
    # with torchvision, which needs it
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"pixels of type {image.mode}, not of 8 bits")
                pixels = np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    # a damaged file may raise anything
    except Exception as error:
        raise UserError(f"data.path={file}: cannot be read as an image ({one_line(error)})") from error
    return (pixels[:, :, None] if pixels.ndim == 2 else pixels).transpose(2, 0, 1)[None]


def _alike(
    images: Sequence[Sequence[np.ndarray]], names: Sequence[str], image_size: int | None, where: str
) -> np.ndarray:
    """Return all images as one array [n, C, H, W]; `images` are those of each domain, in pieces."""
    pieces = [piece for of_domain in images for piece in of_domain]
    sizes, channels = ({piece.shape[axes] for piece in pieces} for axes in (slice(2, 4), 1))
    if len({piece.dtype for piece in pieces}) > 1:
        kinds = ", ".join(f"{name} {own[0].dtype}" for name, own in zip(names, images, strict=True))
        raise UserError(
            f"{where}: images are of several types ({kinds}); give all as uint8, or all as floats"
        )
    if len(channels) > 1 and channels != {1, 3}:
        raise UserError(f"{where}: images have {sorted(channels)} channels; allowed: one number, or 1 and 3")
    if image_size is None and len(sizes) > 1:
        smallest, largest = ("x".join(map(str, edge(sizes))) for edge in (min, max))
        raise UserError(
            f"{where}: images are of {len(sizes)} sizes, from {smallest} to {largest}; make all "
            f"squares with data.image_size, such as data.image_size={max(min(sizes))}"
        )
    made = []
    for piece in pieces:
        if image_size is not None and piece.shape[2:] != (image_size, image_size):
            piece = _resized(piece, image_size)
        made.append(np.repeat(piece, 3, axis=1) if len(channels) > 1 and piece.shape[1] == 1 else piece)
    return np.concatenate(made)


def _resized(x: np.ndarray, size: int) -> np.ndarray:
    functional = torchvision_part("transforms.functional")
    images = torch.from_numpy(np.ascontiguousarray(x))
    resized: torch.Tensor = functional.resize(images, [size, size], antialias=True)
    return resized.numpy()
