"""Means of a method's diagnostics over clients, at the first, the middle and the last evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hpcfl.data.partitions import class_table
from hpcfl.methods import METHODS
from hpcfl.methods.diagnostics import axes_by_name
from hpcfl.tables.cells import Table
from hpcfl.tables.dealing import Unread, dealt_cells
from hpcfl.tables.histories import SUMMARISED, History, evaluations

Line = dict[str, object]


def diagnostics(table: Table, histories: Mapping[Path, History]) -> list[Line]:
    """Return lines of diagnostics.csv from the histories of the finished cells.

    The column `clients` says over what the value is a mean: each client with itself, pairs of clients with a
    given number of classes in common, or all clients.

    - Diagnostics [client, layer, client] and [client, client] are weights. A pair has the weight that the
      first client gives to the second; a client with itself has the weight that it gives to itself.
    - Diagnostics [client, layer, branch] and [client, component] are shares a_b. A pair has the common share
      sum_b min(a_b, a'_b); a client with itself has its largest share.
    - Diagnostics [client, layer] and [client] have means over all clients; but whole numbers [client] name
      groups. A pair has 1 if both are in the same group, and a client with itself if it is in one.
    - Diagnostics [client, path] have no lines.

    Warns of columns whose data, which tell the classes, cannot be read, and leaves them out.
    """
    lines: list[Line] = []
    unread: dict[int, Unread] = {}
    told = [cell for cell in table.cells if cell.folder in histories and histories[cell.folder].diagnostics]
    for cell, arrays, parts in dealt_cells(told, unread):
        axes = axes_by_name(METHODS[cell.config.method.name].diagnostics)
        in_training = parts[: len(parts) - cell.config.data.num_unseen(len(parts))]
        owned = class_table(arrays.y, in_training, arrays.num_classes) > 0
        common = owned.astype(np.int64) @ owned.T
        place = {"label": cell.label, "column": table.columns[cell.column], "seed": cell.seed}
        history = histories[cell.folder]
        for moment in evaluations(history.rounds, SUMMARISED):
            there = {name: by for name, by in history.diagnostics.items() if moment in by}
            for name, values in there.items():
                for layer, clients, value in _summary(axes[name], values[moment], common):
                    lines.append(
                        place
                        | {"round": history.rounds[moment], "quantity": name}
                        | {"layer": "" if layer is None else history.layers[layer], "clients": clients}
                        | {"value": float(f"{value:.6g}")}
                    )
    for found in unread.values():
        warnings.warn(f"{found.cell.place}: no diagnostics of this column: {found.reason}", stacklevel=1)
    return lines


def _summary(
    axes: tuple[str, ...], values: np.ndarray, common: np.ndarray
) -> Iterator[tuple[int | None, str, float]]:
    """Yield (layer, which clients, mean value) of a tensor with these axes; `common` [N, N]: classes."""
    if axes[-1] == "path":
        return
    if axes == ("client",) and values.dtype.kind == "i":
        axes, values = ("client", "client"), (values[:, None] == values) & (values >= 0)
    if axes == ("client",):
        yield None, "all", float(values.mean())
        return
    by_layer = np.moveaxis(values, 1, 0) if "layer" in axes else values[None]
    for number, of_layer in enumerate(by_layer):
        layer = number if "layer" in axes else None
        if axes == ("client", "layer"):
            yield layer, "all", float(of_layer.mean())
            continue
        if axes[-1] == "client":
            own, between = np.diagonal(of_layer), of_layer
        else:
            own = of_layer.max(axis=1)
            between = np.minimum(of_layer[:, None], of_layer[None]).sum(axis=-1)
        yield layer, "itself", float(own.mean())
        others = ~np.eye(len(common), dtype=bool)
        for count in np.unique(common[others])[::-1].tolist():
            yield layer, f"{count} classes in common", float(between[others & (common == count)].mean())
