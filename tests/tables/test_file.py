"""Table files: columns, sweeps, published numbers, files that extend others; what is refused, and where."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from table_files import refused, refused_once_changed

from hpcfl.config.keys import GROUPS, flatten
from hpcfl.errors import UserError
from hpcfl.main import main
from hpcfl.tables.cells import Table
from hpcfl.tables.file import PartialConfig

PAPER = """
title: A paper's table
source: table 1
size: "small: 5 of 50 clients"
seeds: [3, 5]
config: base.yaml
settings:
  train: {rounds: 20, lr: 0.3}
columns:
  - {label: few, data: {clients: 5}}
  - {label: many, data: {clients: 8}, train: {rounds: 40, lr: 0.1}}
  - {label: kept, sweep: {key: method.k, values: [0, 2]}, data: {clients: 5}}
rows:
  - {label: ours, method: {name: heurpfedla}, published: {few: 61.43, many: 73}}
  - {method: {name: fedavg}, train: {lr: 0.2}, without: ["kept, k = 0", "kept, k = 2"]}
  - {method: {name: local}, without: [many, "kept, k = 0", "kept, k = 2"], tuned: train.lr of 0.1 and 0.3}
compare:
  - [ours, fedavg]
  - {rows: [ours, local], columns: [few]}
"""
BASE = """
method: {name: pfedla, hypernetwork_lr: 0.5}
data: {source: cifar10, per_client: 60}
train: {rounds: 3, batch_size: 9}
run: {seed: 4, eval_every: 7}
environment: {torch: old}
"""
EXTENDING = """
extends: paper.yaml
title: A paper's table, small
size: "small: 10 rounds"
seeds: [1]
settings: {train: {rounds: 10}}
columns:
  - "kept, k = 2"
  - {label: few, data: {clients: 4}, train: {batch_size: 8}}
rows: [local, {label: ours, method: {hypernetwork_lr: 0.25}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "paper.yaml").write_text(PAPER)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "small.yaml").write_text(EXTENDING)
    return tmp_path


def flat(table: Table, row: str, column: str) -> dict[str, Any]:
    """Return the settings of a cell of the first seed."""
    return flatten(table.cells_of(row, column)[0].config.tree())


# The content of a file


def test_cells_are_columns_by_rows_by_seeds(folder: Path) -> None:
    table = Table(folder / "paper.yaml")
    assert table.columns == ["few", "many", "kept, k = 0", "kept, k = 2"]
    names = ["ours, few", "fedavg, few", "local, few", "ours, many", "fedavg, many"]
    names += ["ours, kept, k = 0", "ours, kept, k = 2"]
    by_seed = [(name, seed) for seed in (3, 5) for name in names]
    assert [(cell.name, cell.seed) for cell in table.cells] == by_seed
    assert table.cells[4].folder == Path("runs/paper/many/fedavg-s3")
    assert table.cells[-1].folder == Path("runs/paper/kept-k-2/ours-s5")
    expected = ("A paper's table", "table 1", "small: 5 of 50 clients")
    assert (table.title, table.source, table.size) == expected
    assert [row.published for row in table.rows] == [{"few": 61.43, "many": 73.0}, {}, {}]
    assert [row.tuned for row in table.rows] == [None, None, "train.lr of 0.1 and 0.3"]


def test_settings_override_a_configuration_columns_override_both_and_rows_override_all(folder: Path) -> None:
    table = Table(folder / "paper.yaml", ["train.momentum=0.5"])
    ours, fedavg = flat(table, "ours", "many"), flat(table, "fedavg", "many")
    assert (ours["data.source"], ours["data.per_client"], ours["run.eval_every"]) == ("cifar10", 60, 7)
    assert (ours["run.seed"], ours["method.hypernetwork_lr"]) == (3, 0.5)
    assert (ours["train.rounds"], flat(table, "ours", "few")["train.rounds"]) == (40, 20)
    assert (ours["train.lr"], fedavg["train.lr"]) == (0.1, 0.2)
    assert (ours["data.clients"], fedavg["data.clients"]) == (8, 8)
    assert {flat(table, "ours", column)["train.momentum"] for column in table.columns} == {0.5}
    assert "method.hypernetwork_lr" not in fedavg


