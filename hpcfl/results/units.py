"""Numbers as people read them."""

from __future__ import annotations


def readable_bytes(count: float) -> str:
    """Return a count of bytes with three digits and its unit, such as "16.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
