"""LEAF's and PFLlib's files: exact values, and errors on unfit files."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl.config.keys import DataConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.sources import read_source
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.samples import SampleType

Fields = dict[str, Any]


def writer(labels: list[int], seed: int) -> Fields:
    """Make one writer as LEAF does, every value a 255th."""
    x = np.random.default_rng(seed).integers(0, 256, (len(labels), 784)) / 255
    return {"x": x.tolist(), "y": labels}


def leaf_file(folder: Path, name: str, user_data: Fields, users: list[str] | None = None) -> Path:
    """Write one of LEAF's files; `users` are all of user_data by default."""
    folder.mkdir(parents=True, exist_ok=True)
    users = list(user_data) if users is None else users
    sizes = [len(user_data[user]["y"]) for user in users]
    file = folder / name
    file.write_text(json.dumps({"users": users, "num_samples": sizes, "user_data": user_data}))
    return file


def femnist(folder: Path) -> Arrays:
    return read_source(DataConfig(source="femnist", path=str(folder)))


def pfllib(folder: Path) -> Arrays:
    return read_source(DataConfig(source="pfllib", path=str(folder)))


def scaled(arrays: Arrays) -> np.ndarray:
    """Return the values that normalisation starts from, float32 [n, 784]."""
    return arrays.x.reshape(len(arrays.x), 784).astype(np.float32) / np.float32(arrays.scale)


def test_femnist_orders_the_writers_of_all_files(tmp_path: Path) -> None:
    later, earlier = writer([61, 0], 1), writer([5], 2)
    leaf_file(tmp_path, "all_data_0.json", {"f0002_07": later})
    leaf_file(tmp_path, "all_data_1.json", {"f0001_41": earlier})
    arrays = femnist(tmp_path)
    assert (arrays.x.dtype, arrays.x.shape) == (np.uint8, (3, 1, 28, 28))
    np.testing.assert_array_equal(scaled(arrays), np.float32(earlier["x"] + later["x"]))
    assert (arrays.y.tolist(), arrays.owner.tolist(), arrays.is_test) == ([5, 61, 0], [0, 1, 1], None)
    assert arrays.names == ("f0001_41", "f0002_07")
    assert (arrays.num_classes, arrays.mean, arrays.std) == (62, (0.1307,), (0.3081,))


def test_femnist_keeps_the_split_of_leaf(tmp_path: Path) -> None:
    parts = {"train": [writer([1, 2], 1), writer([3], 2)], "test": [writer([4], 3), writer([5, 6], 4)]}
    for part, (a, b) in parts.items():
        # LEAF leaves writers with less than two samples in user_data, empty and unlisted.
        content = {"b": b, "few": {"x": [], "y": []}, "a": a}
        leaf_file(tmp_path / part, f"all_data_0_{part}_9.json", content, ["b", "a"])
    arrays = femnist(tmp_path)
    assert (arrays.y.tolist(), arrays.owner.tolist()) == ([1, 2, 4, 3, 5, 6], [0, 0, 0, 1, 1, 1])
    assert arrays.is_test.tolist() == [False, False, True, False, True, True]
    images = [image for index in (0, 1) for part in parts.values() for image in part[index]["x"]]
    np.testing.assert_array_equal(scaled(arrays), np.float32(images))


def test_femnist_stores_multiples_of_1_255_as_bytes_and_other_values_as_floats(tmp_path: Path) -> None:
    every_byte = np.resize(np.arange(256) / 255, 784).tolist()
    leaf_file(tmp_path, "0.json", {"a": {"x": [every_byte], "y": [0]}})
    assert femnist(tmp_path).x.dtype == np.uint8
    between = [0.3333333] * 784
    leaf_file(tmp_path, "1.json", {"b": {"x": [between], "y": [0]}})
    arrays = femnist(tmp_path)
    assert (arrays.x.dtype, arrays.scale) == (np.float32, 1)
    np.testing.assert_array_equal(arrays.x.reshape(2, 784), np.float32([every_byte, between]))


