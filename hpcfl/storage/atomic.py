"""Files that change at once or not at all."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that no reader ever sees half of it; OSError if it cannot be, and nothing is left."""
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        # whoever made the folder may have put a link there
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
