"""All commands beside running, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hpcfl.communication.world import World

Command = Callable[[Sequence[str], World], bool | None]
"""Takes the words behind its name and the ranks; returns whether a request to stop ended it."""

COMMANDS = {
    "list": ("list", "list_everything"),
    "plan": ("plan", "show_plan"),
    "data": ("data", "fetch_data"),
    "bench": ("bench", "run_bench"),
    "table": ("table", "run_table"),
}
"""The module and the function of each; a run, which starts on every rank, imports none of them."""

COLLECTIVE_COMMANDS = ("bench", "table")
"""Commands that all ranks run; the others are rank 0's."""


def command(name: str) -> Command:
    """Import a command."""
    module, function = COMMANDS[name]
    found: Command = getattr(importlib.import_module(f"hpcfl.commands.{module}"), function)
    return found
