"""What the checkpoints of finished cells tell over rounds, each read once.

Shapes: N clients, E evaluations.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.methods.diagnostics import axes_by_name
from hpcfl.results.run import Run
from hpcfl.tables.cells import Table
from hpcfl.tables.schema import CurvesEntry, HeatMapsEntry

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


def histories(table: Table) -> dict[Path, History]:
    """Return the histories of the finished cells by folder, of those of which something is made.

    Warns of checkpoints that cannot be read, and leaves them out.
    """
    by_client = any(isinstance(one, CurvesEntry) and one.client is not None for one in table.drawings)
    wanted = [SUMMARISED, *(one.rounds for one in table.drawings if isinstance(one, HeatMapsEntry))]
    found = {}
    for cell in table.cells:
        axes = axes_by_name(METHODS[cell.config.method.name].diagnostics)
        if (by_client or axes) and (run := cell.finished_run):
            try:
                history = _read(run, axes, wanted)
            except UserError as error:
                warnings.warn(f"{cell.place}: no diagnostics and no figure: {error}", stacklevel=1)
                continue
            if history is not None:
                found[cell.folder] = history
    return found


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
    layers = [0]
    for name in axes:
        if (found := run.recorded(name)) is not None:
            values, of_values = found
            there = dict(zip(of_values.tolist(), values, strict=True))
            by_evaluation = {at: there[rounds[at]].copy() for at in kept if rounds[at] in there}
            known |= {name: by_evaluation} if by_evaluation else {}
            layers.append(values.shape[2] if "layer" in axes[name] else 0)
    history = History(rounds, run.history["accuracy"], known, run.layers(max(layers)))
    run.close()
    return history
