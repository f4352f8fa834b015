"""All commands beside running, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcfl.commands.bench import run_bench
from hpcfl.commands.data import fetch_data
from hpcfl.commands.list import list_everything
from hpcfl.commands.plan import show_plan
from hpcfl.commands.table import run_table
from hpcfl.communication.world import World

COMMANDS: dict[str, Callable[[Sequence[str], World], bool | None]] = {
    "list": list_everything,
    "plan": show_plan,
    "data": fetch_data,
    "bench": run_bench,
    "table": run_table,
}
"""A command takes the words behind its name and the ranks; it returns whether a request to stop ended it."""


COLLECTIVE_COMMANDS = ("bench", "table")
"""Commands that all ranks run; the others are rank 0's."""
