"""A stranger's folder of clients: LEAF's JSON files, and PFLlib's npz files with the pickles in them."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import NUMBERS, Read, assert_refused_or_read, damaged_bytes, damaged_tree, sweep
from test_hostile_npz import zipped

from hpcfl.data.client_files import read_leaf, read_pfllib
from hpcfl.errors import UserError

IMAGE = [0.0, 0.25, 1, 0.5] * 196
LEAF = {
    "users": ["a", "b"],
    "num_samples": [2, 1],
    "user_data": {"a": {"x": [IMAGE, IMAGE], "y": [0, 61]}, "b": {"x": [IMAGE], "y": [5]}},
    "hierarchies": [],
}
LEAF_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        62,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        10**40,
        -(2**63),
        2**64 - 1,
        "a",
        "",
        "\u2028",
    ),
    *(
        "\x1b[2J",
        "x" * 3000,
        [],
        [[]],
        {},
        [IMAGE],
        [IMAGE, IMAGE[1:]],
        [["a" * 1000] + [""] * 1000],
        [0, "1"],
    ),
    *([[[0.0] * 784]], {"x": [IMAGE], "y": [0]}, [10**30], [True], [None], ["a", "a"], {"a": 1}),
)


def hostile_leaf(draw: random.Random) -> bytes:
    if draw.random() < 0.05:
        return draw.choice(
            (b"[" * 50_000, b'{"a":' * 50_000, b"1" * 10_000, b'"' + b"\\u0000" * 99, b"\xff", b"")
        )
    tree = LEAF if draw.random() < 0.3 else damaged_tree(LEAF, draw, LEAF_VALUES)
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5, default=str).encode()
    return text if tree is not LEAF else damaged_bytes(text, draw)


def leaf_reader(folder: Path) -> Read:
    (folder / "leaf").mkdir(exist_ok=True)

    def read(seed: int) -> object:
        (folder / "leaf" / "all_data_0.json").write_bytes(hostile_leaf(random.Random(seed)))
        return read_leaf(str(folder / "leaf"))

    return read


PART = {"x": np.linspace(0, 1, 2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4), "y": np.array([0, 1])}
NPY_HEADER = io.BytesIO()
np.lib.format.write_array_header_1_0(NPY_HEADER, {"descr": "|O", "fortran_order": False, "shape": ()})
PFLLIB_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 0.5, "a", b"", [], {}, (), PART["x"], PART["y"], np.array(1.0), np.array([])),
    *(
        np.array(["a"]),
        np.array([None]),
        np.zeros((0, 10**9)),
        np.array([1 + 2j]),
        np.array([2**63], np.uint64),
    ),
    *(
        np.array([(1, 2.0)], dtype="i4,f4"),
        np.array(["2001-01-01"], "M8[D]"),
        PART["x"].astype(">f2"),
        [[[[0.0]]]],
    ),
    *(np.array([0, -1]), np.array([0, 10**9]), np.array([np.nan, 0.0]), np.float32(1), np.dtype("f4")),
)


def hostile_pickle(draw: random.Random) -> bytes:
    """Return a pickle that is damaged, of something else, or whose operations are others."""
    content: Any = PART if draw.random() < 0.6 else damaged_tree(PART, draw, PFLLIB_VALUES)
    whole = pickle.dumps(np.array(content, dtype=object), draw.choice((2, 3, 4, 4, 4, 5)))
    kind = draw.randrange(4)
    if kind == 0:
        return damaged_bytes(whole, draw)
    if kind == 1:
        # an operation is another one, with the argument that it finds
        places = [place for _, _, place in pickletools.genops(whole) if place is not None]
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 3))):
            data[draw.choice(places)] = ord(draw.choice(pickletools.opcodes).code)
        return bytes(data)
    if kind == 2:
        number = draw.choice(NUMBERS)
        put = b"r" + (number % 2**32).to_bytes(4, "little")
        large = draw.choice(
            (b"B\xff\xff\xff\x7f", b"\x8e" + number.to_bytes(8, "little"), b"\x96" + b"\xff" * 5 + bytes(3))
        )
        return (
            whole[:2]
            + draw.choice((b"N" + put + b"0", large, b"\x8b\xff\xff\xff\x7f", b"cos\nsystem\n", b"(" * 3000))
            + whole[2:]
        )
    return whole


def hostile_pfllib(draw: random.Random) -> bytes:
    npz = zipped({"data.npy": NPY_HEADER.getvalue() + hostile_pickle(draw)}, draw.choice((0, 8)))
    return damaged_bytes(npz, draw) if draw.random() < 0.2 else npz


def pfllib_reader(folder: Path) -> Read:
    whole = zipped({"data.npy": NPY_HEADER.getvalue() + pickle.dumps(np.array(PART, dtype=object), 4)})
    for part in ("train", "test"):
        (folder / "pfllib" / part).mkdir(parents=True, exist_ok=True)
        (folder / "pfllib" / part / "0.npz").write_bytes(whole)

    def read(seed: int) -> object:
        (folder / "pfllib" / "train" / "0.npz").write_bytes(hostile_pfllib(random.Random(seed)))
        return read_pfllib(str(folder / "pfllib"))

    return read


@sweep
def test_leaf_s_files_are_read_or_refused(seeds: Sequence[int], tmp_path: Path) -> None:
    assert_refused_or_read(leaf_reader(tmp_path), seeds)


@sweep
def test_pfllib_s_files_are_read_or_refused(seeds: Sequence[int], tmp_path: Path) -> None:
    assert_refused_or_read(pfllib_reader(tmp_path), seeds)


@pytest.mark.parametrize("operations", [b"cbuiltins\neval\n", b"cos\nsystem\n"])
def test_a_pickle_runs_no_code(operations: bytes, tmp_path: Path) -> None:
    pfllib_reader(tmp_path)
    whole = pickle.dumps(np.array(PART, dtype=object), 2)
    content = NPY_HEADER.getvalue() + whole[:2] + operations + whole[2:]
    (tmp_path / "pfllib" / "train" / "0.npz").write_bytes(zipped({"data.npy": content}))
    with pytest.raises(UserError, match=r"train/0.npz: refused, since it wants to run code"):
        read_pfllib(str(tmp_path / "pfllib"))


def leaf(folder: Path, content: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "all_data_0.json").write_text(json.dumps(content))
    return str(folder)


def test_texts_make_no_array_as_wide_as_the_longest(tmp_path: Path) -> None:
    """One of a million characters among a hundred thousand short ones: 400 GB."""
    x = ["a" * 10**6, *[""] * 10**5]
    path = leaf(tmp_path / "leaf", {"users": ["a"], "user_data": {"a": {"x": x, "y": [0]}}})
    with pytest.raises(UserError, match="writer a: x is not an array of numbers"):
        read_leaf(path)


def test_a_file_of_no_writers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="users names no writer"):
        read_leaf(leaf(tmp_path / "leaf", {"users": [], "user_data": {}}))
