"""The experiments under configs/: every file loads, and its clients and its methods can be made.

The sets themselves are not here, so they are replaced by pools with their image shapes and numbers of labels.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bits import read_csv
from processes import REPOSITORY

from hpcfl.config.keys import Config, flatten
from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices, class_table
from hpcfl.data.sources import SOURCES
from hpcfl.methods import METHODS
from hpcfl.models import MODELS
from hpcfl.models.torchvision_networks import TorchvisionNet
from hpcfl.registries import load_config
from hpcfl.setup.experiment import make_method, partition_samples
from hpcfl.tables.cells import Cell, Table
from hpcfl.tables.write_results import settings

FOLDER = REPOSITORY / "configs"

POOLS = {
    "cifar10": ((3, 32, 32), [6000] * 10),
    "cifar100": ((3, 32, 32), [600] * 100),
    "mnist": ((1, 28, 28), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]),
    "fashionmnist": ((1, 28, 28), [7000] * 10),
    "emnist mnist": ((1, 28, 28), [7000] * 10),
    "emnist byclass": ((1, 28, 28), [40_000] * 10 + [7_774] * 51 + [17_781]),
    "femnist": ((1, 28, 28), [2000] * 62),
}
"""Image shape and number of images of each class; those of 62 classes are made up, but for EMNIST's sum."""

MADE: dict[tuple[int, int, int | None], str] = {
    (20, 20, 10): "fedafk/cifar100_pathological",
    (20, 20, 2): "fedafk/cifar10_pathological fedafk/mnist_pathological",
    (20, 20, None): "fedafk/cifar100_practical fedafk/cifar10_practical fedafk/mnist_practical"
    " fedafk/small_practical fedmn/small_mixture",
    (80, 80, None): "fedmn/cifar10_80clients",
    (100, 100, None): "fedmn/cifar100_100clients fedmn/emnist_100clients fedmn/emnist_communication",
    (539, 539, None): "fedmn/femnist_539clients",
    (10, 10, 12): "pfedla/cifar100_noniid1_10clients",
    (10, 10, 10): "pfedla/cifar10_noniid2_10clients",
    (10, 10, 4): "pfedla/cifar10_noniid1_10clients pfedla/emnist_noniid1_10clients"
    " pfedla/fashionmnist_noniid1_10clients",
    (100, 10, 4): "pfedla/cifar10_noniid1_100clients",
    (15, 15, None): "pfedmb/cifar10_dirichlet_15clients pfedmb/small_dirichlet",
    (50, 10, None): "pfedmb/cifar10_dirichlet_50clients",
    (10, 10, 2): "pfedmb/cifar10_pairs_10clients pfedmb/small_pairs",
    (15, 15, 2): "pfedmb/cifar10_random2_15clients",
    (50, 10, 2): "pfedmb/cifar10_random2_50clients",
}
"""Files by clients, those in a round, and classes a client, as the papers have them; None: they are drawn."""
EXPECTED = {f"{name}.yaml": numbers for numbers, names in MADE.items() for name in names.split()}

TABLES = sorted(str(path.relative_to(FOLDER)) for path in (FOLDER / "tables").glob("*.yaml"))

PAPERS = {
    "fedafk_table1": (7, 1, 7),
    "fedafk_table2": (7, 1, 7),
    "fedafk_table3": (6, 14, 84),
    "fedafk_table4": (1, 14, 0),
    "fedafk_table5": (3, 4, 12),
    "fedmn_figure2": (1, 15, 0),
    "fedmn_table2": (3, 9, 27),
    "fedmn_table2_femnist": (1, 9, 9),
    "pfedla_figure1": (1, 5, 0),
    "pfedla_figure5": (4, 1, 0),
    "pfedla_figure6": (4, 1, 0),
    "pfedla_figure7": (2, 1, 2),
    "pfedla_table1": (8, 11, 84),
    "pfedla_table2": (8, 11, 84),
    "pfedla_table3": (7, 1, 7),
    "pfedmb_figure3": (1, 2, 2),
    "pfedmb_table1": (1, 5, 5),
    "pfedmb_table2": (4, 10, 40),
}
"""Columns, rows and published numbers of the papers' tables and figures in full size."""

LAST_BATCH = {"pfedla": "even", "pfedmb": "even", "fedmn": "keep", "fedafk": "drop"}
"""How a paper's mini-batches are cut."""


def load(name: str, *overrides: str) -> Config:
    """Load a file as a user does: a folder that the source is read from is named on the command line."""
    path = FOLDER / name
    config = load_config(path, [])
    assert config.data.path is None
    needs_path = SOURCES[config.data.source].path_names is not None
    return load_config(path, [*overrides, *(["data.path=FOLDER"] * needs_path)])


