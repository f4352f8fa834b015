"""The cells of a table: every row, column and seed resolved into the configuration of a run."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from hpcfl.config.keys import Config, flatten
from hpcfl.config.load import differences
from hpcfl.config.own_code import digest
from hpcfl.config.registry import DEFAULT_SOURCE
from hpcfl.errors import UserError
from hpcfl.formatting import did_you_mean
from hpcfl.methods import METHODS
from hpcfl.registries import merge, read_keys, resolve
from hpcfl.results.run import Run
from hpcfl.tables.file import (
    ONLY,
    Drawing,
    HeatMaps,
    Pair,
    PartialConfig,
    Row,
    TableFile,
    place_of,
    read_table,
)

_DATA_FILE = ("source", "reader", "path", "layout", "normalise")
"""Keys of `data` that say which file data are in."""

_CHANGE_NO_RESULT = re.compile(r"data\.root=|run\.(?!eval_split=|on_divergence=)")
"""Where data lie, and how a run is carried out."""


DIVERGED_NOTE = "diverged"
"""What the note of a cell says whose numbers became nan or infinite."""


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    label: str
    """Of its row."""
    column: str
    """Label of its column."""
    config: Config
    folder: Path
    place: str
    """Where it is in the table file, for errors."""

    @property
    def name(self) -> str:
        """What it is called: its row and column."""
        return self.label if self.column == ONLY else f"{self.label}, {self.column}"

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def note(self) -> Path:
        """A file that is there while the cell runs, and after a run that failed by itself."""
        return self.folder.with_name(f".{self.folder.name}.running")

    @property
    def has_diverged(self) -> bool:
        """Whether its last run ended because numbers became nan or infinite."""
        try:
            return self.note.read_text() == DIVERGED_NOTE
        except OSError:
            return False

    @property
    def finished_run(self) -> Run | None:
        """The run in its folder; None unless it is finished, has these settings, and can be read."""
        with suppress(UserError):
            return self.read()
        return None

    def read(self) -> Run | None:
        """Return the run in its folder if it is finished and has these settings; UserError if it is damaged.

        Where the settings name no file of the user's own, it may have read its data from any.
        """
        run = self._run
        if run is None or self._differences(run) or not run.is_finished:
            return None
        # reading it shows whether it is damaged
        return run if run.clients else None

    @property
    def why_missing(self) -> str:
        """Why it is not finished: numbers became nan, a file is damaged, or a run has other settings."""
        try:
            self.read()
        except UserError as error:
            return f": {error}"
        run = self._run
        is_extended = run is not None and run.rounds < self.config.train.rounds
        but = ["data.path", *["train.rounds"] * is_extended]
        if run is not None and (changes := self._differences(run, but)):
            return f", where a run has other settings ({'; '.join(changes)})"
        return ", has diverged" * self.has_diverged

    @property
    def _run(self) -> Run | None:
        with suppress(UserError):
            return Run(self.folder)
        return None

    def _differences(self, run: Run, but: Sequence[str] = ()) -> list[str]:
        tree, data = self.config.tree(), run.record["data"]
        if _has_own_file(data) and not _has_own_file(tree["data"]):
            tree["data"] |= {key: data.get(key) for key in (*_DATA_FILE, "code", "subset_per_class")}
        return differences(run.record, tree, but)


class Table:
    """A table file with what the command line adds.

    Keys of the command line are for all cells, but those of the file that data are in: they are for the
    chosen columns.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str] = (),
        out: Path | None = None,
        *,
        rounds: int | None = None,
        seeds: Sequence[int] | None = None,
        in_columns: Sequence[str] = (),
        in_rows: Sequence[str] = (),
    ) -> None:
        """Read and resolve everything; UserError for the first mistake.

        Args:
            path: the table file.
            overrides: `key.sub=value` words.
            out: folder of it all; default: runs/<name of the file>.
            rounds: largest number of rounds of a cell.
            seeds: those of the file's seeds that are run; None for all.
            in_columns: labels, or parts of labels, of the columns whose cells are run; () for all.
            in_rows: likewise of rows.
        """
        layers = read_table(path)
        file = layers[-1]
        self.path, self.size, self.source = path, file.size, file.source
        self.rows: list[Row] = file.rows
        self.columns = [column.label for column in file.columns]
        """Labels; [ONLY] of a table without columns."""
        self.compare: list[Pair] = file.compare or []
        self.show: list[str] = file.show
        self.drawings: list[Drawing] = file.figure or []
        """What the table's figure draws, a picture each."""
        of_file = file.seeds
        self.seeds = [seed for seed in of_file if seeds is None or seed in seeds]
        for seed in seeds or ():
            if seed not in of_file:
                raise UserError(f"--seeds: {seed} is not a seed of the table; allowed: {_listed(of_file)}")
        # some methods' runs cannot be extended, so that limited rounds have a folder of their own; not so
        # seeds: a run with more of them uses the finished cells
        name = path.stem if rounds is None else f"{path.stem}-{rounds}rounds"
        self.folder = out or Path("runs") / name
        self.chosen_columns = _matching("--column", in_columns, self.columns)
        """Labels of the columns of which cells are run."""
        of_all = [word for word in overrides if not _is_of_a_column(word)]
        changes = [word for word in of_all if not _CHANGE_NO_RESULT.match(word)]
        shrunk = name if self.seeds == of_file else f"{name}-seeds{_listed(self.seeds, '-')}"
        self.result_name = f"{shrunk}-{digest(' '.join(changes).encode())[:8]}" if changes else shrunk
        """Stem of the names of the table's result files: with changes not those of claims."""
        self._check_not_replaced(layers, of_all, self.columns)
        # of the words that say which file a column's data are in, this one alone changes what they are
        normalised = [word for word in overrides if word.startswith("data.normalise=")]
        self._check_not_replaced(layers, normalised, self.chosen_columns)
        self._longest = 0
        self.cells = self._cells(layers, overrides, of_all, rounds)
        """All cells, ordered by seed, then by column, then by row."""
        if rounds is not None and rounds >= self._longest:
            most = f"no cell has more than {self._longest} rounds"
            raise UserError(f"--rounds {rounds} shrinks nothing: {most}; leave it out")
        if any(word.startswith(("data.source=", "data.reader=")) for word in overrides):
            self._check_one_source(layers)
        self._check_keys(layers)
        self._check_folders()
        self._check_pairs()
        self._check_quantities()
        rows = _matching("--row", in_rows, self.labels)
        self.chosen = [c for c in self.cells if c.column in self.chosen_columns and c.label in rows]
        """The cells that are run."""
        if not self.chosen:
            raise UserError(f"{path}: the chosen rows have no cell in the chosen columns; choose others")
        self.not_run: dict[str, str] = {}
        """Why the data of a column, by its label, cannot be read; known once its methods have been made."""
        self.title = file.title + self._changes(of_file, rounds, changes)

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.rows]

    @property
    def figure_names(self) -> list[str]:
        """Names of the pictures: `figure` of the only one, else `figure_a`, `figure_b` and so on."""
        many = [f"figure_{letter}" for letter in string.ascii_lowercase[: len(self.drawings)]]
        return many if len(many) != 1 else ["figure"]

    def cells_of(self, label: str, column: str) -> list[Cell]:
        """Return the cells of a row and a column, one a seed; none where the row has none there."""
        return [cell for cell in self.cells if (cell.label, cell.column) == (label, column)]

    def firsts(self) -> list[Cell]:
        """Return the first seed's chosen cells, column by column."""
        return [cell for cell in self.chosen if cell.seed == self.seeds[0]]

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Axes of each diagnostic that has two or more, by name, as the first row with it records them."""
        found: dict[str, tuple[str, ...]] = {}
        for cell in self.cells:
            for name, axes in axes_by_diagnostic(cell.config.method.name).items():
                if len(axes) > 1:
                    found.setdefault(name, axes)
        return found

    def _cells(
        self,
        layers: Sequence[TableFile],
        overrides: Sequence[str],
        of_all: Sequence[str],
        rounds: int | None,
    ) -> list[Cell]:
        """Resolve all cells: `overrides` are for those of the chosen columns, `of_all` for the others."""
        swept = {
            column.label: (column.sweep.key, column.sweep.values[0])
            for layer in layers
            for column in layer.columns
            if column.sweep is not None
        }
        cells = []
        for seed, column, (number, row) in product(self.seeds, self.columns, enumerate(self.rows)):
            if column in (row.without or ()):
                continue
            place = f"{self.path}, {place_of('row', number, row.label)}{_in_column(column)}"
            given = overrides if column in self.chosen_columns else of_all
            try:
                tree = _tree(layers, row.label, column)
                key, value = swept.get(column, ("", None))
                if (other := flatten(tree).get(key, value)) != value:
                    raise UserError(
                        f"{key}={other}, and the column's label says {value}; leave it out of "
                        "settings, columns and rows, or name the column in the row's `without`"
                    )
                config = self._config(tree, given, seed, rounds)
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
            method = config.method.name
            if row.label in METHODS and row.label != method:
                raise UserError(
                    f"{place}: it runs method.name={method}, and is called {row.label}; give it a label of "
                    "its own"
                )
            folder = self.folder / _slug(column) / f"{_slug(row.label)}-s{seed}"
            cells.append(Cell(row.label, column, config, folder, f"{place}, seed {seed}"))
        return cells

    def _check_not_replaced(
        self, layers: Sequence[TableFile], words: Sequence[str], labels: Collection[str]
    ) -> None:
        """Refuse to replace what a row or one of these columns differs in: its label would be wrong."""
        given = {word.partition("=")[0]: word for word in words}
        rows = [row for layer in layers for row in layer.rows if row.label in self.labels]
        columns = [column for layer in layers for column in layer.columns if column.label in labels]
        for entry in (*rows, *columns) if given else ():
            for key in given.keys() & flatten(entry.tree()).keys():
                raise UserError(
                    f"{given[key]}: {self.path}, {entry.label} sets {key}; leave it out, or change the file"
                )

    def _config(
        self, tree: dict[str, Any], overrides: Sequence[str], seed: int, rounds: int | None
    ) -> Config:
        tree = merge(tree, overrides)
        if (given := flatten(tree).get("run.seed")) is not None:
            raise UserError(f"run.seed={given}: the table's list of seeds sets it; leave it out")
        config = resolve(merge(tree, [f"run.seed={seed}"]))
        self._longest = max(self._longest, config.train.rounds)
        if rounds is not None and config.train.rounds > rounds:
            config = resolve(merge(config.tree(), [f"train.rounds={rounds}"]))
        return config

    def _check_one_source(self, layers: Sequence[TableFile]) -> None:
        """Refuse to replace different data sets of the chosen columns by one."""
        trees = (_tree(layers, c.label, c.column) for c in self.cells if c.column in self.chosen_columns)
        sources = sorted({str(flatten(tree).get("data.source", DEFAULT_SOURCE)) for tree in trees})
        if len(sources) > 1:
            raise UserError(
                f"{self.path}: data.source on the command line would replace {_listed(sources)} in all "
                "columns; choose columns of one of them with --column LABEL"
            )

    def _check_keys(self, layers: Sequence[TableFile]) -> None:
        """Refuse keys of settings and of columns that no cell has: they would change nothing.

        A column's keys may be dropped by its entry in a later file.
        """
        by_column: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            by_column.setdefault(cell.column, {}).update(dict.fromkeys(flatten(cell.config.tree())))
        of_all = {key: None for keys in by_column.values() for key in keys}
        entries: list[tuple[str, PartialConfig, Mapping[str, None]]] = []
        entries.append(("settings", layers[-1].settings, of_all))
        for number, layer in enumerate(layers):
            changed = {one.label for later in layers[number + 1 :] for one in later.columns if one.tree()}
            # of a row that a later file leaves out, there are no cells that have its keys
            if {row.label for row in layer.rows} <= set(self.labels):
                entries += [
                    (place_of("column", at, column.label), column, by_column.get(column.label, {}))
                    for at, column in enumerate(layer.columns)
                    if column.label not in changed
                ]
        for place, entry, known in entries:
            for key in flatten(entry.tree()) if known else ():
                if key not in known and not key.endswith((".name", ".path")):
                    raise UserError(
                        f"{self.path}, {place}: {key} is a key of no row there{did_you_mean(key, known)}"
                    )

    def _check_folders(self) -> None:
        """Refuse two cells of one folder."""
        known: dict[Path, Cell] = {}
        for cell in self.cells:
            first = known.setdefault(cell.folder, cell)
            if first is not cell:
                raise UserError(f"{cell.place}: {first.name} makes the same folder; give it another label")

    def _check_pairs(self) -> None:
        """Refuse to compare two rows whose clients are not the same ones."""
        for pair in self.compare:
            for column in pair.columns:
                first, second = (self.cells_of(label, column)[0] for label in pair.rows)
                if first.config.sample_keys() != second.config.sample_keys():
                    raise UserError(
                        f"{self.path}, compare {first.label} with {second.label}{_in_column(column)}: their "
                        "clients hold different samples, so they cannot be compared client by client; give "
                        "both rows the same data, data.seed and run.eval_split"
                    )

    def _check_quantities(self) -> None:
        """Refuse heat maps of what no row's method keeps."""
        known = ", ".join(self.axes) or "none, so remove this figure"
        for drawing in self.drawings:
            if isinstance(drawing, HeatMaps) and drawing.quantity not in self.axes:
                raise UserError(
                    f"{self.path}, figure: quantity={drawing.quantity} is not a diagnostic with two or "
                    f"more axes of any row's method; allowed: {known}"
                )

    def _changes(self, seeds: Sequence[int], rounds: int | None, changes: Sequence[str]) -> str:
        """Return what follows the title: what the command line leaves out and changes."""
        shrunk = []
        if rounds is not None:
            shrunk.append(f"at most {rounds} rounds instead of {self._longest}")
        if self.seeds != seeds:
            shrunk.append(f"seeds {_listed(self.seeds)} of {_listed(seeds)}")
        notes = [f"shrunk: {_listed(shrunk)}"] * bool(shrunk) + [f"with {_listed(changes)}"] * bool(changes)
        return f" ({'; '.join(notes)})" if notes else ""


