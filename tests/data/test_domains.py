"""Several domains: how their files are read, which client has which images, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import differing, read_csv, run_here
from PIL import Image
from processes import run_in_one_world

import hpcfl
from hpcfl.config.keys import DataConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.sources import read_source
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.setup.experiment import load_data, texts_of_clients

SIZES = {"a": 30, "b": 40, "c": 50}
"""Samples of each domain of `npz_folder`."""


def npz_folder(folder: Path, **changed: dict[str, np.ndarray]) -> str:
    """Write three domains of grey images 4x4 with two classes; the domain's pixels are 10, 20 or 30."""
    folder /= "sets"
    folder.mkdir()
    for number, (name, size) in enumerate(SIZES.items(), 1):
        arrays = {"x": np.full((size, 4, 4), 10 * number, np.uint8), "y": np.arange(size) % 2}
        np.savez(folder / f"{name}.npz", **(arrays | changed.get(name, {})))  # type: ignore[arg-type]
    return str(folder)


def picture(file: Path, pixels: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, np.uint8)).save(file)


def words_of(path: str, *words: str) -> list[str]:
    return ["data.source=domains", f"data.path={path}", *words]


def read(path: str | Path, image_size: int | None = None, layout: str | None = None) -> Arrays:
    return read_source(DataConfig(source="domains", path=str(path), layout=layout, image_size=image_size))


def test_folders_of_classes_may_have_grey_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    colour = np.arange(12).reshape(2, 2, 3)
    picture(tmp_path / "photo" / "dog" / "1.png", colour)
    picture(tmp_path / "photo" / "cat" / "2.png", colour + 100)
    picture(tmp_path / "photo" / "cat" / "10.PNG", colour + 50)
    picture(tmp_path / "art" / "dog" / "x.png", [[7, 8], [9, 10]])
    (tmp_path / "art" / "cat").mkdir()
    (tmp_path / "photo" / "cat" / "notes.txt").write_text("no image")
    # as macOS writes beside a file
    (tmp_path / "photo" / "cat" / "._2.png").write_bytes(b"no image either")
    (tmp_path / ".hidden").mkdir()
    arrays = read(tmp_path)
    assert arrays.domains == ("art", "photo")
    assert (arrays.owner.tolist(), arrays.y.tolist()) == ([0, 1, 1, 1], [1, 0, 0, 1])
    assert arrays.x.shape == (4, 3, 2, 2)
    assert arrays.x[0].tolist() == [[[7, 8], [9, 10]]] * 3
    # files in the order of their names
    np.testing.assert_array_equal(arrays.x[1:].transpose(0, 2, 3, 1), [colour + 50, colour + 100, colour])
    assert arrays.num_classes == 2
    (warning,) = caplog.messages
    assert warning.endswith("(.png, .jpg, .jpeg) are left out: 1, such as cat/notes.txt")


def test_images_are_resized_to_one_size(tmp_path: Path) -> None:
    picture(tmp_path / "large" / "one" / "0.png", np.repeat([[0, 0, 80, 80]], 4, axis=0))
    picture(tmp_path / "small" / "one" / "0.png", [[5, 6], [7, 8]])
    with pytest.raises(UserError, match=r"of 2 sizes, from 2x2 to 4x4; .*data.image_size, such as .*=2$"):
        read(tmp_path)
    x = read(tmp_path, image_size=2).x
    assert x[1, 0].tolist() == [[5, 6], [7, 8]]
    # antialiased by a triangle 4 pixels wide: weights 3/7, 3/7, 1/7 within the image
    assert x[0, 0].tolist() == [[11, 69], [11, 69]]


