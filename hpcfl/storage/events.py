"""The file of a run folder that TensorBoard reads, written by tensorboardX."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfl.errors import UserError, one_line
from hpcfl.storage.ledger import METRICS, Ledger

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

BINS = np.linspace(0, 1, 21)
"""Limits of the bins in which clients are counted by their accuracy."""


def require_writer(is_wanted: bool) -> None:
    """Raise UserError where tensorboardX is wanted and cannot be imported."""
    if not is_wanted:
        return
    try:
        import tensorboardX.event_file_writer  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"run.tensorboard=true needs the package tensorboardX ({one_line(error)}); install it with: "
            "pip install tensorboardX, or drop run.tensorboard"
        ) from error


class EventFile:
    """Columns of metrics.csv as scalars, and the clients' accuracy as a histogram, by round.

    As the CSV files, it is begun anew at every start with all evaluations that the ledger holds: what a
    killed run wrote after its last checkpoint is gone with the old events, and nothing is there twice. A
    TensorBoard that has read the old ones is told to forget them. Each call leaves whole events on the disk.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        for old in folder.glob("events.out.tfevents.*"):
            # a TensorBoard at work goes on from a file at its end, and not from one that is gone
            if old.stat().st_size:
                os.truncate(old, 0)
            else:
                old.unlink()
        # what a run waited between its starts is no time of the run's
        self._began_s = time.time() - ledger.wall_s
        # and to a file of a later name only
        self._writer: EventsWriter = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._written = 0
        self.append(ledger)

    def append(self, ledger: Ledger) -> None:
        """Write the evaluations that are new."""
        for number in range(self._written, len(ledger.metrics)):
            self._writer.write_event(self._event(ledger, number))
        self._written = len(ledger.metrics)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _event(self, ledger: Ledger, number: int) -> Any:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import histogram, scalar

        row = dict(zip(METRICS, ledger.metrics[number], strict=True))
        event = Event(step=int(row.pop("round")), wall_time=self._began_s + row["wall_s"])
        for name, value in row.items():
            if not np.isnan(value):
                event.summary.MergeFrom(scalar(name, value))
        event.summary.MergeFrom(histogram("accuracy_of_clients", ledger.evaluated["accuracy"][number], BINS))
        return event
