"""All commands beside running, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcfl.commands.bench import bench
from hpcfl.commands.data import data
from hpcfl.commands.list import list_everything
from hpcfl.commands.plan import plan
from hpcfl.commands.table import table
from hpcfl.communication.world import World

COMMANDS: dict[str, Callable[[Sequence[str], World], bool | None]] = {
    "list": list_everything,
    "plan": plan,
    "data": data,
    "bench": bench,
    "table": table,
}
"""A command takes the words behind its name and the ranks; it returns whether a request to stop ended it."""


COLLECTIVE_COMMANDS = ("bench", "table")
"""Commands that all ranks run; the others are rank 0's."""