@pytest.mark.parametrize(
    "keys", ["name=iid", "name=classes classes_per_client=1", "name=dirichlet min_samples=3"]
)
def test_client_c_has_images_of_domain_c_mod_d(keys: str, tmp_path: Path) -> None:
    words = words_of(npz_folder(tmp_path), *(f"data.partition.{key}" for key in keys.split()))
    config = load_config(None, words)
    assert config.data.clients == 10
    arrays, parts = load_data(config)
    for client, part in enumerate(parts):
        for samples in (part.train, part.test):
            assert len(samples)
            assert (arrays.owner[samples] == client % 3).all()
    assert texts_of_clients(config, arrays, parts) == {"domain": [*"abcabcabca"]}
    taken = np.concatenate([samples for part in parts for samples in (part.train, part.val, part.test)])
    assert len(np.unique(taken)) == len(taken)


def test_each_domain_has_its_own_random_stream(tmp_path: Path) -> None:
    same = {"x": np.zeros((60, 4, 4), np.uint8), "y": np.arange(60) % 2}
    path = npz_folder(tmp_path, a=same, b=same, c=same)
    words = words_of(path, "data.clients=6", "data.partition.name=dirichlet")
    _, parts = load_data(load_config(None, words))
    sizes = [len(part.train) for part in parts]
    assert sizes[0::3] != sizes[1::3]
    _, of_iid = load_data(load_config(None, [*words[:-1], "data.partition.name=iid"]))
    assert (of_iid[0].train + 60).tolist() != of_iid[1].train.tolist()


def test_a_run_records_the_domain_of_each_client(tmp_path: Path, mpirun_command: list[str]) -> None:
    words = [
        *words_of(npz_folder(tmp_path), "data.clients=7", "data.image_size=8"),
        *("data.unseen_clients=0.3", "model.name=mlp", "method.name=fedavg", "run.report=false"),
        *("train.rounds=1", "train.local_epochs=1", "data.shift=noise", "run.placement=balanced"),
    ]
    assert run_here(tmp_path / "run", words) == FINISHED
    rows = read_csv(tmp_path / "run" / "partition.csv")
    config = load_config(None, words)
    of_clients = texts_of_clients(config, *load_data(config))["domain"]
    assert sorted(of_clients) == [*"aaabbcc"]
    assert {(int(row["client"]), row["domain"]) for row in rows} == set(enumerate(of_clients))
    assert hpcfl.load_run(tmp_path / "run").domains == of_clients
    run_in_one_world(mpirun_command, 3, {tmp_path / "run3": words})
    assert not differing(tmp_path / "run", tmp_path / "run3")


def test_a_plan_names_the_domain_of_each_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(npz_folder(tmp_path), "data.clients=3", "model.name=mlp")
    assert main(["plan", *words, "--no-timing"]) == FINISHED
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["client", "domain", "0", "1", "train", "val", "test"] in lines
    assert ["1", "b", "20", "20", "28", ".", "12"] in lines
    assert ["all", "60", "60", "86", "0", "34"] in lines


def test_results_of_a_table_distinguish_domains(tmp_path: Path) -> None:
    path = npz_folder(tmp_path)
    (tmp_path / "two.yaml").write_text(
        f"settings:\n  data: {{source: domains, path: {path}, clients: 4}}\n  model: {{name: mlp}}\n"
        "  train: {rounds: 2, local_epochs: 1}\n  run: {report: false}\ntitle: Two\nseeds: [0]\nrows:\n"
        "  - {method: {name: fedavg}}\n"
    )
    words = ["table", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*words, "--write-results"]) == FINISHED
    results = tmp_path / "results" / "two"
    of_clients, of_domains = (read_csv(Path(f"{results}_{name}.csv")) for name in ("clients", "diagnostics"))
    assert [line["domain"] for line in of_clients] == [*"abca"]
    accuracy = [float(line["accuracy"]) for line in of_clients]
    last = {line["clients"]: float(line["value"]) for line in of_domains if line["round"] == "2"}
    assert {line["quantity"] for line in of_domains} == {"accuracy"}
    expected = [(accuracy[0] + accuracy[3]) / 2, *accuracy[1:3]]
    np.testing.assert_allclose([last[f"domain {name}"] for name in "abc"], expected, atol=1e-4)


