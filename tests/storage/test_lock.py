"""Locks of a folder, with real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

from hpcfl.errors import UserError
from hpcfl.storage.lock import FolderLock


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
