"""Locks of a folder, with real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import clean_environment

from hpcfl.errors import UserError
from hpcfl.storage import lock
from hpcfl.storage.lock import FolderLock, Holder, holder

FOREIGN = "pid 7 on another-node, job 12345"
"""An owner that this machine cannot see."""


@pytest.fixture
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SIGN_EVERY_S", 0.02)


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch, quick_signs: None) -> None:
    """For owners that give no sign; of another a busy machine may bring none for long."""
    monkeypatch.setattr(lock, "WATCHED_S", 0.4)


def text_of(owner: str, number: int) -> str:
    return f"{owner}\nsign of life {number:012d}\n"


@contextmanager
def beside(work: str, folder: Path) -> Iterator[None]:
    """Have another process do some work again and again, such as to `put` a text into a lock file."""
    code = f"""
import itertools, os, sys, time
file = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
def put(text):
    os.pwrite(file, text.encode(), 0)
    os.ftruncate(file, len(text))
for number in itertools.count():
    {work}
    time.sleep(0.02)
    if not number:
        print("at it", flush=True)
"""
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at it\n"
            yield
        finally:
            process.send_signal(signal.SIGKILL)


GIVES_SIGNS = f"put(f'{FOREIGN}\\nsign of life {{number:012d}}\\n')"


def test_one_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(UserError, match="in use by this process"):
            FolderLock(tmp_path)
        text = f"pid {os.getpid()} on {socket.gethostname()}\nsign of life 000000000000\n"
        assert (tmp_path / ".lock").read_text() == text
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


def test_an_owner_gives_signs_of_life_and_names_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_signs: None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    owner = f"pid {os.getpid()} on {socket.gethostname()}, job 12345"
    with FolderLock(tmp_path) as held:
        assert holder(tmp_path) == Holder(owner, True)
        deadline_s = time.monotonic() + 30
        while (content := os.pread(held._descriptor, 1000, 0).decode()) == text_of(owner, 0):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert re.fullmatch(rf"{owner}\nsign of life 0*[1-9]\d*\n", content)
        assert held.lost() is None
    assert (tmp_path / ".lock").read_text() == ""
    (tmp_path / ".lock").write_text(content)
    assert holder(tmp_path).is_gone


def test_an_owner_elsewhere_that_gives_signs_is_left_alone(tmp_path: Path, quick_signs: None) -> None:
    """Its lock does not reach this machine, as on some network file systems."""
    with beside(GIVES_SIGNS, tmp_path):
        assert holder(tmp_path) == Holder(FOREIGN, False)
        with pytest.raises(UserError, match=f"{tmp_path} is in use by {FOREIGN}; wait for that run"):
            FolderLock(tmp_path)
        assert holder(tmp_path) == Holder(FOREIGN, False)


def test_an_owner_elsewhere_that_gives_no_sign_is_dead(tmp_path: Path, short_watch: None) -> None:
    """As a job on a lost node, which is requeued elsewhere."""
    (tmp_path / ".lock").write_text(text_of(FOREIGN, 17))
    with pytest.warns(UserWarning, match="no sign") as told, FolderLock(tmp_path) as held:
        assert held.lost() is None
    assert [str(entry.message) for entry in told] == [
        f"{tmp_path} has the lock of {FOREIGN}, which gave no sign of life for 0.4 s and is taken for dead; "
        "if it is not (see squeue, or ps on that machine), stop one of the two"
    ]


def test_an_owner_elsewhere_that_ends_meanwhile_is_no_matter(tmp_path: Path, quick_signs: None) -> None:
    path, began_s = tmp_path / ".lock", time.monotonic()
    path.write_text(text_of(FOREIGN, 17))
    end = threading.Timer(0.2, os.truncate, (path, 0))
    end.start()
    with FolderLock(tmp_path) as held:
        assert time.monotonic() - began_s >= 0.2
        assert held.lost() is None
    end.join()


def test_a_dead_owner_on_this_machine_needs_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its process id stands for now: its lock went with it."""
    monkeypatch.setattr(lock, "WATCHED_S", 1000)
    (tmp_path / ".lock").write_text(text_of(f"pid {os.getpid()} on {socket.gethostname()}, job 1", 17))
    with FolderLock(tmp_path):
        pass


def test_without_locks_an_owner_on_this_machine_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_signs: None
) -> None:
    def refuse(descriptor: int, *arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    here = f"pid 7 on {socket.gethostname()}"
    with (
        beside(GIVES_SIGNS.replace(FOREIGN, here), tmp_path),
        pytest.raises(UserError, match=f"in use by {here}"),
    ):
        FolderLock(tmp_path)


def test_an_owner_that_was_taken_for_dead_is_told_and_leaves_the_name_of_the_other(
    tmp_path: Path, quick_signs: None
) -> None:
    with FolderLock(tmp_path) as held:
        with beside(f"put('{FOREIGN}\\n')", tmp_path):
            assert held.lost() == f"was taken over by {FOREIGN}"
        # some signs later
        time.sleep(0.1)
        assert held.lost() == f"was taken over by {FOREIGN}"
        assert (tmp_path / ".lock").read_text() == f"{FOREIGN}\n"
        (tmp_path / ".lock").write_text("")
        assert held.lost() == "was taken over by another run"


def test_no_room_for_a_name_leaves_no_lock_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, reason in ((0, "File too large"), (10, "No space left"), (0, "File too large")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        with pytest.raises(OSError, match=reason):
            FolderLock(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    FolderLock(tmp_path).release()
