"""A run's folder: what configuration it belongs to, where it was made, and its log."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hpcfl import __version__
from hpcfl.checkpoint import CheckpointStore, LoadedCheckpoint
from hpcfl.config import Config, differences
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.process import LOCK_NAME, FolderLock

ENVIRONMENT = "environment"
"""The part of config.yaml that says where and how, beside the configuration itself."""

_PACKAGES = ("torch", "torchvision", "numpy", "h5py", "mpi4py", "scikit-learn")


class RunFolder:
    """One run's files; used by rank 0 alone.

    `check` looks without touching anything; `open` locks the folder, reads its checkpoint and takes it over.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.warnings: list[str] = []
        """What the user should know about this folder."""
        self.store = CheckpointStore(path, self.warnings.append)
        self.checkpoint: LoadedCheckpoint | None = None
        """Where the run goes on; None at round 0."""
        self._config = config

    def check(self, fresh: bool) -> None:
        """Refuse a folder of something else, or of another configuration, with a UserError."""
        if fresh or not self.path.exists():
            return
        recorded = self._recorded()
        if recorded is None:
            if not self.path.is_dir() or any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
                raise UserError(f"{self.path} is there and is no run folder; name another with --out DIR")
            return
        there = {group: keys for group, keys in recorded.items() if group != ENVIRONMENT}
        changed = differences(there, self._config.tree())
        if self._grows(there):
            changed = [line for line in changed if not line.startswith("train.rounds:")]
        if changed:
            raise UserError(
                f"{self.path} holds a run with another configuration ({'; '.join(changed)}); "
                "give the same keys to resume it, --out DIR for another folder, or --fresh to start over"
            )

    def open(self, fresh: bool, ranks: Sequence[str], at_exit: ExitStack) -> None:
        """Lock the folder until `at_exit` closes, load its newest checkpoint, and write config.yaml.

        Raises UserError if another run holds the folder, or if its checkpoints cannot be used.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = at_exit.enter_context(FolderLock(self.path))
        if fresh and any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
            self.path.rename(_free_name(self.path))
            lock.release()
            self.path.mkdir()
            at_exit.enter_context(FolderLock(self.path))
        self.checkpoint = self.store.load()
        environment = _environment(ranks)
        before = (self._recorded() or {}).get(ENVIRONMENT, {})
        for key in ("torch", "processor"):
            if before and before.get(key) != environment[key]:
                self.warnings.append(
                    f"this run began with {key} {before.get(key)} and goes on with {environment[key]}: "
                    "the last bits may differ"
                )
        text = self._config.yaml() + yaml.safe_dump({ENVIRONMENT: environment}, sort_keys=False)
        temporary = self.path / "config.yaml.tmp"
        temporary.write_text(text)
        os.replace(temporary, self.path / "config.yaml")

    def log(self, text: str) -> None:
        """Append a line with the time of day to log.txt."""
        with (self.path / "log.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _recorded(self) -> dict[str, Any] | None:
        record = self.path / "config.yaml"
        if not record.is_file():
            return None
        try:
            tree = yaml.safe_load(record.read_text())
        except (yaml.YAMLError, UnicodeDecodeError):
            tree = None
        if not isinstance(tree, dict):
            raise UserError(f"{record} is damaged; --fresh moves the folder aside and starts over")
        return tree

    def _grows(self, there: Mapping[str, Any]) -> bool:
        """Whether the run is asked for more rounds than before, and its method allows that."""
        rounds = self._config.train.rounds
        return not METHODS[self._config.method].schedule_uses_rounds and there["train"]["rounds"] < rounds


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return aside


def _environment(ranks: Sequence[str]) -> dict[str, Any]:
    return {
        "hpcfl": __version__,
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "processor": _processor(),
        "command": shlex.join(sys.argv),
        "ranks": list(ranks),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Return the CPU's model name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
