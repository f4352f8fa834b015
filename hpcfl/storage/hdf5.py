"""Checkpoints as HDF5 files that plain h5py reads. The only module that imports h5py.

A file's first 512 bytes, HDF5's user block, hold a line of text with the SHA-256 of everything after them, so
that no flipped bit goes unnoticed. Client rows are written and read in blocks, so that memory for all clients
is never needed.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpcfl import __version__
from hpcfl.errors import UserError, one_line
from hpcfl.parameters import Slot
from hpcfl.samples import SampleType
from hpcfl.storage.reading import record_of
from hpcfl.storage.snapshot import (
    Block,
    DataRecord,
    LedgerTable,
    Rows,
    Snapshot,
)

SCHEMA = 2
"""Raised with every change after which an older checkpoint is not resumed: other names or columns."""
LAYOUTS = ("parameters", "buffers")
"""Names of the parts of `Snapshot.layout`."""
USER_BLOCK_BYTES = 512


class LoadedCheckpoint:
    """A verified checkpoint, open for reading; names come in the order in which they were saved."""

    def __init__(self, path: Path, if_damaged: str) -> None:
        """Open the file.

        Raises UserError if a newer hpcfl wrote it, or if it lacks parts that a run writes, or has others.
        """
        self.path = path
        opened = ExitStack()
        # called at the end if not before
        self.close = weakref.finalize(self, opened.close)
        """Close the file; what was not read yet cannot be read any more."""
        try:
            # a file object of our own: a user's script may have the same path open in HDF5 with other options
            raw = opened.enter_context(io.FileIO(path))
            self._file = opened.enter_context(h5py.File(raw, "r"))
            _check_own_content(self._file)
            self._read()
        except Exception as error:
            self.close()
            if isinstance(error, UserError | MemoryError):
                raise
            raise UserError(
                f"{path} is not a valid hpcfl checkpoint ({one_line(error)}); {if_damaged}"
            ) from error

    def _read(self) -> None:
        """Read all but the large tensors; raises an exception of any type if the file is not as a run's."""
        attributes = self._file.attrs
        self.schema = int(attributes["schema"])
        if self.schema > SCHEMA:
            raise UserError(
                f"{self.path} has checkpoint schema {self.schema}, this hpcfl {__version__} reads up to "
                f"{SCHEMA}; upgrade hpcfl, or start over: the run's command with --fresh moves it aside"
            )
        self.round = int(attributes["round"])
        """Completed rounds."""
        self.record = record_of(attributes["config"].decode())
        """The nested keys of the configuration."""
        self.layout = tuple(_read_layout(self._file[f"layout/{kind}"]) for kind in LAYOUTS)
        """As `Snapshot.layout`."""
        self.data = _read_data(self._file["data"])
        self.history = {name: data[()] for name, data in _datasets(self._file["history"]).items()}
        self.ledger = {
            name: LedgerTable(data[()], _decode(data.attrs["columns"]))
            for name, data in _datasets(self._file["ledger"]).items()
        }
        self.rounds = self.ledger["metrics"].column("round").astype(np.int64)
        """The rounds after which there are entries in the history [E]."""
        if any(len(entries) != len(self.rounds) for entries in self.history.values()):
            raise ValueError("the evaluations of the history are not those of the ledger")
        self.layers = [name.removeprefix("down/") for name in self.ledger["bytes"].columns[1:]]
        """Names of what has bytes: the layers of the method's models, in order, come first."""
        for table in self.ledger.values():
            if table.values.shape[1:] != (len(table.columns),):
                raise ValueError("a table of the ledger has more or fewer columns than names")
        self.num_clients = self.history["accuracy"].shape[1]
        """Clients in training, N."""
        self.num_unseen = self.history["accuracy_unseen"].shape[1] if "accuracy_unseen" in self.history else 0
        """Clients that take no part in training, with ids from N on."""
        for group in ("server", "clients", *({"personalised", "unseen"} & self._file.keys())):
            _datasets(self._file[group])

    @cached_property
    def server(self) -> dict[str, torch.Tensor]:
        """The server's state, read when it is first asked for, before `close`."""
        with self._reading():
            return {name: _read_tensor(data) for name, data in _datasets(self._file["server"]).items()}

    def newest(self, name: str) -> np.ndarray | None:
        """Read a quantity of the server, derived ones too, as the last round left it; None without it."""
        with self._reading():
            return self._file["server"][name][()] if name in self._file["server"] else None

    @property
    def has_models(self) -> bool:
        """Whether it holds the personalised models, as the last checkpoint of a run does."""
        return "personalised" in self._file

    def model(self, client: int) -> dict[str, torch.Tensor]:
        """Read the personalised model of a client, by part: "theta" [P], "buffers" [U], or a method's own.

        Clients N and up take no part in training; their models are those that were adapted last. The
        checkpoint must have models, and this client.
        """
        group, row = "personalised", client
        if client >= self.num_clients:
            group, row = "unseen", client - self.num_clients
        parts = _datasets(self._file[group])
        with self._reading():
            # a part that all clients share has one row
            return {name: _read_tensor(data, 0 if len(data) == 1 else row) for name, data in parts.items()}

    def client_rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Read the rows [stop - start, ...] of clients start to stop - 1, by name."""
        with self._reading():
            rows = _datasets(self._file["clients"])
            return {name: torch.from_numpy(data[start:stop]) for name, data in rows.items()}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError where numbers cannot be read, though all that describes them could."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.path} is damaged (it cannot be read: {error}); restore it from a backup"
            ) from error


class _TargetFile(io.FileIO):
    """A file that remembers its first failed write instead of raising it.

    HDF5 2.0 keeps a file open, and later crashes, when a write fails while it closes the file (disk full).
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while rest and not self.failure:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return self.tell()

    def raise_failure(self) -> None:
        if self.failure:
            raise self.failure


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint with its hash to `path` and bring it to the disk.

    Raises:
        OSError: the file could not be written.
        ValueError: a name is there twice, or a row is not there once.
    """
    with _TargetFile(path, "w+") as target:
        with h5py.File(
            target,
            "w",
            userblock_size=USER_BLOCK_BYTES,
            libver=("v108", "v110"),  # readable with old HDF5, and attributes may exceed 64 KiB
            locking=False,
            rdcc_nbytes=0,  # chunks are written whole and once: a cache would only delay a failure
        ) as file:
            _write_content(file, snapshot, target.raise_failure)
        digest = _sha256_after_user_block(target)
        target.seek(0)
        target.write(_user_block(digest))
        target.raise_failure()
        os.fsync(target.fileno())
        # Drop the file from the page cache, so that the verification reads it from the disk.
        os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_content(file: h5py.File, snapshot: Snapshot, between: Callable[[], None]) -> None:
    """Write all but the hash; call `between` after each part or block that may be large."""
    file.attrs["schema"] = SCHEMA
    file.attrs["round"] = snapshot.round
    for key, text in (("hpcfl", __version__), ("method", snapshot.method), ("config", snapshot.config)):
        file.attrs[key] = _encode([text]).reshape(())
    for kind, slots in zip(LAYOUTS, snapshot.layout, strict=True):
        _write_layout(file.create_group(f"layout/{kind}"), slots)
    _write_data(file.create_group("data"), snapshot.data)
    server = file.create_group("server")
    _write_arrays(server, {name: tensor.numpy(force=True) for name, tensor in snapshot.server.items()})
    for name, tensor in snapshot.derived.items():
        server.create_dataset(name, data=tensor.numpy(force=True)).attrs["derived"] = 1
    between()
    _write_rows(file.create_group("clients"), snapshot.clients, between)
    for name, models in snapshot.models.items():
        _write_rows(file.create_group(name), models(), between)
    _write_arrays(file.create_group("history"), snapshot.history())
    ledger = snapshot.ledger()
    _write_arrays(file.create_group("ledger"), {name: table.values for name, table in ledger.items()})
    for name, table in ledger.items():
        file["ledger"][name].attrs["columns"] = _encode(table.columns)
    file.attrs["complete"] = 1


def _write_layout(group: h5py.Group, slots: Sequence[Slot]) -> None:
    """Write names, offsets, layers [T] and shapes [T, most dimensions], where -1 pads the shorter shapes."""
    max_dims = max((len(slot.shape) for slot in slots), default=0)
    padded = [[*slot.shape, *[-1] * (max_dims - len(slot.shape))] for slot in slots]
    group["names"] = _encode([slot.name for slot in slots])
    group["layers"] = _encode([slot.module for slot in slots])
    group["offsets"] = np.array([slot.start for slot in slots], dtype=np.int64)
    group["shapes"] = np.array(padded, dtype=np.int64).reshape(len(slots), max_dims)


def _read_layout(group: h5py.Group) -> tuple[Slot, ...]:
    names, layers = _decode(group["names"][()]), _decode(group["layers"][()])
    shapes = (tuple(size for size in shape if size >= 0) for shape in group["shapes"][()].tolist())
    offsets = group["offsets"][()].tolist()
    return tuple(
        Slot(name, shape, start, start + math.prod(shape), layer)
        for name, shape, start, layer in zip(names, shapes, offsets, layers, strict=True)
    )


def _check_own_content(group: h5py.Group) -> None:
    """Raise ValueError if a part of the file is in another file, which reading would open."""
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{name!r} is a link to another place")
        item = group[name]
        if isinstance(item, h5py.Group):
            _check_own_content(item)
        elif item.is_virtual or item.external:
            raise ValueError(f"{name!r} is in another file")


def _write_data(group: h5py.Group, record: DataRecord) -> None:
    group["num_samples"] = np.array(record.num_samples, dtype=np.int64)
    group.attrs["dtype"] = _encode([record.dtype]).reshape(())
    group.attrs["sample_shape"] = record.sample.shape
    group.attrs["vocabulary"] = record.sample.vocabulary or 0
    for name in ("scale", "mean", "std", "num_classes", "digest", "partition_digest"):
        group.attrs[name] = getattr(record, name)


def _read_data(group: h5py.Group) -> DataRecord:
    found = group.attrs
    # earlier files know images only
    shape = tuple(np.ravel(found.get("sample_shape", found.get("image_shape"))).tolist())
    vocabulary = int(found.get("vocabulary", 0)) or None
    dtype = found["dtype"].decode()
    if dtype not in (("int64",) if vocabulary else ("uint8", "float32")):
        raise ValueError(f"samples of type {dtype!r}")
    if not (len(shape) == 1 if vocabulary else 1 <= len(shape) <= 3):
        raise ValueError(f"samples of shape {shape}")
    sample = SampleType(shape, vocabulary)
    scale, mean, std = (np.ravel(found[name]).tolist() for name in ("scale", "mean", "std"))
    if [len(scale), len(mean), len(std)] != [1, sample.channels, sample.channels]:
        raise ValueError(f"no scale, or not one mean and deviation for each of {sample.channels} channels")
    return DataRecord(
        sample=sample,
        dtype=dtype,
        scale=scale[0],
        mean=tuple(mean),
        std=tuple(std),
        num_classes=int(found["num_classes"]),
        num_samples=tuple(group["num_samples"][()].tolist()),
        digest=int(found.get("digest", 0)),
        partition_digest=int(found.get("partition_digest", 0)),
    )


def _write_arrays(group: h5py.Group, arrays: Mapping[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        group.create_dataset(name, data=values)
    group.attrs["names"] = _encode(list(arrays))


def _write_rows(group: h5py.Group, rows: Rows, between: Callable[[], None]) -> None:
    for name, shaped in rows.shapes.items():
        # one chunk a row, so that reading some clients touches only theirs
        chunks = (1, *shaped.shape[1:]) if shaped.numel() else None
        dtype = torch.empty(0, dtype=shaped.dtype).numpy().dtype
        group.create_dataset(name, shape=shaped.shape, dtype=dtype, chunks=chunks)
    group.attrs["names"] = _encode(list(rows.shapes))
    times = {name: np.zeros(len(shaped), dtype=np.int64) for name, shaped in rows.shapes.items()}
    for block in rows.blocks:
        _write_block(group, block, times)
        between()
        # Free this block before the next one is made, so that memory never holds two.
        del block
    for name, written in times.items():
        if (written != 1).any():
            raise ValueError(
                f"rows {np.flatnonzero(written != 1)[:5]}... of {name!r} were not written exactly once"
            )


def _write_block(group: h5py.Group, block: Block, times: Mapping[str, np.ndarray]) -> None:
    """Write a block's rows, and count in `times` how often each row was written."""
    ids, tensors = block
    # one call for each run of neighbouring rows
    ends_of_runs = np.flatnonzero(np.diff(ids) != 1) + 1
    for name, tensor in tensors.items():
        runs = np.split(tensor.numpy(force=True), ends_of_runs)
        for rows, values in zip(np.split(ids, ends_of_runs), runs, strict=True):
            if len(rows):
                group[name][rows[0] : rows[-1] + 1] = values
        times[name][ids] += 1


