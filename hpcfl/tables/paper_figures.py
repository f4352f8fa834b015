"""What a table file's figure shows, gathered from the finished cells; `drawing.py` draws it."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpcfl.errors import UserError
from hpcfl.formatting import percent
from hpcfl.methods import METHODS
from hpcfl.methods.base import Method
from hpcfl.methods.diagnostics import axes_by_name
from hpcfl.tables.accuracies import Entry
from hpcfl.tables.cells import Cell, Table
from hpcfl.tables.file import ONLY
from hpcfl.tables.histories import History, evaluations
from hpcfl.tables.schema import BarsEntry, CurvesEntry, FigureEntry, HeatMapsEntry, PointsEntry


@dataclass(frozen=True)
class HeatMap:
    """A matrix with the names of its rows and columns."""

    title: str
    values: np.ndarray
    """[rows, columns]."""
    row_names: list[str]
    column_names: list[str]


@dataclass(frozen=True)
class HeatMaps:
    """Matrices in lines, all on one scale."""

    of: str
    """What a value is."""
    axes: tuple[str, ...]
    """What a row and a column of a matrix is."""
    lines: dict[str, list[HeatMap]]
    """By title."""
    is_log: bool
    low: float | None
    """Value of the palest colour; None: 0, or on a logarithmic scale the smallest positive value."""


@dataclass(frozen=True)
class Curve:
    """Accuracy of a row over rounds, between 0 and 1."""

    label: str
    rounds: list[int]
    by_seed: np.ndarray
    """[seeds, rounds]."""
    published: float | None


@dataclass(frozen=True)
class Curves:
    """Curves by the label of their column."""

    of: str
    """Whose accuracy it is."""
    panels: dict[str, list[Curve]]


@dataclass(frozen=True)
class Bar:
    """A row's accuracy in a column, between 0 and 1."""

    mean: float
    deviation: float | None
    """Sample standard deviation over seeds; None of one seed."""
    published: float | None


@dataclass(frozen=True)
class Bars:
    """Bars of rows, grouped by column."""

    of: str
    """Which accuracy it is."""
    groups: list[str]
    series: dict[str, dict[str, Bar]]
    """By row, then by column."""


@dataclass(frozen=True)
class Point:
    """What a row in a column costs and gives."""

    label: str
    gigabytes: float
    """Of trainable numbers, down and up, of all rounds and clients; 1 GB is 10^9 bytes."""
    accuracy: float
    deviation: float | None


@dataclass(frozen=True)
class Points:
    """Points by group: the label's part before a comma."""

    groups: dict[str, list[Point]]


Drawn = HeatMaps | Curves | Bars | Points


@dataclass(frozen=True)
class PaperFigure:
    """One picture."""

    title: str
    drawn: Drawn
    notes: list[str]
    """Sentences below it."""


def sheets(
    table: Table, known: Sequence[Entry], histories: Mapping[Path, History]
) -> dict[str, PaperFigure | None]:
    """Return the pictures of the table's figure by name; None where nothing of one is finished.

    The only one is called `figure`, several `figure_a`, `figure_b` and so on.

    Raises UserError for layers or clients that the cells do not have.
    """
    made = [_sheet(table, drawing, known, histories) for drawing in table.drawings]
    if len(made) == 1:
        return {"figure": made[0]}
    return {
        f"figure_{letter}": sheet and replace(sheet, title=f"{sheet.title} ({letter})")
        for letter, sheet in zip(string.ascii_lowercase, made, strict=False)
    }


def check_parts_not_there(table: Table, cell: Cell, method: Method) -> None:
    """Raise UserError if the figure names layers or a client that a cell's run does not have."""
    for drawing in table.drawings:
        if isinstance(drawing, HeatMapsEntry) and _axes(cell.config.method.name, drawing) == table.axes_of(
            drawing.quantity
        ):
            layers = [layer.name for layer in method.layers]
            _chosen_layers(table, drawing, table.columns[cell.column], layers)
        if isinstance(drawing, HeatMapsEntry | CurvesEntry):
            _check_client(table, drawing, method.context.num_clients)


def _sheet(
    table: Table, drawing: FigureEntry, known: Sequence[Entry], histories: Mapping[Path, History]
) -> PaperFigure | None:
    notes: list[str] = []
    drawn: Drawn | None
    if isinstance(drawing, HeatMapsEntry):
        axes = table.axes_of(drawing.quantity)
        known = [entry for entry in known if _axes(entry.config.method.name, drawing) == axes]
        drawn, notes = _heat_maps(table, drawing, known, histories)
    elif isinstance(drawing, CurvesEntry):
        drawn = _curves(table, drawing, known, histories)
    elif isinstance(drawing, PointsEntry):
        drawn = _points(known)
    else:
        drawn = _bars(table, drawing, known)
    if drawn is None:
        return None
    size = [table.size] if table.size else []
    return PaperFigure(table.title, drawn, [*size, *notes, *_scored(drawing, known), *_missing(known)])


