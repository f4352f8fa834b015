"""What a method is known by, as pictures: declared by its file, drawn by pages and figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """A quantity of a method's history, to be drawn by its axes (`Method.history_axes`).

    - ("client", "layer", "client") and ("client", "layer", "branch"): a matrix for each layer, and for one
      client a matrix of its layers.
    - ("client", "client"), ("client", "layer"), ("client", "component") and ("client", "path"): one matrix.
    - ("client",): a line over rounds for each client; with `is_name`, a matrix of clients by rounds.

    Matrices are of one evaluation, and all evaluations can be stepped through.
    """

    quantity: str
    """Name in the history."""
    title: str
    caption: str
    """What a value means and where the idea is from (paper and figure)."""
    low: float | None = None
    """Value of the palest colour or the axis' lower end; None: the smallest one there is."""
    high: float | None = None
    """Value of the darkest colour or the axis' upper end; None: the largest one there is."""
    is_name: bool = False
    """Whether whole numbers name groups, such as clusters; negative ones name none."""
