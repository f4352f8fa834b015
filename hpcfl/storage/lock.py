"""The lock on a run folder.

It is a POSIX record lock on `<folder>/.lock`, which names the owner: such a lock reaches other nodes on NFS
and Lustre, ends with its process, even by SIGKILL, and can be looked at without being taken. But a process
loses it when any part of it opens and closes the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcfl.errors import STORAGE_ERROR, UserError

LOG = logging.getLogger(__name__)

LOCK_NAME = ".lock"
MAX_BYTES = 1000
"""Number of bytes that are read of a lock file."""

_held: dict[tuple[int, int], int] = {}
"""This process's lock files: their identities and descriptors. The kernel would grant it a lock twice."""


class FolderLock:
    """The lock of a run folder, held by rank 0. It follows the folder when that is renamed.

    Where the lock is free, but names an owner that may live on another node, it is taken over with a warning:
    mostly that is a job whose node died. An owner that lives after all learns it from `lost`, and ends.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder; raise UserError where a run holds it, OSError without room."""
        self._folder, self._owner = folder, _owner()
        self._folder_identity = _identity(folder.stat())
        before = holder(folder)
        if before.is_seen:
            raise _in_use(folder, before.owner)
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.is_enforced = True
        """Whether the file system has locks."""
        soon = f"soon, with exit code {STORAGE_ERROR}"
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = _read_owner(self._descriptor)
            os.close(self._descriptor)
            raise _in_use(folder, owner) from None
        except OSError:
            self.is_enforced = False
            LOG.warning(
                f"{folder}: this file system has no locks: any later start takes the folder over, and this "
                f"run then ends {soon}"
            )
        try:
            self._write(f"{self._owner}\n")
        except BaseException:
            os.close(self._descriptor)
            raise
        _held[_identity(os.fstat(self._descriptor))] = self._descriptor
        if before.owner and not before.is_gone:
            LOG.warning(
                f"{folder} was locked by {before.owner}. This machine cannot see whether it still runs (see "
                "squeue, or ps on that machine), so this run takes over; if it does run, it will stop "
                f"{soon}"
            )

    def lost(self) -> str | None:
        """Return how this process has lost its folder, or None; OSError if the file system cannot tell."""
        if self.is_elsewhere():
            return "was moved or deleted"
        named = holder(self._folder).owner
        if named == self._owner:
            return None
        return f"was taken over by {named}" if named else f"lost its {LOCK_NAME} to another run or a deletion"

    def is_elsewhere(self) -> bool:
        """Whether the folder that was locked has another path now, or none."""
        try:
            return _identity(self._folder.stat()) != self._folder_identity
        except (FileNotFoundError, NotADirectoryError):
            return True

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor < 0:
            return
        # on a full disk the name may stay: its process has ended
        with suppress(OSError):
            if _read_owner(self._descriptor) == self._owner:
                self._write("")
        _held.pop(_identity(os.fstat(self._descriptor)), None)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _write(self, text: str) -> None:
        written = os.pwrite(self._descriptor, text.encode(), 0)
        # after the write, so that nobody sees a lock without a name
        os.ftruncate(self._descriptor, written)
        if written < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Holder:
    """The owner of a folder's lock, as seen from this machine."""

    owner: str
    """`pid 7 on node3`, and its job under SLURM; empty before the first run and after a released lock."""
    is_seen: bool
    """Whether the lock is held, as far as this machine can tell."""
    is_gone: bool
    """Whether the owner has certainly ended without releasing the lock; it was on this machine."""


def holder(folder: Path) -> Holder:
    """Look at a folder's lock without touching it."""
    path = folder / LOCK_NAME
    if not path.exists():
        return Holder("", False, False)
    descriptor = _held.get(_identity(path.stat()))
    if descriptor is not None:
        return Holder(_read_owner(descriptor), True, False)
    with path.open("rb") as file:
        owner, is_locked = _read_owner(file.fileno()), _is_locked(file.fileno())
    is_here = owner.partition(",")[0].endswith(f" on {socket.gethostname()}")
    return Holder(owner, is_locked is True, is_here and is_locked is False)


def _is_locked(descriptor: int) -> bool | None:
    """Whether another process holds a record lock on a file; None where the system cannot tell."""
    # struct flock: type, whence, start, length (0 is the whole file) and process; F_GETLK takes no lock
    flock = struct.Struct("hhqqi")
    with suppress(OSError):
        asked = flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        return bool(flock.unpack(answer)[0] != fcntl.F_UNLCK)
    return None


def _read_owner(descriptor: int) -> str:
    """Return the first line of a lock file; "" where it has no end, as if it was not written whole."""
    line, end, _ = os.pread(descriptor, MAX_BYTES, 0).decode(errors="replace").partition("\n")
    return line.strip() if end else ""


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return device and inode: the same file has the same ones under any path."""
    return status.st_dev, status.st_ino


def _owner() -> str:
    """Return this process's name in its locks."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"pid {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")


def _in_use(folder: Path, owner: str) -> UserError:
    return UserError(
        f"{folder} is in use by {owner or 'another process'}; wait for that run, stop it, or choose another "
        "folder with --out DIR"
    )
