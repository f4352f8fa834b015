"""A stranger's npz file of images, and PFLlib's with the pickles in them."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import NUMBERS, Read, assert_refused_or_read, damaged_bytes, sweep

from hpcfl.data.npz import read_npz
from hpcfl.errors import UserError


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


X, Y = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4), np.arange(6) % 3

SHAPES = ("(6, 4, 4)", "(6,)", "()", "(-6, 4, 4)", "(6, 4, 4, 1)", "6", "(6.0, 4)", "(True, 4, 4)", "None")
DTYPES = (
    "|u1",
    "<i8",
    "<f4",
    ">f8",
    "|O",
    "<U7",
    "|S0",
    "|V8",
    "<M8[s]",
    "<c16",
    "|b1",
    "<f2",
    "<f16",
    "x",
    "",
)


def header(draw: random.Random) -> bytes:
    """Write a header that may be any, and says nothing true of what follows."""
    sizes = ", ".join(str(draw.choice(NUMBERS)) for _ in range(draw.randrange(1, 5)))
    shape = draw.choice((*SHAPES, f"({sizes},)"))
    descr: Any = draw.choice((*DTYPES, [("a", "<f4"), ("b", "|O")], [("a", "<f4", (1000, 1000))]))
    order = draw.choice(("False", "True", "0", "[]"))
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if draw.random() < 0.1:
        text = draw.choice(
            ("(" * 5000, "{" * 300, "1" * 9000, "{'descr'", "\xff", text * 2, "__import__('os')")
        )
    encoded = text.encode("latin1") + b"\n"
    return (
        b"\x93NUMPY"
        + bytes(draw.choice(((1, 0), (1, 0), (2, 0), (3, 0))))
        + len(encoded).to_bytes(2, "little")
        + encoded
    )


def hostile_npz(draw: random.Random) -> bytes:
    """Return an npz file with something wrong: in its bytes, in a member's, or in what a header says."""
    members = {"x.npy": npy(X), "y.npy": npy(Y)}
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    name = draw.choice(list(members))
    kind = draw.randrange(4)
    if kind == 0:
        return damaged_bytes(zipped(members, method), draw)
    if kind == 1:
        members[name] = damaged_bytes(members[name], draw)
    elif kind == 2:
        members[name] = header(draw) + draw.randbytes(draw.choice((0, 96, 768)))
    else:
        whole = members.pop(name)
        members[draw.choice(("x", "y", "../x.npy", "/x.npy", "x.npy", "y.npy.npy", "n"))] = whole
    return zipped(members, method)


def npz_reader(folder: Path) -> Read:
    file = folder / "hostile.npz"

    def read(seed: int) -> object:
        file.write_bytes(hostile_npz(random.Random(seed)))
        return read_npz(str(file), "NCHW")

    return read


@sweep
def test_an_npz_is_read_or_refused(seeds: Sequence[int], tmp_path: Path) -> None:
    assert_refused_or_read(npz_reader(tmp_path), seeds)


def lying(shape: str, descr: str = "'|u1'", version: tuple[int, int] = (1, 0)) -> bytes:
    """Return an array whose header says what follows has a shape and a type."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode("latin1")
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2, "little") + text + bytes(96)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (lying("(1000,)"), "EOF"),
        (lying("(96,)", "'|O'"), "Object arrays cannot be loaded"),
        (lying("__import__('os').mkdir('created')"), "malformed node or string"),
    ],
)
def test_an_array_is_what_its_header_says(member: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "lying.npz").write_bytes(zipped({"x.npy": member, "y.npy": npy(Y)}))
    with pytest.raises(UserError, match=f"lying.npz: cannot be read as an npz file.*{said}"):
        read_npz(str(tmp_path / "lying.npz"), "NCHW")
    assert not Path("created").exists()


def test_an_array_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "many.npz").write_bytes(zipped({f"{n}.npy": npy(Y) for n in range(99)}))
    with pytest.raises(UserError, match=r"it holds 0, 1, 2, .*, 9 and 89 more\)"):
        read_npz(str(tmp_path / "many.npz"), "NCHW")
