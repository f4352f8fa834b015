"""The papers' figures: every figure file makes its picture, which shows the numbers of its cells."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
import yaml
from bits import read_csv, refused, tiny_settings
from processes import REPOSITORY, run_tree
from table_files import refused_once_changed

import hpcfl.storage.checkpoint
from hpcfl.data import bundled
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods import diagnostics
from hpcfl.tables import drawing
from hpcfl.tables.accuracies import read_results
from hpcfl.tables.cells import Table
from hpcfl.tables.diagnostics_csv import evaluations, read_histories
from hpcfl.tables.file import HeatMaps
from hpcfl.tables.write_results import write_from_histories

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLES = REPOSITORY / "configs" / "tables"
FIGURE_FILES = [path for path in sorted(TABLES.glob("*.yaml")) if "\nfigure:" in path.read_text()]

SMALL = {
    "data": {"layout": "NHWC", "subset_per_class": None, "per_client": 20, "test_fraction": 0.5},
    "train": {"rounds": 1, "local_epochs": 1, "finetune_epochs": 0},
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
    digits = bundled.digits()
    folder = tmp_path_factory.mktemp("images")
    made = {}
    for name, times, padding, channels in (("grey", 3, 2, 1), ("colour", 4, 0, 3)):
        x = np.kron(digits.x[:, 0] / digits.scale, np.ones((1, times, times)))
        x = np.pad(x, [(0, 0), (padding, padding), (padding, padding)])
        made[name] = folder / f"{name}.npz"
        np.savez(made[name], x=np.repeat(x[..., None], channels, 3).astype(np.float32), y=digits.y)
    return made


def shrunk(path: Path, images: dict[str, Path], folder: Path) -> Path:
    """Write a file that extends a table file with a tiny size, few rows and one column, and return it."""
    table = Table(path)
    settings: dict[str, Any] = {group: dict(keys) for group, keys in SMALL.items()}
    for group, keys in SMALLER.get(path.stem.partition("_")[0], {}).items():
        settings[group] = settings.get(group, {}) | keys
    column = table.columns[0]
    source = next(cell.config.data.source for cell in table.firsts() if cell.column == column)
    file = images["grey" if "mnist" in source else "colour"]
    data = {"source": "npz", "path": str(file), "normalise": "none"}
    tree: dict[str, Any] = {"extends": str(path), "seeds": [0], "settings": settings}
    tree["rows"] = table.labels[:2]
    if column:
        tree["columns"] = [{"label": column, "data": data}]
    else:
        settings["data"] |= data
    tiny = folder / path.name
    tiny.write_text(yaml.safe_dump(tree))
    return tiny


@pytest.fixture
def png_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare a test the same picture as PDF."""
    monkeypatch.delitem(drawing.WITHOUT_CLOCK_AND_VERSION, "pdf")


@pytest.mark.usefixtures("png_alone")
@pytest.mark.parametrize("path", FIGURE_FILES, ids=lambda path: path.stem)
def test_a_figure_file_makes_its_picture(path: Path, images: dict[str, Path], tmp_path: Path) -> None:
    tiny = shrunk(path, images, tmp_path)
    assert main(["table", str(tiny), "--out", str(tmp_path / "out"), "--quiet"]) == FINISHED
    names = Table(tiny).figure_names
    assert names
    for name in names:
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5_000


# What is drawn

TOY = """
title: A toy
size: "toy: the digits"
seeds: [0, 1]
settings: {train: {lr: 0.05}, run: {eval_every: 1}}
columns:
  - {label: gamma = 0.9}
  - {label: gamma = 0.5, train: {lr_decay: 0.5}}
rows:
  - label: HeurpFedLA, k = 2
    method: {name: heurpfedla, k: 2, hypernetwork_lr: 9}
    published: [61.4, null]
  - {label: Local, method: {name: local}, without: [gamma = 0.5]}
figure:
  - {draw: heat_maps, quantity: alpha, layers: [conv1, fc2], rounds: [first, 3]}
  - {draw: heat_maps, quantity: alpha, client: 2, layers: {gamma = 0.9: [fc2, conv1]}, scale: log, low: 0.01}
  - {draw: curves}
  - {draw: curves, client: 4}
  - {draw: bars}
  - {draw: points}
  - {draw: heat_maps, quantity: retained_rounds, layers: [fc2, conv1]}
"""
TWO = """
extends: toy.yaml
figure: [{draw: heat_maps, quantity: alpha, layers: [conv1]}, {draw: curves}]
"""
FILES = [f"figure_{letter}.{ending}" for letter in "ab" for ending in ("png", "pdf")]
SLUGS = ("gamma-0.9/heurpfedla-k-2", "gamma-0.5/heurpfedla-k-2")


