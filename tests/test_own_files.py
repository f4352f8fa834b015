"""A model, a partition and a source of the user's own, in files outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from bits import differing
from processes import Mpirun

from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.main import main
from hpcfl.registries import load_config

pytestmark = pytest.mark.usefixtures("own_code_forgotten")

TINY = ["method.name=fedavg", "data.clients=4", "train.local_epochs=1", "train.rounds=2"]

NARROW = '''"""A narrower LeNet."""

from hpcfl.models.networks import ConvNet

NARROW = ConvNet("conv 4/8 3x3, fc 16", (4, 8), 3, 1, (16,))
'''

HALVES = '''"""Each half of the clients shares one half of the classes, all clients of equal size."""

import numpy as np
from pydantic import Field

from hpcfl.data.partition_request import IntArray, PartitionOptions, Request
from hpcfl.data.partitions import Partition


class HalvesOptions(PartitionOptions):
    samples: int = Field(5, ge=2)
    """Samples of each class of a client."""


def halves_counts(request: Request, options: HalvesOptions) -> IntArray:
    counts = np.zeros((request.num_clients, request.num_classes), dtype=np.int64)
    classes, clients = request.num_classes // 2, request.num_clients // 2
    counts[:clients, :classes] = counts[clients:, classes:] = options.samples
    return counts


HALVES = Partition("halves", HalvesOptions, halves_counts, True, "raise data.partition.samples")
'''

STRIPES = '''"""Images of one bright row each, which is their class."""

import numpy as np

from hpcfl.data.sources import Arrays, Source, arrays_of


def read(path: str | None) -> Arrays:
    y = np.arange(200) % 8
    x = np.random.default_rng(0).integers(0, 50, (200, 1, 8, 8), np.uint8)
    x[np.arange(200), 0, y] += 200
    return arrays_of(x, y, "stripes")


STRIPES = Source("8x8 stripes, 8 classes, 200 images", read=read)
'''

FILES = {
    "model.path": NARROW,
    "data.partition.path": HALVES,
    "data.reader": STRIPES,
}
NAMES = {
    "model.path": "model.name",
    "data.partition.path": "data.partition.name",
    "data.reader": "data.source",
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write the three files."""
    paths = {key: tmp_path / f"my_{key.split('.')[-2]}.py" for key in FILES}
    for key, path in paths.items():
        path.write_text(FILES[key])
    return paths


def words(files: dict[str, Path]) -> list[str]:
    return [f"{key}={path}" for key, path in files.items()]


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """Return the one line with which a command is refused."""
    capsys.readouterr()
    assert main([*given, *TINY]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_own_files_run_on_any_number_of_ranks_and_go_on(
    files: dict[str, Path], tmp_path: Path, mpirun: Mpirun
) -> None:
    given = [*words(files), *TINY, "data.partition.samples=10"]
    # ranks are copies of this process, which does not know the files yet
    mpirun(3, "-m", "hpcfl.main", *given, "--out", tmp_path / "parts", "train.rounds=1")
    assert main([*given, "--out", str(tmp_path / "whole")]) == FINISHED
    assert main([*given, "--out", str(tmp_path / "parts")]) == FINISHED
    assert differing(tmp_path / "whole", tmp_path / "parts") == []
    saved = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())
    assert (saved["model"]["name"], saved["data"]["source"]) == ("my_model", "my_data")
    assert saved["data"]["partition"]["samples"] == 10
    assert main([str(tmp_path / "whole" / "config.yaml"), "--out", str(tmp_path / "whole")]) == FINISHED


def test_own_files_are_listed(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"model.path": "model", "data.partition.path": "partition", "data.reader": "source"}
    given = [word for key, path in files.items() for word in (f"--{kinds[key]}", str(path))]
    assert main(["list", *given]) == FINISHED
    out = capsys.readouterr().out
    assert "model my_model: conv 4/8 3x3, fc 16" in out
    assert "partition my_partition: halves" in out
    assert "source my_data: 8x8 stripes" in out


