"""The lock on a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpcfl.errors import UserError

LOCK_NAME = ".lock"
_HELD_ERRORS = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# (device, inode) of the lock files this process holds: the kernel would grant it the same lock again.
_held_files: set[tuple[int, int]] = set()


class FolderLock:
    """The one lock of a run folder, held by rank 0 and gone with its process, even after SIGKILL.

    It is a POSIX record lock on `<folder>/.lock`, which names the owner. Such a lock belongs to the process,
    not to the file object: it is lost when any part of the process opens and closes that file. It follows
    the file when the folder is renamed. Where the file system has no locks, there is a warning instead.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder; raise UserError where another run, or this one, holds it."""
        self._path = folder / LOCK_NAME
        if self._path.exists() and _identity(self._path.stat()) in _held_files:
            raise UserError(_in_use(folder, "this process"))
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED_ERRORS:
                warnings.warn(
                    f"{folder}: this file system has no locks, a second run is not refused", stacklevel=1
                )
            else:
                owner = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
                os.close(self._descriptor)
                if error.errno in _HELD_ERRORS:
                    raise UserError(_in_use(folder, owner or "another process")) from None
                raise
        _held_files.add(_identity(os.fstat(self._descriptor)))
        self._write(f"{_owner()}\n")

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor < 0:
            return
        self._write("")
        _held_files.discard(_identity(os.fstat(self._descriptor)))
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _write(self, owner: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, owner.encode(), 0)


@dataclass(frozen=True)
class Holder:
    """Who has the lock of a folder, as it looks from this machine."""

    owner: str
    """`pid 7 on node3`; empty where no run has begun or the last one gave the lock up itself."""
    is_seen: bool
    """Whether the lock is held for all that this machine can tell. Where locks do not reach over the network,
    that of a process on another machine is not seen."""

    @property
    def is_gone(self) -> bool:
        """Whether the owner has certainly ended, without giving the lock up."""
        return bool(self.owner) and not self.is_seen and self.owner.endswith(f" on {socket.gethostname()}")


def holder(folder: Path) -> Holder:
    """Look at a folder's lock without touching it."""
    path = folder / LOCK_NAME
    if not path.exists():
        return Holder("", False)
    if _identity(path.stat()) in _held_files:
        # opened and closed here, the file would lose this process's lock
        return Holder(_owner(), True)
    with path.open("rb") as file:
        return Holder(file.read().decode(errors="replace").strip(), _is_locked(file.fileno()))


def _is_locked(descriptor: int) -> bool:
    """Whether another process holds a record lock on a file; False where the system cannot tell."""
    if sys.platform != "linux":
        return False
    # struct flock: type, whence, start, length (0 is the whole file) and process; F_GETLK takes no lock
    flock = struct.Struct("hhqqi")
    asked = flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    except OSError:
        return False
    return bool(flock.unpack(answer)[0] != fcntl.F_UNLCK)


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others, whatever its path."""
    return status.st_dev, status.st_ino


def _owner() -> str:
    """Return what this process calls itself in its locks."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"{folder} is in use by {owner}; wait for that run, stop it, or choose another folder with --out DIR"
    )