def _datasets(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """Return the datasets of a group that are loaded again, in the order in which they were saved."""
    found = {name: group[name] for name in _decode(group.attrs["names"])}
    if any(isinstance(data, h5py.Group) or data.dtype.kind not in "biuf" for data in found.values()):
        raise ValueError(f"{group.name} names a dataset that does not hold numbers")
    return found


def _read_tensor(data: h5py.Dataset, row: int | None = None) -> torch.Tensor:
    """Read a dataset, or a row of it, into memory that torch allocates.

    NumPy aligns memory less strictly, which may change the last bits of a product.
    """
    shape = data.shape if row is None else data.shape[1:]
    tensor = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, data.dtype)).dtype)
    if tensor.numel():
        data.read_direct(tensor.numpy(), np.s_[:] if row is None else np.s_[row])
    return tensor


def _encode(texts: Sequence[str]) -> np.ndarray:
    """Return texts [n] as UTF-8 strings of one fixed length."""
    encoded = [text.encode() for text in texts]
    length = max((len(text) for text in encoded), default=0)
    return np.array(encoded, dtype=h5py.string_dtype("utf-8", max(length, 1)))


def _decode(encoded: np.ndarray) -> tuple[str, ...]:
    return tuple(text.decode() for text in encoded)


def find_damage(path: Path) -> str | None:
    """Return what is wrong with the bytes of a checkpoint, None where nothing is; may take long."""
    try:
        with io.FileIO(path) as raw:
            user_block = raw.read(USER_BLOCK_BYTES)
            if user_block == _user_block(_sha256_after_user_block(raw)):
                return None
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"is damaged (it cannot be read: {error.strerror})"
    return "is damaged (its bytes do not match the SHA-256 at its start)"


def _sha256_after_user_block(raw: io.FileIO) -> str:
    raw.seek(USER_BLOCK_BYTES)
    return hashlib.file_digest(raw, "sha256").hexdigest()


def _user_block(digest: str) -> bytes:
    return f"hpcfl checkpoint sha256 {digest}\n".encode().ljust(USER_BLOCK_BYTES, b"\0")
