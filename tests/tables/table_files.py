"""Table files that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcfl.errors import UserError
from hpcfl.tables.cells import Table


def refused(path: Path, overrides: Sequence[str] = (), **more: Any) -> str:
    """Return the error on a table file, without its name; `more` goes to Table."""
    with pytest.raises(UserError) as error:
        Table(path, overrides, **more)
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path))


def refused_once_changed(path: Path, text: str, old: str, new: str) -> str:
    """Write a table file with one place of its text changed, and return the error on it."""
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return refused(path)
