"""A run folder as it is seen from outside."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from hpcfl.config import load_config
from hpcfl.errors import UserError
from hpcfl.storage.ledger import METRICS, WHOLE_NUMBERS
from hpcfl.storage.lock import FolderLock, Holder
from hpcfl.storage.view import view

HEADER = ",".join(METRICS)
NODE = socket.gethostname()


def row(number: int) -> str:
    return ",".join([str(number), *("1" if name in WHOLE_NUMBERS else "0.5" for name in METRICS[1:])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run of 3 rounds that has just begun."""
    (tmp_path / "config.yaml").write_text(load_config(None, ["train.rounds=3"]).yaml())
    return tmp_path


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("", []),
        (HEADER[:9], []),
        (f"{HEADER}\n", []),
        (f"{HEADER}\n{row(1)}\n", [1]),
        (f"{HEADER}\n{row(1)}\n{row(2)}", [1]),
        (f"{HEADER}\n{row(1)}\n{row(2)[:5]}", [1]),
    ],
)
def test_a_half_written_line_is_ignored(folder: Path, text: str, rounds: list[int]) -> None:
    (folder / "metrics.csv").write_text(text)
    seen = view(folder)
    assert [line["round"] for line in seen.metrics] == rounds
    assert seen.done == max(rounds, default=0)
    assert seen.rounds == 3


@pytest.mark.parametrize("line", [row(2)[:5], "garbage", f"{row(2)[:-1]}x", "", b"\xff".join([b"2", b"3"])])
def test_a_damaged_line_is_named(folder: Path, line: str | bytes) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    path = folder / "metrics.csv"
    path.write_bytes(f"{HEADER}\n{row(1)}\n".encode() + data + b"\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3: damaged; ")):
        view(folder)


NOTE = "2026-01-01 00:00:00 pfedla on digits, 10 clients, in runs/a\n"
RESUMED = "2026-01-01 00:00:00 resuming after round 2 of 9\n"


def line(done: int) -> str:
    return f"2026-01-01 00:00:00 round {done}/9  accuracy 10.00%  time left 0:00:01\n"


@pytest.mark.parametrize(
    ("log", "done"),
    [
        (NOTE, 0),
        (NOTE + line(1) + line(4), 4),
        (NOTE + line(4) + line(5)[:30], 4),
        (NOTE + line(4) + NOTE, 0),
        (NOTE + line(4) + NOTE + RESUMED, 2),
        (NOTE + line(4) + NOTE + RESUMED + line(3), 3),
    ],
)
def test_the_log_tells_rounds_between_evaluations(folder: Path, log: str, done: int) -> None:
    (folder / "log.txt").write_text(log)
    assert view(folder).done == done
    (folder / "metrics.csv").write_text(f"{HEADER}\n{row(1)}\n")
    assert view(folder).done == max(1, done)


def test_only_the_end_of_a_long_log_is_read(folder: Path) -> None:
    (folder / "log.txt").write_text(line(1) * 10_000 + line(2))
    seen = view(folder)
    assert seen.done == 2
    assert 10 < len(seen.log) < 500


def test_the_lock_tells_how_a_run_is(folder: Path) -> None:
    assert view(folder).state == "stopped"
    with FolderLock(folder):
        assert view(folder).state == "running"
        # a look has not given the lock up
        assert view(folder).holder.is_seen
        with pytest.raises(UserError, match="in use by this process"):
            FolderLock(folder)
    assert view(folder).state == "stopped"
    (folder / ".lock").write_text(f"pid 7 on {NODE}\n")
    assert view(folder).state == "killed"
    (folder / ".lock").write_text("pid 7 on another-node\n")
    assert view(folder).holder == Holder("pid 7 on another-node", False)
    assert view(folder).state == "out of sight"


def test_a_run_is_finished_after_its_last_round_alone(folder: Path) -> None:
    (folder / "metrics.csv").write_text(f"{HEADER}\n{row(3)}\n")
    assert view(folder).state == "stopped"
    (folder / "clients.csv").touch()
    assert view(folder).state == "finished"
    # prolonged
    (folder / "config.yaml").write_text(load_config(None, ["train.rounds=4"]).yaml())
    assert view(folder).state == "stopped"


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "train: {rounds: 3\n", "train: {rounds: 3}\n", "x: 2024-13-45\n"]
)
def test_what_is_no_run_folder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is damaged; name the folder of another run"):
        view(tmp_path)
    for path in (tmp_path / "none", tmp_path / "config.yaml"):
        with pytest.raises(UserError, match=r"is no run folder: .*; name one that a run has made, such as "):
            view(path)
