"""Diagnostics: quantities of a method that evaluations record, and how pages and figures draw them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcfl.parameters import Tensors
from hpcfl.training.client_group import ClientGroup

if TYPE_CHECKING:
    from hpcfl.methods.base import Method

HISTORY_LIMIT = 10_000
"""Largest number of entries, such as N*N, of a matrix of pairs of clients that the history records (below
100 MB for 2,500 evaluations)."""
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
    """Returns the values, given the method and the server's state."""
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

    def _fits(self, method: Method, limit: int) -> bool:
        """Return whether the values may be recorded: matrices of pairs of clients have a limit."""
        of_clients, of_layers = self.axes.count("client"), self.axes.count("layer")
        count = method.context.num_clients**of_clients * len(method.layers) ** of_layers
        return of_clients == 1 or count <= limit


def values_of_server(method: Method, server: Tensors) -> Tensors:
    """Return what an evaluation records of the server's state, one tensor per name."""
    chosen = _chosen(method, HISTORY_LIMIT)
    kept = {one.name: server[one.name] for one in chosen if one.name in server}
    return kept | {one.name: one.of_server(method, server) for one in chosen if one.of_server}


def values_of_clients(method: Method, clients: ClientGroup) -> Tensors:
    """Return what an evaluation records of a group, one tensor [C, ...] per name."""
    kept = {one.name: clients[one.name] for one in method.diagnostics if one.name in clients}
    return kept | {one.name: one.of_clients(method, clients) for one in method.diagnostics if one.of_clients}


def values_in_checkpoint(method: Method, server: Tensors) -> Tensors:
    """Return what a checkpoint holds beside the server's state, one tensor per name."""
    chosen = [one for one in _chosen(method, CHECKPOINT_LIMIT) if one.in_checkpoints]
    return {one.name: one.of_server(method, server) for one in chosen if one.of_server}


def _chosen(method: Method, limit: int) -> list[Diagnostic]:
    """Return the diagnostics of a method that have at most so many entries."""
    fitting = [one for one in method.diagnostics if one._fits(method, limit)]
    names = [one.name for one in fitting]
    return [one for one in fitting if one.instead_of not in names]