def _heat_maps(
    table: Table, drawing: HeatMapsEntry, known: Sequence[Entry], histories: Mapping[Path, History]
) -> tuple[HeatMaps | None, list[str]]:
    name = drawing.quantity
    lines: dict[str, list[HeatMap]] = {}
    notes = []
    axes = table.axes_of(name)
    names = _short_names(known)
    for entry, title in zip(known, names, strict=True):
        cells = table.of(table.labels.index(entry.row.label), table.columns.index(entry.column))
        cell = next((one for one in cells if name in _diagnostics(histories, one)), None)
        if cell is None:
            if entry.runs:
                notes.append(f"{title or entry.row.label}: its checkpoint holds no {name}")
            continue
        history = histories[cell.folder]
        maps, rounds = _of_history(table, drawing, entry.column, axes, history)
        lines[title] = maps
        said = [f"round {rounds[0]}"] if len(rounds) == 1 else []
        if len(rounds) < len(evaluations(history.rounds, drawing.rounds)):
            said.append(f"the newest {name} alone, as the history holds none")
        said.append(
            f"seed {cell.seed}" + (f" of {', '.join(map(str, table.seeds))}" * (len(table.seeds) > 1))
        )
        said.append(f"accuracy {percent(entry.figures[cell.seed]['accuracy_mean'])} %")
        said += [] if entry.published is None else [f"published {entry.published:.2f} %"]
        notes.append(f"{title}: {', '.join(said)}".removeprefix(": "))
    if not lines:
        return None, notes
    drawn_axes = axes[1:] if drawing.client is not None else (axes[0], axes[-1])
    of = name if drawing.client is None else f"{name} of client {drawing.client}"
    return HeatMaps(of, drawn_axes, lines, drawing.scale == "log", drawing.low), notes


def _axes(method: str, drawing: HeatMapsEntry) -> tuple[str, ...] | None:
    return axes_by_name(METHODS[method].diagnostics).get(drawing.quantity)


def _diagnostics(histories: Mapping[Path, History], cell: Cell) -> Mapping[str, object]:
    return histories[cell.folder].diagnostics if cell.folder in histories else {}


def _of_history(
    table: Table, drawing: HeatMapsEntry, column: str, axes: tuple[str, ...], history: History
) -> tuple[list[HeatMap], list[int]]:
    """Return the matrices of one run, by evaluation, and within it by layer; and the evaluations' rounds."""
    _check_client(table, drawing, history.accuracy.shape[1])
    layers = _chosen_layers(table, drawing, column, history.layers) if "layer" in axes else []
    numbers = [history.layers.index(layer) for layer in layers]
    known = history.diagnostics[drawing.quantity]
    # of very many clients there is the last alone
    chosen = [at for at in evaluations(history.rounds, drawing.rounds) if at in known] or list(known)
    made = []
    for at in chosen:
        values = known[at]
        moment = [f"round {history.rounds[at]}"] if len(chosen) > 1 else []
        if drawing.client is not None:
            made.append(_heat_map(moment, values[drawing.client, numbers], row_names=layers))
        elif len(axes) == 2:
            made.append(_heat_map(moment, values, column_names=layers))
        else:
            made += [
                _heat_map([layer, *moment], values[:, number])
                for layer, number in zip(layers, numbers, strict=True)
            ]
    return made, [history.rounds[at] for at in chosen]


def _heat_map(
    title: list[str], values: np.ndarray, row_names: Sequence[str] = (), column_names: Sequence[str] = ()
) -> HeatMap:
    counted = [[str(number) for number in range(size)] for size in values.shape]
    return HeatMap(", ".join(title), values, list(row_names) or counted[0], list(column_names) or counted[1])


def _chosen_layers(table: Table, drawing: HeatMapsEntry, column: str, layers: Sequence[str]) -> list[str]:
    """Return the layers that are drawn in a column."""
    chosen = drawing.layers.get(column) if isinstance(drawing.layers, dict) else drawing.layers
    for layer in chosen or ():
        if layer not in layers:
            place = "" if column == ONLY else f", column {column}"
            raise UserError(
                f"{table.path}, figure{place}: {layer} is none of the layers; there are: {' | '.join(layers)}"
            )
    return list(chosen or layers)