IMAGE = [0.0] * 784


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", r"cannot be read as JSON \(JSONDecodeError"),
        ({"user_data": {}}, "has no field 'users'"),
        ({"users": "a", "user_data": {}}, "users must be a list"),
        ({"users": ["a"], "user_data": {}}, "user_data: has no field 'a'"),
        ({"users": [], "user_data": {}}, "users names no writer"),
        ({"x": [IMAGE]}, "writer a: has no field 'y'"),
        ({"x": [IMAGE, IMAGE[1:]], "y": [0, 0]}, "writer a: x is not an array of numbers with rows of one"),
        ({"x": [["0.5"] * 784], "y": [0]}, "writer a: x is not an array of numbers"),
        ({"x": [IMAGE[1:]], "y": [0]}, r"writer a: x has shape \(1, 783\); must be \[n, 784\]"),
        ({"x": [], "y": []}, r"writer a: x has shape \(0,\); must be \[n, 784\] with n > 0"),
        ({"x": [[*IMAGE[1:], 1.5]], "y": [0]}, "writer a: x holds values outside 0..1"),
        ({"x": [IMAGE], "y": [0.5]}, "writer a: y has type float64; labels must be whole numbers"),
        ({"x": [IMAGE], "y": [62]}, r"writer a: y holds labels 62..62; allowed: 0..61"),
    ],
)
def test_unfit_leaf_files_are_refused(content: Any, expected: str, tmp_path: Path) -> None:
    if isinstance(content, dict) and content.keys() & {"x", "y"}:
        content = {"users": ["a"], "user_data": {"a": content}}
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "f.json").write_bytes(text)
    assert_refused(femnist, tmp_path, f": f.json: {expected}")


def assert_refused(read: Callable[[Path], Arrays], folder: Path, expected: str) -> None:
    """Fail unless a folder is refused with one line that contains this."""
    with pytest.raises(UserError, match=f"^data.path={folder}.*{expected}.*$"):
        read(folder)


def test_unfit_leaf_folders_are_refused(tmp_path: Path) -> None:
    assert_refused(femnist, tmp_path / "absent", r": no such folder; LEAF's data/femnist/preprocess.sh")
    assert_refused(femnist, tmp_path, r"has no files \*.json; LEAF's")
    leaf_file(tmp_path, "0.json", {"a": writer([0], 0)})
    again = leaf_file(tmp_path, "1.json", {"a": writer([0], 0)})
    assert_refused(femnist, tmp_path, r"1.json: writer a is also in another file of that folder")
    again.unlink()
    leaf_file(tmp_path / "train", "0.json", {"a": writer([0], 0), "b": writer([0], 0)})
    assert_refused(femnist, tmp_path, "has a folder train but no folder test")
    (tmp_path / "test").mkdir()
    assert_refused(femnist, tmp_path, r"has no files test/\*.json")
    leaf_file(tmp_path / "test", "0.json", {"a": writer([0], 0)})
    assert_refused(femnist, tmp_path, "writer b has no samples in test; split by samples")


def client(labels: list[int], seed: int) -> Fields:
    """Make one part of a client as PFLlib does: normalised colour images and integer labels."""
    x = np.random.default_rng(seed).uniform(-1, 1, (len(labels), 3, 4, 5)).astype(np.float32)
    return {"x": x, "y": np.array(labels)}


def pfllib_folder(folder: Path, train: list[Any], test: list[Any]) -> None:
    for part, contents in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True)
        for number, content in enumerate(contents):
            with (folder / part / f"{number}.npz").open("wb") as file:
                np.savez_compressed(file, data=content)


def test_pfllib_is_read_client_by_client(tmp_path: Path) -> None:
    train = [client([number % 3] * 2, number) for number in range(11)]
    test = [client([4], 20 + number) for number in range(11)]
    pfllib_folder(tmp_path, train, test)
    (tmp_path / "config.json").write_text("{}")
    arrays = pfllib(tmp_path)
    assert arrays.owner.tolist() == np.repeat(np.arange(11), 3).tolist()
    assert arrays.is_test.tolist() == [False, False, True] * 11
    expected = [part["x"] for of_client in zip(train, test, strict=True) for part in of_client]
    np.testing.assert_array_equal(arrays.x, np.concatenate(expected))
    assert arrays.y[-3:].tolist() == [1, 1, 4]
    assert (arrays.x.dtype, arrays.y.dtype) == (np.float32, np.int64)
    assert (arrays.num_classes, arrays.scale, arrays.mean, arrays.std) == (5, 1, (0.0,) * 3, (1.0,) * 3)


BYTES = np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5)
LETTERS = np.array([[1, 2, 7], [4, 5, 0]])
NEWS = np.empty((2, 2), dtype=object)
"""AG News pairs lists of tokens with their number; Shakespeare has a plain array."""
NEWS[:] = [([1, 2, 7], 3), ([4, 5, 0], 2)]
ONE_ROW = np.random.default_rng(0).normal(size=(2, 9, 1, 128)).astype(np.float32)
WORDS = SampleType((3,), vocabulary=8)


