"""Files that somebody else may have made: what they are, and how much of them is read.

A name in a folder may stand for a pipe, which never ends, or for a file whose size is a lie.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from hpcfl.machine import free_bytes


def open_plain(path: Path, allows_pipe: bool = False) -> io.FileIO:
    """Open a file for reading, in binary and without a buffer.

    Args:
        allows_pipe: whether it may be a pipe that somebody writes into, as a shell's <(command) is.

    Raises:
        OSError: it cannot be opened, or is no file, such as a folder, a pipe or a device.
    """
    try:
        # a pipe without a writer would wait for one
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no possible name of a file: {error}", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if allows_pipe and stat.S_ISFIFO(mode):
        os.set_blocking(descriptor, True)
        return io.FileIO(descriptor)
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        said = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is a pipe or a device, and no file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, said, str(path))
    return io.FileIO(descriptor)


def is_plain(path: Path) -> bool:
    """Whether a name stands for a file, or for nothing yet; opens nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def read_plain(path: Path, most_bytes: int | None = None) -> bytes:
    """Return what is in a file.

    Args:
        most_bytes: a larger file is refused; default: than the memory that is free.

    Raises:
        OSError: as `open_plain`, or the file is larger.
    """
    # one read of the system's may end early, and brings 2 GiB at most
    with io.BufferedReader(open_plain(path)) as file:
        size, most = os.fstat(file.fileno()).st_size, most_bytes or free_bytes()
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, allowed: {most:,}", str(path))
        found = file.read(size)
    if len(found) < size:
        raise OSError(errno.EIO, f"it ends after {len(found):,} of its {size:,} bytes", str(path))
    return found


def read_plain_or_pipe(path: Path, most_bytes: int) -> bytes:
    """Return what is in a file, or what comes through a pipe that the user has named.

    Raises:
        OSError: as `read_plain`, or nothing comes through the pipe.
    """
    with io.BufferedReader(open_plain(path, allows_pipe=True)) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        found = file.read(most_bytes + 1) if is_pipe else b""
    if not is_pipe:
        return read_plain(path, most_bytes)
    if not found:
        raise OSError(
            errno.EINVAL, "it is a pipe through which nothing comes (one rank alone can read it)", str(path)
        )
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more bytes than {most_bytes:,}", str(path))
    return found
