"""Data sets that are divided into clients already: LEAF's JSON files by writer, PFLlib's npz files by client.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018. Zhang et al., PFLlib: A Beginner-Friendly and
Comprehensive Personalized Federated Learning Library and Benchmark, JMLR 2025.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.data.arrays import OF_MNIST, Arrays, pool_of
from hpcfl.data.npz import are_tokens, as_labels, as_pixels, existing
from hpcfl.errors import UserError, one_line

FEMNIST_CLASSES = 62
_SIDE = 28
_PARTS = ("train", "test")
_MAKE_LEAF = (
    "LEAF's data/femnist/preprocess.sh (-s niid --sf 1.0 -t sample) writes such files into data/all_data, "
    "data/train, data/test"
)
_MAKE_PFLLIB = "PFLlib's dataset/generate_*.py write {train,test}/0.npz, 1.npz, ..."
_MAKE_AGAIN = "make the files again, or name another folder with data.path=FOLDER"

Samples = tuple[np.ndarray, np.ndarray]
"""Samples x [n, ...] and labels y [n]."""


def read_leaf(path: str) -> Arrays:
    """Read LEAF's FEMNIST; the writers are the clients, ordered by id.

    Args:
        path: a folder with the folders `train` and `test`, or else with JSON files without a split.

    Returns:
        Grey images of 28x28 pixels: uint8 where every value is a 255th, as LEAF writes them, else float32 in
        0..1.

    Raises:
        UserError: missing, damaged or unfit files.
    """
    folder = existing(path, f"data.path={path}", "folder", _MAKE_LEAF)
    there = [part for part in _PARTS if (folder / part).is_dir()]
    if len(there) == 1:
        absent = "train" if there == ["test"] else "test"
        raise UserError(f"data.path={path}: has a folder {there[0]} but no folder {absent}; {_MAKE_LEAF}")
    parts = [_read_leaf_files(folder, part, path) for part in there or ["."]]
    writers = sorted(set().union(*parts))
    # without a split, all writers are in the only part
    for name, part in zip(there, parts, strict=False):
        if lacking := [writer for writer in writers if writer not in part]:
            raise UserError(
                f"data.path={path}: writer {lacking[0]} has no samples in {name}; "
                "split by samples, not by writers: LEAF's preprocess.sh -t sample"
            )
    x, y, owner, is_test = _pooled([part.pop(writer) for writer in writers for part in parts], len(parts))
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    return Arrays(x, y, FEMNIST_CLASSES, scale, *OF_MNIST, owner, is_test, names=tuple(writers))


def read_pfllib(path: str) -> Arrays:
    """Read the files `{train,test}/<client>.npz` of PFLlib's generators, without executing code in them.

    Args:
        path: the folder that holds the folders `train` and `test`.

    Raises:
        UserError: missing, damaged or unfit files, and files that would run code.
    """
    folder = existing(path, f"data.path={path}", "folder", _MAKE_PFLLIB)
    num_clients = len({file.name for part in _PARTS for file in (folder / part).glob("[!.]*.npz")})
    if num_clients == 0:
        raise UserError(f"data.path={path}: has no files train/*.npz and test/*.npz; {_MAKE_PFLLIB}")
    names = [f"{part}/{client}.npz" for client in range(num_clients) for part in _PARTS]
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"data.path={path}: there are files of {num_clients} clients but no {name}; "
                f"they must be numbered 0..{num_clients - 1} in train and in test"
            )
    pieces = [_read_client(folder / name, f"data.path={path}: {name}") for name in names]
    kinds = [f"{x.dtype} samples of shape {x.shape[1:]}" for x, _ in pieces]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise UserError(
                f"data.path={path}: {name} holds {kind}, {names[0]} {kinds[0]}; all files must agree"
            )
    x, y, owner, is_test = _pooled(pieces, len(_PARTS))
    return pool_of(x, y, f"data.path={path}", owner=owner, is_test=is_test)


def _pooled(
    pieces: Sequence[Samples], num_parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Join the pieces of clients 0, 1, ...: one each without a split, two with it, train first.

    Returns x, y, and owner and is_test of each sample, as in `Arrays`.
    """
    num_clients = len(pieces) // num_parts
    sizes = [len(y) for _, y in pieces]
    owner = np.repeat(np.arange(num_clients, dtype=np.int64).repeat(num_parts), sizes)
    is_test = np.repeat(np.tile([False, True], num_clients), sizes) if num_parts == 2 else None
    images = [x for x, _ in pieces]
    if len({x.dtype for x in images}) > 1:
        images = [_divided(x) if x.dtype == np.uint8 else x for x in images]
    return np.concatenate(images), np.concatenate([y for _, y in pieces]), owner, is_test


