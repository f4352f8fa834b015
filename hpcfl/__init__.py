"""Simulate personalised federated learning on HPC machines with MPI and PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from hpcfl.api import Setting
    from hpcfl.methods import Method
    from hpcfl.results.comparison import Comparison
    from hpcfl.results.run import Run

__version__ = "0.1.0"


def run(
    *settings: Setting,
    method: str | type[Method] | None = None,
    dataset: Any = None,
    out: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> Run | None:
    """Start or resume a run, alone or under mpirun, and return it; see `hpcfl.api.run`. Collective."""
    from hpcfl.api import run

    return run(*settings, method=method, dataset=dataset, out=out, fresh=fresh, quiet=quiet)


def load_run(path: str | Path, own_code: str | Path | Sequence[str | Path] = ()) -> Run:
    """Return the run in a folder, finished or running: its configuration, figures and models.

    Args:
        own_code: a Python file, or several, that may run if the run was made with them; no other code is run.

    Raises:
        hpcfl.errors.UserError: the folder has no run.
    """
    # every rank imports hpcfl, and none needs this
    from hpcfl.results.run import load_run

    return load_run(path, own_code)


def compare(*runs: Run) -> Comparison:
    """Return how much better runs are than others on the same clients, and which of their keys differ.

    Raises:
        hpcfl.errors.UserError: they cannot be compared.
    """
    from hpcfl.results.comparison import compare

    return compare(runs)
