"""Diagnostics of finished cells over rounds, from their checkpoints, and their means for diagnostics.csv.

Shapes: N clients, E evaluations, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl.errors import UserError
from hpcfl.results.run import Run
from hpcfl.tables.cells import Cell, Table, axes_by_diagnostic
from hpcfl.tables.file import Curves, HeatMaps, check_known

LOG = logging.getLogger(__name__)

SUMMARISED = ("first", "middle", "last")
"""Evaluations of which diagnostics.csv has lines."""


@dataclass(frozen=True)
class History:
    """A cell's accuracy, and its method's diagnostics at the evaluations that something is made of."""

    rounds: list[int]
    """The rounds after which there was an evaluation [E]."""
    accuracy: np.ndarray
    """[E, N]."""
    diagnostics: dict[str, dict[int, np.ndarray]]
    """By name, then by the number of the evaluation, which counts from 0; axes: `Method.diagnostics`.

    Of what is too large for a checkpoint's history there is the last evaluation alone.
    """
    layers: list[str]
    """Names of the layers on the diagnostics' axes."""
    common: np.ndarray | None
    """Number of classes that two clients have in common [N, N]; None where the run does not say."""
    domains: list[str]
    """The domain of each client [N]; [] where the data have none."""


def read_histories(table: Table) -> dict[Path, History]:
    """Return the histories of the finished cells by folder, of those of which something is made.

    A cell without a checkpoint has none. Warns of checkpoints that cannot be read, and leaves them out.
    Raises UserError if the figure names layers or clients that a cell does not have.
    """
    by_client = any(isinstance(one, Curves) and one.client is not None for one in table.drawings)
    wanted = [SUMMARISED, *(one.rounds for one in table.drawings if isinstance(one, HeatMaps))]
    found = {}
    for cell in table.cells:
        axes = axes_by_diagnostic(cell.config.method.name)
        has_domains = cell.config.data.source == "domains"
        if (by_client or axes or has_domains) and (run := cell.finished_run):
            try:
                history = _read(run, axes, wanted)
            except UserError as error:
                LOG.warning(f"{cell.place}: no diagnostics and no figure: {error}")
                continue
            if history is not None:
                _check_figure(table, cell, history)
                found[cell.folder] = history
    return found


def _check_figure(table: Table, cell: Cell, history: History) -> None:
    """Raise UserError if the figure names layers or a client that a cell's run does not have."""
    place = f"{table.path}, figure" + (f", column {cell.column}" if cell.column else "")
    num_clients = history.accuracy.shape[1]
    for drawing in table.drawings:
        if isinstance(drawing, HeatMaps) and drawing.quantity in history.diagnostics:
            for layer in drawing.layers_in(cell.column) or ():
                check_known(place, layer, "layer", history.layers)
        if isinstance(drawing, HeatMaps | Curves) and (drawing.client or 0) >= num_clients:
            raise UserError(f"{place}: client={drawing.client} is invalid; give 0 to {num_clients - 1}")


def evaluations(rounds: Sequence[int], wanted: Sequence[int | str]) -> list[int]:
    """Return the numbers of chosen evaluations, ascending, each once.

    Args:
        rounds: the rounds after which there were evaluations.
        wanted: "first", "middle", "last", or a round, which stands for the evaluation nearest to it.
    """
    named = {"first": 0, "middle": len(rounds) // 2, "last": len(rounds) - 1}
    nearest = range(len(rounds))
    return sorted(
        {
            named[one] if isinstance(one, str) else min(nearest, key=lambda at: abs(rounds[at] - one))
            for one in wanted
        }
    )


def _read(
    run: Run, axes: Mapping[str, tuple[str, ...]], wanted: Sequence[Sequence[int | str]]
) -> History | None:
    """Read a run's newest checkpoint; None if there is none."""
    if run.checkpoint is None:
        return None
    rounds = run.history_rounds.tolist()
    kept = sorted({at for choice in wanted for at in evaluations(rounds, choice)})
    known: dict[str, dict[int, np.ndarray]] = {}
    num_layers = 0
    for name in axes:
        if (found := run.recorded(name)) is not None:
            values, of_values = found
            there = dict(zip(of_values.tolist(), values, strict=True))
            known[name] = {at: there[rounds[at]].copy() for at in kept if rounds[at] in there}
            num_layers = max(num_layers, values.shape[2] if "layer" in axes[name] else 0)
    accuracy = run.history["accuracy"]
    common = _common_classes(run, accuracy.shape[1])
    domains = run.domains[: accuracy.shape[1]]
    history = History(rounds, accuracy, known, run.layers(num_layers), common, domains)
    run.close()
    return history


def _common_classes(run: Run, num_clients: int) -> np.ndarray | None:
    """Return how many classes clients in training have in common [N, N]; None without partition.csv."""
    if not run.partition:
        return None
    samples = run.samples_by_class("train_samples") + run.samples_by_class("evaluated_samples")
    # clients that take no part in training come last
    owned = (samples[:num_clients] > 0).astype(np.int64)
    return owned @ owned.T


def diagnostics(table: Table, histories: Mapping[Path, History]) -> list[dict[str, object]]:
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
    - Where the data have domains, there are lines of the mean accuracy over the clients of each.
    """
    lines: list[dict[str, object]] = []
    for cell in table.cells:
        history = histories.get(cell.folder)
        if history is None or history.common is None:
            continue
        axes = axes_by_diagnostic(cell.config.method.name)
        place = {"label": cell.label, "column": cell.column, "seed": cell.seed}
        for moment in evaluations(history.rounds, SUMMARISED):
            found: list[tuple[str, int | None, str, float]] = []
            for domain in sorted(set(history.domains)):
                of_domain = history.accuracy[moment][np.array(history.domains) == domain]
                found.append(("accuracy", None, f"domain {domain}", of_domain.mean()))
            for name, values in history.diagnostics.items():
                if moment in values:
                    found += [(name, *mean) for mean in _summary(axes[name], values[moment], history.common)]
            lines += [
                place
                | {"round": history.rounds[moment], "quantity": name}
                | {"layer": "" if layer is None else history.layers[layer], "clients": clients}
                | {"value": float(f"{value:.6g}")}
                for name, layer, clients, value in found
            ]
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
