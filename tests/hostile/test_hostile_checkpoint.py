"""A stranger's checkpoint, whose SHA-256 is right for what is wrong in it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from bits import run_here
from mutations import NUMBERS, Read, damaged_bytes

from hpcfl.storage.checkpoint import CheckpointStore

SMALL = (
    *("method.name=pfedla", "method.hidden=4", "method.embedding=3", "model.name=mlp", "model.hidden=[3]"),
    *("data.clients=3", "data.per_client=20", "train.rounds=2", "train.local_epochs=1", "run.device=cpu"),
)


def make_run(folder: Path) -> Path:
    """Make the smallest run that has all parts of a checkpoint."""
    if not folder.exists():
        assert run_here(folder, [*SMALL, "run.report=false"]) == 0
    return folder


def signed(content: bytes) -> bytes:
    """Put the SHA-256 that a run would write before what follows the first 512 bytes."""
    line = f"hpcfl checkpoint sha256 {hashlib.sha256(content[512:]).hexdigest()}\n".encode()
    return line.ljust(512, b"\0") + content[512:]


ARRAYS: tuple[Any, ...] = (
    *(np.zeros(0), np.zeros((3, 0)), np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), np.inf)),
    *(
        np.array([-1, 5]),
        np.array([2**62]),
        np.zeros((3, 7), np.float32),
        np.zeros((1, 47)),
        np.int64(3),
        0.5,
    ),
    *(
        np.array([b"a", b"b"]),
        np.array(b"\xff"),
        "text",
        ["a", "b"],
        np.array([True]),
        np.zeros((2, 3), complex),
    ),
    *(np.array([(1, 2.0)], dtype="i4,f4"), np.zeros(3, ">f4"), np.zeros((2, 3), np.float16), -1, 2**62),
)
TEXTS = (
    "",
    "../../x",
    "pfedla",
    "nothing",
    "\x1b[2J",
    "</script>",
    "a: &a [*a]",
    "uint8",
    '"""\nimport os\n"""',
)


def change(file: h5py.File, draw: random.Random) -> None:
    """Make one part of a checkpoint another."""
    groups, datasets = ["/"], []
    file.visititems(lambda name, item: (datasets if isinstance(item, h5py.Dataset) else groups).append(name))
    kind = draw.randrange(9)
    name = draw.choice(datasets)
    if kind == 0:
        del file[draw.choice(datasets + groups[1:])]
    elif kind in (1, 2):
        del file[name]
        file[name] = draw.choice(ARRAYS)
    elif kind in (3, 4):
        holder = file[draw.choice([one for one in [*groups, *datasets] if len(file[one].attrs)])]
        key = draw.choice(list(holder.attrs))
        old = holder.attrs[key]
        if draw.random() < 0.2:
            del holder.attrs[key]
        elif isinstance(old, bytes) or draw.random() < 0.3:
            holder.attrs[key] = np.bytes_(draw.choice(TEXTS).encode())
        else:
            holder.attrs[key] = draw.choice(ARRAYS)
    elif kind == 5:
        place = draw.choice(groups) + "/" + draw.choice(("theta", "x", "accuracy", "metrics", "names"))
        if place in file:
            del file[place]
        file[place] = draw.choice(
            (
                h5py.SoftLink("/server/theta"),
                h5py.SoftLink("/nowhere"),
                h5py.ExternalLink("/etc/passwd", "/"),
                h5py.ExternalLink(str(file.filename), "/"),
                file[draw.choice(groups)],
                file[name],
            )
        )
    elif kind == 6:
        shape = tuple(draw.choice((1, 3, 10**3, 10**6, 10**9)) for _ in range(draw.randrange(1, 4)))
        del file[name]
        how: dict[str, Any] = draw.choice(
            (
                {"chunks": tuple(min(size, 10) for size in shape)},
                {"chunks": tuple(min(size, 10) for size in shape), "compression": "gzip"},
                {"chunks": tuple(min(size, 10) for size in shape), "fletcher32": True},
                {"external": [("/etc/passwd", 0, h5py.h5f.UNLIMITED)]},
                {"maxshape": (None,) * len(shape)},
            )
        )
        file.create_dataset(name, shape=shape, dtype="f4", **how)
    elif kind == 7:
        del file[name]
        layout = h5py.VirtualLayout(shape=(3, 47), dtype="f4")
        layout[:] = h5py.VirtualSource(draw.choice(("/etc/passwd", ".")), "server/theta", shape=(3, 47))
        file.create_virtual_dataset(name, layout)
    else:
        data = file[name]
        if data.dtype.kind in "iuf" and data.size:
            values = data[()]
            flat = values.reshape(-1)
            with np.errstate(over="ignore"):
                number = draw.choice((*NUMBERS[:-2], -1, -(2**40)))
                flat[draw.randrange(len(flat))] = np.array(number).astype(values.dtype)
            data[()] = values


def hostile_checkpoint(whole: bytes, draw: random.Random, path: Path) -> None:
    """Write a checkpoint with damage to its bytes, or with other parts, and the hash that it would have."""
    if draw.random() < 0.5:
        path.write_bytes(signed(damaged_bytes(whole, draw, 512)))
        return
    path.write_bytes(whole)
    with h5py.File(path, "r+", locking=False) as file:
        for _ in range(draw.choice((1, 1, 2))):
            change(file, draw)
    path.write_bytes(signed(path.read_bytes()))


def checkpoint_reader(folder: Path) -> Read:
    whole = (make_run(folder / "made") / "checkpoint.h5").read_bytes()
    (folder / "one").mkdir(exist_ok=True)

    def read(seed: int) -> object:
        hostile_checkpoint(whole, random.Random(seed), folder / "one" / "checkpoint.h5")
        loaded = CheckpointStore(folder / "one").load()
        assert loaded is not None
        try:
            models = (
                [loaded.model(client) for client in range(loaded.num_clients)] if loaded.has_models else []
            )
            return models, loaded.server, loaded.newest("alpha"), loaded.data, loaded.layout
        finally:
            loaded.close()

    return read
