"""Faster start of a process: no garbage collection during imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Exclude imported objects from Python's garbage collection, during and after the block.

    torch creates more than 100,000 objects that live as long as the process. Scanning them repeatedly takes a
    fifth of the import time, and time again at the end of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
