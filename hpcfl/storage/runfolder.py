"""The folder of a run: its configuration, the environment of the run, and its log."""

from __future__ import annotations

import errno
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.config.keys import ENVIRONMENT, Config, digest_key, flatten
from hpcfl.config.load import differences
from hpcfl.config.own_code import OWN_CODE_FOLDER, text_of
from hpcfl.config.yaml_text import yaml_of
from hpcfl.errors import StorageError, UserError, one_line
from hpcfl.parameters import ParameterLayout
from hpcfl.storage.atomic import NO_ROOM, REMEDIES, replace_file, writing
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.hdf5 import SCHEMA, LoadedCheckpoint
from hpcfl.storage.ledger import (
    ACCURACY_VAL,
    ClientMetrics,
    Ledger,
    is_off_schedule,
    is_over,
    write_partition,
)
from hpcfl.storage.lock import LOCK_NAME, locked
from hpcfl.storage.reading import COLUMNS, read_record, whole_lines
from hpcfl.storage.slurm import job
from hpcfl.storage.snapshot import DataRecord, Snapshot
from hpcfl.storage.trackers import TRACKERS, Tracker

LOG = logging.getLogger(__name__)

UNFINISHED = tuple(f".{name}." for name in ("config.yaml", *COLUMNS))
"""How the names of files begin that a killed run may leave."""


