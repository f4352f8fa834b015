"""Clients that take no part in training: they leave no trace in it, and are scored with what they learnt.

The same bits on any number of ranks and after a stop: test_bits.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from bits import (
    DIFFERENT,
    KINDS,
    MEETS_ALL_SOON,
    SECONDS,
    VARIANTS,
    contents,
    kept_runs,
    losses_of,
    method_settings,
    read_csv,
    run_here,
    saved_models,
    tiny_settings,
)

from hpcfl import compare
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import FINISHED, UserError
from hpcfl.methods import METHODS
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.setup import experiment
from hpcfl.setup.experiment import build, load_data, partition_samples
from hpcfl.storage.ledger import METRICS, UNSEEN_METRICS
from hpcfl.storage.reading import read_columns

SEEN, UNSEEN = 5, 2


def by_hooks() -> list[str]:
    """Return a method for each set of hooks that make and score the models of new clients."""
    hooks = ("new_client_download", "new_client_model", "eval_model")
    found: dict[tuple[object, ...], str] = {}
    for name in (*KINDS, *DIFFERENT):
        found.setdefault(tuple(getattr(METHODS[name], hook) for hook in hooks), name)
    return list(found.values())


LOCAL_BUFFERS = [
    *("fedavg", "fedper", "fedmn", "pfedmb", "fedrod", "ifca", "clustered_fl", "per_fedavg", "pfedfda")
]
"""Methods whose unseen clients estimate their own running statistics with `train.buffers=local`."""
OTHER_BUFFERS = ["pfedla-mixed", "heurpfedla-mixed", "lg_fedavg-average"]
ROUNDS = 2

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    rhythm = [f"train.rounds={ROUNDS}", "train.participation=0.6"]
    return [*tiny_settings(digits), *MEETS_ALL_SOON, *rhythm, "data.unseen_clients=0.3"]


def keys_of(case: str) -> list[str]:
    """Return the settings of a case, or of a method with running statistics that stay with the client."""
    method, _, kind = case.partition("-")
    # clusters part only once all clients have trained
    keys = ["train.participation=1"] if method == "clustered_fl" else []
    if kind in ("local", "mixed", "average"):
        return [*method_settings(method), f"train.buffers={kind}", *keys]
    return [*method_settings(case), *keys]


@pytest.fixture(scope="module")
def serial(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function from a case to the folder of its run on one rank."""
    return kept_runs(tmp_path_factory.mktemp("serial"), lambda case: [*settings, *keys_of(case)])


def of_training(folder: Path) -> dict[str, Any]:
    """Return what a run leaves behind of the clients in training, to the bit; CSV files by column."""
    found = {}
    for name, item in contents(folder).items():
        # these have, or name, what is of unseen clients; metrics.csv is compared column by column
        if "unseen" not in name and name not in (
            "/history@names",
            "/ledger/metrics",
            "/ledger/metrics@columns",
            "/data/num_samples",
            "/data@partition_digest",
            "partition.csv",
        ):
            found[name] = item
    for name in ("metrics.csv", "clients.csv"):
        rows = [row for row in read_csv(folder / name) if row.pop("unseen", "0") == "0"]
        left_out = SECONDS | set(UNSEEN_METRICS)
        found[name] = [{key: value for key, value in row.items() if key not in left_out} for row in rows]
    return found