def _read_leaf_files(folder: Path, part: str, path: str) -> dict[str, Samples]:
    """Return the samples of every writer in the JSON files of one part."""
    files = sorted((folder / part).glob("*.json"))
    if not files:
        raise UserError(f"data.path={path}: has no files {Path(part) / '*.json'}; {_MAKE_LEAF}")
    samples: dict[str, Samples] = {}
    for file in files:
        where = f"data.path={path}: {file.relative_to(folder)}"
        of_file = _read_leaf_file(file, where)
        twice = sorted(samples.keys() & of_file)
        if twice:
            raise UserError(f"{where}: writer {twice[0]} is also in another file of that folder; keep one")
        samples |= of_file
    return samples


def _read_leaf_file(file: Path, where: str) -> dict[str, Samples]:
    try:
        text = file.read_bytes().decode()
        content = json.loads(text, object_hook=_lists_as_arrays)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: cannot be read as JSON ({one_line(error)}); {_MAKE_LEAF}") from error
    users, user_data = _field(content, "users", where), _field(content, "user_data", where)
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise UserError(f"{where}: users must be a list of the writers' ids; {_MAKE_LEAF}")
    if not users:
        raise UserError(f"{where}: users names no writer; {_MAKE_LEAF}")
    # LEAF's split leaves writers with too few samples in user_data, empty and unlisted.
    return {user: _writer(_field(user_data, user, f"{where}: user_data"), where, user) for user in users}


def _writer(fields: Any, where: str, user: str) -> Samples:
    """Check and pack one writer's samples."""
    where = f"{where}: writer {user}"
    x, y = (_numbers(_field(fields, key, where), key, where) for key in ("x", "y"))
    if x.ndim != 2 or x.shape[1] != _SIDE**2 or len(x) == 0:
        raise UserError(f"{where}: x has shape {x.shape}; must be [n, {_SIDE**2}] with n > 0; {_MAKE_LEAF}")
    if not ((x >= 0) & (x <= 1)).all():
        raise UserError(f"{where}: x holds values outside 0..1; {_MAKE_LEAF}")
    y = as_labels(y, where, len(x))
    if y.min() < 0 or y.max() >= FEMNIST_CLASSES:
        raise UserError(f"{where}: y holds labels {y.min()}..{y.max()}; allowed: 0..{FEMNIST_CLASSES - 1}")
    return _as_bytes_if_exact(x.reshape(-1, 1, _SIDE, _SIDE)), y


def _as_bytes_if_exact(x: np.ndarray) -> np.ndarray:
    """Return float32 values in 0..1 as uint8 where dividing by 255 gives the same bits back."""
    pixels = np.rint(x * 255).astype(np.uint8)
    return pixels if np.array_equal(_divided(pixels), x) else x


def _divided(pixels: np.ndarray) -> np.ndarray:
    """Return bytes as float32 in 0..1, with the bits that normalisation gives them."""
    return pixels.astype(np.float32) / np.float32(255)


def _lists_as_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn a writer's lists into arrays while the file is parsed: a Python number takes 32 bytes."""
    for key in ("x", "y"):
        if isinstance(fields.get(key), list) and _holds_numbers(fields[key]):
            # other lists stay lists; the error comes later, where the writer is known
            with contextlib.suppress(ValueError, OverflowError), np.errstate(over="ignore"):
                numbers = np.asarray(fields[key])
                fields[key] = numbers.astype(np.float32) if key == "x" and _is_number(numbers) else numbers
    return fields


def _holds_numbers(values: list[Any]) -> bool:
    """Whether a list contains numbers, or lists of numbers; an array of texts would need too much memory."""
    kinds = set(map(type, values))
    if kinds == {list}:
        kinds = set().union(*(map(type, row) for row in values))
    return kinds <= {int, float}


def _is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "iuf"