def test_the_command_line_cannot_change_what_a_row_or_a_column_sets(folder: Path) -> None:
    path = folder / "paper.yaml"
    labels = {"train.lr=1": "fedavg", "method.name=local": "ours", "data.clients=3": "few"}
    for word, label in labels.items():
        with pytest.raises(UserError) as error:
            Table(path, [word])
        key = word.partition("=")[0]
        assert str(error.value) == f"{word}: {path}, {label} sets {key}; leave it out, or change the file"


def test_neither_can_keys_of_runs_or_a_sweep_s_key_be_replaced(folder: Path) -> None:
    """A column's label would be wrong; where a copy of its data lies may be said."""
    path = folder / "split.yaml"
    path.write_text(
        "title: t\nseeds: [0]\nrows: [method: {name: fedavg}]\ncolumns:\n"
        "  - {label: on validation, run: {eval_split: val}, data: {source: digits, val_fraction: 0.2}}\n"
        "  - {label: raw, data: {source: digits, normalise: none}}\n"
        "  - {label: by, sweep: {key: data.normalise, values: [half, none]}}\n"
    )
    for word, label in {"run.eval_split=test": "on validation", "data.normalise=standard": "raw"}.items():
        with pytest.raises(UserError, match=f"{label} sets {word.partition('=')[0]}; leave it out"):
            Table(path, [word])
    with pytest.raises(UserError, match="by, normalise = half sets data"):
        Table(path, ["data.normalise=standard"], in_columns=["normalise = half"])
    copy = Table(path, ["data.source=npz", "data.path=x.npz"], in_columns=["on validation"])
    assert copy.chosen[0].config.data.source == "npz"


def test_a_sweep_is_columns_of_one_key(folder: Path) -> None:
    table = Table(folder / "paper.yaml")
    kept = [flat(table, "ours", f"kept, k = {k}") for k in (0, 2)]
    assert [settings.pop("method.k") for settings in kept] == [0, 2]
    assert kept[0] == kept[1]
    assert kept[0]["data.clients"] == 5
    path = folder / "sweep.yaml"
    sweep = "sweep: {key: method.mixing, values: [true, false]}"
    path.write_text(f"title: t\nseeds: [0]\n{sweep}\nrows: [method: {{name: fedafk}}]")
    whole = Table(path)
    assert whole.columns == ["mixing = true", "mixing = false"]
    assert [flat(whole, "fedafk", column)["method.mixing"] for column in whole.columns] == [True, False]
    assert whole.cells[1].folder == Path("runs/sweep/mixing-false/fedafk-s0")
    for sweep, expected in (("data, values: [5]", "data=5 "), ("train.lr, values: [{a: 1}]", "train.lr={")):
        path.write_text(f"title: t\nseeds: [0]\nrows: [{{}}]\nsweep: {{key: {sweep}}}\n")
        assert expected in refused(path)


def test_a_file_that_extends_another_chooses_cells_and_overrides_settings(folder: Path) -> None:
    table = Table(folder / "small.yaml")
    assert (table.title, table.size) == ("A paper's table, small", "small: 10 rounds")
    assert (table.seeds, table.source) == ([1], "table 1")
    assert table.columns == ["kept, k = 2", "few"]
    assert table.labels == ["local", "ours"]
    assert [row.tuned for row in table.rows] == ["train.lr of 0.1 and 0.3", None]
    assert [row.published for row in table.rows] == [{}, {"few": 61.43}]
    assert [cell.name for cell in table.cells] == ["ours, kept, k = 2", "local, few", "ours, few"]
    few, kept = flat(table, "ours", "few"), flat(table, "ours", "kept, k = 2")
    assert (few["data.clients"], kept["data.clients"]) == (4, 5)
    assert (few["train.rounds"], kept["train.rounds"]) == (10, 10)
    assert (few["train.batch_size"], kept["train.batch_size"]) == (8, 9)
    assert (few["method.name"], few["method.hypernetwork_lr"], kept["method.k"]) == ("heurpfedla", 0.25, 2)
    assert few["data.source"] == "cifar10"
    # of the pairs, those are left whose rows and columns are
    assert [(pair.rows, pair.columns) for pair in table.compare] == [(["ours", "local"], ["few"])]


