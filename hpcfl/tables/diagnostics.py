"""Means of a method's diagnostics over clients, at the first, the middle and the last evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcfl.data.partitions import class_table
from hpcfl.methods import METHODS
from hpcfl.simulation.experiment import make_method
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.ledger import METRICS
from hpcfl.tables.cells import Table
from hpcfl.tables.figures import is_finished
from hpcfl.tables.planning import dealt_cells

DIAGNOSTIC_COLUMNS = ("label", "column", "seed", "round", "quantity", "layer", "clients", "value")
"""Columns of diagnostics.csv."""

Line = dict[str, object]


def diagnostics(table: Table) -> list[Line]:
    """Return lines of diagnostics.csv from the checkpoints of the finished cells.

    The column `clients` says over what the value is a mean: each client with itself, pairs of clients with a
    given number of classes in common, or all clients.

    - Diagnostics [client, layer, client] are weights. A pair has the weight that the first client gives to
      the second; a client with itself has the weight that it gives to itself.
    - Diagnostics [client, layer, branch] are shares a_b. A pair has the common share sum_b min(a_b, a'_b); a
      client with itself has its largest share.
    - Diagnostics [client, layer] and [client] have means over all clients.
    """
    lines: list[Line] = []
    told = [cell for cell in table.cells if METHODS[cell.config.method].history_axes and is_finished(cell)]
    for cell, arrays, parts in dealt_cells(told):
        axes = METHODS[cell.config.method].history_axes
        owned = class_table(arrays.y, parts, arrays.num_classes) > 0
        common = owned.astype(np.int64) @ owned.T
        layers = [layer.name for layer in make_method(cell.config, arrays, parts).layers]
        place = {"label": cell.label, "column": table.columns[cell.column], "seed": cell.seed}
        checkpoint = CheckpointStore(cell.folder).load()
        if checkpoint is None:
            continue
        checkpoint.close()
        rounds = checkpoint.ledger["metrics"].values[:, METRICS.index("round")]
        for moment in sorted({0, len(rounds) // 2, len(rounds) - 1}):
            for name in [name for name in axes if name in checkpoint.history]:
                for layer, clients, value in _summary(axes[name], checkpoint.history[name][moment], common):
                    lines.append(
                        place
                        | {"round": int(rounds[moment]), "quantity": name}
                        | {"layer": "" if layer is None else layers[layer], "clients": clients}
                        | {"value": float(f"{value:.6g}")}
                    )
    return lines


def _summary(
    axes: tuple[str, ...], values: np.ndarray, common: np.ndarray
) -> Iterator[tuple[int | None, str, float]]:
    """Yield (layer, which clients, mean value) of a tensor with these axes; `common` [N, N]: classes."""
    if axes == ("client",):
        yield None, "all", float(values.mean())
        return
    for layer in range(values.shape[1]):
        of_layer = values[:, layer]
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
