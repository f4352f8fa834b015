"""The lock on a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import struct
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpcfl.errors import STORAGE_ERROR, UserError
from hpcfl.machine import boot_id

LOCK_NAME = ".lock"
MAX_BYTES = 1000
"""Of a lock file that are read."""
_HELD_ERRORS = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# (device, inode) of the lock files this process holds: the kernel would grant it the same lock again.
_held_files: set[tuple[int, int]] = set()


class FolderLock:
    """The one lock of a run folder, held by rank 0 and gone with its process, even after SIGKILL.

    It is a POSIX record lock on `<folder>/.lock`, which names the owner. Such a lock belongs to the process,
    not to the file object: it is lost when any part of the process opens and closes that file. It follows
    the file when the folder is renamed.

    Locks of some network file systems reach one node only, and some have none; there, the file also tells
    the owner's process from all others of its machine. Who finds the lock free and an owner on another
    machine named takes the folder over, with a warning that names it: mostly that is a job whose node died.
    Where it lives after all, `lost` tells it so as soon as the file system shows it, and it ends.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder; raise UserError where another run, or this one, holds it."""
        self._folder, self._path = folder, folder / LOCK_NAME
        self._folder_identity = _identity(folder.stat())
        if self._path.exists() and _identity(self._path.stat()) in _held_files:
            raise UserError(_in_use(folder, "this process"))
        before = holder(folder)
        if before.is_seen:
            raise UserError(_in_use(folder, before.owner or "another process"))
        self._owner, self._has_locks = _owner(), True
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(folder)
            self._write(f"{self._owner}\n" + ("" if self._has_locks else f"{_process(os.getpid())}\n"))
        except BaseException:
            os.close(self._descriptor)
            raise
        _held_files.add(_identity(os.fstat(self._descriptor)))
        if before.owner and not before.is_gone:
            warnings.warn(
                f"{folder} has the lock of {before.owner}, which is not seen here and is taken for dead; "
                "if it runs (see squeue, or ps on that machine), it ends soon, with exit code "
                f"{STORAGE_ERROR}",
                stacklevel=1,
            )

    def _take(self, folder: Path) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_ERRORS:
                raise UserError(_in_use(folder, self._named() or "another process")) from None
            if error.errno not in _UNSUPPORTED_ERRORS:
                raise
            self._has_locks = False
            warnings.warn(
                f"{folder}: this file system has no locks: any later start on another machine takes the "
                f"folder over, and this run then ends soon, with exit code {STORAGE_ERROR}",
                stacklevel=1,
            )

    def lost(self) -> str | None:
        """Return how this process has lost its folder, None where it has not.

        Raises:
            OSError: the file system does not say.
        """
        try:
            is_other = _identity(self._path.stat()) != _identity(os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            if self.is_elsewhere():
                return "was moved or deleted"
            return f"lost its {LOCK_NAME}, which was removed"
        if is_other and self.is_elsewhere():
            return "was moved or deleted, and another stands in its place"
        # another run makes the file anew where it was removed
        named = holder(self._folder).owner if is_other else self._named()
        if named == self._owner and not is_other:
            return None
        return f"was taken over by {named or 'another run'}"

    def is_elsewhere(self) -> bool:
        """Whether the folder that was locked has another path now, or none."""
        try:
            return _identity(self._folder.stat()) != self._folder_identity
        except (FileNotFoundError, NotADirectoryError):
            return True

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor < 0:
            return
        # a name that stays, as on a disk that takes no more, is that of a process that has ended
        with suppress(OSError):
            if self._named() == self._owner:
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

    def _named(self) -> str:
        """Return the owner that the file names."""
        if not self._has_locks:
            # what another machine wrote is sure to be read only from a file that is opened anew
            return _first_line(self._path.read_bytes()[:MAX_BYTES])
        # opened and closed, the file would lose the lock
        return _first_line(os.pread(self._descriptor, MAX_BYTES, 0))

    def _write(self, text: str) -> None:
        written = os.pwrite(self._descriptor, text.encode(), 0)
        # not before: nobody is to see a lock without a name in the meantime
        os.ftruncate(self._descriptor, written)
        if written < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Holder:
    """Who has the lock of a folder, as it looks from this machine."""

    owner: str
    """`pid 7 on node3`, and its job under SLURM; empty where no run has begun or the last one gave the lock
    up itself."""
    is_seen: bool
    """Whether the lock is held for all that this machine can tell. Where locks do not reach over the network,
    that of a process on another machine is not seen."""
    is_known: bool = True
    """Whether this machine can tell at all whether an owner here lives."""

    @property
    def is_gone(self) -> bool:
        """Whether the owner has certainly ended, without giving the lock up."""
        here = re.compile(rf"pid \d+ on {re.escape(socket.gethostname())}(, .*)?")
        return self.is_known and not self.is_seen and here.fullmatch(self.owner) is not None


def holder(folder: Path) -> Holder:
    """Look at a folder's lock without touching it."""
    path = folder / LOCK_NAME
    if not path.exists():
        return Holder("", False)
    if _identity(path.stat()) in _held_files:
        # opened and closed here, the file would lose this process's lock
        return Holder(_owner(), True)
    with path.open("rb") as file:
        is_locked, content = _is_locked(file.fileno()), file.read(MAX_BYTES)
    lives = _lives(content) if is_locked is None else is_locked
    return Holder(_first_line(content), lives is True, lives is not None)


def _is_locked(descriptor: int) -> bool | None:
    """Whether another process holds a record lock on a file; None where the system cannot tell."""
    if sys.platform != "linux":
        return None
    # struct flock: type, whence, start, length (0 is the whole file) and process; F_GETLK takes no lock
    flock = struct.Struct("hhqqi")
    asked = flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    except OSError:
        return None
    return bool(flock.unpack(answer)[0] != fcntl.F_UNLCK)


def _lives(content: bytes) -> bool | None:
    """Whether the process that a lock file names lives; None where it is not told, or of another machine."""
    named = re.match(rb"pid (\d+) on .*\n((\S+) start \d+)\n", content)
    if named is None or named[3] != boot_id().encode():
        return None
    return named[2] == _process(int(named[1])).encode()


def _process(pid: int) -> str:
    """Return what tells a live process from all others that had or will have its number; "" if none has."""
    try:
        # after the name, which may hold anything: the state, and 19 fields on the time of the start
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot_id()} start {fields[19]}"


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others, whatever its path."""
    return status.st_dev, status.st_ino


def _owner() -> str:
    """Return what this process calls itself in its locks."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"pid {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")


def _first_line(content: bytes) -> str:
    """Return the first line; "" where it has no end, as of a name that could not be written whole."""
    line, end, _ = content.decode(errors="replace").partition("\n")
    return line.strip() if end else ""


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"{folder} is in use by {owner}; wait for that run, stop it, or choose another folder with --out DIR"
    )
