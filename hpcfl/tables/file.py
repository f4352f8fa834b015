"""A table file with all that it extends: labels, settings by row and column, published numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcfl.config import DEFAULT_METHOD, ENVIRONMENT, read_yaml
from hpcfl.errors import UserError, printable
from hpcfl.formatting import did_you_mean
from hpcfl.tables.schema import (
    DEFAULT_SHOW,
    QUANTITIES,
    ColumnEntry,
    FigureEntry,
    HeatMapsEntry,
    Moment,
    RowEntry,
    TableEntry,
    mistake,
    place_of,
)

ONLY = ""
"""Label of the column of a table that names none."""


@dataclass(frozen=True)
class Row:
    """A row of an outline."""

    label: str
    place: str
    """Where it is, for errors."""
    tuned: str | None = None
    without: tuple[str, ...] = ()
    published: dict[str, float] = field(default_factory=dict)
    """In %, by column."""
    published_bytes: dict[str, float] = field(default_factory=dict)
    """Down and up together, of a client in a round, by column."""


@dataclass(frozen=True)
class Pair:
    """Two rows whose difference, first minus second, is shown in some columns."""

    rows: tuple[str, str]
    columns: list[str]
    at: Moment | None = None
    """When both are scored; None: each at its own moment."""
    weighted: bool = False
    """Whether clients count with their samples."""


@dataclass(frozen=True)
class Layer:
    """Settings of one file: those of all cells, those of each column and those of each row, by label."""

    settings: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Outline:
    """A table file with all that it extends, its labels checked; no configuration is resolved yet."""

    title: str
    size: str | None
    source: str | None
    seeds: list[int]
    columns: list[str]
    """Labels; [ONLY] of a table without columns."""
    rows: list[Row]
    configs: dict[str, dict[str, Any]]
    """Configuration trees by column, which all layers override."""
    layers: list[Layer]
    """Settings by file; a later layer overrides all settings of an earlier one."""
    compare: list[Pair]
    show: list[str]
    drawings: list[FigureEntry]


_EMPTY = Outline("", None, None, [], [ONLY], [], {ONLY: {}}, [], [], list(DEFAULT_SHOW), [])


def read_outline(path: Path, seen: Sequence[Path] = ()) -> Outline:
    """Read a table file and what it extends; UserError for the first mistake."""
    tree = read_yaml(path)
    base = None
    if isinstance(tree.get("extends"), str):
        if (name := tree["extends"]) != printable(name):
            raise UserError(f"{path}: extends={printable(name)} is no file's name; name a table file")
        below = path.parent / name
        if below.resolve() in {file.resolve() for file in (path, *seen)}:
            raise UserError(f"{path}: extends={tree['extends']} leads back to this file; name another")
        # unlike Path's, False of a name that no file can have
        if not os.path.isfile(below):
            raise UserError(
                f"{path}: extends={tree['extends']}: there is no file {below}; name one that is there"
            )
        base = read_outline(below, [*seen, path])
        tree = _with_choices(path, tree, base)
    try:
        file = TableEntry.model_validate(tree)
    except ValidationError as error:
        raise UserError(mistake(path, tree, error)) from error
    return _Reader(path, file, base or _EMPTY, base is not None).outline()


def _with_choices(path: Path, tree: dict[str, Any], base: Outline) -> dict[str, Any]:
    """Replace bare labels among rows and columns, which choose from the extended file, by entries."""
    known = {"columns": base.columns, "rows": [row.label for row in base.rows]}
    changed = dict(tree)
    for kind, labels in known.items():
        entries = tree.get(kind)
        if isinstance(entries, list):
            for entry in entries:
                if isinstance(entry, str) and entry not in labels:
                    raise UserError(f"{path}: {_unknown(kind, entry, labels)}")
            changed[kind] = [{"label": entry} if isinstance(entry, str) else entry for entry in entries]
    return changed


class _Reader:
    """Puts one file on top of what it extends."""

    def __init__(self, path: Path, file: TableEntry, base: Outline, extends: bool) -> None:
        self._path, self._file, self._base, self._extends = path, file, base, extends

    def outline(self) -> Outline:
        file, base = self._file, self._base
        for name in ("title", "seeds", "rows"):
            if not self._extends and getattr(file, name) is None:
                raise UserError(
                    f"{self._path}: {name} is missing; a table has {', '.join(TableEntry.model_fields)}"
                )
        if file.seeds is not None and len(set(file.seeds)) < len(file.seeds):
            raise UserError(f"{self._path}: seeds={file.seeds} is invalid: a seed is there twice; drop one")
        columns, column_trees, configs = self._columns()
        rows, row_trees = self._rows(columns)
        made = Outline(
            title=file.title or base.title,
            size=file.size or base.size,
            source=file.source or base.source,
            seeds=file.seeds or base.seeds,
            columns=columns,
            rows=rows,
            configs=configs,
            layers=[*base.layers, Layer(file.settings.tree(), column_trees, row_trees)],
            compare=self._comparisons(columns, rows),
            show=self._show(),
            drawings=self._drawings(columns),
        )
        return made

    def _columns(self) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Return the columns' labels, and by label their settings here and their configuration files'."""
        file, base = self._file, self._base
        if file.columns is not None and file.sweep is not None:
            raise UserError(f"{self._path}: sweep stands in place of columns; put it into one of them")
        entries = file.columns
        if file.sweep is not None:
            entries = [ColumnEntry(sweep=file.sweep)]
        common = {} if file.config is None else self._config(str(self._path), file.config)
        if entries is None:
            return base.columns, {}, {label: common or base.configs[label] for label in base.columns}
        trees: dict[str, dict[str, Any]] = {}
        configs: dict[str, dict[str, Any]] = {}
        for number, entry in enumerate(entries):
            place = f"{self._path}, {place_of('column', number, entry.label)}"
            for label, tree in self._written_columns(place, entry):
                if label in trees:
                    raise UserError(
                        f"{place}: another column is called {label}; give each a label of its own"
                    )
                trees[label] = tree
                own = common if entry.config is None else self._config(place, entry.config)
                configs[label] = own or base.configs.get(label, {})
        return list(trees), trees, configs

    def _written_columns(self, place: str, entry: ColumnEntry) -> list[tuple[str, dict[str, Any]]]:
        """Return the label and the settings of the columns that an entry stands for."""
        if entry.sweep is None:
            if entry.label is None:
                raise UserError(f"{place}: label is missing; a column without a sweep has one")
            return [(entry.label, entry.tree())]
        prefix = "" if entry.label is None else f"{entry.label}, "
        return [(prefix + label, _laid(entry.tree(), tree)) for label, tree in entry.sweep.columns()]

    def _config(self, place: str, name: str) -> dict[str, Any]:
        try:
            tree = read_yaml(self._path.parent / name)
        except UserError as error:
            raise UserError(f"{place}: config={name}: {error}") from error
        tree.pop(ENVIRONMENT, None)
        return tree

    def _rows(self, columns: Sequence[str]) -> tuple[list[Row], dict[str, dict[str, Any]]]:
        """Return the rows, and their settings here by label."""
        file, base = self._file, self._base
        before = {row.label: row for row in base.rows}
        if file.rows is None:
            return [_in_columns(row, columns) for row in base.rows], {}
        rows: dict[str, Row] = {}
        trees: dict[str, dict[str, Any]] = {}
        for number, entry in enumerate(file.rows):
            label = entry.label or self._method_name(entry)
            place = f"{self._path}, {place_of('row', number, label)}"
            if label in rows:
                first = list(rows).index(label)
                raise UserError(
                    f"{place}: row {first + 1} ({label}) has the same label or makes the same folder; "
                    "give each a label of its own"
                )
            old = before.get(label, Row(label, place))
            published = {
                key: _by_column(place, key, getattr(entry, key), columns)
                for key in ("published", "published_bytes")
            }
            for key, names in {"without": entry.without or (), **published}.items():
                for name in names:
                    if name not in columns:
                        raise UserError(f"{place}: {key}: {_unknown('columns', name, columns)}")
            row = _in_columns(
                replace(
                    old,
                    place=place,
                    tuned=entry.tuned or old.tuned,
                    without=old.without if entry.without is None else tuple(entry.without),
                    published=old.published | published["published"],
                    published_bytes=old.published_bytes | published["published_bytes"],
                ),
                columns,
            )
            for key, numbers in published.items():
                for name in set(numbers) & set(row.without):
                    raise UserError(
                        f"{place}: {key} names column {name}, in which `without` leaves the row no cell; "
                        "drop one of the two"
                    )
            rows[label], trees[label] = row, entry.tree()
        return list(rows.values()), trees

    def _method_name(self, entry: RowEntry) -> str:
        """Return the label of a row that has none: its method, or that of all cells."""
        under = [layer.settings.get("method") for layer in reversed(self._base.layers)]
        for method in (entry.method, self._file.settings.method, *under):
            if isinstance(method, dict) and "name" in method:
                return str(method["name"])
            if isinstance(method, dict) and "path" in method:
                return Path(str(method["path"])).stem
        return DEFAULT_METHOD

    def _comparisons(self, columns: Sequence[str], rows: Sequence[Row]) -> list[Pair]:
        """Return the pairs of rows, each with the columns in which both have a cell."""
        if self._file.compare is None:
            return self._inherited_comparisons(columns, rows)
        by_label = {row.label: row for row in rows}
        chosen = []
        for entry in self._file.compare:
            place = f"{self._path}, compare {entry.rows[0]} with {entry.rows[1]}"
            for label in entry.rows:
                if label not in by_label:
                    raise UserError(f"{place}: {_unknown('rows', label, by_label)}")
            if entry.rows[0] == entry.rows[1]:
                raise UserError(f"{place}: a row differs from itself by nothing; name two")
            named = list(entry.columns or columns)
            pair = Pair((entry.rows[0], entry.rows[1]), named, entry.at, entry.weighted)
            both = _with_both(pair, columns, by_label)
            for name in entry.columns or ():
                if name not in columns:
                    raise UserError(f"{place}: {_unknown('columns', name, columns)}")
                if name not in both.columns:
                    raise UserError(f"{place}: column {name} has no cell of both rows; drop it")
            if not both.columns:
                raise UserError(f"{place}: no column has a cell of both rows; drop the pair")
            chosen.append(both)
        return chosen

    def _inherited_comparisons(self, columns: Sequence[str], rows: Sequence[Row]) -> list[Pair]:
        """Return what is left of the extended file's pairs."""
        by_label = {row.label: row for row in rows}
        pairs = [pair for pair in self._base.compare if all(label in by_label for label in pair.rows)]
        left = [_with_both(pair, columns, by_label) for pair in pairs]
        return [pair for pair in left if pair.columns]

    def _show(self) -> list[str]:
        show = self._file.show
        for name in show or ():
            if name not in QUANTITIES:
                raise UserError(f"{self._path}: show: {_unknown('quantities', name, QUANTITIES)}")
        return show or self._base.show

    def _drawings(self, columns: Sequence[str]) -> list[FigureEntry]:
        """Return what the figure draws; what an extended file says of columns that are gone is dropped."""
        if self._file.figure is None:
            return [_of_columns(drawing, columns) for drawing in self._base.drawings]
        for drawing in self._file.figure:
            if isinstance(drawing, HeatMapsEntry) and isinstance(drawing.layers, dict):
                for name in drawing.layers:
                    if name not in columns:
                        raise UserError(f"{self._path}, figure: layers: {_unknown('columns', name, columns)}")
        return self._file.figure