def _check_client(table: Table, drawing: HeatMapsEntry | CurvesEntry, num_clients: int) -> None:
    if drawing.client is not None and drawing.client >= num_clients:
        raise UserError(
            f"{table.path}, figure: client={drawing.client} is invalid; give 0 to {num_clients - 1}"
        )


def _curves(
    table: Table, drawing: CurvesEntry, known: Sequence[Entry], histories: Mapping[Path, History]
) -> Curves | None:
    panels: dict[str, list[Curve]] = {}
    for entry in known:
        cells = table.of(table.labels.index(entry.row.label), table.columns.index(entry.column))
        by_seed: list[list[float]] = []
        rounds: list[int] = []
        for cell in (cell for cell in cells if cell.seed in entry.runs):
            if drawing.client is None:
                metrics = entry.runs[cell.seed].metrics
                rounds = metrics["round"].astype(int).tolist()
                by_seed.append(metrics["accuracy_mean"].tolist())
            elif cell.folder in histories:
                history = histories[cell.folder]
                _check_client(table, drawing, history.accuracy.shape[1])
                rounds = history.rounds
                by_seed.append(history.accuracy[:, drawing.client].tolist())
        if by_seed:
            published = entry.published if drawing.client is None else None
            curve = Curve(entry.row.label, rounds, np.array(by_seed), _share(published))
            panels.setdefault(entry.column, []).append(curve)
    of = "mean over clients" if drawing.client is None else f"client {drawing.client}"
    return Curves(of, panels) if panels else None


def _bars(table: Table, drawing: BarsEntry, known: Sequence[Entry]) -> Bars | None:
    name = "best_accuracy" if drawing.accuracy == "best" else "accuracy_mean"
    done = [entry for entry in known if entry.runs]
    series: dict[str, dict[str, Bar]] = {}
    for entry in done:
        mean = entry.mean(name)
        assert mean is not None
        bar = Bar(mean, entry.deviation(name), _share(entry.published))
        series.setdefault(entry.row.label, {})[entry.column] = bar
    columns = [label for label in table.columns if any(entry.column == label for entry in done)]
    return Bars(f"{drawing.accuracy} round", columns, series) if series else None


def _points(known: Sequence[Entry]) -> Points | None:
    groups: dict[str, list[Point]] = {}
    done = [entry for entry in known if entry.runs]
    for entry, name in zip(done, _short_names(done), strict=True):
        mean = entry.mean("accuracy_mean")
        bytes_a_turn = [entry.mean(f"bytes_{way}") for way in ("down", "up")]
        assert mean is not None
        num_clients = len(next(iter(entry.runs.values())).in_training["client"])
        turns = entry.config.train.rounds * entry.config.train.cohort_size(num_clients)
        gigabytes = sum(one or 0 for one in bytes_a_turn) * turns / 1e9
        group, _, detail = name.partition(", ")
        point = Point(detail or name, gigabytes, mean, entry.deviation("accuracy_mean"))
        groups.setdefault(group, []).append(point)
    return Points(groups) if groups else None


def _share(published: float | None) -> float | None:
    """Return a published accuracy, which is in %, as between 0 and 1."""
    return None if published is None else published / 100


def _short_names(known: Sequence[Entry]) -> list[str]:
    """Return names of entries by what tells them apart: their rows, their columns, or both."""
    rows, columns = {entry.row.label for entry in known}, {entry.column for entry in known}
    return [
        ", ".join(([entry.row.label] if len(rows) > 1 else []) + ([entry.column] if len(columns) > 1 else []))
        for entry in known
    ]


def _scored(drawing: FigureEntry, known: Sequence[Entry]) -> list[str]:
    """Say when models are scored, where rows differ in it."""
    done = [entry for entry in known if entry.runs]
    moments = {entry.scored for entry in done}
    if isinstance(drawing, HeatMapsEntry) or len(moments) < 2:
        return []
    rows = {
        moment: list(dict.fromkeys(entry.row.label for entry in done if entry.scored == moment))
        for moment in sorted(moments)
    }
    return ["scored " + "; ".join(f"{moment}: {', '.join(labels)}" for moment, labels in rows.items())]


def _missing(known: Sequence[Entry]) -> list[str]:
    """Say which of the cells that would be drawn are not finished."""
    lacking = []
    for entry, name in zip(known, _short_names(known), strict=True):
        if entry.missing:
            total = entry.missing + len(entry.runs)
            seeds = f" ({entry.missing} of {total} seeds)" if entry.runs else ""
            lacking.append(f"{name or entry.row.label}{seeds}")
    return [f"missing: {'; '.join(lacking)}"] if lacking else []