def test_the_label_of_a_row_is_its_method_even_of_one_that_is_extended(folder: Path) -> None:
    path = folder / "one.yaml"
    path.write_text("title: t\nseeds: [0]\nsettings: {method: {name: fedprox}}\nrows: [{}]\n")
    assert Table(path).labels == ["fedprox"]
    other = folder / "two.yaml"
    other.write_text("extends: one.yaml\nrows: [{train: {lr: 0.2}}, method: {name: local}]\n")
    assert Table(other).labels == ["fedprox", "local"]
    assert flat(Table(other), "fedprox", "")["train.lr"] == 0.2
    (folder / "base.yaml").write_text("method: {name: fedavg}\n")
    path.write_text("title: t\nseeds: [0]\nconfig: base.yaml\nrows: [{}]\n")
    assert "row 1 (pfedla): it runs method.name=fedavg, and is called pfedla; give it a" in refused(path)


def test_published_numbers_follow_the_order_of_the_columns(folder: Path) -> None:
    path = folder / "one.yaml"
    path.write_text("title: t\nseeds: [0]\nrows: [{method: {name: local}, published: 59}]\n")
    assert Table(path).rows[0].published == {"": 59.0}
    assert Table(path).cells[0].folder == Path("runs/one/local-s0")
    changed = PAPER.replace("{few: 61.43, many: 73}", "[61.43, null, 1, 2.5]")
    (folder / "paper.yaml").write_text(changed)
    row = Table(folder / "paper.yaml").rows[0]
    assert row.published == {"few": 61.43, "kept, k = 0": 1.0, "kept, k = 2": 2.5}
    assert Table(folder / "small.yaml").rows[1].published == {"few": 61.43, "kept, k = 2": 2.5}


# Shrinking


def test_the_title_names_fewer_rounds_and_seeds_and_the_folder_is_another(folder: Path) -> None:
    table = Table(folder / "paper.yaml", rounds=25, seeds=[5])
    assert {(cell.seed, cell.config.train.rounds) for cell in table.cells} == {(5, 20), (5, 25)}
    assert table.title == "A paper's table (shrunk: at most 25 rounds instead of 40, seeds 5 of 3, 5)"
    assert (table.folder, table.result_name) == (Path("runs/paper-25rounds"), "paper-25rounds-seeds5")
    assert Table(folder / "paper.yaml", seeds=[3, 5]).title == "A paper's table"
    for rounds in (40, 41):
        with pytest.raises(UserError, match="no cell has more than 40 rounds; leave it out"):
            Table(folder / "paper.yaml", [], folder / "out", rounds=rounds)
    fewer = Table(folder / "paper.yaml", seeds=[5])
    # cells of the other seeds may come later, but their results are no results of all
    assert (fewer.folder, fewer.result_name) == (Path("runs/paper"), "paper-seeds5")
    with pytest.raises(UserError, match="--seeds: 4 is not a seed of the table; allowed: 3, 5"):
        Table(folder / "paper.yaml", seeds=[3, 4])


def test_the_title_names_what_the_command_line_changes_but_not_the_folder_of_the_data(folder: Path) -> None:
    where = ["data.source=npz", "data.path=x.npz", "data.layout=NHWC", "data.normalise=cifar10"]
    silent = [*where, "data.root=d", "data.subset_per_class=null", "run.eval_every=2", "run.device=cpu"]
    assert Table(folder / "paper.yaml", silent).title == "A paper's table"
    changed = [*silent, "train.momentum=0.5", "data.subset_per_class=50", "run.on_divergence=skip"]
    table = Table(folder / "paper.yaml", changed, seeds=[5])
    change = (
        "(shrunk: seeds 5 of 3, 5; with train.momentum=0.5, data.subset_per_class=50, run.on_divergence=skip)"
    )
    assert table.title == f"A paper's table {change}"


def test_every_group_of_keys_is_allowed_in_a_table_file() -> None:
    assert set(GROUPS) <= set(PartialConfig.model_fields)


# Choosing

TWO_SOURCES = PAPER.replace("data: {clients: 8}", "data: {clients: 8, source: fashionmnist}")


