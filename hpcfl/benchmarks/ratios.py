"""A measured ratio with its goal, and how it is taken, shown, written and compared.

Seconds depend on the machine and its other users; ratios of what ran one beside the other hardly do.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpcfl import __version__
from hpcfl.errors import UserError
from hpcfl.formatting import aligned


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

    def seconds(function: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        function()
        return time.perf_counter() - began_s

    first()
    second()
    times = [(seconds(first), seconds(second)) for _ in range(repeats)]
    first_s, second_s = (statistics.median(column) for column in zip(*times, strict=True))
    return statistics.median(a / b for a, b in times), first_s, second_s


def as_tables(ratios: Sequence[Ratio], before: Mapping[str, float]) -> str:
    """Return ratios as aligned text, beside earlier values by name if there are any."""
    kinds = dict.fromkeys(tuple(ratio.parts) for ratio in ratios)
    tables = []
    for parts in kinds:
        rows = [["ratio", "value", "goal", "", *(["before", "change"] if before else []), *parts, "measured"]]
        rows += [_row(ratio, before) for ratio in ratios if tuple(ratio.parts) == parts]
        tables.append("\n".join(aligned(rows)) + "\n")
    return "\n".join(tables)


def _row(ratio: Ratio, before: Mapping[str, float]) -> list[str]:
    goal = "" if ratio.goal is None else f"{'>=' if ratio.is_floor else '<='} {ratio.goal:g}"
    row = [ratio.name, f"{ratio.value:.3g}", goal, {None: "", True: "holds", False: "missed"}[ratio.holds]]
    if before:
        old = before.get(ratio.name)
        row += [f"{old:.3g}", f"{ratio.value / old - 1:+.0%}"] if old else ["", ""]
    return [*row, *(f"{value:.3g}" for value in ratio.parts.values()), ratio.detail]


def write_json(path: Path, ratios: Sequence[Ratio], num_ranks: int) -> None:
    """Write ratios with what they were measured on; UserError where that is not possible."""
    shown = ("name", "value", "goal", "holds", "parts", "detail")
    found = {
        "hpcfl": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ranks": num_ranks,
        "ratios": [{key: getattr(ratio, key) for key in shown} for ratio in ratios],
    }
    try:
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another with --json FILE") from error


def read_json(path: Path, num_ranks: int) -> dict[str, float]:
    """Return the values of an earlier run by name, with a warning where it had other ranks.

    Raises UserError if the file is none of `write_json`.
    """
    try:
        found = json.loads(path.read_text())
        ranks = int(found["ranks"])
        values = {str(ratio["name"]): float(ratio["value"]) for ratio in found["ratios"]}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file of hpcfl bench --json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no file of hpcfl bench --json FILE; give one that is") from error
    if ranks != num_ranks:
        warnings.warn(f"{path} has {ranks} ranks, this run {num_ranks}: do not compare", stacklevel=1)
    return values
