"""A table file: rows of settings by seeds, resolved into the cells of a comparison, each of them a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from hpcfl.config import GROUPS, Config, lay_over, read_yaml, resolve
from hpcfl.errors import UserError


def _one_line(text: str) -> str:
    if len(text.splitlines()) != 1 or not text.strip():
        raise ValueError("it must be one line of text")
    return text.strip()


Line = Annotated[StrictStr, AfterValidator(_one_line)]


class _Settings(BaseModel):
    """A configuration tree, looked into when it is resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Any = None
    data: Any = None
    model: Any = None
    train: Any = None
    run: Any = None

    def tree(self) -> dict[str, Any]:
        return self.model_dump(include=set(GROUPS), exclude_none=True)


class _Row(_Settings):
    label: Line | None = None
    """Name in the table; default: the method's."""
    tuned: Line | None = None
    """Which keys were chosen on a validation split, and among what; the table repeats it."""

    @property
    def name(self) -> object:
        return self.label or (self.method.get("name") if isinstance(self.method, dict) else None)


class _TableFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Line
    seeds: list[Annotated[StrictInt, Field(ge=0)]] = Field(min_length=1)
    settings: _Settings = _Settings()
    """What all rows have in common."""
    rows: list[_Row] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    row: int
    """Number of its row, from 0."""
    label: str
    config: Config
    folder: Path
    place: str
    """Where it is in the table file, for errors."""


class Table:
    """A table file with what the command line adds."""

    def __init__(self, path: Path, overrides: Sequence[str], out: Path | None) -> None:
        """Read and resolve everything; UserError for the first mistake."""
        file = _read(path)
        self.folder = out or Path("runs") / path.stem
        self.title, self.seeds = file.title, file.seeds
        self.tuned = [row.tuned for row in file.rows]
        """Which keys of each row were chosen on a validation split, and among what."""
        configs = [_configs(file, number, path, overrides) for number in range(len(file.rows))]
        self.labels = [row.label or made[0].method for row, made in zip(file.rows, configs, strict=True)]
        """Each row's name."""
        self._refuse_twins(path)
        self.cells = [
            Cell(
                row,
                label,
                configs[row][number],
                self.folder / f"{_slug(label)}-s{seed}",
                f"{_place(path, row, label)}, seed {seed}",
            )
            for number, seed in enumerate(file.seeds)
            for row, label in enumerate(self.labels)
        ]
        """All rows of the first seed first."""

    def _refuse_twins(self, path: Path) -> None:
        rows: dict[str, int] = {}
        for row, label in enumerate(self.labels):
            first = rows.setdefault(_slug(label), row)
            if first != row:
                raise UserError(
                    f"{_place(path, row, label)}: row {first + 1} ({self.labels[first]}) has the same label "
                    "or makes the same folder; give each a label of its own"
                )


def _read(path: Path) -> _TableFile:
    tree = read_yaml(path)
    try:
        file = _TableFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(_mistake(path, tree, error)) from error
    if len(set(file.seeds)) < len(file.seeds):
        raise UserError(f"{path}: seeds={file.seeds} is not possible: a seed is there twice")
    return file


def _mistake(path: Path, tree: dict[str, Any], error: ValidationError) -> str:
    """Say in a line where in the file the first mistake is, and what is allowed."""
    first = error.errors()[0]
    place, keys = str(path), list(first["loc"])
    kind: type[BaseModel] = _TableFile
    if keys[0] == "rows" and len(keys) > 1:
        row = tree["rows"][keys[1]]
        label = row.get("label") if isinstance(row, dict) else None
        place, keys, kind = _place(path, int(keys[1]), label), keys[2:], _Row
    elif keys[0] == "settings" and len(keys) > 1:
        place, keys, kind = f"{path}, settings", keys[1:], _Settings
    key = ".".join(map(str, keys)) or "the row"
    allowed = ", ".join(kind.model_fields)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, kind.model_fields, n=1)
        return f"{place}: {key} is an unknown key; allowed: {allowed}" + "".join(
            f"; did you mean {name}?" for name in near
        )
    if first["type"] == "missing":
        return f"{place}: {key} is missing; a table has {allowed}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place}: {key}={first['input']!r} is not possible: {reason}"


def _configs(file: _TableFile, number: int, path: Path, overrides: Sequence[str]) -> list[Config]:
    """Resolve a row's configuration for each seed; may raise UserError."""
    row = file.rows[number]
    try:
        tree = lay_over(lay_over(lay_over({}, file.settings.tree()), row.tree()), overrides)
        run_group = tree.get("run")
        if isinstance(run_group, dict) and "seed" in run_group:
            raise UserError(f"run.seed={run_group['seed']}: the table's list of seeds sets it; leave it out")
        return [resolve(lay_over(tree, [f"run.seed={seed}"])) for seed in file.seeds]
    except UserError as error:
        raise UserError(f"{_place(path, number, row.name)}: {error}") from error


def _place(path: Path, row: int, label: object) -> str:
    return f"{path}, row {row + 1}" + (f" ({label})" if label else "")


def _slug(label: str) -> str:
    """Return a label as a part of a folder's name."""
    return re.sub(r"[^a-z0-9_.]+", "-", label.lower()).strip("-.")