def chosen(path: Path, columns: Sequence[str] = (), rows: Sequence[str] = ()) -> list[str]:
    """Return the names of the chosen cells of the first seed."""
    table = Table(path, in_columns=columns, in_rows=rows)
    assert len(table.cells) == 14
    assert len(table.chosen) == 2 * len(table.firsts())
    return [cell.name for cell in table.firsts()]


def test_cells_are_chosen_by_labels_or_parts_of_them(folder: Path) -> None:
    path = folder / "paper.yaml"
    assert len(chosen(path)) == 7
    assert chosen(path, columns=("many",)) == ["ours, many", "fedavg, many"]
    assert chosen(path, columns=("K = 2", "MA")) == ["ours, many", "fedavg, many", "ours, kept, k = 2"]
    assert chosen(path, rows=("avg",)) == ["fedavg, few", "fedavg, many"]
    of_both = ["ours, few", "local, few", "ours, kept, k = 0"]
    assert chosen(path, columns=("kept, k = 0", "few"), rows=("ours", "local")) == of_both
    # a whole label before those that it is a part of
    path.write_text(PAPER.replace("label: ours", "label: fedavg+").replace("[ours", "[fedavg+"))
    for row in ("fedavg", "FedAvg"):
        assert chosen(path, rows=(row,)) == ["fedavg, few", "fedavg, many"]


def test_labels_that_choose_no_cell_or_several_are_refused(folder: Path) -> None:
    path = folder / "paper.yaml"
    for columns, rows, expected in (
        (["lots"], [], "--column lots is unknown; give one of: few | many | kept, k = 0 | kept, k = 2"),
        (["few"], ["a"], "--row a matches 2 labels; give one of: fedavg | local"),
        (["many"], ["local"], f"{path}: the chosen rows have no cell in the chosen columns; choose others"),
    ):
        with pytest.raises(UserError) as error:
            Table(path, in_columns=columns, in_rows=rows)
        assert str(error.value) == expected


def test_the_file_of_the_data_is_for_the_chosen_columns_and_other_keys_for_all(folder: Path) -> None:
    (folder / "paper.yaml").write_text(TWO_SOURCES)
    file = ["data.source=npz", "data.path=x.npz", "data.layout=NHWC", "data.normalise=fashionmnist"]
    given = [*file, "data.subset_per_class=null", "train.momentum=0.5"]
    table = Table(folder / "paper.yaml", given, in_columns=["many"])
    untouched = Table(folder / "paper.yaml", ["train.momentum=0.5"])
    for cell, as_in_file in zip(table.cells, untouched.cells, strict=True):
        data = cell.config.data
        if cell.column == "many":
            assert (data.source, data.path, data.layout) == ("npz", "x.npz", "NHWC")
        else:
            assert cell.config.tree() == as_in_file.config.tree()
    assert table.title == "A paper's table (with train.momentum=0.5)"


# Mistakes


def test_one_data_set_for_columns_of_several_is_refused(folder: Path) -> None:
    (folder / "paper.yaml").write_text(TWO_SOURCES)
    for choice in ({}, {"in_columns": ["few", "many"]}, {"in_rows": ["ours"]}):
        start, end = refused(folder / "paper.yaml", ["data.source=digits"], **choice).split("; ")
        assert start == ": data.source on the command line would replace cifar10, fashionmnist in all columns"
        assert end == "choose columns of one of them with --column LABEL"
    Table(folder / "paper.yaml", ["data.source=digits"], in_columns=["few", "k = 0"])
    (folder / "paper.yaml").write_text(PAPER)
    table = Table(folder / "paper.yaml", ["data.source=digits"])
    assert {cell.config.data.source for cell in table.cells} == {"digits"}


