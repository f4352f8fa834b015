"""The cells of a table: every row, column and seed resolved into the configuration of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcfl.config import DEFAULT_SOURCE, Config, differences, flatten
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.methods.diagnostics import axes_by_name
from hpcfl.registries import merge, resolve
from hpcfl.results.run import Run
from hpcfl.tables.file import ONLY, Outline, Pair, Row, read_outline
from hpcfl.tables.schema import FigureEntry, HeatMapsEntry

_WHERE_DATA_LIE = ("data.source", "data.root", "data.path", "data.layout", "data.normalise")
_OF_A_COLUMN = ("data.source", "data.reader", "data.path", "data.layout", "data.normalise")
"""Keys of the file that a column's data are in."""


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    row: int
    """Number of its row, from 0."""
    column: int
    label: str
    """Label of its row."""
    config: Config
    folder: Path
    place: str
    """Where it is in the table file, for errors."""

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def finished_run(self) -> Run | None:
        """The run in its folder; None unless it is finished, and has these settings."""
        try:
            run = Run(self.folder)
        except UserError:
            return None
        return run if not differences(run.record, self.config.tree()) and run.is_finished else None


@dataclass(frozen=True)
class Shrinking:
    """Limits that make a table shorter than its file says; None is no limit."""

    rounds: int | None = None
    """Largest number of rounds of a cell."""
    seeds: tuple[int, ...] | None = None
    """The seeds of the file that are run."""


@dataclass(frozen=True)
class Choice:
    """Which cells are run, by labels or parts of labels; () is all."""

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


