"""Metrics at the end of a run: of which model, and only on request. All methods are in test_bits.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bits import MEETS_ALL_SOON, differing, kept_runs, raw_tests, run_here, tiny_settings
from bits import right as right_samples

from hpcfl.errors import FINISHED
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.simulation import federation
from hpcfl.storage.reading import read_columns
from hpcfl.training.metrics import CLIENT_METRICS, confusion, metrics_of

CASES = {
    "pfedla": ["method.name=pfedla", "data.unseen_clients=0.3"],
    "fedem": ["method.name=fedem", "method.components=2"],
    "batched": ["method.name=fedavg", "data.unseen_clients=0.3", "run.engine=batched"],
}


Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MEETS_ALL_SOON, "train.rounds=2", "run.checkpoint_every=1"]


@pytest.fixture(scope="module")
def folder(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    keys = [*settings, "run.metrics=true"]
    return kept_runs(tmp_path_factory.mktemp("serial"), lambda case: [*keys, *CASES[case]])


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_of_each_client_s_model_on_its_own_samples(folder: Folder, case: str) -> None:
    run = load_run(folder(case))
    right, total, num_tested = np.zeros(10), np.zeros(10), list[int]()
    for client, (x, y) in enumerate(raw_tests(run)):
        predicted = run.predict(client, x)
        found = [run.clients[name][client] for name in CLIENT_METRICS]
        assert found == pytest.approx(metrics_of(predicted, y), nan_ok=True)
        assert run.clients["accuracy"][client] == pytest.approx(right_samples(predicted, y) / len(y))
        is_there = run.confusion["client"] == client
        cells = [run.confusion[name][is_there].astype(int) for name in run.confusion][1:]
        counts = np.zeros((10, 10), int)
        counts[cells[0], cells[1]] = cells[2]
        np.testing.assert_array_equal(counts, confusion(predicted, y))
        if client < len(run.in_training["accuracy"]):
            num_tested.append(len(y))
            right, total = right + counts.diagonal(), total + counts.sum(axis=1)
    assert run.accuracy_by_class == pytest.approx(right / total)
    weighted = np.average(run.clients["accuracy"][: len(num_tested)], weights=num_tested)
    assert run.metrics["accuracy_weighted"][-1] == pytest.approx(weighted)


def test_clients_are_in_order_whatever_the_cohorts_of_an_evaluation(
    folder: Folder, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients 0, 2 and 4 are scored before 1 and 3."""
    size = len(load_run(folder("pfedla")).models.saved(0)["theta"])
    monkeypatch.setattr(federation, "EVALUATED_ELEMENTS", 4 * size)
    assert run_here(tmp_path / "run", [*settings, *CASES["pfedla"], "run.metrics=true"]) == FINISHED
    assert "confusion.csv" not in differing(folder("pfedla"), tmp_path / "run")


def test_metrics_change_nothing_else_and_can_be_added_to_a_finished_run(
    folder: Folder, settings: list[str], tmp_path: Path
) -> None:
    plain, keys = tmp_path / "plain", [*settings, *CASES["pfedla"]]
    assert run_here(plain, keys) == FINISHED
    assert differing(folder("pfedla"), plain) == ["clients.csv", "confusion.csv"]
    without, whole = (read_columns(path / "clients.csv") for path in (plain, folder("pfedla")))
    assert [*whole] == [*without, *CLIENT_METRICS]
    for name, values in without.items():
        np.testing.assert_array_equal(whole[name], values)
    assert len(load_run(plain).accuracy_by_class) == 0
    assert run_here(plain, [str(plain / "config.yaml"), "run.metrics=true"]) == FINISHED
    assert not differing(folder("pfedla"), plain)
    assert run_here(plain, keys) == FINISHED
    assert not differing(folder("pfedla"), plain)
    named = [load_config(None, [*keys, *more]).run_name() for more in ([], ["run.metrics=true"])]
    assert named[0] == named[1]