@pytest.mark.parametrize(
    ("x", "expected", "sample"),
    [
        (BYTES, BYTES, SampleType((3, 4, 5))),
        (np.asfortranarray(BYTES / 7), BYTES / 7, SampleType((3, 4, 5))),
        (BYTES.astype(">f4"), BYTES, SampleType((3, 4, 5))),
        (np.float16(BYTES)[..., ::2], BYTES[..., ::2], SampleType((3, 4, 3))),
        (list(np.float32(BYTES)), BYTES, SampleType((3, 4, 5))),
        (BYTES.reshape(2, -1) / 2, BYTES.reshape(2, -1) / 2, SampleType((60,))),
        (NEWS, LETTERS, WORDS),
        (LETTERS, LETTERS, WORDS),
        (ONE_ROW, ONE_ROW[:, :, 0], SampleType((9, 128))),
    ],
)
def test_pfllib_s_samples_may_have_any_type_and_order(
    x: Any, expected: np.ndarray, sample: SampleType, tmp_path: Path
) -> None:
    """Its generators of Camelyon17, iWildCam, Omniglot and AmazonReview write lists."""
    pfllib_folder(tmp_path, [{"x": x, "y": [0, 1]}], [{"x": x, "y": np.array([0, 1], np.uint8)}])
    # macOS writes such beside each file
    (tmp_path / "train" / "._0.npz").write_bytes(b"Mac OS X")
    arrays = pfllib(tmp_path)
    dtype, scale = (np.uint8, 255) if x is BYTES else (np.int64 if sample is WORDS else np.float32, 1)
    np.testing.assert_array_equal(arrays.x, np.concatenate([expected, expected]).astype(dtype))
    assert (arrays.x.dtype, arrays.scale, arrays.sample) == (dtype, scale, sample)
    assert set(arrays.mean) <= {0.5 if x is BYTES else 0.0}
    assert (arrays.y.tolist(), arrays.y.dtype) == ([0, 1, 0, 1], np.int64)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_pfllib_s_features_may_be_a_matrix_and_labels_floats_or_scalars(tmp_path: Path) -> None:
    x = np.float32(BYTES.reshape(2, -1))
    for name, y in {"floats": np.array([0.0, 1.0]), "scalars": list(np.array([0, 1]))}.items():
        part = {"x": np.asmatrix(x), "y": y}
        pfllib_folder(tmp_path / name, [part], [part])
        arrays = pfllib(tmp_path / name)
        np.testing.assert_array_equal(arrays.x, np.concatenate([x, x]))
        assert (arrays.y.tolist(), arrays.y.dtype) == ([0, 1, 0, 1], np.int64)


def npz_of_pickle(file: Path, content: bytes) -> None:
    """Write an npz whose array `data` of one object is pickled as `content`."""
    npy = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": ()}
    np.lib.format.write_array_header_1_0(npy, header)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.npy", npy.getvalue() + content)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_of_older_numpy_are_read(protocol: int, module: bytes, tmp_path: Path) -> None:
    part = client([2, 0], 0)
    pfllib_folder(tmp_path, [part], [part])
    content = pickle.dumps(np.array(part, dtype=object), protocol)
    ours = np.array(0).__reduce__()[0].__module__.encode()  # type: ignore[index]
    if protocol < 4:
        content = content.replace(b"c" + ours, b"c" + module)
    else:
        content = content.replace(bytes([len(ours)]) + ours, bytes([len(module)]) + module)
        # The third byte opens a frame, whose length follows.
        content = content[:3] + struct.pack("<Q", len(content) - 11) + content[11:]
    assert module in content
    npz_of_pickle(tmp_path / "train" / "0.npz", content)
    arrays = pfllib(tmp_path)
    np.testing.assert_array_equal(arrays.x[:2], part["x"])
    assert arrays.y.tolist() == [2, 0, 2, 0]