def axes_by_diagnostic(method: str) -> dict[str, tuple[str, ...]]:
    """Return the axes of each diagnostic that a method records, by name."""
    return {one.name: one.axes for one in METHODS[method].diagnostics}


def _tree(layers: Sequence[TableFile], label: str, column: str) -> dict[str, Any]:
    """Return the keys of a row in a column: of a file the row's override the column's, and those the rest."""
    (config,) = (one.config for one in layers[-1].columns if one.label == column)
    tree: dict[str, Any] = {}
    if config is not None:
        tree = read_keys(Path(config))
        if isinstance(tree.get("run"), dict):
            tree["run"].pop("seed", None)
    for layer in layers:
        of_column = [one for one in layer.columns if one.label == column]
        of_row = [one for one in layer.rows if one.label == label]
        for more in (layer.settings, *of_column, *of_row):
            tree = merge(tree, more.tree())
    return tree


def _in_column(column: str) -> str:
    return "" if column == ONLY else f", column {column}"


def _matching(option: str, wanted: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the labels that an option names, whole or by a part that no other has; () is all.

    A whole label goes before parts of others.
    """
    named = set()
    for text in wanted:
        small = text.lower()
        found = [label for label in labels if label.lower() == small]
        found = found or [label for label in labels if small in label.lower()]
        if len(found) != 1:
            what = f"matches {len(found)} labels" if found else "is unknown"
            there = " | ".join(label for label in found or labels if label != ONLY) or "none"
            raise UserError(f"{option} {text} {what}; give one of: {there}")
        named.add(found[0])
    return [label for label in labels if label in named or not wanted]


def _has_own_file(data: Mapping[str, Any]) -> bool:
    """Whether keys of `data` name a file of the user's own."""
    return bool(data.get("path") or data.get("reader"))


def _is_of_a_column(override: str) -> bool:
    """Whether a key says which file a column's data are in."""
    group, _, key = override.partition("=")[0].partition(".")
    return (group == "data" and key in _DATA_FILE) or override == "data.subset_per_class=null"


def _listed(values: Sequence[object], separator: str = ", ") -> str:
    return separator.join(map(str, values))


def _slug(label: str) -> str:
    """Return a label as a part of a folder's name."""
    return re.sub(r"[^a-z0-9_.+]+", "-", label.lower()).strip("-.")
