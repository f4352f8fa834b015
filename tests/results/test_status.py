"""The status of a run, read from its folder."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run

from hpcfl.errors import UserError
from hpcfl.registries import load_config
from hpcfl.results.run import Run
from hpcfl.storage.ledger import METRICS, WHOLE_NUMBERS
from hpcfl.storage.lock import locked

HEADER = ",".join(METRICS)


def row(number: int) -> str:
    return ",".join([str(number), *("1" if name in WHOLE_NUMBERS else "0.5" for name in METRICS[1:])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run of 3 rounds that has just begun."""
    (tmp_path / "config.yaml").write_text(load_config(None, ["train.rounds=3"]).yaml())
    return tmp_path


def test_a_half_written_line_is_ignored(folder: Path) -> None:
    known = {"": [], HEADER[:9]: [], f"{HEADER}\n": [], f"{HEADER}\n{row(1)}\n{row(2)}": [1]}
    for text, rounds in known.items():
        (folder / "metrics.csv").write_text(text)
        run = Run(folder)
        assert run.metrics.get("round", np.empty(0)).tolist() == rounds
        assert run.done == max(rounds, default=0)
        assert run.rounds == 3


def test_the_best_round_is_the_first_of_highest_accuracy_and_not_nan(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "run", np.array([[np.nan, 1], [0.5, 0.25], [0.25, 0.5], [0.25, 0.25]])))
    assert [run.best[name] for name in ("round", "accuracy_mean")] == [2, 0.375]
    assert [run.last[name] for name in ("round", "accuracy_mean")] == [4, 0.25]
    assert run.samples_by_class("train_samples").tolist() == [[40, 0], [0, 40]]


def test_a_run_is_printed_with_its_name_and_progress(folder: Path) -> None:
    made = Run(make_run(folder / "mine", np.array([[0.5], [0.25]])))
    assert str(made) == "<Run mine: finished, round 2/2, accuracy 25.00%>"
    assert repr(Run(folder)) == f"<Run {folder.name}: stopped, round 0/3, no evaluation yet>"
    for name in ("best", "last"):
        with pytest.raises(UserError, match=r"has no evaluation yet; wait for the first one$"):
            getattr(Run(folder), name)


@pytest.mark.parametrize("line", [row(2)[:5], "garbage", f"{row(2)[:-1]}x", "", b"\xff".join([b"2", b"3"])])
def test_a_damaged_line_is_named(folder: Path, line: str | bytes) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    path = folder / "metrics.csv"
    path.write_bytes(f"{HEADER}\n{row(1)}\n".encode() + data + b"\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3: damaged; ")):
        assert Run(folder).metrics


@pytest.mark.parametrize("name", ["accuracy_mean", "index_bytes_up"])
def test_a_damaged_header_is_named(folder: Path, name: str) -> None:
    path = folder / "metrics.csv"
    path.write_text(f"{HEADER.replace(name, name[1:])}\n{row(1)}\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, line 1: damaged; ")):
        assert Run(folder).metrics


def test_the_status_of_a_run_follows_from_its_lock(folder: Path) -> None:
    assert Run(folder).status.state == "stopped"
    with locked(folder):
        assert Run(folder).status.state == "running"
        # a look has not given the lock up
        assert Run(folder).status.state == "running"
        with pytest.raises(UserError, match="in use by pid "), locked(folder):
            pass
    assert Run(folder).status.state == "stopped"
    (folder / ".lock").write_text(f"pid 7 on {socket.gethostname()}\n")
    assert Run(folder).status.state == "killed"
    (folder / ".lock").write_text("pid 7 on another-node\n")
    status = Run(folder).status
    assert (status.owner, status.state) == ("pid 7 on another-node", "unknown")


def test_a_run_is_finished_only_after_its_last_round(folder: Path) -> None:
    (folder / "metrics.csv").write_text(f"{HEADER}\n{row(3)}\n")
    assert Run(folder).status.state == "stopped"
    (folder / "clients.csv").touch()
    assert Run(folder).status.state == "finished"
    # prolonged
    (folder / "config.yaml").write_text(load_config(None, ["train.rounds=4"]).yaml())
    assert Run(folder).status.state == "stopped"


@pytest.mark.parametrize("text", ["", "- 1", "train: {rounds: 3", "train: {rounds: 3}", "x: 2024-13-45"])
def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is damaged; name the folder of another run"):
        Run(tmp_path)
    for path in (tmp_path / "none", tmp_path / "config.yaml"):
        with pytest.raises(UserError, match=r"is not a run folder: .*; name one that a run has made, such"):
            Run(path)
