"""Metrics at the end of a run: of which model, and only on request. All methods are in test_bits.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bits import MEETS_ALL_SOON, differing, run_here, tiny_settings

from hpcfl.errors import FINISHED
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.setup.experiment import load_data
from hpcfl.simulation import federation
from hpcfl.storage.reading import read_columns
from hpcfl.training.metrics import CLIENT_METRICS

CASES = {
    "pfedla": ["method.name=pfedla", "data.unseen_clients=0.3"],
    "fedem": ["method.name=fedem", "method.components=2"],
    "batched": ["method.name=fedavg", "data.unseen_clients=0.3", "run.engine=batched"],
}


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MEETS_ALL_SOON, "train.rounds=2", "run.checkpoint_every=1"]


@pytest.fixture(scope="module")
def folders(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("serial")
    for case, keys in CASES.items():
        assert run_here(base / case, [*settings, *keys, "run.metrics=true"]) == FINISHED
    return {case: base / case for case in CASES}


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_metrics_are_of_each_client_s_model_on_its_own_samples(folders: dict[str, Path], case: str) -> None:
    # here, as every process of the tests would need a second and more for this
    from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score

    run = load_run(folders[case])
    arrays, parts = load_data(run.config)
    right, total, num_tested = np.zeros(10), np.zeros(10), list[int]()
    for client, part in enumerate(parts):
        y = arrays.y[part.test]
        predicted = run.predict(client, np.ascontiguousarray(arrays.x[part.test])).argmax(axis=1)
        expected = balanced_accuracy_score(y, predicted), f1_score(y, predicted, average="macro")
        found = [run.clients[name][client] for name in ("balanced_accuracy", "macro_f1")]
        assert found == pytest.approx(expected)
        is_there = run.confusion["client"] == client
        cells = [run.confusion[name][is_there].astype(int) for name in run.confusion][1:]
        counts = np.zeros((10, 10), int)
        counts[cells[0], cells[1]] = cells[2]
        np.testing.assert_array_equal(counts, confusion_matrix(y, predicted, labels=range(10)))
        if client < len(parts) - run.num_unseen:
            num_tested.append(len(y))
            right, total = right + counts.diagonal(), total + counts.sum(axis=1)
    assert run.accuracy_by_class == pytest.approx(right / total)
    weighted = np.average(run.clients["accuracy"][: len(num_tested)], weights=num_tested)
    assert run.metrics["accuracy_weighted"][-1] == pytest.approx(weighted)


def test_clients_are_in_order_whatever_the_cohorts_of_an_evaluation(
    folders: dict[str, Path], settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients 0, 2 and 4 are scored before 1 and 3."""
    size = len(load_run(folders["pfedla"]).models.saved(0)["theta"])
    monkeypatch.setattr(federation, "EVALUATED_ELEMENTS", 4 * size)
    assert run_here(tmp_path / "run", [*settings, *CASES["pfedla"], "run.metrics=true"]) == FINISHED
    assert "confusion.csv" not in differing(folders["pfedla"], tmp_path / "run")


def test_metrics_change_nothing_else_and_can_be_added_to_a_finished_run(
    folders: dict[str, Path], settings: list[str], tmp_path: Path
) -> None:
    plain, keys = tmp_path / "plain", [*settings, *CASES["pfedla"]]
    assert run_here(plain, keys) == FINISHED
    assert differing(folders["pfedla"], plain) == ["clients.csv", "confusion.csv"]
    without, whole = (read_columns(folder / "clients.csv") for folder in (plain, folders["pfedla"]))
    assert [*whole] == [*without, *CLIENT_METRICS]
    for name, values in without.items():
        np.testing.assert_array_equal(whole[name], values)
    assert len(load_run(plain).accuracy_by_class) == 0
    assert run_here(plain, [str(plain / "config.yaml"), "run.metrics=true"]) == FINISHED
    assert not differing(folders["pfedla"], plain)
    assert run_here(plain, keys) == FINISHED
    assert not differing(folders["pfedla"], plain)
    named = [load_config(None, [*keys, *more]).run_name() for more in ([], ["run.metrics=true"])]
    assert named[0] == named[1]