@pytest.mark.parametrize("case", by_hooks())
def test_training_equals_that_without_unseen_clients(
    serial: Folders, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    expected = of_training(serial(case))
    whole = partition_samples
    config = load_config(None, settings)
    monkeypatch.setattr(experiment, "partition_samples", lambda _, arrays: whole(config, arrays)[:SEEN])
    assert run_here(tmp_path / "run", [*settings, *keys_of(case), "data.unseen_clients=0"]) == FINISHED
    assert of_training(tmp_path / "run") == expected


@pytest.mark.parametrize(
    "case", [*by_hooks(), *VARIANTS, *OTHER_BUFFERS, *(f"{method}-local" for method in LOCAL_BUFFERS)]
)
def test_the_checkpoint_contains_the_scored_models_of_unseen_clients(
    serial: Folders, settings: list[str], case: str
) -> None:
    made = build(load_config(None, [*settings, *keys_of(case)]), Communicator())
    with h5py.File(serial(case) / "checkpoint.h5", "r", locking=False) as file:
        expected = file["history/loss_unseen"][-1].tolist()
        assert file["history/accuracy_unseen"].shape == (ROUNDS, UNSEEN)
    models = saved_models(serial(case), "unseen", UNSEEN)
    assert losses_of(models, made.method, made.unseen) == pytest.approx(expected, rel=1e-9)


def test_models_of_unseen_clients_are_exported(serial: Folders, tmp_path: Path) -> None:
    run = load_run(serial("fedavg"))
    several = (SEEN - 1, SEEN, SEEN + 1)
    for client in several:
        run.export(client, tmp_path / f"{client}.pt")
    recipes = [json.loads((tmp_path / f"{client}.json").read_text()) for client in several]
    assert [recipe["unseen"] for recipe in recipes] == [False, True, True]
    assert [recipe["accuracy"] for recipe in recipes] == run.clients["accuracy"][SEEN - 1 :].tolist()
    states = [torch.load(tmp_path / f"{client}.pt") for client in several[1:]]
    assert not torch.equal(*(next(iter(state.values())) for state in states))
    with pytest.raises(UserError, match=r"client 7 is not in this run; allowed: 0 to 6"):
        run.model(SEEN + UNSEEN)


def test_runs_are_compared_on_the_clients_in_training(serial: Folders) -> None:
    one, other = (load_run(serial(case)) for case in ("fedavg", "local"))
    found = compare(one, other)
    accuracies = [run.clients["accuracy"] for run in (one, other)]
    assert [len(run.in_training["accuracy"]) for run in (one, other)] == [SEEN, SEEN]
    assert found.means == pytest.approx([of_run[:SEEN].mean() for of_run in accuracies])
    assert found.unseen_means == pytest.approx([of_run[SEEN:].mean() for of_run in accuracies])
    assert found.difference().over_clients.count == SEEN
    assert found.difference().over_clients.mean == pytest.approx(found.means[0] - found.means[1])
    header, line, *_ = str(found).splitlines()
    assert header.split()[-3:] == ["scored", "unseen", "clients"]
    assert f"{found.unseen_means[0]:.2%}" in line


@pytest.mark.parametrize("case", [f"{method}-local" for method in LOCAL_BUFFERS])
def test_unseen_clients_estimate_their_own_running_statistics(serial: Folders, case: str) -> None:
    with h5py.File(serial(case) / "checkpoint.h5", "r", locking=False) as file:
        buffers = file["unseen/buffers"][()]
    assert not np.array_equal(*buffers)
    # neither means of 0 nor variances of 1, which they began with
    assert not np.isin(buffers, (0.0, 1.0)).any()


def test_files_distinguish_unseen_clients(serial: Folders) -> None:
    metrics, clients = (read_columns(serial("fedavg") / name) for name in ("metrics.csv", "clients.csv"))
    assert list(metrics) == [*METRICS, *UNSEEN_METRICS]
    assert clients["unseen"].tolist() == [0] * SEEN + [1] * UNSEEN
    assert clients["client"].tolist() == list(range(SEEN + UNSEEN))
    seen, unseen = np.split(clients["accuracy"], [SEEN])
    last = {name: values[-1] for name, values in metrics.items()}
    assert last["accuracy_mean"] == pytest.approx(seen.mean(), rel=1e-12)
    assert last["accuracy_unseen"] == pytest.approx(unseen.mean(), rel=1e-12)
    assert last["accuracy_unseen_std"] == pytest.approx(unseen.std(), rel=1e-12)
    assert not (clients["bytes_down"] + clients["bytes_up"])[SEEN:].any()
    # cohorts of three of the five: {0, 2, 3}, {0, 2, 4}
    assert last["coverage"] == 0.8


# Who they are


@pytest.mark.parametrize(("share", "unseen"), [(0.0, 0), (0.01, 1), (0.24, 2), (0.25, 3), (0.99, 9)])
def test_the_number_of_unseen_clients_follows_from_their_share(share: float, unseen: int) -> None:
    assert load_config(None, [f"data.unseen_clients={share}"]).data.num_unseen(10) == unseen


def test_unseen_clients_are_drawn_with_the_data_seed_and_come_last(settings: list[str]) -> None:
    def partition(*keys: str) -> list[list[int]]:
        return [part.train.tolist() for part in load_data(load_config(None, [*settings, *keys]))[1]]

    def order(*keys: str) -> list[int]:
        everyone = partition("data.unseen_clients=0", *keys)
        return [everyone.index(part) for part in partition(*keys)]

    found = order()
    assert sorted(found) == list(range(SEEN + UNSEEN))
    assert found[:SEEN] == sorted(found[:SEEN])
    assert found[SEEN:] == sorted(found[SEEN:])
    assert partition("run.seed=9", "method.name=local") == partition()
    assert len({tuple(order(f"data.seed={seed}")[SEEN:]) for seed in range(3)}) > 1


class LooksThemUp(FedAvg):
    """A method that sends each client a row of the server's state, and does not know of unseen clients."""

    name = "looks_them_up"
    summary = "FedAvg whose server has a model a client"

    def server_state(self) -> State:
        return {"theta": self.context.initial_parameters(range(self.context.num_clients))}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(per_client={"theta": server["theta"][list(cohort.clients)]})


def test_a_method_that_reads_rows_of_unseen_clients_is_refused_before_the_first_round(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "looks_them_up", LooksThemUp)
    with pytest.raises(IndexError):
        run_here(tmp_path / "run", [*settings, "method.name=looks_them_up"])
    assert not (tmp_path / "run" / "checkpoint.h5").exists()
