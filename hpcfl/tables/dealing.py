"""Cells of a table with their data: read and dealt once for cells that share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.methods.base import Method
from hpcfl.setup.experiment import deal, make_method, read_source
from hpcfl.setup.validate import check_chain
from hpcfl.tables.cells import Cell, Table


def methods_of(
    table: Table, cells: Iterable[Cell], num_workers: int
) -> Iterator[tuple[Cell, Method, Arrays, list[ClientIndices]]]:
    """Yield cells, their methods and data, but those of columns whose data cannot be read (`Table.not_run`).

    Raises UserError, with the cell's place, for what cannot be run, and where no chosen column has data.
    """
    unread: dict[int, Unread] = {}
    for cell, arrays, parts in dealt_cells(cells, unread):
        try:
            method = make_method(cell.config, arrays, parts)
            check_chain(method, num_workers)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        yield cell, method, arrays, parts
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
