"""The papers' figures: every figure file ends in its picture, which shows the numbers of its cells."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import REPOSITORY

from hpcfl.main import BAD_INPUT, FINISHED, main
from hpcfl.tables.cells import Table

TABLES = REPOSITORY / "configs" / "tables"


def drawings_of(path: Path) -> int:
    return len(Table(path, ["data.path=FOLDER"] * ("femnist" in path.stem), None).drawings)


FIGURE_FILES = [path for path in sorted(TABLES.glob("*.yaml")) if drawings_of(path)]

SMALL = {
    "data": {"layout": "NHWC", "subset_per_class": None, "per_client": 20, "test_fraction": 0.5},
    "train": {"rounds": 2, "local_epochs": 1, "finetune_epochs": 0},
    "run": {"device": "cpu", "eval_every": 1},
}
WHOLE = {"per_client": None, "subset_per_class": 18}
SMALLER = {
    "fedafk": {"model": {"name": "lenet_small"}, "data": WHOLE | {"clients": 3}},
    "fedmn": {"data": WHOLE | {"clients": 3, "subset_fraction": None}},
    "pfedmb": {"data": WHOLE},
}
"""What the files of a paper need besides."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the digits as images of MNIST's and of CIFAR's size."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    folder = tmp_path_factory.mktemp("images")
    made = {}
    for name, times, padding, channels in (("grey", 3, 2, 1), ("colour", 4, 0, 3)):
        x = np.kron(digits.images / 16, np.ones((1, times, times)))
        x = np.pad(x, [(0, 0), (padding, padding), (padding, padding)])
        made[name] = folder / f"{name}.npz"
        np.savez(made[name], x=np.repeat(x[..., None], channels, 3).astype(np.float32), y=digits.target)
    return made


def shrunk(path: Path, images: dict[str, Path], folder: Path) -> Path:
    """Write a file that extends a table file with a tiny size, and return it."""
    table = Table(path, [], None)
    settings: dict[str, Any] = {group: dict(keys) for group, keys in SMALL.items()}
    for group, keys in SMALLER.get(path.stem.partition("_")[0], {}).items():
        settings[group] = settings.get(group, {}) | keys
    columns = []
    for cell in table.firsts():
        grey = "mnist" in cell.config.data.source
        file = images["grey" if grey else "colour"]
        # columns of one image size would be twins but for the seed
        data = {"source": "npz", "path": str(file), "normalise": "none", "seed": cell.column}
        columns.append({"label": table.columns[cell.column], "data": data})
    tree: dict[str, Any] = {"extends": str(path), "seeds": [0], "settings": settings}
    if table.columns == [""]:
        settings["data"] |= columns[0]["data"]
    else:
        tree["columns"] = list({column["label"]: column for column in columns}.values())
    tiny = folder / path.name
    tiny.write_text(yaml.safe_dump(tree))
    return tiny


@pytest.mark.parametrize("path", FIGURE_FILES, ids=lambda path: path.stem)
def test_a_figure_file_ends_in_its_picture(path: Path, images: dict[str, Path], tmp_path: Path) -> None:
    tiny = shrunk(path, images, tmp_path)
    assert main(["table", str(tiny), "--out", str(tmp_path / "out"), "--quiet"]) == FINISHED
    count = drawings_of(path)
    names = ["figure"] if count == 1 else [f"figure_{letter}" for letter in "abc"[:count]]
    for name in names:
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000
        assert (tmp_path / "out" / f"{name}.pdf").stat().st_size > 5_000
