"""Files that change at once or not at all, and the text of CSV files."""

from __future__ import annotations

import csv
import errno
import io
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfl.errors import StorageError, UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDIES = {
    **dict.fromkeys(NO_ROOM, "free space on the disk (see df -h and your quota)"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make the folder writable"),
}
"""What helps where a file cannot be written, by the number of the error."""


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows of cells as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that no reader ever sees half of it; OSError if it cannot be, and nothing is left."""
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        # whoever made the folder may have put a link there
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            # a node without power would leave it empty
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def writing(what: str | Path, advice: str, of_storage: tuple[int, ...] = NO_ROOM) -> Iterator[None]:
    """Turn an OSError into a StorageError where its number is one `of_storage`, else into a UserError that
    gives advice."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write {what}: {error.strerror or error}"
        if error.errno in of_storage:
            raise StorageError(f"{problem}; {REMEDIES[error.errno]} and rerun the same command") from error
        raise UserError(f"{problem}; {advice}") from error
