"""Bytes and metrics of a run, worked out by hand for three clients and two layers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfl.communication.messages import Cohort
from hpcfl.communication.traffic import Traffic
from hpcfl.config.keys import ClientsConfig
from hpcfl.storage.ledger import METRICS, Evaluation, Ledger

LAYERS = ["conv", "fc"]
NUM_SAMPLES = np.array([10, 20, 10])
UNKNOWN = np.full(3, np.nan)


def evaluation(accuracy: Sequence[float], loss: Sequence[float] | None = None) -> Evaluation:
    """Return figures of clients without a model after a download, and with a loss of 0 by default."""
    unknown = np.full(len(accuracy), np.nan)
    return Evaluation(np.array(accuracy), np.array(loss or [0.0] * len(accuracy)), unknown, unknown)


def traffic(layers: list[list[int]], buffers: int = 0, indices: int = 0, **others: list[int]) -> Traffic:
    clients = len(layers)
    of_others = {name: np.array(count) for name, count in others.items()}
    return Traffic(np.array(layers), of_others, np.full(clients, buffers), np.full(clients, indices))


def new_ledger(clients: int = 3) -> Ledger:
    return Ledger("pfedla", ClientsConfig(), clients, LAYERS, is_private=False, has_patience=False)


@pytest.fixture
def ledger() -> Ledger:
    """Return a ledger of two rounds, an evaluation after the second, and one more round."""
    ledger = new_ledger()
    first, second = Cohort(0, (0, 2), torch.tensor([7, 9])), Cohort(1, (1,), torch.tensor([8]))
    moved = (traffic([[4, 8], [4, 0]], 2, 8), traffic([[4, 8], [4, 8]]))
    ledger.record_round(first, moved, {0: 2, 2: 4}, {}, 0.75, 2.0, [0, 2])
    ledger.record_round(second, (traffic([[4, 8]]), traffic([[4, 8]], 3)), {1: 4}, {}, 0.5, 3.0, [1])
    found = replace(evaluation([0.5, 1.0, 0.75], [1.0, 2.0, 6.0]), after_download=np.array([0.25, 0.5, 0.75]))
    ledger.wall_s = 12.5
    ledger.spent["evaluate_s"] += 1.5
    ledger.spent["save_s"] += 0.25
    ledger.record_evaluation(2, found, NUM_SAMPLES, np.array([np.nan, 0.125, np.nan]), {})
    third, moved = Cohort(2, (0,), torch.tensor([7])), (traffic([[4, 8]]), traffic([[4, 8]]))
    ledger.record_round(third, moved, {0: 2}, {}, 0.25, 1, [0])
    return ledger


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_metrics_are_cumulative(ledger: Ledger, tmp_path: Path) -> None:
    expected = {
        "round": 2,
        "wall_s": 12.5,
        "accuracy_mean": 0.75,
        "accuracy_std": np.std([0.5, 1.0, 0.75]),
        "accuracy_weighted": (5 + 20 + 7.5) / 40,
        "accuracy_after_download": 0.5,
        "accuracy_after_training": 0.125,
        "coverage": 1.0,
        "loss_mean": 3.0,
        "train_loss_mean": 0.5,
        "bytes_down": 16 + 12,
        "bytes_up": 24 + 12,
        "buffer_bytes_down": 4,
        "buffer_bytes_up": 3,
        "index_bytes_down": 16,
        "index_bytes_up": 0,
        "client_steps_per_s": 2.0,
        "train_s": 5.0,
        "evaluate_s": 1.5,
        "save_s": 0.25,
        "diverged": 3,
    }
    assert {name: ledger.last(name) for name in METRICS} == pytest.approx(expected)
    ledger.start_files(tmp_path)
    header, row = read(tmp_path / "metrics.csv")
    assert header == list(METRICS)
    assert row[0] == "2"
    assert [float(cell) for cell in row] == ledger.metrics[0]


def test_a_restored_ledger_writes_the_files_of_the_run(ledger: Ledger, tmp_path: Path) -> None:
    restored = new_ledger()
    restored.restore(ledger.tables(), ledger.history())
    for name, table in ledger.tables().items():
        assert np.array_equal(restored.tables()[name].values, table.values)
    restored.start_files(tmp_path)
    restored.write_clients(tmp_path, np.array([7, 8, 9]), NUM_SAMPLES)
    assert read(tmp_path / "bytes.csv") == [
        ["round", "direction", "layer", "bytes"],
        ["1", "down", "conv", "8"],
        ["1", "down", "fc", "8"],
        ["1", "down", "(running statistics)", "4"],
        ["1", "down", "(indices)", "16"],
        ["1", "up", "conv", "8"],
        ["1", "up", "fc", "16"],
        ["2", "down", "conv", "4"],
        ["2", "down", "fc", "8"],
        ["2", "up", "conv", "4"],
        ["2", "up", "fc", "8"],
        ["2", "up", "(running statistics)", "3"],
        ["3", "down", "conv", "4"],
        ["3", "down", "fc", "8"],
        ["3", "up", "conv", "4"],
        ["3", "up", "fc", "8"],
    ]
    assert read(tmp_path / "clients.csv") == [
        [
            *("client", "accuracy", "loss", "train_samples", "evaluated_samples", "bytes_down", "bytes_up"),
            *("accuracy_after_download", "accuracy_after_training", "diverged"),
        ],
        ["0", "0.5", "1.0", "7", "10", "24", "24", "0.25", "nan", "2"],
        ["1", "1.0", "2.0", "8", "20", "12", "12", "0.5", "0.125", "1"],
        ["2", "0.75", "6.0", "9", "10", "4", "12", "0.75", "nan", "1"],
    ]


def test_other_tensors_are_counted_by_their_names(tmp_path: Path) -> None:
    ledger, cohorts = new_ledger(), [Cohort(n, (n,), torch.tensor([7])) for n in range(3)]
    with_others = (traffic([[4, 8]], mix=[2]), traffic([[4, 0]], 1, fc=[6]))
    ledger.record_round(cohorts[0], (traffic([[4, 8]]), traffic([[4, 8]])), {}, {}, 1.0, 1.0)
    ledger.record_round(cohorts[1], with_others, {}, {}, 1.0, 1.0)
    restored = new_ledger()
    restored.restore(ledger.tables(), ledger.history())
    for number, one in enumerate((ledger, restored)):
        one.record_round(cohorts[2], (traffic([[4, 8]]), traffic([[4, 8]], mix=[1])), {}, {}, 1.0, 1.0)
        folder = tmp_path / str(number)
        folder.mkdir()
        one.start_files(folder)
        lines = read(folder / "bytes.csv")[1:]
        assert [line for line in lines if line[2] not in LAYERS] == [
            ["2", "down", "mix", "2"],
            ["2", "up", "fc (tensor)", "6"],
            ["2", "up", "(running statistics)", "1"],
            ["3", "up", "mix", "1"],
        ]
        assert one.client_bytes.tolist() == [[12, 12], [14, 10], [12, 13]]
        one.record_evaluation(3, evaluation([1, 1, 1]), NUM_SAMPLES, UNKNOWN, {})
        assert (one.last("bytes_down"), one.last("bytes_up")) == (38, 35)


def test_the_best_round_is_the_first_of_highest_accuracy() -> None:
    ledger = new_ledger(2)
    for round, accuracy in enumerate([[0.5, 0.5], [0.25, 1.0], [1.0, 0.25], [0.0, 1.0]], start=1):
        ledger.record_evaluation(2 * round, evaluation(accuracy), np.ones(2), np.full(2, np.nan), {})
    assert ledger.best() == (0.625, 4)
    assert ledger.last("accuracy_mean") == 0.5


@pytest.mark.parametrize(
    ("evaluations", "steps_per_s"),
    # 2 steps in 1 s and 9 in 2 s, or all from the first round on
    [(2, 11 / 3), (1, (10 + 2 + 9) / 8)],
)
def test_a_forgotten_evaluation_gives_its_steps_to_the_next_one(
    ledger: Ledger, evaluations: int, steps_per_s: float
) -> None:
    found = evaluation([0.5] * 3)
    if evaluations == 2:
        ledger.record_evaluation(3, found, NUM_SAMPLES, UNKNOWN, {})
    ledger.forget_last_evaluation()
    assert len(ledger.metrics) == evaluations - 1
    ledger.record_round(Cohort(3, (0,), torch.tensor([7])), (traffic([[4, 8]]),) * 2, {0: 9}, {}, 0.25, 2, [])
    ledger.record_evaluation(4, found, NUM_SAMPLES, UNKNOWN, {})
    assert ledger.last("client_steps_per_s") == pytest.approx(steps_per_s)
