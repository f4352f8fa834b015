"""All commands beside running, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hpcfl.communication.communicator import Communicator

Command = Callable[[Sequence[str], Communicator], bool | None]
"""Takes the words behind its name and the ranks; returns whether a request to stop ended it."""

COMMANDS = {
    "list": "list_everything",
    "plan": "show_plan",
    "doctor": "check_everything",
    "data": "fetch_data",
    "report": "make_report",
    "export": "export_models",
    "predict": "predict_images",
    "compare": "compare_runs",
    "bench": "run_bench",
    "table": "run_table",
    "claims": "judge_claims",
    "watch": "watch_runs",
    "completion": "print_completion",
}
"""The function of each, in the module of its name; a run, on all its ranks, imports none of them."""

COLLECTIVE_COMMANDS = ("bench", "doctor", "plan", "table")
"""Commands that all ranks run; the others are rank 0's."""


def command(name: str) -> Command:
    """Return a command, imported now."""
    found: Command = getattr(importlib.import_module(f"hpcfl.commands.{name}"), COMMANDS[name])
    return found
