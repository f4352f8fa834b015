"""Which cells of a table can be run, and how long they take."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import read_source
from hpcfl.errors import UserError
from hpcfl.formatting import Document, Grid, readable_seconds
from hpcfl.methods.base import Method
from hpcfl.planning.dry_run import dry_run, lacks_memory, missing_gpu
from hpcfl.planning.estimate import Planner
from hpcfl.setup.experiment import make_method, partition_samples
from hpcfl.setup.validate import check_chain, check_settings_of_data, state_bytes, too_large
from hpcfl.tables.cells import Cell, Table

LOG = logging.getLogger(__name__)


def methods_of(
    table: Table, cells: Sequence[Cell], num_workers: int
) -> Iterator[tuple[Cell, Method, Arrays, list[ClientIndices]]]:
    """Yield cells, their methods and data, but those of columns whose data cannot be read (`Table.not_run`).

    Data are loaded once for cells in a row that share them. Raises UserError, with the cell's place, for what
    cannot be run, and where no chosen column has data.
    """
    loaded: object = None
    for cell in cells:
        if cell.column in table.not_run:
            continue
        data = (cell.config.tree()["data"], cell.config.data_seed)
        try:
            if data != loaded:
                arrays = read_source(cell.config.data)
        except UserError as error:
            table.not_run[cell.column] = str(error)
            continue
        try:
            if data != loaded:
                parts, loaded = partition_samples(cell.config, arrays), data
            method = make_method(cell.config, arrays, parts)
            check_settings_of_data(cell.config, arrays, method)
            check_chain(method, num_workers)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        yield cell, method, arrays, parts
    if table.not_run.keys() == {cell.column for cell in table.chosen}:
        column, reason = next(iter(table.not_run.items()))
        raise UserError(f"{table.path}, column {column}: {reason}" if column else f"{table.path}: {reason}")


def plan(table: Table) -> Document:
    """Return how long the cells take that are not finished; writes nothing. Call it on one rank only.

    UserError as `methods_of`.
    """
    header = ["method", "cells", "finished", "rounds", "time left"]
    rows: dict[str, list[list[str]]] = {column: [] for column in table.columns}
    count, seconds, missing = 0, 0.0, ""
    for cell, method, arrays, parts in methods_of(table, table.firsts(), num_workers=1):
        cells = table.cells_of(cell.label, cell.column)
        finished = sum(one.finished_run is not None for one in cells)
        left_s, reason = 0.0, None
        if finished < len(cells):
            if reason := too_large(method) or lacks_memory(method, state_bytes(method)):
                LOG.warning(f"{cell.place}, without a time: {reason}")
            else:
                measured = dry_run(cell.config, arrays, parts)
                planner = Planner(cell.config.run, method, parts, measured)
                missing = missing or missing_gpu(cell.config.run, measured)
                left_s = (len(cells) - finished) * planner.on(1).total_s
        numbers = (len(cells), finished, cell.config.train.rounds)
        rows[cell.column].append(
            [cell.label, *map(str, numbers), "-" if reason else readable_seconds(left_s)]
        )
        count, seconds = count + len(cells), seconds + left_s
    grids = []
    for column in table.columns:
        if rows[column]:
            grids.append(Grid(column, header, rows[column]))
        if column in table.not_run:
            grids.append(Grid(column, [f"not run: {table.not_run[column]}"], []))
    here = f"this machine{missing}," if missing else "this machine"
    notes = [
        *([table.size] if table.size else []),
        f"{count} cells, {readable_seconds(seconds)} of one process on {here} for what is not finished, by a "
        "dry run of one cell of each row in each column.",
    ]
    return Document(table.title, notes, grids)