@pytest.fixture(scope="module")
def words(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the file with two of the toy's drawings and the settings of all cells."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "toy.yaml").write_text(TOY)
    (folder / "two.yaml").write_text(TWO)
    return [str(folder / "two.yaml"), *[word for word in tiny_settings(digits) if "lr_decay" not in word]]


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert main(["table", *words, "--out", str(folder), "--quiet", "--write-results"]) == FINISHED
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


@pytest.fixture(scope="module")
def toy(words: list[str], whole: Path) -> dict[str, Figure]:
    return drawn(words, whole, "toy.yaml")


def drawn(words: list[str], folder: Path, file: str = "two.yaml") -> dict[str, Figure]:
    """Return the pictures of a file's figure by name, of the cells in a folder."""
    table = Table(Path(words[0]).with_name(file), words[1:], folder)
    found = drawing.draw(table, read_results(table), read_histories(table))
    return {name: picture for name, picture in found if picture is not None}


def history(run: str | Path, name: str = "alpha") -> np.ndarray:
    """Return what a run has of a quantity [evaluations, clients, ...]."""
    with h5py.File(f"{run}/checkpoint.h5", "r") as file:
        return np.array(file["history"][name])


def panels(picture: Figure) -> list[Axes]:
    """Return the axes without bars of colours and without those that are left empty."""
    return [one for one in picture.get_axes() if one.axison and one.get_label() != "<colorbar>"]


def texts(picture: Figure) -> str:
    """Return the title and the notes, in one line."""
    return " ".join(text.get_text() for part in picture.subfigs for text in part.texts).replace("\n", " ")


def test_a_heat_map_shows_the_weights_of_the_checkpoint(toy: dict[str, Figure], whole: Path) -> None:
    found = panels(toy["figure_a"])
    weights = [history(f"{whole / slug}-s0") for slug in SLUGS]
    # a line a column of the table; in it the evaluations, of each all layers
    layers = {0: "conv1", 5: "fc2"}
    expected = list(itertools.product(range(2), (0, 2), layers))
    assert len(found) == len(expected)
    for axes, (column, at, layer) in zip(found, expected, strict=True):
        assert axes.get_title() == f"{layers[layer]}, round {at + 1}"
        drawn = axes.images[0]
        assert np.array_equal(np.asarray(drawn.get_array()), weights[column][at, :, layer])
        # one scale for all, from white at zero
        assert drawn.get_clim() == pytest.approx((0, max(one[[0, 2]][:, :, [0, 5]].max() for one in weights)))
    assert [found[at].get_ylabel() for at in (0, 4)] == ["gamma = 0.9\nclient", "gamma = 0.5\nclient"]
    last = [read_csv(whole / f"{slug}-s0" / "metrics.csv")[-1]["accuracy_mean"] for slug in SLUGS]
    first, second = (f"seed 0 of 0, 1, accuracy {100 * float(accuracy):.1f} %" for accuracy in last)
    assert f"gamma = 0.9: {first}, published 61.4 %" in texts(toy["figure_a"])
    assert f"gamma = 0.5: {second}" in texts(toy["figure_a"])


def test_the_matrix_of_one_client_shows_its_layers(toy: dict[str, Figure], whole: Path) -> None:
    first, second = panels(toy["figure_b"])
    weights = [history(f"{whole / slug}-s0")[-1, 2] for slug in SLUGS]
    # in the order of the file where it names them; all where it names none; from `low` on
    for axes, expected in ((first, weights[0][[5, 0]]), (second, weights[1])):
        assert np.array_equal(np.asarray(axes.images[0].get_array()), np.maximum(expected, np.float32(0.01)))
        assert axes.images[0].norm.vmin == 0.01
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["fc2", "conv1"]
    assert (first.get_title(), second.get_title()) == ("gamma = 0.9", "gamma = 0.5")
    assert "gamma = 0.5: round 3, seed 0" in texts(toy["figure_b"])
    # the same of a matrix of clients by layers
    of_clients, _ = panels(toy["figure_g"])
    retained = history(f"{whole / SLUGS[0]}-s0", "retained_rounds")[-1]
    assert not np.array_equal(retained[:, 5], retained[:, 0])
    assert np.array_equal(np.asarray(of_clients.images[0].get_array()), retained[:, [5, 0]])
    assert [tick.get_text() for tick in of_clients.get_xticklabels()] == ["fc2", "conv1"]


UNKNOWN = """
title: Nobody has uploaded yet
seeds: [0]
settings: {clients: {drop_rate: 0.999999}}
rows: [{label: pFedGraph, method: {name: pfedgraph}}]
figure:
  - {draw: heat_maps, quantity: collaboration}
  - {draw: heat_maps, quantity: collaboration, scale: log}
"""


@pytest.mark.usefixtures("png_alone")
def test_unknown_values_have_no_effect_on_the_colours(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "unknown.yaml"
    file.write_text(UNKNOWN)
    assert main(["table", str(file), *words[1:], "--out", str(tmp_path / "out"), "--quiet"]) == FINISHED
    linear, log = drawn([str(file), *words[1:]], tmp_path / "out", "unknown.yaml").values()
    assert np.isnan(np.asarray(panels(linear)[0].images[0].get_array())).all()
    assert panels(linear)[0].images[0].get_clim() == (0, 1)
    assert panels(log)[0].images[0].get_clim() == (1, 10)
    part = [np.array([[np.nan, -5.0], [3.0, 40.0]])]
    assert drawing._ends(HeatMaps(draw="heat_maps", quantity="alpha"), part) == (-5, 40)


@pytest.mark.usefixtures("png_alone")
def test_the_newest_weights_are_drawn_if_there_are_too_many(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "HISTORY_LIMIT", 1)
    command = ["table", *words, "--out", str(tmp_path), "--quiet", "--seeds", "0"]
    assert main([*command, "--row", "HeurpFedLA", "--column", "0.9"]) == FINISHED
    picture = drawn(words, tmp_path, "toy.yaml")["figure_a"]
    with h5py.File(f"{tmp_path / SLUGS[0]}-s0/checkpoint.h5") as file:
        assert "alpha" not in file["history"]
        weights = file["server/alpha"][:, 0]
    assert np.array_equal(np.asarray(panels(picture)[0].images[0].get_array()), weights)
    assert "round 3, only the last evaluation: earlier ones are not stored" in texts(picture)
    lines = [line for line in read_csv(tmp_path / "diagnostics.csv") if line["quantity"] == "alpha"]
    assert {line["round"] for line in lines} == {"3"}


def test_curves_are_accuracies_over_rounds(toy: dict[str, Figure], whole: Path) -> None:
    runs = [f"gamma-0.9/{row}-s{seed}" for row in ("heurpfedla-k-2", "local") for seed in (0, 1)]
    means = [[float(line["accuracy_mean"]) for line in read_csv(whole / run / "metrics.csv")] for run in runs]
    one = [history(whole / run, "accuracy")[:, 4] for run in runs]
    for name, known in (("figure_c", means), ("figure_d", one)):
        first, second = panels(toy[name])
        by_seed = 100 * np.reshape(known, (2, 2, 3))
        drawn = [line for line in first.lines if len(line.get_xdata()) == 3]
        assert [line.get_label() for line in drawn] == ["HeurpFedLA, k = 2", "Local"]
        for line, band, seeds in zip(drawn, first.collections, by_seed, strict=True):
            assert list(line.get_xdata()) == [1, 2, 3]
            assert np.asarray(line.get_ydata()) == pytest.approx(seeds.mean(axis=0))
            heights = band.get_paths()[0].vertices[:, 1]
            assert (heights.min(), heights.max()) == pytest.approx((seeds.min(), seeds.max()))
        # the published one is that of the mean over clients
        levels = [line.get_ydata()[0] for line in first.lines if len(line.get_xdata()) == 2]
        assert levels == ([61.4] if name == "figure_c" else [])
        assert len(second.lines) == 1
    assert panels(toy["figure_d"])[0].get_ylabel() == "accuracy, %, client 4"
    scored = "scored after download: HeurpFedLA, k = 2; after training: Local"
    assert scored in texts(toy["figure_c"])
    assert "bands: from the lowest to the highest seed" in texts(toy["figure_c"])
    # rows of one colour differ in line, mark and hatch
    looks = [drawing._look(number) for number in range(64)]
    for form in (1, 2, 3):
        assert len({(look[0], look[form]) for look in looks}) == 64


def test_bars_are_as_high_as_the_table_s_accuracies(toy: dict[str, Figure], whole: Path) -> None:
    [axes] = panels(toy["figure_e"])
    lines = read_csv(whole / "table.csv")
    heights = [bar.get_height() for bar in axes.patches]
    # by row; table.csv goes by column
    expected = [100 * float(lines[at]["accuracy_mean"]) for at in (0, 2, 1)]
    assert heights == pytest.approx(expected)
    spreads = [path.vertices[:, 1] for lines in axes.collections for path in lines.get_paths()]
    spreads = [ends for ends in spreads if not np.isnan(ends).any()]
    deviations = [100 * float(lines[at]["accuracy_std_over_seeds"]) for at in (0, 2, 1)]
    assert [np.ptp(ends) / 2 for ends in spreads] == pytest.approx([one for one in deviations if one])
    [published] = [line for line in axes.lines if line.get_label() == "published"]
    assert list(published.get_ydata()) == pytest.approx([61.4, np.nan], nan_ok=True)
    bar = axes.patches[0]
    assert published.get_xdata()[0] == pytest.approx(bar.get_x() + bar.get_width() / 2)
    assert axes.get_xlabel() == "gamma"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.9", "0.5"]


def test_points_are_drawn_at_the_bytes_of_the_run(toy: dict[str, Figure], whole: Path) -> None:
    [axes] = panels(toy["figure_f"])
    assert axes.get_xlabel() == "MB down and up, all rounds and clients"
    assert "whiskers: one standard deviation over seeds" in texts(toy["figure_f"])
    assert list(dict.fromkeys(axes.get_legend_handles_labels()[1])) == ["HeurpFedLA", "Local"]
    runs = (SLUGS[0], "gamma-0.9/local", SLUGS[1])
    for (point, *_), run in zip(axes.containers, runs, strict=True):
        last = [read_csv(whole / f"{run}-s{seed}" / "metrics.csv")[-1] for seed in (0, 1)]
        parts = [f"{part}bytes_{way}" for part in ("", "buffer_", "index_") for way in ("down", "up")]
        sent = np.mean([sum(int(one[part]) for part in parts) for one in last])
        assert np.asarray(point.get_xdata()) * 1e6 == pytest.approx([sent])
        mean = 100 * np.mean([float(one["accuracy_mean"]) for one in last])
        assert np.asarray(point.get_ydata()) == pytest.approx([mean])
    labels = ["k = 2, gamma = 0.9", "gamma = 0.9", "k = 2, gamma = 0.5"]
    assert [text.get_text() for text in axes.texts] == labels


def test_the_evaluation_nearest_to_the_given_round_is_drawn() -> None:
    rounds = [5, 10, 15, 20, 25, 30]
    assert evaluations(rounds, ["first", "middle", "last"]) == [0, 3, 5]
    # 7 is nearer to 5, 17 to 15, and what is beyond the end is the last
    assert evaluations(rounds, [7, 17, 600, "last"]) == [0, 2, 5]
    assert evaluations([8], ["first", "middle", "last", 3]) == [0]


# Files


def test_pictures_are_beside_the_table_and_the_png_is_with_the_results(words: list[str], whole: Path) -> None:
    results = Path(words[0]).parent / "results"
    for name in ("figure_a", "figure_b"):
        png, pdf = ((whole / f"{name}.{ending}").read_bytes() for ending in ("png", "pdf"))
        assert png.startswith(b"\x89PNG")
        assert len(png) < 150_000
        # fonts are embedded as TrueType, never as drawings of letters
        assert pdf.startswith(b"%PDF-")
        assert b"/FontFile2" in pdf
        assert b"/Type3" not in pdf
        assert b"Date" not in pdf
        assert (results / f"{Table(Path(words[0]), words[1:]).result_name}_{name}.png").read_bytes() == png
    assert not list(results.glob("*.pdf"))


def test_a_user_s_style_changes_no_byte(words: list[str], whole: Path, copied: Path) -> None:
    style = copied / "matplotlibrc"
    style.write_text("font.size: 30\npdf.fonttype: 3\nimage.cmap: jet\naxes.facecolor: red\n")
    for name in FILES:
        (copied / name).unlink()
    command = [sys.executable, "-m", "hpcfl.main", "table", *words, "--out", str(copied)]
    done = run_tree(command, env={"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(style)})
    assert f"drawn: {', '.join(FILES)}\n" in done.stdout
    for name in FILES:
        assert (copied / name).read_bytes() == (whole / name).read_bytes(), name


def test_unfinished_cells_are_named_and_the_others_are_drawn(
    words: list[str], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (f"{SLUGS[0]}-s0", f"{SLUGS[1]}-s0", f"{SLUGS[1]}-s1"):
        shutil.rmtree(copied / name)
    made = drawn(words, copied)
    # the map is now the other seed's
    drawn_map = panels(made["figure_a"])[0].images[0].get_array()
    assert np.array_equal(np.asarray(drawn_map), history(f"{copied / SLUGS[0]}-s1")[-1, :, 0])
    assert texts(made["figure_a"]).endswith(" missing: gamma = 0.9 (1 of 2 seeds); gamma = 0.5")
    missing = " missing: HeurpFedLA, k = 2, gamma = 0.9 (1 of 2 seeds); HeurpFedLA, k = 2, gamma = 0.5"
    assert texts(made["figure_b"]).endswith(missing)
    shutil.rmtree(copied / f"{SLUGS[0]}-s1")
    table = Table(Path(words[0]), words[1:], copied)
    assert write_from_histories(table) == {"figure_a": [], "figure_b": ["figure_b.png", "figure_b.pdf"]}
    assert not list(copied.glob("figure_a*"))
    assert len(list(copied.glob("figure_b*"))) == 2
    assert main(["table", *words, "--out", str(copied), "--part", "9/9"]) == FINISHED
    assert "figure_a is not drawn: nothing that it shows is finished\n" in capsys.readouterr().out


@pytest.mark.usefixtures("png_alone")
def test_a_damaged_checkpoint_omits_only_its_own_cell(
    words: list[str], copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied / f"{SLUGS[0]}-s0"
    for name in ("checkpoint.h5", "checkpoint.prev.h5"):
        (folder / name).write_bytes(b"nothing")
    table = Table(Path(words[0]), words[1:], copied)
    pictures = write_from_histories(table)
    (warning,) = caplog.messages
    assert re.search("HeurpFedLA.*seed 0: no diagnostics and no figure: .*checkpoint", warning)
    assert all(pictures.values())
    cells = {(line["column"], line["seed"]) for line in read_csv(copied / "diagnostics.csv")}
    assert cells == {("gamma = 0.9", "1"), ("gamma = 0.5", "0"), ("gamma = 0.5", "1")}
    by_client = drawn(words, copied, "toy.yaml")["figure_d"]
    assert "without checkpoint: HeurpFedLA, k = 2, gamma = 0.9 (1 of 2 seeds)" in texts(by_client)
    caplog.clear()


@pytest.mark.usefixtures("png_alone")
def test_a_cell_finished_on_another_machine_has_all_but_diagnostics(
    words: list[str],
    whole: Path,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brought here are config.yaml and the CSV files; neither checkpoints, nor data where they were.

    Checkpoints that are here are verified once; local training has nothing that is drawn or summed up.
    """
    verified, find_damage = [], hpcfl.storage.checkpoint.find_damage

    def counting(path: Path) -> str | None:
        verified.append(path)
        return find_damage(path)

    monkeypatch.setattr(hpcfl.storage.checkpoint, "find_damage", counting)
    brought = {"config.yaml", "metrics.csv", "clients.csv", "partition.csv", "bytes.csv"}
    for folder in copied.glob("*/heurpfedla-k-2-s0"):
        for path in folder.iterdir():
            if path.name not in brought:
                path.unlink()
    before = sorted(path for path in copied.rglob("*") if path.parent.parent.parent == copied)
    assert main(["table", *words, "--out", str(copied)]) == FINISHED
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == (f"6 of 6 cells are finished, in {copied}", "")
    assert sorted(verified) == sorted(copied.glob("*/heurpfedla-k-2-s1/checkpoint.h5"))
    assert "missing" not in out
    assert sorted(path for path in copied.rglob("*") if path.parent.parent.parent == copied) == before
    for name in ("table.csv", "table.md", "figure_b.png"):
        assert (copied / name).read_bytes() == (whole / name).read_bytes()
    diagnostics = read_csv(whole / "diagnostics.csv")
    left = [line for line in diagnostics if line["seed"] == "1"]
    assert read_csv(copied / "diagnostics.csv") == left != diagnostics
    for path in copied.glob("*/*/checkpoint*.h5"):
        path.unlink()
    assert main(["table", *words, "--out", str(copied)]) == FINISHED
    out, err = capsys.readouterr()
    assert err == ""
    assert "figure_a is not drawn: nothing that it shows is finished\n" in out
    assert not (copied / "diagnostics.csv").exists()


# Mistakes

KNOWN = "with two or more axes of any row's method; allowed: alpha, self_weight, retained_rounds"


def test_a_mistake_is_reported_with_its_position(tmp_path: Path) -> None:
    for old, new, expected in (
        ("{draw: bars}", "{quantity: alpha}", ", figure 5: draw is missing"),
        ("quantity: alpha, client: 2, ", "", ", figure 2: quantity is missing"),
        ("bars}", "pie}", ", figure 5: draw=pie is unknown; allowed: heat_maps, curves, bars, points"),
        ("bars}", "bars, acuracy: best}", ", figure 5: acuracy is an unknown key; allowed: draw, accuracy;"),
        ("scale: log", "scale: logg", ", figure 2: scale='logg' is invalid: it must be 'linear'"),
        ("[first, 3]", "[frist]", ", figure 1: round 1='frist' is invalid: "),
        ("alpha, client: 2", "beta, client: 2", f", figure: quantity=beta is not a diagnostic {KNOWN}"),
        ("{gamma = 0.9: [", "{gamma = 0.8: [", ", figure: layers: unknown column gamma = 0.8; allowed: "),
    ):
        assert refused_once_changed(tmp_path / "toy.yaml", TOY, old, new).startswith(expected)


def test_missing_layers_and_clients_are_reported_when_the_figure_is_drawn(
    words: list[str], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for old, new, expected in (
        ("{gamma = 0.9: [fc2, conv1]}", "[fc3]", "unknown layer fc3; allowed: conv1 | bn1 |"),
        ("client: 4", "client: 7", "client=7 is invalid; give 0 to 6"),
    ):
        path = copied.parent / "toy.yaml"
        path.write_text(TOY.replace(old, new))
        line = refused(capsys, "table", path, *words[1:], "--out", copied, "--quiet")
        assert f"{path}, figure, column gamma = 0.9: {expected}" in line


def test_a_file_inherits_a_figure_without_the_columns_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    path = tmp_path / "less.yaml"
    path.write_text("extends: toy.yaml\ncolumns: [gamma = 0.5]\n")
    kept, whole = (Table(file).drawings for file in (path, tmp_path / "toy.yaml"))
    assert [one.draw for one in kept] == [one.draw for one in whole]
    path.write_text("extends: toy.yaml\nfigure: []\n")
    assert Table(path).drawings == []
