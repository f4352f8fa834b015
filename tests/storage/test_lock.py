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

import pytest
from processes import files_up_to, forked

from hpcfl.errors import UserError
from hpcfl.storage.lock import FolderLock, Holder, holder

FOREIGN = "pid 7 on another-node, job 12345"
"""An owner that this machine cannot see."""


def test_a_lock_follows_a_renamed_folder(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    with FolderLock(folder):
        folder.rename(aside)
        folder.mkdir()
        with FolderLock(folder), pytest.raises(UserError, match=r"run\.old"):
            FolderLock(aside)


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        FolderLock(tmp_path)
        # as code does that copies the folder: a POSIX lock would be lost
        (tmp_path / ".lock").read_bytes()
        os.write(writer, b"held")
        time.sleep(60)

    owner = forked(hold)
    os.close(writer)
    try:
        assert os.read(reader, 4) == b"held"
        with pytest.raises(UserError) as refused:
            FolderLock(tmp_path)
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    assert str(tmp_path) in str(refused.value)
    assert f"pid {owner} on {socket.gethostname()};" in str(refused.value)
    FolderLock(tmp_path).release()


def test_a_released_lock_is_free_while_a_child_has_the_file_open(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        child = forked(lambda: time.sleep(60))
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_copy_in_place_of_a_moved_folder_is_not_the_locked_one(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "run.old"
    folder.mkdir()
    with FolderLock(folder) as held:
        folder.rename(aside)
        shutil.copytree(aside, folder)
        assert held.lost() == "was moved or deleted, or lost its .lock,"


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
    assert holder(tmp_path) == Holder(owner, False, False)
    held = FolderLock(tmp_path)
    assert not held.is_enforced
    assert held.lost() is None
    (tmp_path / ".lock").write_text(f"{FOREIGN}\n")
    assert held.lost() == f"was taken over by {FOREIGN}"
    held.release()
    assert (tmp_path / ".lock").read_text() == f"{FOREIGN}\n"
    no_locks, taken = (text.removeprefix(str(tmp_path)) for text in caplog.messages)
    assert no_locks.startswith(": this file system has no locks: any later start takes the folder over")
    assert taken.startswith(f" was locked by {owner}. This machine cannot see whether it still runs")


def test_an_owner_names_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    owner = f"pid {os.getpid()} on {socket.gethostname()}, job 12345"
    with FolderLock(tmp_path) as held:
        assert holder(tmp_path) == Holder(owner, True, False)
        assert os.pread(held._descriptor, 1000, 0).decode() == f"{owner}\n"
        assert held.lost() is None
        # a second call, at the end of the block, does nothing
        held.release()
    assert (tmp_path / ".lock").read_text() == ""
    (tmp_path / ".lock").write_text(f"{owner}\n")
    assert holder(tmp_path).is_gone


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path) -> None:
    for room, reason in ((0, "File too large"), (10, "No space left"), (0, "File too large")):
        with files_up_to(room), pytest.raises(OSError, match=reason):
            FolderLock(tmp_path)
    FolderLock(tmp_path).release()