GREY = np.zeros((4, 4, 4), np.uint8)
LABELS = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": GREY.astype(np.float32)}, r"of several types \(a uint8, b float32, c uint8\)"),
        ({"x": np.zeros((4, 2, 4, 4), np.uint8)}, r"images have \[1, 2\] channels; allowed: one number, or"),
        ({"x": np.zeros((4, 5), np.float32)}, r"x has shape \(4, 5\); domains are of images"),
        ({"y": LABELS[:3]}, r"y has shape \(3,\), x has 4 samples"),
        ({"y": LABELS - 1}, "y holds labels -1"),
        ({"client": LABELS}, "data.source=domains has no use for its array client; save the file"),
    ],
)
def test_unfit_npz_files_are_refused(arrays: dict[str, np.ndarray], expected: str, tmp_path: Path) -> None:
    path = npz_folder(tmp_path, b={"x": GREY, "y": LABELS} | arrays)
    with pytest.raises(UserError, match=f"^data.path={path}(/b.npz)?: .*{expected}") as caught:
        read(path, layout="NCHW")
    assert "\n" not in str(caught.value)


def test_unfit_folders_are_refused(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(UserError, match=f"^data.path={tmp_path}") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    with pytest.raises(UserError, match=r"no such folder; it must have DOMAIN.npz files \(x, y\), or folde"):
        read(tmp_path / "absent")
    assert "has no domains; it must have" in refusal()
    (tmp_path / "photo").mkdir()
    assert "domain photo has no folders of classes" in refusal()
    (tmp_path / "photo" / "cat").mkdir()
    assert "/photo: has no images; allowed: .png, .jpg, .jpeg" in refusal()
    picture(tmp_path / "photo" / "cat" / "0.png", [[1]])
    picture(tmp_path / "art" / "dog" / "0.png", [[1]])
    assert "domain art has no folder of class cat, which others have" in refusal()
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS)
    assert "has npz files and folders" in refusal()
    (tmp_path / "a.npz").unlink()
    (tmp_path / "art" / "dog").rename(tmp_path / "art" / "cat")
    whole = (tmp_path / "art" / "cat" / "0.png").read_bytes()
    for content in (b"", b"<html>", whole[:-30]):
        (tmp_path / "art" / "cat" / "0.png").write_bytes(content)
        assert "/art/cat/0.png: cannot be read as an image (" in refusal()
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(tmp_path / "art" / "cat" / "0.png")
    assert "not of 8 bits" in refusal()


def test_given_makes_each_domain_a_client_in_alphabetical_order(tmp_path: Path) -> None:
    config = load_config(None, words_of(npz_folder(tmp_path), "data.partition.name=given"))
    arrays, parts = load_data(config)
    assert (arrays.x.reshape(120, -1) == 10 * (arrays.owner[:, None] + 1)).all()
    assert (arrays.x.dtype, arrays.num_classes, arrays.scale, arrays.mean) == (np.uint8, 2, 255, (0.5,))
    assert [len(part.train) + len(part.test) for part in parts] == [*SIZES.values()]
    assert texts_of_clients(config, arrays, parts) == {"domain": [*SIZES]}


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    path = npz_folder(tmp_path, b={"y": np.zeros(40, np.int64)})
    of_two = ["data.partition.name=classes", "data.partition.classes_per_client=2"]
    for more, expected in (
        (["data.clients=2"], "data.clients=2: the source has 3 domains, and each needs a client; set data."),
        (of_two, "domain b with 3 clients: data.clients=3: class 1 has 0 samples; labels"),
    ):
        with pytest.raises(UserError, match=f"^{expected}.*$"):
            load_data(load_config(None, words_of(path, *more)))
    with pytest.raises(UserError, match=r"^data.image_size=8 needs data.source=domains; set that"):
        load_config(None, ["data.image_size=8"])
