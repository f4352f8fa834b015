"""Diagnostics: quantities of a method that evaluations record, and how pages and figures draw them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpcfl.parameters import Tensors
from hpcfl.training.client_group import ClientGroup

HISTORY_LIMIT = 10_000
"""Largest number of entries, such as N*N, of a computed matrix of pairs of clients that the history records
(below 100 MB for 2,500 evaluations)."""
CHECKPOINT_LIMIT = 2**24
"""Largest number of its entries that a checkpoint holds for readers (64 MB)."""

AXES = ("client", "layer", "branch", "component", "path")


@dataclass(frozen=True)
class Diagnostic:
    """A quantity of the server's or the clients' state that every evaluation records.

    Its values are the state's tensor of this name, unless `of_server` or `of_clients` computes them.

    Axes are "client" first, then "layer", "branch", "component", "path" or a second "client":

    - ("client", "layer", "client") and ("client", "layer", "branch"): a matrix for each layer, and for one
      client a matrix of its layers.
    - ("client", "client"), ("client", "layer"), ("client", "component") and ("client", "path"): one matrix.
    - ("client",): a line over rounds for each client; with `is_name`, a matrix of clients by rounds.

    Matrices are of one evaluation, and all evaluations can be stepped through.
    """

    name: str
    axes: tuple[str, ...]
    title: str
    caption: str
    """What a value means and where the idea is from (paper and figure)."""
    low: float | None = None
    """Value of the palest colour or the axis' lower end; None: the smallest one there is."""
    high: float | None = None
    """Value of the darkest colour or the axis' upper end; None: the largest one there is."""
    is_name: bool = False
    """Whether whole numbers name groups, such as clusters; negative ones name none."""
    entries: Callable[[Any], list[str]] | None = None
    """Returns names of the entries along the last axis, given the method's parameters; None: numbers."""
    of_server: Callable[[Any, Tensors], Tensor] | None = None
    """Returns the values, given the method and the server's state; not recorded in the history if they are
    of pairs of clients and more than HISTORY_LIMIT."""
    of_clients: Callable[[Any, ClientGroup], Tensor] | None = None
    """Returns the values [C, ...] of a group of clients, given the method and the group."""
    in_checkpoints: bool = False
    """Whether checkpoints too hold the values `of_server`, for readers; a resumed run does not load them."""
    instead_of: str | None = None
    """The diagnostic in whose place this one is recorded, where that one has too many entries."""

    def __post_init__(self) -> None:
        if self.axes[:1] != ("client",):
            raise ValueError(f"diagnostic {self.name!r}: the first of its axes {self.axes} must be 'client'")
        if unknown := [axis for axis in self.axes if axis not in AXES]:
            raise ValueError(
                f"diagnostic {self.name!r} has the axis {unknown[0]!r}; allowed: {', '.join(AXES)}"
            )
        if len(self.axes) > 2 and self.axes[1:-1] != ("layer",):
            raise ValueError(f"diagnostic {self.name!r}: the second of its axes {self.axes} must be 'layer'")

    def fits(self, num_clients: int, num_layers: int, limit: int) -> bool:
        """Return whether computed values may be recorded: matrices of pairs of clients have a limit."""
        of_clients, of_layers = self.axes.count("client"), self.axes.count("layer")
        return of_clients == 1 or num_clients**of_clients * num_layers**of_layers <= limit
