"""What a run writes for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import differing, run_here, run_killed_in_round, tiny_settings, write_digits

from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.registries import load_config
from hpcfl.storage.events import BINS

ROUNDS = 5
TOLERANCE = 1e-6
"""Events hold float32."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digits = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(digits)
    return [*tiny_settings(digits), "method.name=fedavg", f"train.rounds={ROUNDS}", "run.checkpoint_every=2"]


def reader(folder: Path) -> Any:
    """Return TensorBoard's reader of a folder, whose Reload reads what has come since."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "histograms": 0}).Reload()


def scalars(found: Any) -> dict[tuple[str, int], float]:
    """Return values by name and round; none may be there twice."""
    names = found.Tags()["scalars"]
    events = [(name, event.step, event.value) for name in names for event in found.Scalars(name)]
    assert max(Counter(event[:2] for event in events).values()) == 1
    return {(name, step): value for name, step, value in events}


def rows(folder: Path) -> dict[tuple[str, int], float]:
    """Return the numbers of metrics.csv by name and round."""
    with (folder / "metrics.csv").open(newline="") as file:
        lines = [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    return {
        (name, int(line["round"])): value
        for line in lines
        for name, value in line.items()
        if name != "round" and not math.isnan(value)
    }


def test_a_killed_run_has_every_round_once(settings: list[str], tmp_path: Path) -> None:
    folder, plain = tmp_path / "run", tmp_path / "plain"
    asked = [*settings, "run.tensorboard=true"]
    run_killed_in_round(3, folder, asked)
    found = reader(folder)
    # rounds 1 to 3, of which the checkpoint after round 2 does not know the last
    assert {step for _, step in scalars(found)} == {1, 2, 3}
    assert run_here(folder, asked) == FINISHED
    again = reader(folder)
    expected = rows(folder)
    assert {step for _, step in expected} == set(range(1, ROUNDS + 1))
    assert scalars(again) == pytest.approx(expected, rel=TOLERANCE)
    # one that has read the events of before the kill
    assert scalars(found.Reload()) == pytest.approx(expected, rel=TOLERANCE)
    assert [event.step for event in again.Histograms("accuracy_of_clients")] == list(range(1, ROUNDS + 1))
    assert [path.stat().st_size > 0 for path in sorted(folder.glob("events.*"))] == [False, True]
    assert run_here(folder, asked) == FINISHED
    assert [path.stat().st_size > 0 for path in sorted(folder.glob("events.*"))] == [False, True]
    assert scalars(found.Reload()) == pytest.approx(expected, rel=TOLERANCE)
    assert run_here(plain, settings) == FINISHED
    assert not differing(plain, folder)
    assert not list(plain.glob("events.*"))


def test_the_histogram_counts_clients_by_accuracy(settings: list[str], tmp_path: Path) -> None:
    assert run_here(tmp_path, [*settings, "run.tensorboard=true"]) == FINISHED
    with (tmp_path / "clients.csv").open(newline="") as file:
        accuracy = np.array([float(row["accuracy"]) for row in csv.DictReader(file)])
    last = reader(tmp_path).Histograms("accuracy_of_clients")[-1].histogram_value
    assert (last.num, last.min, last.max) == (len(accuracy), accuracy.min(), accuracy.max())
    # a bin that ends at 1 has those at 1 too
    edges = np.minimum(np.searchsorted(BINS, accuracy, side="right"), len(BINS) - 1)
    counts = Counter(BINS[edges].round(9).tolist())
    assert {round(end, 9): n for end, n in zip(last.bucket_limit, last.bucket, strict=True) if n} == counts


def test_events_asked_for_late_begin_with_the_first_round(settings: list[str], tmp_path: Path) -> None:
    run_killed_in_round(3, tmp_path, settings)
    assert not list(tmp_path.glob("events.*"))
    assert run_here(tmp_path, [*settings, "run.tensorboard=true"]) == FINISHED
    assert scalars(reader(tmp_path)) == pytest.approx(rows(tmp_path), rel=TOLERANCE)


def test_the_name_of_the_run_stays() -> None:
    names = {load_config(None, [f"run.tensorboard={value}"]).run_name() for value in ("true", "false")}
    assert names == {load_config(None, []).run_name()}


def test_a_missing_package_is_told_before_the_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert run_here(tmp_path / "run", [*settings, "run.tensorboard=true"]) == BAD_INPUT
    (error,) = capfd.readouterr().err.splitlines()
    assert error.startswith("hpcfl: error: run.tensorboard=true needs the package tensorboardX")
    assert "pip install tensorboardX" in error
    assert not (tmp_path / "run").exists()
    assert run_here(tmp_path / "run", settings) == FINISHED
