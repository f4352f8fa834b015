"""Locks of a folder, with real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from processes import files_up_to, forked

from hpcfl.errors import UserError
from hpcfl.storage import lock
from hpcfl.storage.lock import holder, locked

FOREIGN = "pid 7 on another-node, job 12345"
"""An owner that this machine cannot see."""


def test_a_lock_follows_a_renamed_folder(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    with locked(folder):
        folder.rename(aside)
        folder.mkdir()
        with locked(folder), pytest.raises(UserError, match=r"run\.old"), locked(aside):
            pass


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        with locked(tmp_path):
            # as code does that copies the folder: a POSIX lock would be lost
            (tmp_path / ".lock").read_bytes()
            os.write(writer, b"held")
            time.sleep(60)

    owner = forked(hold)
    os.close(writer)
    try:
        assert os.read(reader, 4) == b"held"
        with pytest.raises(UserError) as refused, locked(tmp_path):
            pass
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    assert str(tmp_path) in str(refused.value)
    assert f"pid {owner} on {socket.gethostname()};" in str(refused.value)
    with locked(tmp_path):
        pass


def test_a_released_lock_is_free_while_a_child_has_the_file_open(tmp_path: Path) -> None:
    with locked(tmp_path):
        child = forked(lambda: time.sleep(60))
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_copy_in_place_of_a_moved_folder_is_not_the_locked_one(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    with locked(folder) as loss:
        folder.rename(aside)
        shutil.copytree(aside, folder)
        assert loss() == "was moved or deleted, or lost its .lock,"


def test_a_folder_that_is_moved_between_the_opening_and_the_lock_of_its_file_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    take = lock._take

    def move_first(*arguments: Any) -> None:
        folder.rename(aside)
        folder.mkdir()
        take(*arguments)

    monkeypatch.setattr(lock, "_take", move_first)
    with pytest.raises(UserError, match="was moved or deleted"), locked(folder):
        pass
    assert not list(folder.iterdir())
    assert holder(aside) == ("", False)


def test_without_file_locks_a_later_start_takes_over_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    # as the kernel answers for a file system without locks
    monkeypatch.setattr(fcntl, "fcntl", refused)
    owner = f"pid 7 on {socket.gethostname()}"
    (tmp_path / ".lock").write_text(f"{owner}\n")
    # whether the owner is alive cannot be determined
    assert holder(tmp_path) == (owner, None)
    with locked(tmp_path) as loss:
        assert loss() is None
        (tmp_path / ".lock").write_text(f"{FOREIGN}\n")
        assert loss() == f"was taken over by {FOREIGN}"
    assert (tmp_path / ".lock").read_text() == f"{FOREIGN}\n"
    (warning,) = caplog.messages
    assert warning.startswith(
        f"{tmp_path} was locked by {owner}. This machine cannot see whether it still runs"
    )


def test_an_owner_names_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    owner = f"pid {os.getpid()} on {socket.gethostname()}, job 12345"
    with locked(tmp_path) as loss:
        assert holder(tmp_path) == (owner, True)
        assert (tmp_path / ".lock").read_text() == f"{owner}\n"
        assert loss() is None
    assert (tmp_path / ".lock").read_text() == ""
    assert holder(tmp_path) == ("", False)
    (tmp_path / ".lock").write_text(f"{owner}\n")
    assert holder(tmp_path) == (owner, False)


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path) -> None:
    for room in (0, 10, 0):
        with files_up_to(room), pytest.raises(OSError, match="File too large"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass
