"""The lock on a run folder.

It is a record lock on `<folder>/.lock`, which names the owner: such a lock reaches other nodes on NFS and
Lustre, ends with its process, even by SIGKILL, and can be looked at without being taken. It belongs to the
open file (F_OFD_SETLK), so that other code of the process may open and close `.lock`. A child that the
process forks shares the lock: if the process is killed, it ends with the child.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hpcfl.errors import STORAGE_ERROR, UserError

LOG = logging.getLogger(__name__)

LOCK_NAME = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], str | None]]:
    """Lock an existing run folder, as rank 0 does; the lock follows the folder when that is renamed.

    Yields a function that returns how this process has lost the folder, or None; it may raise OSError. Raises
    UserError where a run holds the lock, or has just moved the folder; OSError where its file cannot be
    written.

    A lock whose owner may live, on another node or on a file system without locks, but does not refuse this
    one, is taken over with a warning: mostly that is a job whose node died. An owner that lives after all
    learns it from the function, and ends.
    """
    owner = _own_name()
    with open(os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        _take(folder, file, owner)
        loss = partial(_loss, folder, os.fstat(file.fileno()), owner)
        try:
            # another run may have moved the folder away since its lock file was opened
            if lost := loss():
                raise UserError(f"{folder} {lost} while this run began; rerun the same command")
            yield loss
        finally:
            _release(file, owner)


def holder(folder: Path) -> tuple[str, bool | None]:
    """Look at a folder's lock without touching it; return its owner, and whether that holds it.

    The owner, such as `pid 7 on node3, job 12`, is empty before the first run and after a released lock. None
    means that this machine cannot tell; False after a named owner, that it has ended without a release.
    """
    path, is_held = folder / LOCK_NAME, None
    if not path.exists():
        return "", False
    with path.open("rb") as file:
        owner = _read_owner(file)
        with suppress(OSError):
            is_held = _record_lock(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK
    is_elsewhere = owner != "" and not owner.partition(",")[0].endswith(f" on {socket.gethostname()}")
    return owner, None if is_elsewhere and not is_held else is_held


def _take(folder: Path, file: BinaryIO, owner: str) -> None:
    """Lock the open lock file of a folder, and write the owner's name to it."""
    before, is_held = holder(folder)
    try:
        _record_lock(file, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
    except (BlockingIOError, PermissionError):
        raise UserError(
            f"{folder} is in use by {_read_owner(file) or 'another process'}; wait for that run, stop it, or "
            "choose another folder with --out DIR"
        ) from None
    except OSError:
        # this file system has no locks
        pass
    _write(file, f"{owner}\n")
    if before and is_held is None:
        LOG.warning(
            f"{folder} was locked by {before}. This machine cannot see whether it still runs (see squeue, or "
            "ps on that machine), so this run takes over; if it does run, it will stop soon, with exit code "
            f"{STORAGE_ERROR}"
        )


def _loss(folder: Path, taken: os.stat_result, owner: str) -> str | None:
    """Return how the owner of the lock file `taken` has lost its folder, or None."""
    path, named = folder / LOCK_NAME, ""
    # a copy of the folder at its path names this process too
    if path.exists() and os.path.samestat(path.stat(), taken):
        named, _ = holder(folder)
    if named == owner:
        return None
    return f"was taken over by {named}" if named else f"was moved or deleted, or lost its {LOCK_NAME},"


def _release(file: BinaryIO, owner: str) -> None:
    # on a full disk the name may stay: its process has ended
    with suppress(OSError):
        if _read_owner(file) == owner:
            _write(file, "")
    # a forked child may still have the file open, and would keep the lock
    with suppress(OSError):
        _record_lock(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)


def _record_lock(file: BinaryIO, command: int, kind: int) -> int:
    """Lock or unlock a file (F_OFD_SETLK), or look (F_OFD_GETLK); return the kind of lock that is there."""
    # the kernel's struct flock: type, whence, start, length (0 is the whole file) and process
    flock = struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0)
    kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, command, flock))
    return kind


def _write(file: BinaryIO, text: str) -> None:
    file.seek(0)
    file.write(text.encode())
    # writes first, so that nobody sees a lock without a name
    file.truncate()


def _read_owner(file: BinaryIO) -> str:
    """Return the first line of a lock file; "" where it has no end, as if it was not written whole."""
    line, end, _ = os.pread(file.fileno(), 1000, 0).decode(errors="replace").partition("\n")
    return line.strip() if end else ""


def _own_name() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"pid {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
