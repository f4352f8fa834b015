"""What makes a process start fast."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keep Python from looking for garbage among what is imported inside, then and later.

    torch leaves more than 100,000 objects that live as long as the process. Going through them again and
    again takes a fifth of its import, and once more at the end of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
