"""A measured ratio with its goal, and how it is taken, shown and written.

Seconds depend on the machine and its other users; ratios of what ran one beside the other hardly do.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpcfl import __version__
from hpcfl.formatting import aligned
from hpcfl.storage.atomic import writing


@dataclass(frozen=True)
class Ratio:
    """One measured figure."""

    name: str
    value: float
    goal: float | None = None
    """The largest value that is good enough."""
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it is made of, by name; ratios with the same names have a table of their own."""

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.value <= self.goal


def compare(
    first: Callable[[], None], second: Callable[[], None], repeats: int
) -> tuple[float, float, float]:
    """Run two functions turn by turn; return the median ratio of their seconds, and both medians in s."""

    def seconds(function: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        function()
        return time.perf_counter() - began_s

    first()
    second()
    times = [(seconds(first), seconds(second)) for _ in range(repeats)]
    first_s, second_s = (statistics.median(column) for column in zip(*times, strict=True))
    return statistics.median(a / b for a, b in times), first_s, second_s


def as_tables(ratios: Sequence[Ratio]) -> str:
    """Return ratios as aligned text."""
    kinds = dict.fromkeys(tuple(ratio.parts) for ratio in ratios)
    tables = []
    for parts in kinds:
        rows = [["ratio", "value", "goal", "", *parts, "measured"]]
        rows += [_row(ratio) for ratio in ratios if tuple(ratio.parts) == parts]
        tables.append("\n".join(aligned(rows)) + "\n")
    return "\n".join(tables)


def _row(ratio: Ratio) -> list[str]:
    goal = "" if ratio.goal is None else f"<= {ratio.goal:g}"
    row = [ratio.name, f"{ratio.value:.3g}", goal, {None: "", True: "holds", False: "missed"}[ratio.holds]]
    return [*row, *(f"{value:.3g}" for value in ratio.parts.values()), ratio.detail]


def write_json(path: Path, ratios: Sequence[Ratio], num_ranks: int) -> None:
    """Write ratios with what they were measured on; UserError where that fails, StorageError without
    room."""
    shown = ("name", "value", "goal", "holds", "parts", "detail")
    found = {
        "hpcfl": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ranks": num_ranks,
        "ratios": [{key: getattr(ratio, key) for key in shown} for ratio in ratios],
    }
    with writing(path, "name another with --json FILE"):
        path.write_text(json.dumps(found, indent=1) + "\n")
