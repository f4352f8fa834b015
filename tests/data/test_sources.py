"""Sources: the files torchvision expects, the user's own npz, and errors on unfit files."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import forked, give_up_capabilities

from hpcfl.config.keys import DataConfig
from hpcfl.data.arrays import Arrays, arrays_of
from hpcfl.data.partition_request import Split
from hpcfl.data.partitions import partition_given
from hpcfl.data.sources import SOURCES, _read_own, fetch, read_source, subset_fraction, subset_per_class
from hpcfl.errors import UserError
from hpcfl.registries import load_config
from hpcfl.samples import SampleType
from hpcfl.setup.experiment import load_data, make_method, texts_of_clients
from hpcfl.torchvision_parts import torchvision_part


def idx_bytes(array: np.ndarray) -> bytes:
    """Encode a uint8 array in the idx format of MNIST."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_set(folder: Path, train: str, test: str, labels: tuple[list[int], list[int]]) -> np.ndarray:
    """Write both parts of a set of 28x28 images; return all images, train first."""
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (len(labels[0]) + len(labels[1]), 28, 28), np.uint8)
    pieces = images[: len(labels[0])], images[len(labels[0]) :]
    for prefix, piece, of_piece in zip((train, test), pieces, labels, strict=True):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(piece))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(np.array(of_piece)))
    return images


def python2_pickle(content: dict[str, Any]) -> bytes:
    """Pickle as CIFAR's authors did: Python 2's protocol, where a dtype's flags are integers."""
    return pickle.dumps(content, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[int]]:
    """Write a tiny CIFAR set and its checksums; return its images [n, 3, 32, 32] and labels, train first."""
    dataset = getattr(torchvision_part("datasets"), name.upper())
    label_key = {"cifar10": "labels", "cifar100": "fine_labels"}[name]
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    all_images, all_labels = [], []

    def write(file: str, content: dict[str, Any]) -> str:
        data = python2_pickle(content)
        (folder / file).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    for table in ("train_list", "test_list"):
        checked = []
        for file, _ in getattr(dataset, table):
            images = rng.integers(0, 256, (2, 3 * 32 * 32), np.uint8)
            labels = rng.integers(0, 10, 2).tolist()
            checked.append([file, write(file, {"data": images, label_key: labels})])
            all_images.append(images)
            all_labels += labels
        monkeypatch.setattr(dataset, table, checked)
    meta = dict(dataset.meta)
    meta["md5"] = write(meta["filename"], {meta["key"]: [str(label) for label in range(10)]})
    monkeypatch.setattr(dataset, "meta", meta)
    return np.concatenate(all_images).reshape(-1, 3, 32, 32), all_labels


