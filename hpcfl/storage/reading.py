"""The text files of a run folder, also while a run writes them: reads, takes no lock."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import yaml

from hpcfl.config.plain_yaml import MOST_BYTES, plain_yaml
from hpcfl.errors import UserError
from hpcfl.plain_files import open_plain, read_plain

_GROUPS = ("method", "data", "model", "train", "run")
"""Groups of keys that every run's config.yaml has."""
_OF_TEXT = ("direction", "layer")
"""Columns of a run's CSV files whose cells need be no numbers."""


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
        tree = plain_yaml(read_plain(path, MOST_BYTES).decode())
    except OSError as error:
        raise UserError(
            f"{folder} is no run folder: {error.strerror}: {path}; name one that a run has made, such as "
            "runs/NAME"
        ) from error
    except (yaml.YAMLError, ValueError):
        tree = None
    if not _is_record(tree):
        raise UserError(f"{path} is damaged; {if_damaged}")
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
            found = read_plain(path)
        else:
            with open_plain(path) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
                found = file.read(most_bytes)
    except FileNotFoundError:
        return ""
    return found[: found.rfind(b"\n") + 1].decode(errors="replace")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the whole rows of a run's CSV file by column; none where there is no file.

    Raises:
        UserError: a row has not the header's columns, a cell of a column of numbers is none, or the file
            cannot be read.
    """
    try:
        lines = whole_lines(path).splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows = csv.reader(lines)
    try:
        header = next(rows, [])
        is_text = [name in _OF_TEXT for name in header]
        found = []
        for row in rows:
            if len(row) != len(header) or not all(map(_is_sound, row, is_text)):
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


def _is_sound(cell: str, is_text: bool) -> bool:
    if is_text:
        # what was no UTF-8
        return "\ufffd" not in cell
    try:
        float(cell)
    except ValueError:
        return False
    return True