class Table:
    """A table file with what the command line adds.

    Keys of the command line are for all cells, but those of the file that data are in: they are for the
    chosen columns. Columns without such keys have their data in the file that their runs so far have read.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        out: Path | None,
        shrinking: Shrinking | None = None,
        choice: Choice | None = None,
    ) -> None:
        """Read and resolve everything; UserError for the first mistake."""
        outline = read_outline(path)
        shrinking = shrinking or Shrinking()
        self.path = path
        self.size, self.source, self.show = outline.size, outline.source, outline.show
        self.rows: list[Row] = outline.rows
        self.columns: list[str] = outline.columns
        """Labels; [ONLY] of a table without columns."""
        self.compare: list[Pair] = outline.compare
        self.drawings: list[FigureEntry] = outline.drawings
        """What the table's figure draws, a picture each."""
        self.seeds = _seeds(outline.seeds, shrinking.seeds)
        self.title = outline.title
        self.shrunk = ""
        """Which options made the table shorter than its file says, for its title."""
        name = _name(path, shrinking)
        self.result_name = name if self.seeds == outline.seeds else f"{name}-seeds{_listed(self.seeds, '-')}"
        """Stem of the names of the table's result files."""
        # without the seeds, so that a run with more seeds uses the finished cells in the same folder
        self.folder = out or Path("runs") / name
        choice = choice or Choice()
        self.chosen_columns = _numbers_of("--column", choice.columns, self.columns)
        """Numbers of the columns of which cells are run."""
        self.cells = self._cells(outline, overrides, shrinking)
        """All cells, ordered by seed, then by column, then by row."""
        self.chosen = self._chosen(choice)
        """Numbers of the cells that are run."""
        self.not_run: dict[str, str] = {}
        """Why the data of a column, by its label, cannot be read; known once its methods have been made."""
        self._check_one_source_for_all(overrides)
        self._check_twins()
        self._check_unpaired()
        self._check_undrawable()
        self._say_changed(outline, shrinking, overrides)
        is_named = any(map(_is_of_a_column, overrides))
        self._take_files_of_runs(without=self.chosen_columns if is_named else ())

    @property
    def tuned(self) -> list[str | None]:
        """Which keys of each row were chosen on a validation split, and among what."""
        return [row.tuned for row in self.rows]

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.rows]

    def of(self, row: int, column: int) -> list[Cell]:
        """Return the cells of a row and a column, one a seed; none where the row has none there."""
        return [cell for cell in self.cells if (cell.row, cell.column) == (row, column)]

    def firsts(self) -> list[Cell]:
        """Return the first seed's chosen cells, column by column."""
        chosen = {(self.cells[number].column, self.cells[number].row) for number in self.chosen}
        return [self.of(row, column)[0] for column, row in sorted(chosen)]

    def axes_of(self, quantity: str) -> tuple[str, ...]:
        """Return the axes of the first row's diagnostic of this name that has two or more; () without any."""
        known = (axes_by_name(METHODS[cell.config.method.name].diagnostics) for cell in self.cells)
        axes = (by_name.get(quantity, ()) for by_name in known)
        return next((found for found in axes if len(found) > 1), ())

    def name(self, cell: Cell) -> str:
        """Return what a cell is called: its row and column."""
        column = self.columns[cell.column]
        return cell.label if column == ONLY else f"{cell.label}, {column}"

    def _chosen(self, choice: Choice) -> list[int]:
        rows = _numbers_of("--row", choice.rows, self.labels)
        chosen = [
            number
            for number, cell in enumerate(self.cells)
            if cell.column in self.chosen_columns and cell.row in rows
        ]
        if not chosen:
            raise UserError(
                f"{self.path}: the chosen rows have no cell in the chosen columns (`without`); choose others"
            )
        return chosen

    def _cells(self, outline: Outline, overrides: Sequence[str], shrinking: Shrinking) -> list[Cell]:
        self._longest = 0
        self._sources: set[str] = set()
        cells = []
        of_all = [word for word in overrides if not _is_of_a_column(word)]
        for seed in self.seeds:
            for column, column_label in enumerate(self.columns):
                given = overrides if column in self.chosen_columns else of_all
                for number, row in enumerate(self.rows):
                    if column_label not in row.without:
                        config = self._config(outline, row, column_label, seed, given, shrinking.rounds)
                        place = f"{_place(row, column_label)}, seed {seed}"
                        folder = self.folder / _slug(column_label) / f"{_slug(row.label)}-s{seed}"
                        cells.append(Cell(number, column, row.label, config, folder, place))
        if not cells:
            raise UserError(f"{self.path}: every row is left out of every column; drop a `without`")
        return cells

    def _config(
        self,
        outline: Outline,
        row: Row,
        column: str,
        seed: int,
        overrides: Sequence[str],
        most_rounds: int | None,
    ) -> Config:
        try:
            tree = merge({}, outline.configs[column])
            run_group = tree.get("run")
            if isinstance(run_group, dict):
                run_group.pop("seed", None)
            for layer in outline.layers:
                for more in (layer.settings, layer.columns.get(column, {}), layer.rows.get(row.label, {})):
                    tree = merge(tree, more)
            if self.columns.index(column) in self.chosen_columns:
                self._sources.add(_source(tree))
            tree = merge(tree, overrides)
            run_group = tree.get("run")
            if isinstance(run_group, dict) and "seed" in run_group:
                raise UserError(
                    f"run.seed={run_group['seed']}: the table's list of seeds sets it; leave it out"
                )
            config = resolve(merge(tree, [f"run.seed={seed}"]))
            self._longest = max(self._longest, config.train.rounds)
            if most_rounds is not None and config.train.rounds > most_rounds:
                config = resolve(merge(config.tree(), [f"train.rounds={most_rounds}"]))
            return config
        except UserError as error:
            raise UserError(f"{_place(row, column)}: {error}") from error

    def _check_one_source_for_all(self, overrides: Sequence[str]) -> None:
        """Refuse to replace different data sets of the chosen columns by one."""
        if len(self._sources) > 1 and any(
            word.startswith(("data.source=", "data.reader=")) for word in overrides
        ):
            sources = ", ".join(sorted(self._sources))
            raise UserError(
                f"{self.path}: data.source on the command line would replace {sources} in all columns; "
                "choose columns of one of them with --column LABEL"
            )

    def _check_twins(self) -> None:
        """Refuse two cells of one folder, and two that are the same run."""
        folders: dict[Path, Cell] = {}
        runs: dict[str, Cell] = {}
        for cell in self.cells:
            first = folders.setdefault(cell.folder, cell)
            if first is not cell:
                raise UserError(
                    f"{self._of(cell)}: {self._of(first, short=True)} has the same label or makes the same "
                    "folder; give each a label of its own"
                )
            first = runs.setdefault(_what_changes_results(cell.config), cell)
            if first is not cell:
                raise UserError(
                    f"{self._of(cell)}: nothing that changes a result tells it from "
                    f"{self._of(first, short=True)}; drop one of the cells (a row's `without` does)"
                )

    def _check_unpaired(self) -> None:
        """Refuse to compare two rows whose clients are not the same ones."""
        for pair in self.compare:
            first, second = (self.labels.index(label) for label in pair.rows)
            for name in pair.columns:
                column = self.columns.index(name)
                for one, other in zip(self.of(first, column), self.of(second, column), strict=True):
                    if _clients(one.config) != _clients(other.config):
                        place = _in_column(name)
                        raise UserError(
                            f"{self.path}, compare {pair.rows[0]} with {pair.rows[1]}{place}: their clients "
                            "hold different samples, so that no difference client by client exists; give "
                            "both rows the same data, data.seed and run.eval_split"
                        )

    def _check_undrawable(self) -> None:
        """Refuse heat maps of what no row's method keeps, or of parts that it has not."""
        for drawing in self.drawings:
            if not isinstance(drawing, HeatMapsEntry):
                continue
            place = f"{self.path}, figure: quantity={drawing.quantity}"
            axes = self.axes_of(drawing.quantity)
            if not axes:
                methods = [METHODS[cell.config.method.name] for cell in self.cells]
                kept = dict.fromkeys(name for method in methods for name in axes_by_name(method.diagnostics))
                known = _listed([name for name in kept if self.axes_of(name)])
                raise UserError(
                    f"{place} is invalid: of matrices the methods of its rows keep {known or 'none'}"
                )
            for key in ("client", "layers"):
                if getattr(drawing, key) is not None and len(axes) < 3:
                    raise UserError(
                        f"{place} is one matrix, {' by '.join(axes)}, of which {key} chooses nothing; "
                        f"drop {key}"
                    )

    def _take_files_of_runs(self, without: Sequence[int]) -> None:
        """Let columns, but those `without`, have their data in the user's file that their runs have read."""
        files: dict[tuple[int, str], dict[str, Any]] = {}
        for cell in self.cells:
            if cell.column not in without:
                place = cell.column, cell.config.data.source
                if place not in files and (cell.folder / "config.yaml").is_file():
                    files[place] = _file_of_run(cell)
        for number, cell in enumerate(self.cells):
            if file := files.get((cell.column, cell.config.data.source)):
                tree = cell.config.tree()
                tree["data"] |= file
                try:
                    self.cells[number] = replace(cell, config=resolve(tree))
                except UserError as error:
                    raise UserError(f"{cell.place}: {error}") from error

    def _say_changed(self, outline: Outline, shrinking: Shrinking, overrides: Sequence[str]) -> None:
        """Put into the title what the command line leaves out and changes."""
        said = []
        if shrinking.rounds is not None and shrinking.rounds < self._longest:
            said.append(f"at most {shrinking.rounds} rounds instead of {self._longest}")
        if self.seeds != outline.seeds:
            said.append(f"seeds {_listed(self.seeds)} of {_listed(outline.seeds)}")
        self.shrunk = ", ".join(said)
        changes = ", ".join(word for word in overrides if not _is_of_this_machine(word))
        notes = [f"shrunk: {self.shrunk}"] * bool(said) + [f"with {changes}"] * bool(changes)
        if notes:
            self.title += f" ({'; '.join(notes)})"

    def _of(self, cell: Cell, short: bool = False) -> str:
        """Say where a cell is, without its seed."""
        row, column = self.rows[cell.row], self.columns[cell.column]
        if short:
            return f"row {cell.row + 1} ({row.label}){_in_column(column)}"
        return _place(row, column)