@cache
def table_of(name: str) -> Table:
    return Table(FOLDER / "tables" / f"{name}.yaml", ["data.path=FOLDER"] * ("femnist" in name))


def pool(config: Config) -> Arrays:
    """Return black images with labels in random order; of FEMNIST by 600 writers."""
    data = config.data
    shape, sizes = POOLS[f"{data.source} {data.split}" if data.source == "emnist" else data.source]
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = np.broadcast_to(np.uint8(0), (len(y), *shape))
    owner = np.arange(len(y)) * 600 // len(y) if data.source == "femnist" else None
    zeros, ones = (0.0,) * shape[0], (1.0,) * shape[0]
    return Arrays(x, y, len(sizes), 255.0, zeros, ones, owner)


PARTITIONED: dict[str, tuple[Arrays, list[ClientIndices]]] = {}
"""What `partitioned` has computed, by the settings that it depends on."""


def partitioned(config: Config) -> tuple[Arrays, list[ClientIndices]]:
    """Return a configuration's pool, and what each client gets of it."""
    key = f"{config.tree()['data']} {config.data_seed}"
    if key not in PARTITIONED:
        arrays = pool(config)
        PARTITIONED[key] = arrays, partition_samples(config, arrays)
    return PARTITIONED[key]


def classes_of_clients(arrays: Arrays, parts: list[ClientIndices]) -> np.ndarray:
    """Return which classes each client has, bool [N, K]."""
    return class_table(arrays.y, parts, arrays.num_classes) > 0


def split_sizes(parts: list[ClientIndices]) -> list[int]:
    """Return the training, validation and test samples of all clients together."""
    return np.sum([[len(part.train), len(part.val), len(part.test)] for part in parts], axis=0).tolist()


def test_every_file_is_expected() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml") if path.parent.name != "claims"}
    assert found == {*EXPECTED, *TABLES}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_makes_the_clients_and_the_method_of_its_paper(name: str) -> None:
    num_clients, cohort_size, classes_per_client = EXPECTED[name]
    config = load(name)
    arrays, parts = partitioned(config)
    assert config.method.name == Path(name).parent.name
    assert (len(parts), config.train.cohort_size(len(parts))) == (num_clients, cohort_size)
    if classes_per_client is not None:
        assert set(classes_of_clients(arrays, parts).sum(axis=1)) == {classes_per_client}
    train, val, test = split_sizes(parts)
    assert test / (train + val + test) == pytest.approx(config.data.test_fraction, rel=0.02)
    assert val / (train + val) == pytest.approx(config.data.val_fraction, rel=0.01)
    # torchvision's take seconds
    if not isinstance(MODELS[config.model.name], TorchvisionNet):
        assert make_method(config, arrays, parts).context.num_clients == num_clients


@pytest.mark.parametrize("name", ["fedmn/emnist_100clients.yaml", "fedmn/emnist_communication.yaml"])
def test_fedmn_takes_a_tenth_of_emnist_as_it_is_distributed(name: str) -> None:
    arrays, parts = partitioned(load(name))
    assert sum(split_sizes(parts)) == 81_425
    sizes = class_table(arrays.y, parts, arrays.num_classes).sum(axis=0)
    np.testing.assert_allclose(sizes, np.bincount(arrays.y) / 10, atol=300)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("pfedmb/cifar10")])
def test_pfedmb_trains_on_40_thousand_and_validates_and_tests_on_10_thousand_images(name: str) -> None:
    assert split_sizes(partitioned(load(name))[1]) == pytest.approx([40000, 10000, 10000], abs=40)


NOT_COMPARED: set[str] = set()
"""Methods that nobody has tuned and run for the table of baselines."""


