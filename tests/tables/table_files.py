"""Table files that cannot be read, and the CSV files beside tables and runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcfl.errors import UserError
from hpcfl.tables.cells import Table


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def refused(path: Path, overrides: Sequence[str] = (), **more: Any) -> str:
    """Return what is said of a table file, behind its name; `more` goes to Table."""
    with pytest.raises(UserError) as error:
        Table(path, overrides, **more)
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path))


def refused_once_changed(path: Path, text: str, old: str, new: str) -> str:
    """Write a table file with one place of its text changed, and return what is said of it."""
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return refused(path)