def _place(row: Row, column: str) -> str:
    return f"{row.place}{_in_column(column)}"


def _in_column(column: str) -> str:
    return "" if column == ONLY else f", column {column}"


def _what_changes_results(config: Config) -> str:
    """Return a run's keys and values as text, without the keys that do not change the results of this run."""
    keys = config.result_keys()
    keys |= {"data.seed": config.data_seed, "method": [config.method.name, config.method.options.in_use()]}
    keys |= flatten({"comm": config.comm.in_use(), "server": config.server.in_use()})
    source = config.data.source
    # the first four change at most the last bits, the fifth only which rounds the best one is chosen from
    idle = {"run.clients_at_once", "run.engine", "run.device", "run.threads", "run.eval_every"}
    idle |= {key for key in keys if key.startswith("method.")}
    idle |= set() if source == "emnist" else {"data.split"}
    idle |= set() if source == "npz" else {"data.layout"}
    if keys["data.normalise"] == source:
        keys["data.normalise"] = "auto"
    return json.dumps({key: value for key, value in keys.items() if key not in idle}, sort_keys=True)


def _source(tree: Mapping[str, Any]) -> str:
    """Return what nested keys say of the data source; a source in a user's file is called as the file."""
    keys = flatten(tree)
    reader = keys.get("data.reader")
    return str(keys.get("data.source", DEFAULT_SOURCE) if reader is None else Path(str(reader)).stem)


