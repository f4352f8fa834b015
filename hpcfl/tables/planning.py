"""How long a table takes: its gradients, and hours after timing a few steps of each network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcfl.communication.world import World
from hpcfl.config import Config
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.formatting import Document, Grid
from hpcfl.methods.base import Method
from hpcfl.simulation.experiment import deal, is_batched, make_method, read_source
from hpcfl.simulation.refusals import refuse_chain
from hpcfl.simulation.work import step_seconds, work_of
from hpcfl.tables.cells import Cell, Table


@dataclass(frozen=True)
class PlannedRun:
    """A row in a column."""

    cell: Cell
    """Cell of the first seed."""
    cells: int
    finished: int
    gradients: float
    """Gradients of mini-batches in one cell: those of training, and before evaluations those of fine-tuning
    and of clients that take no part in training."""
    step_s: float
    """Seconds of one gradient of the network and the update with it, on this machine."""

    @property
    def hours(self) -> float:
        """Of one process, for all its cells."""
        return self.cells * self.gradients * self.step_s / 3600

    @property
    def hours_left(self) -> float:
        return self.hours * (self.cells - self.finished) / self.cells


def plan(table: Table) -> Document:
    """Return the estimated costs of a table's cells; runs and writes nothing. Call it on one rank only."""
    runs = list(planned_runs(table))
    header = ["method", "cells", "finished", "gradients a cell", "ms a gradient", "hours"]
    grids = []
    for column, label in enumerate(table.columns):
        rows = [
            [
                run.cell.label,
                str(run.cells),
                str(run.finished),
                f"{run.gradients:,.0f}",
                f"{1e3 * run.step_s:.2f}",
                f"{run.hours:.2f}",
            ]
            for run in runs
            if run.cell.column == column
        ]
        if rows:
            grids.append(Grid(label, header, rows))
        if label in table.not_run:
            grids.append(Grid(label, [f"not run: {table.not_run[label]}"], []))
    total = sum(run.cells * run.gradients for run in runs)
    hours, left = sum(run.hours for run in runs), sum(run.hours_left for run in runs)
    notes = [
        *([table.size] if table.size else []),
        f"{sum(run.cells for run in runs)} cells, {total:,.0f} gradients of mini-batches, "
        f"{hours:.1f} hours of one process on this machine, {left:.1f} hours for what is not finished. "
        "Gradients are those of training, and "
        "before evaluations those of fine-tuning and of unseen clients; hours are these times a gradient of "
        "the network timed here (fedmn: of its modular one, all paths open and pretraining included), "
        "without evaluation, server and messages, and whatever a method computes beside the network "
        "(hpcfl plan measures those of one run).",
    ]
    return Document(table.title, notes, grids)


def planned_runs(table: Table) -> Iterator[PlannedRun]:
    """Yield the chosen runs of a table, column by column; UserError as `methods_of`."""
    seconds: dict[tuple[object, ...], float] = {}
    for cell, method in methods_of(table, table.firsts(), num_workers=1):
        config, cells = cell.config, table.of(cell.row, cell.column)
        key = _timing_key(config, method)
        if key not in seconds:
            seconds[key] = step_seconds(config, method)
        finished = sum(cell.finished_run is not None for cell in cells)
        yield PlannedRun(cell, len(cells), finished, work_of(config, method).total, seconds[key])


def methods_of(table: Table, cells: Iterable[Cell], num_workers: int) -> Iterator[tuple[Cell, Method]]:
    """Yield cells and their methods, but those of columns whose data cannot be read (`Table.not_run`).

    Raises UserError, with the cell's place, for what cannot be run, and where no chosen column has data.
    """
    unread: dict[int, Unread] = {}
    for cell, arrays, parts in dealt_cells(cells, unread):
        try:
            method = make_method(cell.config, arrays, parts)
            refuse_chain(method, num_workers)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        yield cell, method
    table.not_run = {table.columns[column]: found.reason for column, found in unread.items()}
    if set(unread) == {table.cells[number].column for number in table.chosen}:
        first = next(iter(unread.values()))
        raise UserError(f"{first.cell.place}: {first.reason}")


@dataclass(frozen=True)
class Unread:
    """A column's first cell whose data cannot be read."""

    cell: Cell
    reason: str


def dealt_cells(
    cells: Iterable[Cell], unread: dict[int, Unread]
) -> Iterator[tuple[Cell, Arrays, list[ClientIndices]]]:
    """Yield cells with their data and their clients' samples, and enter columns without data into `unread`.

    Data are loaded once for cells in a row that share them. Raises UserError, with the cell's place, for
    samples that cannot be dealt.
    """
    data: object = None
    dealt: tuple[Arrays, list[ClientIndices]]
    for cell in cells:
        if cell.column in unread:
            continue
        of_cell = (cell.config.tree()["data"], cell.config.data_seed)
        if of_cell != data:
            try:
                arrays = read_source(cell.config)
            except UserError as error:
                unread[cell.column] = Unread(cell, str(error))
                continue
            try:
                data, dealt = of_cell, (arrays, deal(cell.config, arrays))
            except UserError as error:
                raise UserError(f"{cell.place}: {error}") from error
        yield cell, *dealt


def _timing_key(config: Config, method: Method) -> tuple[object, ...]:
    """Return all that a step's seconds depend on."""
    context, run = method.context, config.run
    device = World().device(run.device)
    engine = (run.clients_at_once, run.convolutions, run.tf32) if is_batched(config, device) else None
    network = (config.model, config.model_options.model_dump_json(), context.image_shape, context.num_classes)
    own = "" if method.network is context.network else f"{config.method} {method.params.model_dump_json()}"
    train = (config.train.batch_size, config.train.precision)
    return (*network, own, *train, str(device), engine, run.threads)