NUMBERS = "published: {few: 61.43, many: 73}"
LONG = "a" * 2000
NEAR_FEW = "column fev; allowed: few | many | kept, k = 0 | kept, k = 2; did you mean few?"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("published: {few:", "published: {fev:", f", row 1 (ours): published: unknown {NEAR_FEW}"),
        (NUMBERS, "published: {null: 61}", ", row 1 (ours): published: unknown column None; allowed: "),
        ("without: [many,", "without: [lots,", ", row 3 (local): without: unknown column lots; allowed: "),
        (
            NUMBERS,
            "published_bytes: {few: -1}",
            ", row 1 (ours): published_bytes: -1 is invalid; give numbers from 0",
        ),
        (NUMBERS, "published: 61.43", ", row 1 (ours): published: 1 given for 4 columns; give one each,"),
        ("label: few, ", "", ", column 1: label is missing"),
        ("label: many", "label: few", ", column 2 (few): another column is called"),
        ("train: {rounds: 20, lr", "{train.lr", ", settings: train.lr has a dot, which is for the command"),
        ("{clients: 8}", "{client: 8}", ", row 1 (ours), column many: data.client=8 is an unknown key"),
        (
            "method.k, ",
            "methd.k, ",
            ", column 3 (kept), sweep: key='methd.k' is invalid: methd.k is ",
        ),
        ("method.k, ", "train.k, ", ", row 1 (ours), column kept, k = 0: train.k=0 is an unknown key"),
        ("[ours, fedavg]", "[ours, mean]", ", compare ours with mean: unknown row mean; allowed: "),
        ("[ours, fedavg]", "[ours]", ": compare 1=['ours'] is invalid"),
        ("columns: [few]", "columns: [fex]", ", compare ours with local: its columns need a cell of both"),
        ("columns: [few]", "columns: [many]", ", compare ours with local: its columns need a cell of both"),
        ("train: {lr: 0.2}", "data: {seed: 1}", ", compare ours with fedavg, column few: their clients hold"),
        ("data: {clients: 8}", "data: 5", ", row 1 (ours), column many: data=5 "),
        ("train: {lr: 0.2}", "data: 5", ", row 2 (fedavg), column few: data=5 "),
        ("seeds: [3, 5]", "seeds: 2", ": seeds=2 is invalid: it must be a list, such as [0, 1]"),
        ("source: table 1", "show: seeds", ": show='seeds' is invalid: it must be a list, such as [seeds]"),
        ("source: table 1", "show: [loss]", ": show: unknown quantity loss; allowed: "),
        ("base.yaml", "basis.yaml", ", row 1 (ours), column few: cannot read"),
        (
            "  - [ours,",
            "  - ours\n  - [ours,",
            ": compare 1='ours' is invalid: it must be a group of keys",
        ),
        ("settings:", "settings:\n  method: {kk: 1}", ", settings: method.kk is a key of no row there; did"),
        ("label: many", "method: {kk: 1}, label: many", ", column 2 (many): method.kk is a key of no row "),
        ("heurpfedla}", "heurpfedla, k: 1}", ", row 1 (ours), column kept, k = 0: method.k=1, and the c"),
        ("table 1", '"a\\nb"', ": source='a\\nb' is invalid: it must be one line"),
        ("source: table 1", 'extends: "a\\0b"', ": extends='a\\x00b' is invalid: it must be one line of"),
        ("source: table 1", '"": 1', ":  is an unknown key; allowed: extends, title"),
        ("label: ours", f"label: {LONG}", f", row 1 ({LONG}): label='{LONG}' is invalid: it must be one li"),
    ],
)
def test_a_mistake_is_reported_with_its_position(folder: Path, old: str, new: str, expected: str) -> None:
    assert refused_once_changed(folder / "paper.yaml", PAPER, old, new).startswith(expected)


def test_a_new_column_of_an_extending_file_has_the_configuration_of_the_extended_one(folder: Path) -> None:
    columns = "[{label: new, data: {clients: 6}}, {sweep: {key: train.lr, values: [0.1]}}]"
    more = f"extends: paper.yaml\ntitle: more\ncolumns: {columns}\nrows: [ours]\ncompare: []\n"
    (folder / "more.yaml").write_text(more)
    table = Table(folder / "more.yaml")
    for column in ("new", "lr = 0.1"):
        assert flat(table, "ours", column)["data.source"] == "cifar10"
        assert flat(table, "ours", column)["train.batch_size"] == 9
    (folder / "last.yaml").write_text("extends: more.yaml\ntitle: last\nsettings: {train: {lr: 0.2}}\n")
    expected = "row 1 (ours), column lr = 0.1: train.lr=0.2, and the column's label says 0.1; leave it out"
    assert expected in refused(folder / "last.yaml")
    (folder / "last.yaml").write_text("extends: more.yaml\ntitle: last\nsettings: {train: {lr: 0.1}}\n")
    assert flat(Table(folder / "last.yaml"), "ours", "lr = 0.1")["train.lr"] == 0.1