def _clients(config: Config) -> tuple[object, ...]:
    """Return all that decides which samples each client is scored on."""
    keys = config.result_keys().items()
    data = {key: value for key, value in keys if key.startswith("data.") and key != "data.normalise"}
    return data, config.data_seed, config.run.eval_split


def _seeds(seeds: Sequence[int], wanted: Sequence[int] | None) -> list[int]:
    if wanted is None:
        return list(seeds)
    for seed in wanted:
        if seed not in seeds:
            raise UserError(f"--seeds: {seed} is none of the table's seeds; allowed: {_listed(seeds)}")
    return [seed for seed in seeds if seed in wanted]


def _name(path: Path, shrinking: Shrinking) -> str:
    """Return the file's stem, with the rounds if they are limited: some methods' runs cannot be extended."""
    return path.stem if shrinking.rounds is None else f"{path.stem}-{shrinking.rounds}rounds"


def _numbers_of(option: str, wanted: Sequence[str], labels: Sequence[str]) -> list[int]:
    """Return the numbers of labels that an option names, whole or by a part that no other has; () is all.

    A whole label goes before parts, and its own capitals before others.
    """
    numbers = set()
    for text in wanted:
        small = text.lower()
        found = (
            [label for label in labels if label == text]
            or [label for label in labels if label.lower() == small]
            or [label for label in labels if small in label.lower()]
        )
        if len(found) != 1:
            there = " | ".join(label for label in labels if label != ONLY) or "none"
            what = f"is a part of {len(found)}" if found else "is none"
            raise UserError(f"{option} {text} {what} of the labels; there are: {there}")
        numbers.add(labels.index(found[0]))
    return sorted(numbers) if wanted else list(range(len(labels)))


def _file_of_run(cell: Cell) -> dict[str, Any]:
    """Return keys of `data` for the user's file that the run in a cell's folder has read; {} for none."""
    try:
        data = Run(cell.folder).record["data"]
    except UserError:
        # which is told when the cell's folder is looked at
        return {}
    if data.get("path") is None and data.get("reader") is None:
        return {}
    whole = {"subset_per_class": None} if data.get("subset_per_class") is None else {}
    names = {key.removeprefix("data.") for key in _OF_A_COLUMN} | {"code"}
    return {key: value for key, value in data.items() if key in names} | whole


def _is_of_a_column(override: str) -> bool:
    """Whether a key says which file a column's data are in."""
    return override.partition("=")[0] in _OF_A_COLUMN or override == "data.subset_per_class=null"


def _is_of_this_machine(override: str) -> bool:
    """Whether a key only says where the data lie, or how the run is carried out."""
    key, _, _ = override.partition("=")
    return key in _WHERE_DATA_LIE or key.startswith("run.") or override == "data.subset_per_class=null"


def _listed(values: Sequence[object], separator: str = ", ") -> str:
    return separator.join(map(str, values))


def _slug(label: str) -> str:
    """Return a label as a part of a folder's name."""
    return re.sub(r"[^a-z0-9_.+]+", "-", label.lower()).strip("-.")
