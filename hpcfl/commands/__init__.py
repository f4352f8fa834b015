"""All commands except `run`, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hpcfl.communication.communicator import Communicator

Command = Callable[[Sequence[str], Communicator], bool | None]
"""Takes the words after the command's name and the ranks; returns whether it was stopped early."""

COMMANDS = {
    "list": "list_everything",
    "plan": "show_plan",
    "doctor": "check_everything",
    "data": "fetch_data",
    "report": "make_report",
    "export": "export_models",
    "predict": "predict_samples",
    "compare": "compare_runs",
    "bench": "run_bench",
    "table": "run_table",
    "claims": "judge_claims",
    "watch": "watch_runs",
    "completion": "print_completion",
}
"""The function of each command, in the module of its name, where `parser` returns what reads its words; a
run imports none of them."""

COLLECTIVE_COMMANDS = ("bench", "doctor", "plan", "table")
"""Commands that all ranks run; only rank 0 runs the others."""


def command(name: str) -> Command:
    """Return a command, imported now."""
    found: Command = getattr(importlib.import_module(f"hpcfl.commands.{name}"), COMMANDS[name])
    return found