def test_digits_are_the_bundled_1797() -> None:
    arrays = read_source(DataConfig(source="digits"))
    assert arrays.x.shape == (1797, 1, 8, 8)
    assert arrays.x.max() == arrays.scale == 16
    assert arrays.y.dtype == np.int64
    assert np.bincount(arrays.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (arrays.x / 16).mean() == pytest.approx(arrays.mean[0], abs=5e-5)
    assert (arrays.x / 16).std() == pytest.approx(arrays.std[0], abs=5e-5)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashionmnist", "FashionMNIST")])
def test_mnist_and_fashionmnist_are_train_then_test(name: str, folder: str, tmp_path: Path) -> None:
    images = write_idx_set(tmp_path / folder / "raw", "train", "t10k", ([3, 0, 9], [7, 3]))
    arrays = read_source(DataConfig(source=name, root=str(tmp_path)))
    np.testing.assert_array_equal(arrays.x, images[:, None])
    assert arrays.x.dtype == np.uint8
    assert arrays.y.tolist() == [3, 0, 9, 7, 3]
    assert (arrays.num_classes, arrays.scale) == (10, 255)
    assert (arrays.mean, arrays.std) == (SOURCES[name].mean, SOURCES[name].std)


@pytest.mark.parametrize(
    ("split", "stored", "labels", "num_classes"),
    [("letters", ([1, 26], [2]), [0, 25, 1], 26), ("byclass", ([61, 0], [5]), [61, 0, 5], 62)],
)
def test_emnist_splits_have_labels_from_zero(
    split: str, stored: tuple[list[int], list[int]], labels: list[int], num_classes: int, tmp_path: Path
) -> None:
    folder = tmp_path / "EMNIST" / "raw"
    images = write_idx_set(folder, f"emnist-{split}-train", f"emnist-{split}-test", stored)
    arrays = read_source(DataConfig(source="emnist", root=str(tmp_path), split=split))
    np.testing.assert_array_equal(arrays.x, images[:, None])
    assert arrays.y.tolist() == labels
    assert arrays.num_classes == num_classes


@pytest.mark.parametrize(
    ("name", "count", "file"), [("cifar10", 12, "data_batch_3"), ("cifar100", 4, "train")]
)
def test_cifar_is_read_from_the_pickles_of_python_2_unless_it_is_damaged(
    name: str, count: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = write_cifar(tmp_path, name, monkeypatch)
    arrays = read_source(DataConfig(source=name, root=str(tmp_path)))
    assert len(arrays.x) == count
    np.testing.assert_array_equal(arrays.x, images)
    assert arrays.y.tolist() == labels
    (path,) = tmp_path.glob(f"*/{file}")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=rf"^{name} in .* is damaged or incomplete \(RuntimeError: .*corrupted"
    ):
        read_source(DataConfig(source=name, root=str(tmp_path)))


@pytest.mark.parametrize("name", ["mnist", "fashionmnist", "emnist", "cifar10", "cifar100"])
def test_the_error_on_missing_files_explains_how_to_fetch_them(name: str, tmp_path: Path) -> None:
    root = str(tmp_path / "my data")
    with pytest.raises(UserError) as caught:
        read_source(DataConfig(source=name, root=root))
    assert str(caught.value).startswith(f"{name} is not in '{root}'")
    assert str(caught.value).endswith(f"hpcfl data fetch {name} --root '{root}'")
    assert not Path(root).exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((3, 28, 28)))[:1000]),
        ("t10k-labels-idx1-ubyte", b"<html>not found</html>"),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.array([1, 2, 3]))),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.array([1, 10]))),
    ],
)
def test_damaged_files_are_reported(file: str, content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    write_idx_set(folder, "train", "t10k", ([3, 0, 9], [7, 3]))
    (folder / file).write_bytes(content)
    expected = f"^mnist in '{folder}' is damaged or incomplete .*: delete that folder, then fetch"
    with pytest.raises(UserError, match=expected):
        read_source(DataConfig(source="mnist", root=str(tmp_path)))


def test_fetch_unpacks_archives_and_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = torchvision_part("datasets")
    folder = tmp_path / "FashionMNIST" / "raw"
    write_idx_set(folder, "train", "t10k", ([3, 0, 9], [7, 3]))
    resources = []
    for file in list(folder.iterdir()):
        archive = gzip.compress(file.read_bytes())
        (folder / f"{file.name}.gz").write_bytes(archive)
        resources.append((f"{file.name}.gz", hashlib.md5(archive).hexdigest()))
        file.unlink()
    monkeypatch.setattr(datasets.FashionMNIST, "resources", resources)
    assert fetch("fashionmnist", str(tmp_path)) == folder
    assert read_source(DataConfig(source="fashionmnist", root=str(tmp_path))).y.tolist() == [3, 0, 9, 7, 3]


def test_a_failed_download_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = torchvision_part("datasets")
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # an older torchvision names only the file
    expected = r"^mnist could not be fetched into .*(refused|Error downloading train-images)"
    with pytest.raises(UserError, match=expected) as caught:
        fetch("mnist", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_bundled_sources_are_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.source=digits: there is nothing to fetch; it is bundled"):
        fetch("digits", str(tmp_path))


OWN = {"csv": "FILE.csv", "npz": "FILE.npz", "domains": "FOLDER", "femnist": "FOLDER", "pfllib": "FOLDER"}


@pytest.mark.parametrize(("name", "file"), OWN.items())
def test_files_of_one_s_own_must_be_named_and_are_never_fetched(name: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^data.path is not set: data.source={name} needs data.path={file}"):
        read_source(DataConfig(source=name, target="y"))
    expected = f"^data.source={name}: there is nothing to fetch; name yours with data.path={file}"
    with pytest.raises(UserError, match=expected):
        fetch(name, str(tmp_path))


def test_an_unknown_split_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.split=all: .* allowed: mnist, digits, letters,"):
        read_source(DataConfig(source="emnist", root=str(tmp_path), split="all"))


def write_npz(folder: Path, **arrays: np.ndarray) -> str:
    path = folder / "mine.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def read_npz(path: Path | str, layout: str | None = None) -> Arrays:
    return read_source(DataConfig(source="npz", path=str(path), layout=layout))


def test_npz_files_of_bytes_may_have_either_layout(tmp_path: Path) -> None:
    x = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    path = write_npz(tmp_path, x=x, y=np.array([0, 1], np.int32))
    last = read_npz(path, "NHWC")
    np.testing.assert_array_equal(last.x, x.transpose(0, 3, 1, 2))
    assert (last.num_classes, last.scale, last.mean, last.std) == (2, 255, (0.5,) * 3, (0.5,) * 3)
    assert last.y.dtype == np.int64
    np.testing.assert_array_equal(read_npz(path, "NCHW").x, x)
    for layout in (None, "NCL"):
        with pytest.raises(UserError, match=f"^data.layout={layout or 'null'}: .*=NCHW for .*=NHWC for"):
            read_npz(path, layout)


@pytest.mark.parametrize(
    ("shape", "layout", "likely"), [((2, 8, 5, 3), "NCHW", "NHWC"), ((2, 1, 5, 8), "NHWC", "NCHW")]
)
def test_a_layout_with_as_many_channels_as_no_image_has_is_refused(
    tmp_path: Path, shape: tuple[int, ...], layout: str, likely: str
) -> None:
    path = write_npz(tmp_path, x=np.zeros(shape, np.uint8), y=np.array([0, 1]))
    with pytest.raises(UserError, match=f"^data.layout={layout}: .* 8 channels; set data.layout={likely}$"):
        read_npz(path, layout)
    assert read_npz(path, likely).sample.shape[0] in (1, 3)


def test_npz_files_of_grey_floats_need_no_layout(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 3 * 4 * 5).reshape(3, 4, 5)
    arrays = read_npz(write_npz(tmp_path, x=x, y=np.array([2, 0, 1])))
    assert arrays.x.dtype == np.float32
    np.testing.assert_allclose(arrays.x[:, 0], x, rtol=1e-7)
    assert (arrays.num_classes, arrays.scale, arrays.mean, arrays.std) == (3, 1, (0.0,), (1.0,))


def test_labels_with_large_gaps_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y = np.arange(300) % 3 * 100
    arrays = read_npz(write_npz(tmp_path, x=np.zeros((300, 4, 5), np.uint8), y=y))
    assert arrays.num_classes == 201
    assert "y holds labels up to 200, and only 3 of them occur, so that models have 201" in caplog.text


GOOD_X, GOOD_Y = np.zeros((3, 4, 5), np.uint8), np.array([0, 1, 2])
UNEQUAL_X = np.array([np.zeros((2, 5)), np.zeros((2, 6)), None], dtype=object)
TEXTS = {"x": np.array([[0, 4], [1, 1], [3, 0]]), "y": GOOD_Y}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GOOD_X}, "no array 'y' .it holds x."),
        ({"images": GOOD_X, "y": GOOD_Y}, "no array 'x' .it holds images, y."),
        ({"x": np.zeros(3), "y": GOOD_Y}, "x has 1 dimensions; allowed: 4 .images., 3 "),
        ({"x": np.array([[1, -1]] * 3), "y": GOOD_Y}, "x holds tokens -1..1; allowed: 0..16777215 "),
        ({"x": GOOD_X, "y": GOOD_Y, "client": np.array([0, 1])}, r"client has shape \(2,\) and type int64"),
        ({"x": GOOD_X, "y": GOOD_Y, "client": GOOD_Y + 0.5}, "number or a text for each of 3 samples"),
        (TEXTS | {"x": np.ones((3, 2)), "vocabulary": np.array(9)}, "tokens are whole numbers "),
        (TEXTS | {"vocabulary": np.array(0)}, "vocabulary must be one whole number"),
        (TEXTS | {"vocabulary": np.array(4)}, "x holds tokens 0..4; allowed: 0..3 "),
        ({"x": GOOD_X[:0], "y": GOOD_Y[:0]}, r"x is empty, its shape is \(0, 4, 5\)"),
        ({"x": GOOD_X.astype(np.int64), "y": GOOD_Y}, r"x has type int64; .* as of x\.astype\('uint8'\)"),
        ({"x": GOOD_X.astype(np.int64) + 256, "y": GOOD_Y}, r"x has type int64; .* x\.astype\('float32'\)"),
        ({"x": np.full((3, 4, 5), 1e300), "y": GOOD_Y}, "not finite in float32"),
        ({"x": GOOD_X, "y": GOOD_Y[:2]}, r"y has shape \(2,\), x has 3 samples"),
        ({"x": GOOD_X, "y": GOOD_Y / 4}, "y has type float64; labels must be whole numbers"),
        ({"x": GOOD_X, "y": GOOD_Y + np.inf}, "y has type float64; labels must be whole numbers"),
        ({"x": GOOD_X, "y": GOOD_Y - 1}, "y holds labels -1..1; allowed: 0..K-1"),
        ({"x": GOOD_X, "y": GOOD_Y + 1}, "y holds labels 1..3, and classes count from 0"),
        ({"x": GOOD_X, "y": GOOD_Y * 1000}, "y holds labels 0..2000; allowed: 0..K-1"),
        ({"x": GOOD_X, "y": np.array([0, 1, None])}, "an array has dtype object "),
        ({"x": UNEQUAL_X, "y": GOOD_Y}, "unequal length.*: crop or pad all samples to one length"),
    ],
)
def test_unfit_npz_is_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = write_npz(tmp_path, **arrays)
    with pytest.raises(UserError, match=f"^data.path={path}: .*{message}"):
        read_npz(path)


