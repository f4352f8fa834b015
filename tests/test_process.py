"""Stop requests and folder locks, with real signals and real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import clean_environment

from hpcfl.errors import UserError
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.lock import FolderLock

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    stop_flag = StopFlag()
    yield stop_flag
    stop_flag.restore()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop(flag: StopFlag, number: signal.Signals) -> None:
    assert not flag.requested
    signal.raise_signal(number)
    assert flag.requested


def test_only_a_second_sigint_interrupts(flag: StopFlag) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_restore_brings_the_old_handlers_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    flag = StopFlag()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    flag.restore()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize(
    ("end_in_s", "needed_s", "short"), [(100, 50, False), (100, 150, True), (-5, 0, True), (None, 1e9, False)]
)
def test_time_is_short_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, end_in_s: int | None, needed_s: float, short: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end_in_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + end_in_s))
    flag = StopFlag()
    flag.restore()
    assert flag.time_is_short(needed_s) is short


def test_an_unreadable_end_time_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    flag = StopFlag()
    flag.restore()
    assert not flag.time_is_short(1e9)


def test_one_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(UserError, match="in use by this process"):
            FolderLock(tmp_path)
        assert (tmp_path / ".lock").read_text() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    with FolderLock(tmp_path) as lock:
        lock.release()
        FolderLock(tmp_path).release()


def test_a_lock_follows_a_renamed_folder(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    with FolderLock(folder):
        folder.rename(aside)
        folder.mkdir()
        with FolderLock(folder), pytest.raises(UserError, match=r"run\.old"):
            FolderLock(aside)


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from hpcfl.storage.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "held\n"
            with pytest.raises(UserError) as refused:
                FolderLock(tmp_path)
        finally:
            owner.kill()
    assert str(tmp_path) in str(refused.value)
    assert f"pid {owner.pid} on {socket.gethostname()};" in str(refused.value)
    FolderLock(tmp_path).release()


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.warns(UserWarning, match=f"{tmp_path}: this file system has no locks"):
        FolderLock(tmp_path).release()