@pytest.mark.parametrize("key", FILES)
def test_an_edited_file_is_not_that_of_its_configuration(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    config = load_config(None, words(files))
    (tmp_path / "config.yaml").write_text(config.yaml())
    assert load_config(tmp_path / "config.yaml", []).short_hash() == config.short_hash()
    files[key].write_text(FILES[key] + "\n")
    said = refused(capsys, str(tmp_path / "config.yaml"))
    assert f"{key}={files[key]} is not the file of this configuration" in said
    assert f"drop {key.rpartition('.')[0]}.code to run the file as it is now" in said


@pytest.mark.parametrize("key", FILES)
def test_a_moved_file_is_the_same_and_another_name_takes_its_place(files: dict[str, Path], key: str) -> None:
    tree = load_config(None, words(files)).tree()
    moved = files[key].parent / "elsewhere" / files[key].name
    moved.parent.mkdir()
    moved.write_text(FILES[key])
    there = files[key].parent / "config.yaml"
    there.write_text(yaml.safe_dump(tree))
    config = load_config(there, [f"{key}={moved}"])
    assert config.short_hash() == load_config(there, []).short_hash()
    others = {"model.path": "mlp", "data.partition.path": "iid", "data.reader": "digits"}
    changed = load_config(there, [f"{NAMES[key]}={others[key]}"])
    assert not any(name.startswith(f"{key}=") for name in changed.own_files)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("model.path", "x = 1\n", " defines 0 instances of Model (none); it needs one"),
        (
            "data.reader",
            "from hpcfl.data.sources import Source\nA = Source('no read')\n",
            " defines 0 instances of Source with a read (none); it needs one",
        ),
        (
            "data.partition.path",
            HALVES.replace("(PartitionOptions)", "(BaseModel)").replace(
                "import Field", "import BaseModel, Field"
            ),
            ": its options must be a class derived from PartitionOptions",
        ),
        (
            "data.partition.path",
            HALVES.replace("samples", "path"),
            ": HalvesOptions has path, but data.partition.path is reserved; rename it",
        ),
    ],
)
def test_a_file_that_is_no_such_thing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, text: str | None, said: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert refused(capsys, f"{key}={path}") == f"hpcfl: error: {key}={path}{said}"


@pytest.mark.parametrize(
    ("key", "wrong"), [("model.path", "mlp"), ("data.partition.path", "iid"), ("data.reader", "digits")]
)
def test_names_and_files_that_do_not_go_together(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], key: str, wrong: str
) -> None:
    assert f"{NAMES[key]}={wrong} does not go with {key}={files[key]}" in refused(
        capsys, f"{key}={files[key]}", f"{NAMES[key]}={wrong}"
    )
    name = files[key].stem
    assert f"{NAMES[key]}={name} is a " in refused(capsys, f"{NAMES[key]}={name}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("= options.samples", "= -1"), "has the count -1; allowed: 0 or more"),
        (
            ("dtype=np.int64", "dtype=float"),
            "is float64 (4, 10); it must be int64 [clients, classes], here (4, 10)",
        ),
        (("return counts", "return counts[1:]"), "is int64 (3, 10); it must be int64 [clients, classes]"),
        (("= options.samples", "= 100"), "deals 200 samples of class 0; allowed: up to 178"),
    ],
)
def test_a_table_that_cannot_be_dealt_is_refused(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    path = files["data.partition.path"]
    path.write_text(HALVES.replace(*change))
    line = refused(capsys, f"data.partition.path={path}")
    assert f"data.partition.name=my_partition: its table {said}" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("return arrays_of", "return (x, y) or arrays_of"),
            "its read returned a tuple; return arrays_of(x, y, name)",
        ),
        (
            ("return arrays_of(x, y,", "return arrays_of(x, y / 2,"),
            "y has type float64; labels must be integers",
        ),
        (
            ('return arrays_of(x, y, "stripes")', "return Arrays(x, y, 3, 255.0, (0.5,), (0.5,))"),
            "y holds labels 0..7, and num_classes is 3",
        ),
    ],
)
def test_a_reader_s_mistakes_are_told(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    path = files["data.reader"]
    path.write_text(STRIPES.replace(*change))
    assert said in refused(capsys, f"data.reader={path}")


def test_naming_the_source_that_a_file_reads_keeps_it(files: dict[str, Path], tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(load_config(None, words(files)).yaml())
    for words_ in (["data.source=my_data"], [f"data.reader={files['data.reader']}"]):
        assert load_config(saved, words_).source_file["reader"] == str(files["data.reader"])
    config = load_config(saved, ["data.reader=null", "data.partition.name=iid"])
    assert (config.data.source, config.source_file) == ("digits", {})


def test_images_of_another_shape_are_refused(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files["data.reader"].write_text(
        STRIPES.replace("(200, 1, 8, 8)", "(200, 1, 1, 8, 8)").replace("x[np", "# x[np")
    )
    said = refused(capsys, f"data.reader={files['data.reader']}")
    assert "stripes: x has shape (200, 1, 1, 8, 8); allowed: images [n, channels, height, width]," in said