def test_pixels_far_from_the_scale_of_networks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.arange(40 * 64).reshape(40, 8, 8) % 256
    for kind, normalise in (("uint8", "auto"), ("float32", "standard"), ("float32", "auto")):
        assert caplog.messages == []
        path = write_npz(tmp_path, x=x.astype(kind), y=np.arange(40) % 4)
        words = ["data.source=npz", f"data.path={path}", "model.name=digits_cnn", "data.clients=2"]
        config = load_config(None, [*words, f"data.normalise={normalise}"])
        make_method(config, *load_data(config))
    text = "pixels reach 255 in size with data.normalise=auto, and networks expect a few units: give images "
    assert text in caplog.text


def test_npz_files_may_contain_tokens_features_or_series(tmp_path: Path) -> None:
    texts = read_npz(write_npz(tmp_path, **TEXTS))
    assert (texts.sample, texts.x.dtype, texts.mean) == (SampleType((2,), vocabulary=5), np.int64, ())
    more = write_npz(tmp_path, **TEXTS, vocabulary=np.array([9]))
    assert read_npz(more).vocabulary == 9
    features = read_npz(write_npz(tmp_path, x=np.ones((3, 4)), y=GOOD_Y))
    assert (features.sample, features.x.dtype, features.mean) == (SampleType((4,)), np.float32, ())
    x = np.arange(24.0).reshape(3, 2, 4)
    path = write_npz(tmp_path, x=x, y=GOOD_Y)
    for layout, expected in (("NCL", x), ("NLC", x.transpose(0, 2, 1))):
        series = read_npz(path, layout)
        np.testing.assert_array_equal(series.x, expected)
        assert series.sample == SampleType(expected.shape[1:])


