"""The text files of a run folder, also while a run writes them: reads, takes no lock."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.config.yaml_text import parse_yaml
from hpcfl.errors import UserError

Columns = dict[str, np.ndarray]
"""Columns of a CSV file: float64, int64 (rounds, numbers of clients and classes) or text."""

_GROUPS = ("method", "data", "model", "train", "run")
"""Groups of keys that every run's config.yaml has."""
_OF_TEXT = ("direction", "layer", "domain", "name")
"""Columns whose cells are text."""
_WHOLE = ("round", "client", "class", "predicted", "unseen", "diverged", "lost")
COLUMNS = {
    "metrics.csv": (
        *("round", "wall_s", "accuracy_mean", "accuracy_std", "accuracy_weighted", "loss_mean"),
        *("train_loss_mean", "client_steps_per_s", "bytes_down", "bytes_up"),
        *("buffer_bytes_down", "buffer_bytes_up", "index_bytes_down", "index_bytes_up"),
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
    "confusion.csv": ("client", "class", "predicted", "evaluated_samples"),
    "partition.csv": ("client", "class", "train_samples", "evaluated_samples"),
}
"""Columns that these files have in every run."""


def read_record(folder: Path, if_damaged: str = "name the folder of another run") -> dict[str, Any]:
    """Return the nested keys of a run's config.yaml.

    Args:
        folder: the run's.
        if_damaged: what the user can do if the file is damaged.

    Raises:
        UserError: config.yaml is missing, cannot be read or is damaged.
    """
    path = folder / "config.yaml"
    try:
        return record_of(path.read_bytes().decode())
    except OSError as error:
        raise UserError(
            f"{folder} is not a run folder: {error.strerror}: {path}; name one that a run has made, such as "
            "runs/NAME"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged; {if_damaged}") from error


def record_of(text: str) -> dict[str, Any]:
    """Return the nested keys of a run's configuration in YAML; raise ValueError if it is not one."""
    tree: dict[str, Any] = parse_yaml(text)
    is_record = isinstance(tree, dict) and all(tree.get(group) for group in _GROUPS)
    is_record = is_record and all(isinstance(group, dict) for group in tree.values())
    if not is_record or not isinstance(tree["train"].get("rounds"), int):
        raise ValueError("a configuration without the groups of keys that every run has, or train.rounds")
    return tree


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, none if there is no file; UserError if it cannot be read."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return found[: found.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def read_columns(path: Path) -> Columns:
    """Return the complete rows of a run's CSV file by column; empty if there are none.

    Raises:
        UserError: a column that every run has is missing, a row has other columns than the header, a cell is
            impossible in its column, or the file cannot be read.
    """
    lines = csv.reader(whole_lines(path))
    rows = []
    try:
        header = next(lines, [])
        if header and (len(set(header)) < len(header) or not set(COLUMNS[path.name]) <= set(header)):
            raise ValueError("other columns")
        for row in lines:
            rows.append([_value(name, cell) for name, cell in zip(header, row, strict=True)])
    except (csv.Error, ValueError) as error:
        raise damaged(path, max(1, lines.line_num)) from error
    return {
        name: np.array(values, np.int64 if name in _WHOLE else None)
        for name, values in zip(header, zip(*rows, strict=True), strict=False)
    }


def damaged(path: Path, line: int) -> UserError:
    """Return the error for a damaged line of a run's CSV file."""
    return UserError(
        f"{path}, line {line}: damaged; restore the file from a backup, or delete it and rerun the run's "
        "command, which writes it again; without a checkpoint, rerun the run's command with --fresh"
    )


def _value(name: str, cell: str) -> float | str:
    """Return a cell of a column; raise ValueError if it is impossible there."""
    if name in _OF_TEXT:
        return cell
    value = float(cell)
    is_whole = name in _WHOLE
    is_positive = is_whole or name.endswith(("_s", "_samples")) or "bytes" in name
    limit = 2**31 if is_whole else math.inf
    if (is_positive and not 0 <= value < limit) or (is_whole and value % 1):
        raise ValueError(f"{name}={cell}")
    return value