def _numbers(value: Any, key: str, where: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or not _is_number(value):
        raise UserError(f"{where}: {key} is not an array of numbers with rows of one length; {_MAKE_AGAIN}")
    return value


def _field(fields: Any, key: str, where: str) -> Any:
    if not isinstance(fields, dict) or key not in fields:
        raise UserError(f"{where}: has no field '{key}'; {_MAKE_AGAIN}")
    return fields[key]


def _read_client(file: Path, where: str) -> Samples:
    """Read x and y of one client's part."""
    try:
        with zipfile.ZipFile(file) as archive:
            fields = _read_pickled_dict(archive.read("data.npy"), where)
        x, y = (_rebuilt(_field(fields, key, where), key) for key in ("x", "y"))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: cannot be read ({one_line(error)}); {_MAKE_PFLLIB}") from error
    x, y = _numbers(x, "x", where), _numbers(y, "y", where)
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(
            f"{where}: x has shape {x.shape}; must be images [n, C, H, W], series [n, C, L] or [n, C, 1, L], "
            f"or tokens [n, L], not empty; {_MAKE_AGAIN}"
        )
    if x.ndim == 4 and x.shape[2] == 1:
        x = x[:, :, 0]
    return x if are_tokens(x) else as_pixels(x, where), as_labels(y, where, len(x))


def _rebuilt(value: Any, key: str) -> Any:
    """Return an array that a pickle describes, or a list of them, or of numbers, as one array."""
    if isinstance(value, list):
        return np.array([_rebuilt(one, key) for one in value])
    if not isinstance(value, _PickledArray):
        return value
    return _texts(value) if key == "x" and value.holds_objects else value.rebuilt()


def _texts(pairs: _PickledArray) -> np.ndarray:
    """Return the tokens [n, L] of an array [n, 2] that pairs them with their number."""
    tokens = np.array(pairs.content[::2])
    if pairs.shape != (len(tokens), 2) or tokens.ndim != 2:
        raise ValueError("x holds objects, and not texts of one length with the numbers of their tokens")
    return tokens


def _read_pickled_dict(npy: bytes, where: str) -> Any:
    """Return the dict that numpy.savez saved as an array of one object; its arrays are not yet rebuilt."""
    stream = io.BytesIO(npy)
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    if shape != () or dtype != np.dtype(object):
        raise ValueError(f"data is {dtype} of shape {shape}, not one dict of x and y")
    (fields,) = _NumpyUnpickler(stream, where).load().content
    return fields


class _PickledDtype:
    """A numpy.dtype as a pickle describes it."""

    def __init__(self, code: str, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]

    def rebuilt(self) -> np.dtype[Any]:
        if not re.fullmatch(r"[biuf]\d+", self.code):
            raise ValueError(f"an array of type {self.code}")
        return np.dtype(self.code).newbyteorder(self.byte_order)


class _PickledArray:
    """A numpy.ndarray as a pickle describes it; numpy itself would take bytes for pointers if it says so."""

    def __init__(self, *_: object) -> None:
        """Take the arguments of numpy's _reconstruct, a type and two placeholders."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state

    @property
    def holds_objects(self) -> bool:
        return bool(self.dtype.code == "O8") and isinstance(self.content, list)

    def rebuilt(self) -> np.ndarray:
        flat: np.ndarray = np.frombuffer(self.content, self.dtype.rebuilt())
        return flat.reshape(self.shape, order="F" if self.is_fortran else "C")


def _scalar(dtype: _PickledDtype, content: bytes) -> Any:
    """Replace numpy's function that makes a number of bytes."""
    return np.frombuffer(content, dtype.rebuilt())[0]


def _encoded(text: str, encoding: str) -> bytes:
    """Replace _codecs.encode, with which protocol 2 writes bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_STAND_INS: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _PickledArray,
    "numpy._core.multiarray._reconstruct": _PickledArray,
    "numpy.ndarray": _PickledArray,
    "numpy.matrix": _PickledArray,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.dtype": _PickledDtype,
    "_codecs.encode": _encoded,
}


class _NumpyUnpickler(pickle.Unpickler):
    """Unpickle numpy arrays as descriptions; refuse everything else that a pickle calls."""

    def __init__(self, stream: io.BytesIO, where: str) -> None:
        super().__init__(stream)
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        called = f"{module}.{name}"
        if called not in _STAND_INS:
            raise UserError(f"{self.where}: refused, because it would run code ({called}); {_MAKE_PFLLIB}")
        return _STAND_INS[called]