@pytest.mark.parametrize("of", [lambda n: f"ward {n}", lambda n: f"ward {n}".encode(), lambda n: 7 * n])
def test_clients_keep_the_names_that_an_npz_gives_them(
    of: Callable[[int], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    number = np.repeat(np.arange(8), 6)
    # the first feature tells whose a sample is
    x = np.stack([number, np.arange(48)], axis=1).astype(np.float32)
    path = write_npz(tmp_path, x=x, y=np.arange(48) % 2, client=np.array([of(n) for n in number.tolist()]))
    words = ["data.source=npz", f"data.path={path}", "data.partition.name=given", "data.clients=5"]
    config = load_config(None, [*words, "data.unseen_clients=0.4", "data.seed=1", "model.name=mlp"])
    arrays, parts = load_data(config)
    whose = [int(arrays.x[part.train[0], 0]) for part in parts]
    # five of eight are drawn, and the unseen ones come last
    assert sorted(whose) != whose
    texts = [name.decode() if isinstance(name := of(n), bytes) else str(name) for n in whose]
    assert texts_of_clients(config, arrays, parts) == {"name": texts}
    others = load_config(None, [*words[:2], "data.partition.name=iid", "data.clients=5", "model.name=mlp"])
    assert caplog.messages == []
    assert texts_of_clients(others, *load_data(others)) == {}
    (message,) = caplog.messages
    assert message.startswith("data.partition.name=iid makes clients of its own, and does not use those of")


def test_bundled_tables_and_texts_are_read() -> None:
    names = ("wine", "breast_cancer", "topics")
    wine, cancer, topics = (read_source(DataConfig(source=name)) for name in names)
    assert (wine.sample, np.bincount(wine.y).tolist()) == (SampleType((13,)), [59, 71, 48])
    assert (cancer.sample, np.bincount(cancer.y).tolist()) == (SampleType((30,)), [212, 357])
    assert topics.sample == SampleType((32,), vocabulary=96)
    assert (np.diff(topics.owner) >= 0).all()
    # windows of 32 characters begin every 8, and the next character is the label
    assert topics.x[0, 8:].tolist() == topics.x[1, :24].tolist()
    assert topics.y[0] == topics.x[1, 24]
    for client in np.unique(topics.owner):
        tests = topics.is_test[topics.owner == client]
        assert 0.25 < tests.mean() < 0.35
        assert (np.diff(tests.astype(int)) >= 0).all()


def test_a_file_that_is_no_npz_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "single.npy", GOOD_X)
    for name, reason in (("single.npy", "cannot be read as an npz file"), ("absent.npz", "no such file")):
        with pytest.raises(UserError, match=f"^data.path={tmp_path / name}: {reason}"):
            read_npz(tmp_path / name)


def test_a_file_of_someone_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "private.npz"
    np.savez(path, x=GOOD_X, y=GOOD_Y)

    def read() -> None:
        give_up_capabilities()
        path.chmod(0)
        with pytest.raises(UserError, match=r"private\.npz: you may not read this file; name an npz file"):
            read_npz(path)

    assert os.waitpid(forked(read), 0)[1] == 0


def test_subset_takes_equally_many_of_each_class_in_the_order_of_the_pool() -> None:
    y = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [5, 9, 7]))
    chosen = subset_per_class(y, 4, seed=3)
    assert np.bincount(y[chosen]).tolist() == [4, 4, 4]
    assert (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(chosen, subset_per_class(y, 4, seed=3))
    assert chosen.tolist() != subset_per_class(y, 4, seed=4).tolist()
    with pytest.raises(UserError, match=r"^data.subset_per_class=6: class 0 allows at most 5"):
        subset_per_class(y, 6, seed=3)


def test_a_fraction_keeps_the_shares_of_the_classes() -> None:
    # FedEM takes 10 % of EMNIST's 814,255 images: 81,425
    assert len(subset_fraction(814_255, 0.1, seed=0)) == 81_425
    y = np.repeat([0, 1, 2], [6000, 3000, 1000])
    chosen = subset_fraction(len(y), 0.29, seed=3)
    assert len(chosen) == 2900
    assert (np.diff(chosen) > 0).all()
    # standard deviations of a hypergeometric draw: 22, 21 and 13
    np.testing.assert_allclose(np.bincount(y[chosen]), [1740, 870, 290], atol=80)
    np.testing.assert_array_equal(chosen, subset_fraction(len(y), 0.29, seed=3))
    assert chosen.tolist() != subset_fraction(len(y), 0.29, seed=4).tolist()
    np.testing.assert_array_equal(subset_fraction(7, 1.0, seed=0), np.arange(7))
    expected = r"^data.subset_fraction=0.1 leaves none of 9 samples; allowed: 0.11 to 1"
    with pytest.raises(UserError, match=expected):
        subset_fraction(9, 0.1, seed=0)


def test_samples_that_share_characters_stay_in_one_part() -> None:
    message = r"known from training; set data\.partition\.name=given data\.val_fraction=0"
    for key in ("data.partition.name=iid", "data.val_fraction=0.1"):
        words = ["data.source=topics", "data.clients=5", "data.per_client=null", "model.name=textcnn", key]
        with pytest.raises(UserError, match=message):
            load_data(load_config(None, words))


def test_the_split_of_an_own_source_may_be_of_zeros_and_ones() -> None:
    """Used as indices, they would be sample 0 and the last ones."""
    is_test = np.arange(40) % 7 == 0
    given = replace(
        arrays_of(np.zeros((40, 3), np.float32), np.arange(40) % 2, "x"),
        owner=np.arange(40, dtype=np.uint8) % 5,
        is_test=is_test.astype(np.uint8),
    )
    arrays = _read_own("mine", lambda _: given, None)
    assert arrays.is_test.dtype == bool
    parts = partition_given("given", arrays.owner, arrays.is_test, None, None, Split(0.3, 0.0, 0))
    assert sorted(np.concatenate([part.test for part in parts])) == np.flatnonzero(is_test).tolist()
    assert sorted(np.concatenate([part.train for part in parts])) == np.flatnonzero(~is_test).tolist()


def test_arrays_may_be_lists_and_tensors() -> None:
    x, y, client = torch.rand(3, 2), [0, 1, 0], ["b", "a", "b"]
    arrays = arrays_of(x, y, "own", client=client)
    assert arrays.x.tolist() == x[[1, 0, 2]].tolist()
    assert (arrays.y.tolist(), arrays.names) == ([1, 0, 0], ("a", "b"))
    for wrong in ([[1.0, 2.0], [3.0]], x.requires_grad_()):
        with pytest.raises(UserError, match="own: x is not an array of numbers: "):
            arrays_of(wrong, y, "own")
