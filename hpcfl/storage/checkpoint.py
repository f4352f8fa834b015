"""The checkpoints of a run folder: the newest and the one before, verified when written and when loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpcfl.errors import StorageError, UserError
from hpcfl.storage.hdf5 import LoadedCheckpoint, find_damage, write_snapshot
from hpcfl.storage.snapshot import Snapshot

LOG = logging.getLogger(__name__)


class CheckpointStore:
    """The newest and the previous checkpoint of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest = folder / "checkpoint.h5"
        self._previous = folder / "checkpoint.prev.h5"
        self._unfinished = folder / "checkpoint.tmp.h5"
        self._newest_is_good = False
        self.last_round: int | None = None
        """Rounds done in the last good checkpoint; None without one."""

    @property
    def exists(self) -> bool:
        """Whether there is a checkpoint, good or not."""
        return self._newest.exists() or self._previous.exists()

    def save(self, snapshot: Snapshot, end_if_lost: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint and make it the newest; the one before becomes the previous one if it is good.

        If anything fails, both old checkpoints stay as they are; blocks of the snapshot may be consumed.

        Args:
            snapshot: what is written.
            end_if_lost: is called before anything is read, replaced or deleted; raises StorageError if the
                folder is another run's by now.

        Raises:
            OSError: the file could not be written, or its bytes are not those that were written.
            ValueError: as `write_snapshot`.
        """
        self._unfinished.unlink(missing_ok=True)
        try:
            write_snapshot(self._unfinished, snapshot)
            end_if_lost()
            if damage := find_damage(self._unfinished):
                raise OSError(f"{self._unfinished} {damage}")
            end_if_lost()
            if self._newest_is_good and self._newest.exists():
                os.replace(self._newest, self._previous)
            os.replace(self._unfinished, self._newest)
        except BaseException:
            # the first error is the one to report; the unfinished file may be another run's by now
            with suppress(OSError, StorageError):
                end_if_lost()
                self._unfinished.unlink()
            raise
        self._newest_is_good = True
        self.last_round = snapshot.round
        _sync_folder(self._folder)

    def load(self, if_damaged: str = "name the folder of another run") -> LoadedCheckpoint | None:
        """Open the newest checkpoint, or with a warning the previous one; None where there never was one.

        Args:
            if_damaged: what the user can do if no checkpoint is whole.

        Raises:
            UserError: no checkpoint is whole, or that which is cannot be used.
        """
        self._newest_is_good, self.last_round = False, None
        if not self.exists:
            return None
        complaints: list[str] = []
        for path in (self._newest, self._previous):
            if damage := find_damage(path):
                complaints.append(f"{path} {damage}")
                continue
            loaded = LoadedCheckpoint(path, if_damaged)
            self._newest_is_good = path == self._newest
            self.last_round = loaded.round
            for complaint in complaints:
                LOG.warning(f"{complaint}; taking {path}, round {loaded.round}")
            return loaded
        raise UserError(f"{' and '.join(complaints)}; {if_damaged}")


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