def test_an_extending_file_may_leave_out_rows_and_sweep_again(folder: Path) -> None:
    (folder / "rows.yaml").write_text("extends: paper.yaml\ntitle: r\nrows: [fedavg, local]\ncompare: []\n")
    sweep = "columns: [{label: few}, {sweep: {key: method.k, values: [2, 3]}}]"
    again = f"extends: paper.yaml\ntitle: a\n{sweep}\nrows: [ours]\nsettings: {{method: {{k: 9}}}}\n"
    (folder / "again.yaml").write_text(f"{again}compare: []\n")
    of_few = PAPER.replace("{label: few, data", "{label: few, method: {k: 1}, data")
    (folder / "paper.yaml").write_text(of_few)
    assert Table(folder / "rows.yaml").columns[0] == "few"
    assert flat(Table(folder / "again.yaml"), "ours", "k = 3")["method.k"] == 3


def test_an_extending_file_keeps_labels_of_columns_right(folder: Path) -> None:
    two = "  - {label: two, data: {clients: 5, partition: {name: classes, classes_per_client: 2}}}\nrows:"
    (folder / "paper.yaml").write_text(PAPER.replace("rows:", two, 1).replace("61.43, many: 73", "61.43"))
    for more, expected in (
        ("rows: [{label: ours, method: {k: 5}}]", "kept, k = 0: method.k=5, and the column's label says 0; "),
        ('columns: [{label: "kept, k = 0", method: {k: 5}}]\ncompare: []\nrows: [ours]', ": method.k=5, and"),
        ("settings: {data: {partition: {name: iid}}}", "(two): data.partition.classes_per_client is a key"),
    ):
        (folder / "more.yaml").write_text(f"extends: paper.yaml\ntitle: more\n{more}\n")
        assert expected in refused(folder / "more.yaml")


def test_a_mistake_in_an_extending_file_is_reported(folder: Path) -> None:
    for old, new, expected in (
        ('"kept, k = 2"', "lots", ": unknown column lots; allowed: few | many | kept, k = 0"),
        ("[local, ", "[locale, ", ": unknown row locale; allowed: ours |"),
        ("paper.yaml", "small.yaml", ": extends=small.yaml leads back to this file"),
        ("paper.yaml", "papr.yaml", ": extends=papr.yaml, but there is no file "),
        ("paper.yaml", "a" * 300, f": extends={'a' * 300}, but there is no file "),
    ):
        assert refused_once_changed(folder / "small.yaml", EXTENDING, old, new).startswith(expected)


def test_a_name_alone_needs_a_file_that_is_extended(folder: Path) -> None:
    path = folder / "alone.yaml"
    for lists, expected in (
        ("rows: [fedavg]", "fedavg is a name alone, .*; write .*, {method: {name: NAME}} for a row$"),
        ("columns: [few]\nrows: [method: {name: local}]", "few is a name .*; write {label: NAME, ...} for a"),
    ):
        path.write_text(f"title: alone\nseeds: [0]\n{lists}\n")
        assert re.search(expected, refused(path))


# Help


def test_the_example_of_the_help_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["table", "--help"])
    text = capsys.readouterr().out
    example = re.search(r"^  columns: .*\n(?:  .*\n)+", text, re.MULTILINE)
    assert example
    path = tmp_path / "example.yaml"
    path.write_text(f"title: t\nseeds: [0]\n{textwrap.dedent(example[0])}")
    table = Table(path)
    assert table.columns == ["many", "lr = 0.1", "lr = 0.2"]
    assert len(table.cells) == 5
    pairs = [(pair.columns, pair.at) for pair in table.compare]
    assert pairs == [(["many", "lr = 0.1"], None), (["many"], "after_training")]
    assert [row.tuned for row in table.rows] == ["train.lr of 0.1 and 0.2", None]