class Touch:
    """Pickles as a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", ["array", "beside", "label"])
def test_a_pickle_that_would_run_code_is_refused(place: str, tmp_path: Path) -> None:
    trap = tmp_path / "created"
    part = client([0, 1], 0)
    pfllib_folder(tmp_path, [part], [part])
    content: Any = {
        "array": Touch(trap),
        "beside": np.array({**part, "z": Touch(trap)}, dtype=object),
        "label": np.array({**part, "y": np.array([0, Touch(trap)], dtype=object)}, dtype=object),
    }[place]
    hostile = pickle.dumps(content, 4)
    npz_of_pickle(tmp_path / "test" / "0.npz", hostile)
    assert_refused(pfllib, tmp_path, r": test/0.npz: refused, because it would run code \(")
    assert not trap.exists()
    pickle.loads(hostile)
    assert trap.exists()


GOOD = client([0, 1], 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"x": GOOD["x"]}, "has no field 'y'"),
        ([1, 2], r"cannot be read \(ValueError: data is int64 of shape \(2,\), not one dict"),
        ({**GOOD, "x": ["a", "b"]}, "x is not an array of numbers"),
        ({**GOOD, "x": [GOOD["x"][0], GOOD["x"][0, 0]]}, r"cannot be read \(ValueError: "),
        ({**GOOD, "x": GOOD["x"][0, 0, 0]}, r"x has shape \(5,\); must be images \[n, C, H, W\], series"),
        ({**GOOD, "x": np.array([[[1, 2], 2], [[1], 1]], object)}, r"cannot be read \(ValueError: "),
        ({**GOOD, "x": np.array([[[1, 2]], [[1, 3]]], object)}, "cannot be read .ValueError: x holds obj"),
        ({**GOOD, "x": GOOD["x"].astype(np.int64)}, "x has type int64; allowed: uint8"),
        ({**GOOD, "x": GOOD["x"] * np.nan}, "x holds values that are not finite"),
        ({**GOOD, "y": GOOD["y"][:1]}, r"y has shape \(1,\), x has 2 samples"),
        ({**GOOD, "x": GOOD["x"][:, :, 1:]}, r"holds float32 samples of shape \(3, 3, 5\), train/0.npz"),
    ],
)
def test_unfit_pfllib_files_are_refused(content: Any, expected: str, tmp_path: Path) -> None:
    with np.errstate(invalid="ignore"):
        pfllib_folder(tmp_path, [GOOD, content], [GOOD, GOOD])
    assert_refused(pfllib, tmp_path, f": train/1.npz:? {expected}")


def test_damaged_pfllib_files_are_refused(tmp_path: Path) -> None:
    pfllib_folder(tmp_path, [GOOD], [GOOD])
    file = tmp_path / "train" / "0.npz"
    expected = r": train/0.npz: cannot be read \(.*PFLlib's"
    file.write_bytes(file.read_bytes()[:-50])
    assert_refused(pfllib, tmp_path, expected)
    # bytes are not passed for objects
    objects = pickle.dumps(np.array({**GOOD, "y": np.array([0, None])}, dtype=object), 4)
    for content in (pickle.dumps({"x": 1}, 4), b"\x80\x04N.", objects):
        npz_of_pickle(file, content)
        assert_refused(pfllib, tmp_path, expected)
    with file.open("wb") as stream:
        np.savez_compressed(stream, x=GOOD["x"], y=GOOD["y"])
    assert_refused(pfllib, tmp_path, expected)


def test_unfit_pfllib_folders_are_refused(tmp_path: Path) -> None:
    assert_refused(pfllib, tmp_path / "absent", r": no such folder; PFLlib's dataset/generate_\*.py")
    assert_refused(pfllib, tmp_path, r"has no files train/\*.npz and test/\*.npz")
    pfllib_folder(tmp_path / "labels", [{**GOOD, "y": GOOD["y"] - 1}], [GOOD])
    assert_refused(pfllib, tmp_path / "labels", r": y holds labels -1..1; allowed: 0..K-1")
    pfllib_folder(tmp_path, [GOOD] * 3, [GOOD] * 2)
    assert_refused(pfllib, tmp_path, r"files of 3 clients but no test/2.npz; .* numbered 0..2")
    for part in ("train", "test"):
        (tmp_path / part / "1.npz").rename(tmp_path / part / "7.npz")
    assert_refused(pfllib, tmp_path, r"files of 3 clients but no train/1.npz; .* numbered 0..2")


@pytest.mark.parametrize("source", ["femnist", "pfllib"])
def test_a_run_trains_and_scores_the_clients_of_the_files(source: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    if source == "femnist":
        for part, count in (("train", 6), ("test", 2)):
            leaf_file(files / part, "0.json", {name: writer([0, 61] * count, count) for name in "abc"})
    else:
        grey = {"x": np.zeros((8, 1, 28, 28), np.float32), "y": np.arange(8)}
        pfllib_folder(files, [grey] * 3, [grey] * 3)
    out = tmp_path / "run"
    settings = [f"data.source={source}", f"data.path={files}", "method.name=fedavg", "train.rounds=1"]
    assert main([*settings, "model.name=lenet", "run.device=cpu", "--quiet", "--out", str(out)]) == FINISHED
    assert load_config(out / "config.yaml", []).partition.name == "given"
    assert len((out / "clients.csv").read_text().splitlines()) == 1 + 3
