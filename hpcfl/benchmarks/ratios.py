"""A measured ratio with its goal, and how it is taken, shown, written and compared.

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
from typing import Any

import torch

from hpcfl import __version__
from hpcfl.errors import UserError
from hpcfl.formatting import Document, Grid, as_text


@dataclass(frozen=True)
class Ratio:
    """One measured figure."""

    name: str
    value: float
    goal: float | None = None
    detail: str = ""
    is_floor: bool = False
    """Whether the goal is the least value that is good enough, not the largest."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it is made of, by name; ratios with the same names stand in a table of their own."""

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.is_floor else self.value <= self.goal


def compare(
    first: Callable[[], None], second: Callable[[], None], repeats: int
) -> tuple[float, float, float]:
    """Run two functions turn by turn; return the median ratio of their seconds, and both medians in s."""
    first()
    second()
    times = [(_seconds(first), _seconds(second)) for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return statistics.median(a / b for a, b in times), medians[0], medians[1]


@dataclass(frozen=True)
class Earlier:
    """What an earlier run measured."""

    ranks: int
    values: dict[str, float]
    """By name of the ratio."""


def as_table(ratios: Sequence[Ratio], before: Earlier | None, num_ranks: int) -> str:
    """Return the ratios of so many ranks as aligned text, beside those of an earlier run if there is one."""
    notes = []
    if before and before.ranks != num_ranks:
        notes.append(f"The earlier run had {before.ranks} ranks, this one has {num_ranks}: do not compare.")
    kinds = dict.fromkeys(tuple(ratio.parts) for ratio in ratios) or [()]
    grids = [_grid([r for r in ratios if tuple(r.parts) == parts], parts, before) for parts in kinds]
    return as_text(Document("hpcfl bench", notes, grids))


def _grid(ratios: Sequence[Ratio], parts: Sequence[str], before: Earlier | None) -> Grid:
    """Return a table of ratios that consist of the same parts."""
    words = {None: "", True: "holds", False: "missed"}
    header = ["ratio", "value", "goal", "", *(["before", "change"] if before else []), *parts, "measured"]
    rows = []
    for ratio in ratios:
        goal = "" if ratio.goal is None else f"{'>=' if ratio.is_floor else '<='} {ratio.goal:g}"
        row = [ratio.name, f"{ratio.value:.3g}", goal, words[ratio.holds]]
        if before:
            old = before.values.get(ratio.name)
            row += ["", ""] if old is None else [f"{old:.3g}", f"{ratio.value / old - 1:+.0%}" if old else ""]
        rows.append([*row, *(f"{ratio.parts[part]:.3g}" for part in parts), ratio.detail])
    return Grid("", header, rows)


def write_json(path: Path, ratios: Sequence[Ratio], num_ranks: int) -> None:
    """Write ratios with what they were measured on; UserError where that is not possible."""
    found: dict[str, Any] = {
        "hpcfl": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ranks": num_ranks,
        "ratios": [
            {
                "name": r.name,
                "value": r.value,
                "goal": r.goal,
                "holds": r.holds,
                "parts": dict(r.parts),
                "detail": r.detail,
            }
            for r in ratios
        ],
    }
    try:
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another with --json FILE") from error


def read_json(path: Path) -> Earlier:
    """Return what an earlier run measured; UserError if the file is none of `write_json`."""
    try:
        found = json.loads(path.read_text())
        values = {str(ratio["name"]): float(ratio["value"]) for ratio in found["ratios"]}
        return Earlier(int(found["ranks"]), values)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file of hpcfl bench --json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no file of hpcfl bench --json FILE; give one that is") from error


def _seconds(function: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