def _of_columns(drawing: FigureEntry, columns: Sequence[str]) -> FigureEntry:
    if not isinstance(drawing, HeatMapsEntry) or not isinstance(drawing.layers, dict):
        return drawing
    layers = {name: layers for name, layers in drawing.layers.items() if name in columns}
    return drawing.model_copy(update={"layers": layers})


def _with_both(pair: Pair, columns: Sequence[str], by_label: Mapping[str, Row]) -> Pair:
    """Return a pair in those of its columns that are there and have a cell of both rows."""
    without = {name for label in pair.rows for name in by_label[label].without}
    return replace(pair, columns=[name for name in columns if name in pair.columns and name not in without])


def _by_column(place: str, key: str, given: Any, columns: Sequence[str]) -> dict[str, float]:
    """Return published numbers by column; `given` is as the file has them."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return {str(label): float(value) for label, value in given.items()}
    if isinstance(given, list):
        if len(given) != len(columns):
            raise UserError(
                f"{place}: {key} has {len(given)} numbers for {len(columns)} columns; give one a column, and "
                "null where there is none"
            )
        pairs = zip(columns, given, strict=True)
        return {label: float(value) for label, value in pairs if value is not None}
    if len(columns) > 1:
        raise UserError(
            f"{place}: {key}={given} does not say of which column; write {key}: {{{columns[0]}: {given}}}"
        )
    return {columns[0]: float(given)}


def _in_columns(row: Row, columns: Sequence[str]) -> Row:
    """Return a row without what it says of columns that are not there."""
    return replace(
        row,
        without=tuple(name for name in row.without if name in columns),
        published={name: value for name, value in row.published.items() if name in columns},
        published_bytes={name: value for name, value in row.published_bytes.items() if name in columns},
    )


def _laid(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return nested keys with others put in."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _laid(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = [label for label in known if label != ONLY]
    # labels may hold commas
    there = " | ".join(names) or "none, as the table has one column without a name"
    return f"{name} is none of the {kind}; there are: {there}{did_you_mean(name, names)}"
