"""Simulate personalised federated learning on HPC machines with MPI and PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfl.api import run
    from hpcfl.results.comparison import compare
    from hpcfl.results.run import load_run

__all__ = ["__version__", "compare", "load_run", "run"]
__version__ = "0.1.0"

_MODULES = {"run": "hpcfl.api", "load_run": "hpcfl.results.run", "compare": "hpcfl.results.comparison"}
"""Where the functions are; every rank imports hpcfl, and none needs them before they are called."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