def test_the_table_of_baselines_has_a_row_for_every_method() -> None:
    cells = table_of("baselines").cells
    assert {cell.config.method.name for cell in cells} == METHODS.keys() - NOT_COMPARED
    assert {cell.config.run.seed for cell in cells} == {0, 1, 2}
    assert len({cell.folder for cell in cells}) == len(cells)
    arrays, parts = partitioned(cells[0].config)
    assert [len(part.train) + len(part.test) for part in parts] == [600] * 10
    assert set(classes_of_clients(arrays, parts).sum(axis=1)) == {4}
    data = cells[0].config.tree()["data"]
    for cell in cells[: len(cells) // 3]:
        assert cell.config.tree()["data"] == data
        assert make_method(cell.config, arrays, parts).context.num_clients == 10


def choices(cell: Cell) -> tuple[str, str, float]:
    """Return what may be tuned: the method, its options and the step size."""
    config = cell.config
    return config.method.name, str(config.method.options), config.train.lr


def test_a_table_states_that_the_values_of_its_baselines_were_tuned_on_validation_samples() -> None:
    baselines, steps, tuning = map(table_of, ("baselines", "baselines_steps", "baselines_tuning"))

    for cell in (*steps.cells, *tuning.cells):
        assert cell.config.run.eval_split == "val"
        assert cell.config.data.val_fraction == 0.2
    tried = [choices(cell) for cell in steps.cells]
    compared = [choices(cell)[:2] for cell in tuning.cells]
    tuned = {row.label: row.tuned for row in baselines.rows}
    for cell in baselines.cells:
        assert cell.config.run.eval_split == "test"
        assert cell.config.data.val_fraction == 0
        method, options, _ = choices(cell)
        assert choices(cell) in tried
        *others, grid = str(tuned[cell.label]).split("; ")
        assert grid == "train.lr of 0.02, 0.05, 0.1, 0.2"
        if others:
            assert (method, options) in compared
            assert len([name for name, _ in compared if name == method]) > 1
        else:
            assert options == str(METHODS[method].Params())
    ours, theirs = baselines.cells[0].config.tree(), tuning.cells[0].config.tree()
    ours["data"]["val_fraction"] = theirs["data"]["val_fraction"]
    assert (ours["data"], ours["model"]) == (theirs["data"], theirs["model"])
    assert ours["train"]["batch_size"] == theirs["train"]["batch_size"]


@pytest.mark.parametrize(
    ("name", "tuning"),
    [
        ("fedafk_table5_small", "fedafk_tuning"),
        ("fedmn_switches_small", "fedmn_switches_tuning"),
        ("pfedla_table1_large_tests", "pfedla_table1_tuning pfedla_printed_tuning"),
        ("pfedla_table2_large_tests", "pfedla_table2_tuning"),
        ("pfedmb_table1_small", "pfedmb_tuning"),
        ("pfedmb_table2_small", "pfedmb_tuning"),
    ],
)
def test_values_that_a_table_calls_tuned_were_tried(name: str, tuning: str) -> None:
    table, tried = table_of(name), [cell for one in tuning.split() for cell in table_of(one).cells]
    assert {cell.config.run.eval_split for cell in tried} == {"val"}
    tuned = {row.label: row.tuned for row in table.rows}
    known = {choices(cell) for cell in tried}
    for cell in table.cells:
        text = tuned[cell.label] or "none"
        of_another_column = text.startswith("with Dirichlet") and "Dirichlet" not in cell.column
        if not text.startswith("none") and not of_another_column:
            assert choices(cell) in known, cell.place


@pytest.mark.parametrize("name", TABLES)
def test_a_table_with_tuned_rows_names_the_file_of_their_tuning(name: str) -> None:
    table = table_of(Path(name).stem)
    if any(row.tuned and not row.tuned.startswith("none") for row in table.rows):
        tunings = re.findall(r"\w+_tuning\.yaml", comments(name))
        assert tunings
        assert all((FOLDER / "tables" / tuning).is_file() for tuning in tunings)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_table_has_its_numbers_and_its_clients_and_methods_can_be_made(name: str) -> None:
    table = table_of(name)
    published = [row.published or {} for row in table.rows]
    assert (len(table.columns), len(table.rows), sum(map(len, published))) == PAPERS[name]
    assert (table.source is not None) == any(published)
    assert table.size is None
    cut = LAST_BATCH[name.partition("_")[0]]
    for cell in table.cells:
        assert cell.config.train.last_batch == cut
        assert cell.config.data.path == ("FOLDER" if "femnist" in name else None)
    for cell in table.cells[: len(table.cells) // len(table.seeds)]:
        found = partitioned(cell.config)
        # torchvision's take seconds
        if not isinstance(MODELS[cell.config.model.name], TorchvisionNet):
            make_method(cell.config, *found)


def test_pfedla_s_toy_example_has_nine_classes() -> None:
    owned = classes_of_clients(*partitioned(table_of("pfedla_figure1").cells[0].config))
    assert owned.sum(axis=1).tolist() == [4] * 6
    assert owned.any(axis=0).sum() == 9


SETTING = r"(?:method|data|model|train|run)\.\w+=[\w\[][\w.,\]]*(?<![.,])"


def comments(name: str) -> str:
    return str(re.findall(r"^#.*", (FOLDER / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", [name for name in TABLES if re.findall(SETTING, comments(name))])
def test_a_table_resolves_with_all_settings_that_its_comments_name(name: str) -> None:
    settings = re.findall(SETTING, comments(name))
    for cell in Table(FOLDER / name, settings, None).cells:
        flat = flatten(cell.config.tree())
        for key, _, value in (setting.partition("=") for setting in settings):
            assert flat[key] == yaml.safe_load(value)


def test_settings_that_the_comments_name_are_possible() -> None:
    for name in EXPECTED:
        for setting in re.findall(SETTING, comments(name)):
            key, _, value = setting.partition("=")
            assert flatten(load(name, setting).tree())[key] == yaml.safe_load(value), name


PRINTED = {
    "fedafk": {"coefficient_pull": 0},
    "fedmn": {"aggregation": "sum", "router_norm": "joint"},
    "heurpfedla": {"optimiser": "sgd"},
    "pfedla": {"optimiser": "sgd"},
    "pfedmb": {"step": "branch"},
}
"""Options of a method that make it follow its paper where ours may differ."""


@pytest.mark.parametrize("path", sorted((FOLDER / "claims").glob("*.yaml")), ids=lambda path: path.stem)
def test_rows_of_the_paper_s_rule_have_it_and_those_of_ours_differ(path: Path) -> None:
    claims = yaml.safe_load(path.read_text())["claims"]
    assert "printed" in {claim["rule"] for claim in claims}
    for claim in claims:
        for runs in claim["runs"]:
            for cell in table_of(runs["table"]).cells:
                if cell.label != runs["row"]:
                    continue
                method = cell.config.method
                printed = PRINTED[method.name].items()
                follows = all(getattr(method.options, key) == value for key, value in printed)
                assert follows == (claim["rule"] == "printed"), (claim["sentence"], cell.place)


CHANGED = {
    "baselines": {"per_fedavg"},
} | {
    f"pfedla_{table}_small_{data}": {"Per-FedAvg", "FedRep"}
    for table in ("table1", "table2")
    for data in ("cifar10", "fashionmnist")
}
"""By table, rows of its results that its file no longer has as they were; they wait for a run."""


def named(text: str) -> dict[str, Any]:
    """Read the settings of a line of results."""
    return {key: json.loads(value) for key, value in re.findall(r"([\w.]+)=(.*?)(?= [\w.]+=|$)", text)}


RESULTS = [
    path
    for path in sorted((FOLDER / "tables" / "results").glob("*.csv"))
    if not path.stem.endswith(("_clients", "_differences", "_diagnostics", "_theirs"))
    # which has no table file, but a soak test
    and not path.stem.startswith("long_run")
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_those_of_the_table_file_beside_them(path: Path) -> None:
    found = re.fullmatch(r"(\w+)(?:-(\d+)rounds)?", path.stem)
    assert found is not None
    name, rounds = found.groups()
    path_of_table = FOLDER / "tables" / f"{name}.yaml"
    table = table_of(name) if rounds is None else Table(path_of_table, rounds=int(rounds))
    lines = read_csv(path)
    # some results are of runs with one partition, by a fixed data.seed, and state it
    sizes = [line["size"].removesuffix("; one partition for all seeds") for line in lines]
    titles = [line["title"].partition(" (shrunk")[0] for line in lines]
    assert set(zip(titles, sizes, strict=True)) == {(table.title.partition(" (shrunk")[0], table.size or "")}
    seeds = [name for name in lines[0] if name.startswith("accuracy_seed_")]
    assert seeds == [f"accuracy_seed_{seed}" for seed in table.seeds]
    of_table = {(cell.label, cell.column): cell for cell in reversed(table.cells)}
    tuned = {row.label: row.tuned for row in table.rows}
    changed = CHANGED.get(name, set())
    assert changed <= {line["label"] for line in lines}
    kept = [line for line in lines if line["label"] not in changed]
    # a row of the file without a line is newer than the results
    places = [(table.columns.index(line["column"]), table.labels.index(line["label"])) for line in kept]
    assert places == sorted(places)
    for line in kept:
        cell = of_table[line["label"], line["column"]]
        config = cell.config
        assert line["method"] == config.method.name
        # a line may name what has become a default since
        used, stated = flatten(config.tree()), named(line["settings"])
        assert stated == {key: used[key] for key in stated}
        assert named(settings(config.method, config.train.lr)).keys() <= stated.keys()
        assert int(line["rounds"]) == config.train.rounds
        assert int(line["finetune_epochs"]) == config.train.finetune_epochs
        assert line["eval_split"] == config.run.eval_split
        assert line["tuned"] == (tuned[cell.label] or "")
