"""The text files of a run folder, also while a run writes them: reads, takes no lock."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcfl.config.yaml_text import parse_yaml
from hpcfl.errors import UserError

_GROUPS = ("method", "data", "model", "train", "run")
"""Groups of keys that every run's config.yaml has."""
_OF_TEXT = ("direction", "layer")
"""Columns of a run's CSV files whose cells need be no numbers."""
_WHOLE = ("round", "client", "class", "unseen", "diverged")
COLUMNS = {
    "metrics.csv": (
        *("round", "wall_s", "accuracy_mean", "accuracy_std", "accuracy_weighted", "loss_mean"),
        *("train_loss_mean", "client_steps_per_s", "bytes_down", "bytes_up"),
    ),
    "clients.csv": (
        "client",
        "accuracy",
        "loss",
        "train_samples",
        "evaluated_samples",
        "bytes_down",
        "bytes_up",
    ),
    "bytes.csv": ("round", "direction", "layer", "bytes"),
    "partition.csv": ("client", "class", "train_samples", "evaluated_samples"),
}
"""Columns that these files have in every run; the ledger writes them by these names."""


def read_record(folder: Path, if_damaged: str = "name the folder of another run") -> dict[str, Any]:
    """Return the nested keys of a run's config.yaml.

    Args:
        folder: the run's.
        if_damaged: what the user can do where the file is damaged.

    Raises:
        UserError: there is no config.yaml that can be read, or it is damaged.
    """
    path = folder / "config.yaml"
    try:
        return record_of(path.read_bytes().decode())
    except OSError as error:
        raise UserError(
            f"{folder} is no run folder: {error.strerror}: {path}; name one that a run has made, such as "
            "runs/NAME"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged; {if_damaged}") from error


def record_of(text: str) -> dict[str, Any]:
    """Return the nested keys of a run's configuration as YAML; ValueError where the text is none."""
    tree = parse_yaml(text)
    if not _is_record(tree):
        raise ValueError("a configuration without the groups of keys that every run has")
    found: dict[str, Any] = tree
    return found


def _is_record(tree: object) -> bool:
    if not isinstance(tree, dict) or not all(tree.get(group) for group in _GROUPS):
        return False
    return all(isinstance(group, dict) for group in tree.values())


def whole_lines(path: Path, most_bytes: int | None = None) -> str:
    """Return the lines of a file that have their end, or those in its last bytes; "" where it is not."""
    try:
        if most_bytes is None:
            found = path.read_bytes()
        else:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
                found = file.read(most_bytes)
    except FileNotFoundError:
        return ""
    return found[: found.rfind(b"\n") + 1].decode(errors="replace")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the whole rows of a run's CSV file by column; none where there is no file.

    Raises:
        UserError: columns that the file has in every run are not there, a row has not the header's columns, a
            cell is none of its column's values, or the file cannot be read.
    """
    try:
        lines = whole_lines(path).splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows = csv.reader(lines)
    try:
        header = next(rows, [])
        if lines and (len(set(header)) < len(header) or not set(COLUMNS.get(path.name, ())) <= set(header)):
            raise damaged(path, 1)
        checks = [_check_of(name) for name in header]
        found = []
        for row in rows:
            if len(row) != len(header) or not all(
                check(cell) for check, cell in zip(checks, row, strict=True)
            ):
                raise damaged(path, rows.line_num)
            found.append(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise damaged(path, rows.line_num) from error
    return found


def damaged(path: Path, line: int) -> UserError:
    """Return the error that a line of a run's CSV file is not as a run writes it."""
    return UserError(
        f"{path}, line {line}: damaged; bring the file back from a copy, or name the folder of another run"
    )


def _check_of(name: str) -> Callable[[str], bool]:
    """Return what tells whether a cell is a value of a column, by the column's name."""
    if name in _OF_TEXT:
        return lambda cell: True
    if name in _WHOLE:
        return lambda cell: cell.isascii() and cell.isdecimal()
    if name.endswith(("_s", "_samples")) or "bytes" in name:
        return lambda cell: _is_number(cell) and 0 <= float(cell) < math.inf
    return _is_number


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
