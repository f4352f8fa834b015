"""A run folder seen from outside, also while a run writes it: reads, takes no lock, writes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcfl.config import ENVIRONMENT, flatten
from hpcfl.errors import UserError, printable
from hpcfl.storage.lock import Holder, holder
from hpcfl.storage.reading import read_record, read_rows, whole_lines

LOG_BYTES = 10_000
"""How much of the end of log.txt is read."""

State = Literal["running", "finished", "stopped", "killed", "out of sight"]
"""`stopped` has given the lock up, `killed` has not. `out of sight`: on another machine, may be running."""

ENDED: tuple[State, ...] = ("finished", "stopped", "killed")

# How far the run was at a line of the log; a start, which names the clients, begins at round 0.
_ROUND = re.compile(r" round (\d{1,15})/\d+ | resuming after round (\d{1,15}) of | clients, in ")


@dataclass(frozen=True)
class RunView:
    """One run folder at one moment."""

    path: Path
    config: Mapping[str, Any]
    """The nested keys of config.yaml."""
    metrics: list[dict[str, float]]
    """The rows of metrics.csv, by column."""
    log: list[str]
    """The last lines of log.txt."""
    holder: Holder
    is_complete: bool
    """Whether clients.csv is there, which a run writes last."""
    changed_s: float
    """When the run last wrote, in seconds since 1970; checkpoints apart."""

    @property
    def rounds(self) -> int:
        """All rounds that the run is to do."""
        return int(self.config["train"]["rounds"])

    @property
    def command(self) -> str:
        """What was typed to start the run."""
        return printable(str((self.config.get(ENVIRONMENT) or {}).get("command", "the same command")))

    @property
    def done(self) -> int:
        """Rounds done, as far as evaluations and the log tell."""
        logged = [match for line in self.log for match in _ROUND.finditer(f"{line} ")]
        told = int(logged[-1][1] or logged[-1][2] or 0) if logged else 0
        return max(told, int(self.metrics[-1]["round"]) if self.metrics else 0)

    @property
    def state(self) -> State:
        if self.is_complete and self.metrics and self.metrics[-1]["round"] == self.rounds:
            return "finished"
        if self.holder.is_seen:
            return "running"
        if not self.holder.owner:
            return "stopped"
        return "killed" if self.holder.is_gone else "out of sight"


def view(path: Path) -> RunView:
    """Look at a run folder; raise UserError where there is none."""
    try:
        return RunView(
            path,
            _record(path),
            [{name: float(value) for name, value in row.items()} for row in read_rows(path / "metrics.csv")],
            [printable(line) for line in whole_lines(path / "log.txt", LOG_BYTES).splitlines()],
            _holder(path),
            (path / "clients.csv").exists(),
            max(_changed_s(path / name) for name in ("config.yaml", "metrics.csv", "log.txt")),
        )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}: {error.filename}") from error


def _holder(path: Path) -> Holder:
    """Return who has the lock, by a name that a terminal can show."""
    found = holder(path)
    return replace(found, owner=printable(found.owner))


def _record(path: Path) -> dict[str, Any]:
    """Return the nested keys of config.yaml; UserError where those that are shown are not there."""
    tree = read_record(path)
    keys = flatten(tree)
    texts = [keys.get(f"{group}.name") for group in ("method", "data.partition", "model")]
    texts.append(keys.get("data.source"))
    counts = [keys.get("train.rounds"), keys.get("run.seed"), keys.get("data.clients") or 0]
    if not all(isinstance(text, str) and text == printable(text) for text in texts) or not all(
        isinstance(count, int) and count >= 0 for count in counts
    ):
        raise UserError(f"{path / 'config.yaml'} is damaged; name the folder of another run")
    return tree


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
