"""Comparison of runs: differences worked out by hand, and runs that cannot be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from bits import refused
from made_runs import make_run

import hpcfl
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.results.run import Run


def made(folder: Path, *settings: str, accuracies: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)) -> Run:
    make_run(folder, np.array([accuracies]), ["method.name=fedavg", *settings])
    return hpcfl.load_run(folder)


def of_two_seeds(folder: Path, entries: Mapping[str, tuple[float, ...]]) -> list[Run]:
    """Return runs of seeds 0 and 1 by their keys, which are separated by spaces, with accuracies."""
    return [
        made(folder / f"{number}-s{seed}", *keys.split(), f"run.seed={seed}", accuracies=accuracies)
        for number, (keys, accuracies) in enumerate(entries.items())
        for seed in (0, 1)
    ]


def test_differences_and_keys_equal_those_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = ("method.name=local", "train.lr=0.1")
    one = made(tmp_path / "A-s0")
    other = made(tmp_path / "B-s0", *local, accuracies=(0.4, 0.6, 0.5, 0.7))
    found = hpcfl.compare(one, other)
    assert found.means == pytest.approx([0.65, 0.55])
    paired = found.difference()
    # differences 0.1, 0, 0.2, 0.1: deviation sqrt(0.02 / 3), Student's t of 3 degrees 3.182446, so 0.1299
    assert paired.over_clients.mean == pytest.approx(0.1)
    assert paired.over_clients.count == 4
    assert dict(found.keys) == {"method.name": ("fedavg", "local"), "train.lr": (0.05, 0.1)}
    assert main(["compare", str(one.path), str(other.path)]) == FINISHED
    out = capsys.readouterr().out
    assert "*: the interval" not in out
    lines = out.splitlines()
    assert ["A-s0", "-", "B-s0", "+10.00", "±", "12.99", "4", "-", "1"] in [line.split() for line in lines]
    assert lines[-2].split() == ["method.name", "fedavg", "local"]
    assert "diverged" not in str(lines)
    assert main(["compare", str(tmp_path)]) == FINISHED
    assert capsys.readouterr().out == out
    other.clients["diverged"][1:] += 2
    header, *rows = (line.split() for line in str(hpcfl.compare(one, other)).splitlines()[:3])
    assert header[-2:] == ["scored", "diverged"]
    assert [row[-1] for row in rows] == ["0", "6"]

    three = made(tmp_path / "A-s1", "run.seed=1", accuracies=(0.5,) * 4)
    four = made(tmp_path / "B-s1", *local, "run.seed=1", accuracies=(0.2,) * 4)
    both = hpcfl.compare(one, other, four, three)
    assert both.entries == ((one, three), (other, four))
    assert both.means == pytest.approx([0.575, 0.375])
    # seeds differ by 0.1 and 0.3
    assert both.difference().over_seeds.mean == pytest.approx(0.2)
    assert both.difference(1, 0).over_clients.mean == pytest.approx(-0.2)
    assert both.difference().over_clients.count == 8
    assert "run.seed" not in both.keys
    assert "\nA-s0 (2 seeds) - B-s0 (2 seeds)  " in str(both)
    assert "one partition" not in str(both)


def test_runs_in_folders_of_one_name_are_named_by_more_of_their_paths(tmp_path: Path) -> None:
    runs = made(tmp_path / "q" / "fedavg" / "s0"), made(tmp_path / "q" / "local" / "s0", "method.name=local")
    text = str(hpcfl.compare(*runs))
    assert "\nfedavg/s0 - local/s0 " in text
    assert re.search(r"\nkeys that differ +fedavg/s0 +local/s0\n", text)


def test_entries_of_several_seeds_are_compared_client_by_client(tmp_path: Path) -> None:
    entries = {"train.lr=0.1": (0.1,) * 4, "train.lr=0.2": (0.2, 0.2, 0.19, 0.21)}
    text = str(hpcfl.compare(*of_two_seeds(tmp_path, entries)))
    # both seeds have the same difference: an interval over them would have the width 0
    assert re.search(r"\n0-s0 \(2 seeds\) - 1-s0 \(2 seeds\) +-10\.00 +± 0\.63 +8 +- +2\n", text)
    assert "\n\nThe interval over clients and seeds holds for these runs only" in text


def test_a_star_marks_an_interval_over_seeds(tmp_path: Path) -> None:
    low = of_two_seeds(tmp_path, {"train.lr=0.1": (0.1,) * 4})
    high = [
        made(tmp_path / f"high-s{seed}", "train.lr=0.2", f"run.seed={seed}", accuracies=(accuracy,) * 4)
        for seed, accuracy in enumerate((0.2, 0.21))
    ]
    text = str(hpcfl.compare(*low, *high))
    assert re.search(r" -10\.50 +± 0\.45 +8 +± 6\.35 \* +2\n", text)
    assert "*: the interval over seeds excludes 0. The interval over clients and seeds" in text


@pytest.mark.parametrize("key", ["data.seed=0", "data.partition.name=given"])
def test_a_comparison_names_seeds_that_share_a_partition(tmp_path: Path, key: str) -> None:
    entries = [f"method.name={name} {key}" for name in ("fedavg", "local")]
    runs = of_two_seeds(tmp_path, dict.fromkeys(entries, (0.5, 0.6, 0.7, 0.8)))
    assert "All seeds have one partition of the data: the interval over seeds" in str(hpcfl.compare(*runs))
    if "given" in key:
        # the last seed's clients are tested on other samples
        with (runs[1].path / "partition.csv").open("a") as file:
            file.write("3,9,1,1\n")
        runs = [hpcfl.load_run(run.path) for run in runs]
        assert "one partition" not in str(hpcfl.compare(*runs))


def test_runs_of_other_samples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "A")
    keys = {"run.seed=1": "data.seed: 0 there, 1 here", "data.clients=3": "data.clients: 4 there, 3 here"}
    for key, why in keys.items():
        made(tmp_path / key, key)
        line = refused(capsys, "compare", tmp_path / "A", tmp_path / key)
        assert f"cannot be compared: their clients have other samples ({why})" in line


def test_runs_on_the_same_samples_in_another_file_or_with_wrong_training_labels_are_compared(
    tmp_path: Path,
) -> None:
    data, runs = ("data.source=npz", "data.layout=NHWC"), []
    for name, *keys in (
        ("A", "data.path=images.npz"),
        ("B", "data.path=/scratch/images.npz", "data.label_noise=0.4", "data.label_noise_clients=0.5"),
    ):
        made(tmp_path / name, *data, *keys)
        record = tmp_path / name / "config.yaml"
        record.write_text(record.read_text() + "  samples: '00c0ffee'\n")
        runs.append(hpcfl.load_run(tmp_path / name))
    assert hpcfl.compare(*runs).keys.keys() == {"data.label_noise", "data.label_noise_clients"}


def test_runs_of_data_that_changed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, samples in (("A", "00c0ffee"), ("B", "00c0ffee"), ("C", "0badf00d")):
        made(tmp_path / name, f"train.lr=0.{len(name) + ord(name) - 64}")
        record = tmp_path / name / "config.yaml"
        record.write_text(record.read_text() + f"  samples: '{samples}'\n")
    assert main(["compare", str(tmp_path / "A"), str(tmp_path / "B")]) == FINISHED
    line = refused(capsys, "compare", tmp_path / "A", tmp_path / "C")
    assert "cannot be compared: their data have changed in between (00c0ffee and 0badf00d in the" in line
    page = tmp_path / "page.html"
    for other, is_noted in (("B", False), ("C", True)):
        assert main(["report", str(tmp_path / "A"), str(tmp_path / other), "--out", str(page)]) == FINISHED
        assert ("data of these runs have changed in between: 00c0ffee, 0badf" in page.read_text()) == is_noted


def test_normalisation_and_the_training_seed_may_differ(tmp_path: Path) -> None:
    one = made(tmp_path / "A", "data.seed=0")
    other = made(tmp_path / "B", "data.seed=0", "data.normalise=half", "run.seed=5")
    assert dict(hpcfl.compare(one, other).keys) == {"data.normalise": ("auto", "half"), "run.seed": (0, 5)}
    with pytest.raises(UserError, match="two runs or more"):
        hpcfl.compare(one)


def test_other_seeds_and_equal_folders_are_refused_with_advice(tmp_path: Path) -> None:
    one, two = (made(tmp_path / f"A-s{seed}", f"run.seed={seed}") for seed in (1, 2))
    with pytest.raises(UserError, match=r"\(data.seed: 1 there, 2 here\); .* A-s1 B-s1 A-s2 B-s2$"):
        hpcfl.compare(one, two)
    with pytest.raises(UserError, match="a run is named twice; compare runs in two folders"):
        hpcfl.compare(one, two, hpcfl.load_run(tmp_path / "." / "A-s1"))
    other = made(tmp_path / "B-s1", "run.seed=1", "method.name=local")
    with pytest.raises(UserError, match=r"data.seed: 1 there, 2 here.*, each configuration with the same"):
        hpcfl.compare(one, two, other)
    of_seeds = [made(tmp_path / f"C-s{seed}", f"data.seed={seed}") for seed in (1, 2)]
    with pytest.raises(UserError, match=r"\(data.seed: 1 there, 2 here\)"):
        hpcfl.compare(*of_seeds)
