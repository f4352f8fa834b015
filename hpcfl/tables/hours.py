"""How long a table takes: dry runs of one cell of each row in each column."""

from __future__ import annotations

from hpcfl.communication.network import Network
from hpcfl.formatting import Document, Grid
from hpcfl.planning.dry_run import dry_run
from hpcfl.planning.estimate import Planner
from hpcfl.tables.cells import Table
from hpcfl.tables.dealing import methods_of


def plan(table: Table) -> Document:
    """Return how long the cells take that are not finished; writes nothing. Call it on one rank only.

    UserError as `methods_of`.
    """
    header = ["method", "cells", "finished", "rounds", "hours left"]
    rows: list[list[list[str]]] = [[] for _ in table.columns]
    count, hours = 0, 0.0
    for cell, method, arrays, parts in methods_of(table, table.firsts(), num_workers=1):
        cells = table.of(cell.row, cell.column)
        finished = sum(cell.finished_run is not None for cell in cells)
        left = 0.0
        if finished < len(cells):
            planner = Planner(cell.config, method, parts, dry_run(cell.config, arrays, parts), Network(1))
            left = (len(cells) - finished) * planner.on(1).total_s / 3600
        numbers = (len(cells), finished, cell.config.train.rounds)
        rows[cell.column].append([cell.label, *map(str, numbers), f"{left:.2f}"])
        count, hours = count + len(cells), hours + left
    grids = []
    for column, label in enumerate(table.columns):
        if rows[column]:
            grids.append(Grid(label, header, rows[column]))
        if label in table.not_run:
            grids.append(Grid(label, [f"not run: {table.not_run[label]}"], []))
    notes = [
        *([table.size] if table.size else []),
        f"{count} cells, {hours:.1f} hours of one process on this machine for what is not finished, by a dry "
        "run of one cell of each row in each column.",
    ]
    return Document(table.title, notes, grids)
