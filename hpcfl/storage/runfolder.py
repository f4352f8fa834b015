"""The folder of a run: its configuration, the environment of the run, and its log."""

from __future__ import annotations

import os
import platform
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from hpcfl import __version__
from hpcfl.config import ENVIRONMENT, Config, differences
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.parameters import ParameterLayout
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.events import EventFile
from hpcfl.storage.hdf5 import LoadedCheckpoint
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.lock import LOCK_NAME, FolderLock
from hpcfl.storage.reading import read_record
from hpcfl.storage.snapshot import LayoutRecord

UNFINISHED_NAME = "config.yaml.tmp"
"""What config.yaml is called until it is whole; a killed run may leave it."""

_PACKAGES = ("torch", "torchvision", "numpy", "h5py", "mpi4py", "scikit-learn")


class RunFolder:
    """One run's files; used by rank 0 alone.

    `check` looks without touching anything; `open` locks the folder, reads its checkpoint and takes it over.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        clients = f"{config.data.clients or 'all its'} clients"
        self.notes = [f"{config.method} on {config.data.source}, {clients}, in {path}"]
        """What the user is told at the start."""
        self.store = CheckpointStore(path)
        self.checkpoint: LoadedCheckpoint | None = None
        """Where the run goes on; None at round 0."""
        self._config = config
        self._events: EventFile | None = None

    def check(self, fresh: bool) -> None:
        """Raise UserError if the path is no run folder or holds a run with another configuration."""
        if not self.path.exists():
            return
        if not self._is_ours():
            raise UserError(f"{self.path} is there and is no run folder; name another with --out DIR")
        recorded = None if fresh else self._recorded()
        if recorded is None:
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

    def open(
        self,
        fresh: bool,
        layout: ParameterLayout,
        ranks: Sequence[str],
        at_exit: ExitStack,
        command: str = "",
    ) -> None:
        """Lock the folder until `at_exit` closes, load its newest checkpoint, and write config.yaml.

        Args:
            fresh: move what is there aside first.
            layout: the model's, which the checkpoint's must equal.
            ranks: host, device and engine of each rank.
            command: what was typed to start the run.

        Raises:
            UserError: another run holds the folder, it cannot be written, or its checkpoints cannot be used.
        """
        try:
            self._take(fresh, at_exit)
            at_exit.callback(self._close_events)
            # another run may have come and gone since the first look
            self.check(fresh=False)
            self.checkpoint = self.store.load(f"add --fresh to move {self.path} aside and start over")
            self._refuse_other_layout(layout)
            self._write_record(ranks, command)
        except OSError as error:
            raise UserError(
                f"cannot write the run folder {self.path}: {error.strerror}; name another with --out DIR"
            ) from error

    def _write_record(self, ranks: Sequence[str], command: str) -> None:
        record = self._recorded()
        rounds = self._config.train.rounds
        if record is not None and self.checkpoint is not None and self.checkpoint.header.round == rounds:
            return
        environment = _environment(ranks, command)
        self._compare_environment((record or {}).get(ENVIRONMENT) or {}, environment)
        unfinished = self.path / UNFINISHED_NAME
        with unfinished.open("w") as file:
            file.write(self._config.yaml() + yaml.safe_dump({ENVIRONMENT: environment}, sort_keys=False))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path / "config.yaml")

    def _refuse_other_layout(self, layout: ParameterLayout) -> None:
        if self.checkpoint is not None and self.checkpoint.layout != LayoutRecord.of(layout):
            raise UserError(
                f"{self.checkpoint.path} holds a model of another structure, written by another version of "
                "hpcfl; use that version to resume it, or --fresh to start over"
            )

    def start_files(self, ledger: Ledger) -> None:
        """Rewrite the CSV files, and what TensorBoard reads if the run wants it, with all that is known."""
        ledger.start_files(self.path)
        if self._config.run.tensorboard:
            self._events = EventFile(self.path, ledger)

    def append_files(self, ledger: Ledger) -> None:
        """Append what is new to the files of `start_files`."""
        ledger.append_files(self.path)
        if self._events is not None:
            self._events.append(ledger)

    def _close_events(self) -> None:
        if self._events is not None:
            self._events.close()

    def log(self, text: str) -> None:
        """Append a line with the time of day to log.txt."""
        with (self.path / "log.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _take(self, fresh: bool, at_exit: ExitStack) -> None:
        """Make the folder if need be, and lock it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = at_exit.enter_context(FolderLock(self.path))
        if fresh and not self._is_empty():
            aside = _free_name(self.path)
            self.path.rename(aside)
            lock.release()
            self.path.mkdir()
            at_exit.enter_context(FolderLock(self.path))
            self.notes.append(f"the run that was there is now in {aside}")

    def _is_empty(self) -> bool:
        passing = (LOCK_NAME, UNFINISHED_NAME)
        return self.path.is_dir() and all(entry.name in passing for entry in self.path.iterdir())

    def _is_ours(self) -> bool:
        return self._is_empty() or (self.path / "config.yaml").is_file()

    def _recorded(self) -> dict[str, Any] | None:
        """Return what config.yaml says, None where there is none; UserError where it is damaged."""
        if not (self.path / "config.yaml").is_file():
            return None
        return read_record(self.path, "--fresh moves the folder aside and starts over")

    def _grows(self, there: Mapping[str, Any]) -> bool:
        """Whether the run is asked for more rounds than before, and its method allows that."""
        before, rounds = there.get("train", {}).get("rounds"), self._config.train.rounds
        can_grow = not METHODS[self._config.method].schedule_uses_rounds
        return can_grow and isinstance(before, int) and before < rounds

    def _compare_environment(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in ("hpcfl", "torch", "processor", "workers"):
            if before and before.get(key) != now[key]:
                warnings.warn(
                    f"this run began with {key} {before.get(key)} and goes on with {now[key]}: "
                    "the last bits may differ",
                    stacklevel=2,
                )


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return aside


def _environment(ranks: Sequence[str], command: str) -> dict[str, Any]:
    # keep type of device and engine of each "host device engine"; rank 0 trains only if it is alone
    workers = {re.sub(r"^\S+ (\w+)\S*", r"\1", rank) for rank in ranks[1:] or ranks}
    return {
        "hpcfl": __version__,
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "processor": _processor(),
        "command": command,
        "workers": ", ".join(sorted(workers)),
        "ranks": list(ranks),
    }


def _version(package: str) -> str:
    if package == "torch":
        # names the build, such as +cpu, which the metadata of some wheels leave out
        return str(torch.__version__)
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
