"""The lock on a run folder.

It is a record lock on `<folder>/.lock`, which names the owner: such a lock reaches other nodes on NFS and
Lustre, ends with its process, even by SIGKILL, and can be looked at without being taken. It belongs to the
open file (F_OFD_SETLK), so that other code of the process may open and close `.lock`. A child that the
process forks shares the lock: if the process is killed, it ends with the child.
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

_FLOCK = struct.Struct("hhqqi")
"""The kernel's struct flock: type, whence, start, length (0 is the whole file) and process."""


class FolderLock:
    """The lock of a run folder, held by rank 0. It follows the folder when that is renamed.

    Where the lock is free, but names an owner that may live on another node, it is taken over with a warning:
    mostly that is a job whose node died. An owner that lives after all learns it from `lost`, and ends.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder; raise UserError where a run holds it, OSError without room."""
        self._folder, self._owner = folder, _owner()
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.is_enforced = True
        """Whether the file system has locks."""
        soon = f"soon, with exit code {STORAGE_ERROR}"
        try:
            self._set(fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            owner = _read_owner(self._descriptor)
            os.close(self._descriptor)
            raise UserError(
                f"{folder} is in use by {owner or 'another process'}; wait for that run, stop it, or choose "
                "another folder with --out DIR"
            ) from None
        except OSError:
            self.is_enforced = False
            LOG.warning(
                f"{folder}: this file system has no locks: any later start takes the folder over, and this "
                f"run then ends {soon}"
            )
        before = _read_owner(self._descriptor)
        try:
            self._write(f"{self._owner}\n")
        except BaseException:
            os.close(self._descriptor)
            raise
        if before and not (self.is_enforced and _is_here(before)):
            LOG.warning(
                f"{folder} was locked by {before}. This machine cannot see whether it still runs (see "
                "squeue, or ps on that machine), so this run takes over; if it does run, it will stop "
                f"{soon}"
            )

    def lost(self) -> str | None:
        """Return how this process has lost its folder, or None; OSError if the file system cannot tell."""
        path, named = self._folder / LOCK_NAME, ""
        # a copy of the folder at its path names this process too
        if path.exists() and os.path.samestat(path.stat(), os.fstat(self._descriptor)):
            named = holder(self._folder).owner
        if named == self._owner:
            return None
        return f"was taken over by {named}" if named else f"was moved or deleted, or lost its {LOCK_NAME},"

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor < 0:
            return
        # on a full disk the name may stay: its process has ended
        with suppress(OSError):
            if _read_owner(self._descriptor) == self._owner:
                self._write("")
        # a forked child may still have the file open, and would keep the lock
        with suppress(OSError):
            self._set(fcntl.F_UNLCK)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _set(self, kind: int) -> None:
        """Lock the file (F_WRLCK) or unlock it (F_UNLCK)."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))

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
    with path.open("rb") as file:
        owner, is_locked = _read_owner(file.fileno()), _is_locked(file.fileno())
    return Holder(owner, is_locked is True, is_locked is False and _is_here(owner))


def _is_locked(descriptor: int) -> bool | None:
    """Whether a record lock on a file is held; None where the system cannot tell."""
    with suppress(OSError):
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    return None


def _read_owner(descriptor: int) -> str:
    """Return the first line of a lock file; "" where it has no end, as if it was not written whole."""
    line, end, _ = os.pread(descriptor, MAX_BYTES, 0).decode(errors="replace").partition("\n")
    return line.strip() if end else ""


def _owner() -> str:
    """Return this process's name in its locks."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"pid {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")


def _is_here(owner: str) -> bool:
    """Whether an owner was on this machine."""
    return owner.partition(",")[0].endswith(f" on {socket.gethostname()}")