class RunFolder:
    """One run's files; used by rank 0 alone.

    `check` looks without touching anything; `open` locks the folder, reads its checkpoint and takes it over.
    `uses_total_rounds`: the method depends on the number of rounds, so that a resumed run can have no more.
    """

    def __init__(self, path: Path, config: Config, uses_total_rounds: bool) -> None:
        if path.name in ("", ".."):
            # "." would follow the folder when that is moved aside
            path = path.resolve()
        self.path, self.config = path, config
        self._is_extendable = not uses_total_rounds and config.train.lr_end is None
        clients = f"{config.data.clients or 'all its'} clients"
        self.notes = [f"{config.method.name} on {config.data.source}, {clients}, in {path}"]
        """Lines that the start prints."""
        if started_by := job():
            self.notes.append(f"SLURM job {started_by}")
        self.store = CheckpointStore(path)
        self.checkpoint: LoadedCheckpoint | None = None
        """The round from which the run resumes; None at round 0."""
        self._tracker: Tracker | None = None
        self.keeps_metrics = False
        """Whether the run is over and has the files of `run.metrics`."""
        self._is_over = False
        """Whether no round followed the newest checkpoint when the folder was opened."""
        self._has_ended = False
        self._loss: Callable[[], str | None] = lambda: None
        """Returns how this run has lost its folder, or None."""
        self._log_is_refused = False

    def check(self, fresh: bool) -> None:
        """Raise UserError if the path is not a run folder or holds a checkpoint of another configuration."""
        try:
            # the run's files name their folder
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"--out {str(self.path)!a} is not UTF-8; name another folder") from error
        try:
            if not self.path.exists():
                return
            if not (self._is_empty() or (self.path / "config.yaml").is_file() or self.store.exists):
                raise UserError(
                    f"{self.path} exists but is not a run folder; name another with --out DIR, or move it "
                    "away"
                )
            recorded = None if fresh else self._recorded()
        except OSError as error:
            # such as a name that is too long, or a folder of someone else
            raise UserError(f"{self.path}: {error.strerror}; name another folder with --out DIR") from error
        # without a checkpoint, as after a mistake in one's own method, there is nothing to lose
        if recorded is not None and self.store.exists:
            # of more rounds, none may have been saved: the checkpoint tells
            has_more = recorded["train"]["rounds"] > self.config.train.rounds
            self._compare(recorded, but=["train.rounds"] * has_more)

    def _compare(
        self, recorded: Mapping[str, Any], but: Sequence[str] = (), foreign: Path | None = None
    ) -> None:
        """Raise UserError if keys other than some differ from a recorded run's, so that it cannot be resumed.

        The same data may be in another place; their checksum is compared later. `foreign` is a checkpoint
        that can only be another run's, since config.yaml has been compared.
        """
        there = {group: keys for group, keys in recorded.items() if group != ENVIRONMENT}
        is_extended = self._is_extendable and there["train"]["rounds"] < self.config.train.rounds
        free = ["data.path", *["train.rounds"] * is_extended, *but]
        changed = differences(there, self.config.tree(), but=free)
        if not changed:
            return
        keys = {line.partition(":")[0] for line in changed}
        what, remedy = f"another configuration ({'; '.join(changed)})", "give the same keys"
        texts = [file for file in self.config.own_code if digest_key(file.partition("=")[0]) in keys]
        if len(texts) == len(keys):
            what, remedy = f"another text of {', '.join(texts)}", "bring that text back"
        elif keys == {"train.rounds"}:
            remedy = f"rounds can be added, unless results depend on their number, but not removed; {remedy}"
        elif foreign is not None:
            raise UserError(
                f"{foreign} is of another run than config.yaml ({'; '.join(changed)}); restore this run's "
                "own checkpoint, or add --fresh to move the folder aside and start over"
            )
        raise UserError(
            f"{self.path} holds a run with {what}; {remedy} to resume it; --out DIR names another folder, "
            "and --fresh starts over"
        )

    def open(
        self,
        fresh: bool,
        layout: ParameterLayout,
        at_exit: ExitStack,
        environment: Mapping[str, Any],
        data: DataRecord | None = None,
    ) -> None:
        """Lock the folder until `at_exit` closes, load its newest checkpoint, and write config.yaml.

        Args:
            fresh: move what is there aside first.
            layout: the model's, which the checkpoint's must equal.
            environment: what config.yaml records beside the configuration.
            data: its checksums must equal those of the checkpoint.

        Raises:
            UserError: another run holds the folder, it cannot be written, or its checkpoints cannot be used.
            StorageError: there is no room to write.
        """
        # on a read-only disk, a new run can begin in another folder
        of_storage = (*NO_ROOM, errno.EROFS) if self.store.exists else NO_ROOM
        with writing(f"the run folder {self.path}", "name another with --out DIR", of_storage):
            self._take(fresh, at_exit)
            at_exit.callback(self._close_tracker)
            # another run may have come and gone since the first look
            self._load(layout, data)
            self._write_record(environment)

    def can_resume(self, layout: ParameterLayout, data: DataRecord | None) -> bool:
        """Return whether `open` would take the folder as it is; nothing is touched."""
        try:
            self._load(layout, data)
        except UserError:
            return False
        finally:
            if (checkpoint := self.take_checkpoint()) is not None:
                checkpoint.close()
        return True

    def _load(self, layout: ParameterLayout, data: DataRecord | None) -> None:
        """Load the newest checkpoint; UserError where the run can neither resume nor start here."""
        self.check(fresh=False)
        self.checkpoint = self.store.load(f"add --fresh to move {self.path} aside and start over")
        self._check_checkpoint(layout, data)
        if self.checkpoint is None:
            self._check_start_over()

    def _check_start_over(self) -> None:
        """Warn where rounds are done that have no checkpoint; UserError if the run was finished."""
        if (self.path / "clients.csv").is_file():
            raise UserError(
                f"{self.path} holds a finished run without its checkpoint, and to start over would delete "
                "its figures; bring checkpoint.h5 back, give --out DIR for another folder, or --fresh to "
                "move this one aside"
            )
        if len(whole_lines(self.path / "metrics.csv")) > 1:
            LOG.warning(f"{self.path} has no checkpoint; starting over at round 0")

    def _write_record(self, environment: Mapping[str, Any]) -> None:
        record, train = self._recorded(), self.config.train
        known: list[float] = []
        if self.checkpoint is not None and train.patience is not None:
            metrics, every = self.checkpoint.ledger["metrics"], self.config.run.eval_every
            rounds = metrics.column("round")
            # the run drops an evaluation that it would not have had
            kept = [not is_off_schedule(int(done), train.rounds, every) for done in rounds]
            known = metrics.column(ACCURACY_VAL)[kept].tolist()
        self._is_over = is_over(self.store.last_round, train.rounds, known, train.patience)
        self.keeps_metrics = self._is_over and (self.path / "confusion.csv").is_file()
        if record is not None and record["train"]["rounds"] == train.rounds and self._is_over:
            if record["data"].get("path") == self.config.data.path:
                return
            environment = record[ENVIRONMENT]
        _compare_environment((record or {}).get(ENVIRONMENT) or {}, environment)
        path = self.path / "config.yaml"
        if record is None and self.store.exists:
            LOG.warning(f"{path} is {'damaged' if path.is_file() else 'missing'}, and is written again")
        self._keep_own_code()
        replace_file(path, self.config.yaml() + yaml_of({ENVIRONMENT: environment}))

    def _keep_own_code(self) -> None:
        """Write the texts of the user's own files, without which the run cannot be read."""
        kept = self.path / OWN_CODE_FOLDER
        for named, code in self.config.own_code.items():
            key, _, file = named.partition("=")
            # a class given to hpcfl.run has no text
            if (text := text_of(code)) is not None:
                kept.mkdir(exist_ok=True)
                _check_links(kept)
                folder = kept / key.rpartition(".")[0]
                folder.mkdir(exist_ok=True)
                # a method without a name has its file's
                replace_file(folder / Path(file).name, text)

    def _check_checkpoint(self, layout: ParameterLayout, data: DataRecord | None) -> None:
        """Raise UserError unless the run can resume from its checkpoint."""
        if (found := self.checkpoint) is None:
            return
        self._compare(found.record, foreign=None if self._recorded() is None else found.path)
        other = None
        if found.schema < SCHEMA:
            other = f"schema {found.schema}, now {SCHEMA}"
        elif found.layout != layout.slots:
            other = "a model of another structure"
        if other:
            raise UserError(
                f"{found.path} was written by another version of hpcfl ({other}) and cannot be resumed; "
                "finish the run with that version, or add --fresh to move the folder aside and start over; "
                "report, compare, export and predict can read it"
            )
        there, here = found.data, data or found.data
        what = "the data have" if there.digest not in (0, here.digest) else ""
        if there.partition_digest not in (0, here.partition_digest):
            what = what or "the division of the data among clients has"
        if what:
            raise UserError(
                f"{what} changed since {found.path} was written: bring the earlier one back to resume "
                "this run, give --out DIR for another folder, or --fresh to start over"
            )

    def take_checkpoint(self) -> LoadedCheckpoint | None:
        """Return the open checkpoint, and keep none: memory may not hold it beside the run."""
        checkpoint, self.checkpoint = self.checkpoint, None
        return checkpoint

    def start_files(self, ledger: Ledger) -> None:
        """Rewrite the CSV files with all rows so far, and start the tracker.

        This and the functions below raise StorageError if the folder cannot be written. The log and the
        tracker are given up with a warning instead: no result depends on them.
        """
        with self._writing("its CSV files"):
            ledger.start_files(self.path, self._is_over)
        if name := self.config.run.tracker:
            with self._tracker_or_warning():
                keys = {"folder": str(self.path), **flatten(self.config.tree())}
                self._tracker = TRACKERS[name](
                    self.path, name, keys, ledger, is_resumed=self.store.last_round is not None
                )

    def append_files(self, ledger: Ledger) -> None:
        """Append new rows to the files of `start_files`."""
        with self._writing("its CSV files"):
            ledger.append_files(self.path)
        if self._tracker is not None:
            with self._tracker_or_warning():
                self._tracker.append(ledger)

    def write_partition(
        self, train: np.ndarray, evaluated: np.ndarray, texts: Mapping[str, Sequence[str]]
    ) -> None:
        """Write partition.csv, as `ledger.write_partition` does."""
        with self._writing("partition.csv"):
            write_partition(self.path, train, evaluated, texts)

    def write_clients(
        self, ledger: Ledger, num_train: np.ndarray, num_evaluated: np.ndarray, added: ClientMetrics | None
    ) -> None:
        """Write clients.csv, which marks a finished run, and confusion.csv if `run.metrics` is true."""
        with self._writing("clients.csv"):
            ledger.write_clients(self.path, num_train, num_evaluated, added)
        self._has_ended = True

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint."""
        with self._writing(f"the checkpoint of round {snapshot.round}"):
            self.store.save(snapshot, self._end_if_lost)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StorageError that says what to do."""
        self._end_if_lost()
        try:
            yield
        except OSError as error:
            self._end_if_lost()
            raise StorageError(
                f"{self.path}: {what} cannot be written: {error.strerror or error}; {self.last_good()}; "
                f"{REMEDIES.get(error.errno or 0, 'check the disk')} and {self._again()}"
            ) from error

    def _end_if_lost(self) -> None:
        """Raise StorageError if the folder at this run's path is no longer its own."""
        with suppress(OSError):
            if lost := self._loss():
                raise StorageError(
                    f"{self.path} {lost} while this run wrote it; {self.last_good()}; {self._again()} "
                    "(with --out DIR, if the folder has another path now)"
                )

    def _again(self) -> str:
        return f"rerun the same command to {'start over' if self.store.last_round is None else 'resume'}"

    def last_good(self) -> str:
        """Say of which round the newest good checkpoint is."""
        done = self.store.last_round
        return (
            "there is no checkpoint yet" if done is None else f"the last good checkpoint is of round {done}"
        )

    @contextmanager
    def _tracker_or_warning(self) -> Iterator[None]:
        """Give up the tracker with a warning, whatever its package raises; ignore its own warnings."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            self._tracker = None
            reason = error.strerror if isinstance(error, OSError) else None
            LOG.warning(
                f"{self.path}: run.tracker={self.config.run.tracker} has failed: "
                f"{reason or one_line(error)}; the run continues without, and its next start sends what is "
                "missing"
            )

    def _close_tracker(self) -> None:
        if (tracker := self._tracker) is not None:
            with self._tracker_or_warning():
                tracker.close(self._has_ended)

    def log(self, text: str) -> None:
        """Append a line with the time of day to log.txt; a run continues without, after one warning."""
        try:
            if self._loss():
                return
            with (self.path / "log.txt").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            if not self._log_is_refused:
                self._log_is_refused = True
                LOG.warning(
                    f"{self.path}: log.txt cannot be written: {error.strerror or error}; the run continues "
                    "without"
                )

    def _take(self, fresh: bool, at_exit: ExitStack) -> None:
        """Make the folder if need be, and lock it."""
        # a link to the folder, such as to a scratch disk, stays
        place = self.path.resolve()
        place.mkdir(parents=True, exist_ok=True)
        _check_links(self.path)
        if fresh and not self._is_empty():
            with locked(self.path):
                aside = _free_name(place)
                place.rename(aside)
            place.mkdir()
            self.notes.append(f"the run that was there is now in {aside}")
        self._loss = at_exit.enter_context(locked(self.path))
        for entry in self.path.iterdir():
            if entry.name.startswith(UNFINISHED):
                entry.unlink()

    def _is_empty(self) -> bool:
        passing = (LOCK_NAME, *UNFINISHED)
        return self.path.is_dir() and all(entry.name.startswith(passing) for entry in self.path.iterdir())

    def _recorded(self) -> dict[str, Any] | None:
        """Return the keys of config.yaml; None without it, or if it is damaged and there is a checkpoint.

        Raises:
            UserError: config.yaml is damaged, and there is no checkpoint.
        """
        path = self.path / "config.yaml"
        if not path.is_file():
            return None
        if_damaged = "restore it from a backup, or add --fresh to move the folder aside and start over"
        try:
            record = read_record(self.path, if_damaged)
            # the environment is written last
            environment = record.get(ENVIRONMENT) or {"": None}
            if None not in environment.values() and path.read_bytes().endswith(b"\n"):
                return record
            raise UserError(f"{path} is damaged; {if_damaged}")
        except UserError:
            if not self.store.exists:
                raise
            # the checkpoint's configuration is compared when it is loaded
            return None


def _compare_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of what may change the last bits."""
    counts = [len(of["ranks"]) for of in (before, now) if "ranks" in of]
    if len({*counts}) > 1 and "batched" in now["workers"]:
        LOG.warning(
            f"this run began on {counts[0]} ranks and continues on {counts[1]}: with run.engine=batched "
            "the last bits may differ"
        )
    for key in ("hpcfl", "torch", "processor", "workers"):
        if key in before and before[key] != now[key]:
            LOG.warning(
                f"this run began with {key} {before[key]} and continues with {now[key]}: "
                "the last bits may differ"
            )


def _check_links(path: Path) -> None:
    """Raise UserError if an entry is a link, a pipe or a device: writing would change something else."""
    with os.scandir(path) as entries:
        for entry in entries:
            is_known = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            # a run that still writes here may have renamed it
            if not is_known and os.path.lexists(entry.path):
                raise UserError(
                    f"{entry.path} is a link, a pipe or a device, which no run makes, and would be written "
                    "to; remove it, or name another folder with --out DIR"
                )


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return aside
