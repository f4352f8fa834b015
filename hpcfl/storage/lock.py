"""The lock on a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
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
        self._write(f"pid {os.getpid()} on {socket.gethostname()}\n")

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


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others, whatever its path."""
    return status.st_dev, status.st_ino


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"{folder} is in use by {owner}; wait for that run, stop it, or choose another folder with --out DIR"
    )
