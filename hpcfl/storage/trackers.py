"""A run's numbers for the pages of TensorBoard, Weights & Biases and MLflow, by each package's client."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpcfl.config import Config, flatten
from hpcfl.errors import UserError, one_line
from hpcfl.storage.ledger import Ledger

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

BINS = np.linspace(0, 1, 21)
"""Limits of the bins in which clients are counted by their accuracy."""

PROJECT = "hpcfl"
"""Project of Weights & Biases and experiment of MLflow, where the user's environment names no other."""

RUN_ID_NAME = "tracker.txt"
"""File of a run folder: under which id Weights & Biases or MLflow know the run."""

_PACKAGES = {
    "tensorboard": ("tensorboardX.event_file_writer", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""What each tracker imports, and the package of pip that has it."""


class Tracker(Protocol):
    """Where rank 0 sends each evaluation; knows all that the ledger held when it was made."""

    def append(self, ledger: Ledger) -> None:
        """Send the evaluations that are new."""

    def close(self, is_finished: bool) -> None:
        """End; `is_finished`: the run has done its last round."""


def check_tracker(name: str | None) -> None:
    """Raise UserError where the tracker's package cannot be imported."""
    if name is None:
        return
    module, package = _PACKAGES[name]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"run.tracker={name} needs the package {package} ({one_line(error)}); install it with: "
            f"pip install {package}, or drop run.tracker"
        ) from error


def start_tracker(name: str, folder: Path, config: Config, ledger: Ledger) -> Tracker:
    """Begin or continue a run's pages, with the evaluations that they do not have yet.

    Raises what the package raises.
    """
    if name == "tensorboard":
        return EventFile(folder, ledger)
    return {"wandb": WandbRun, "mlflow": MlflowRun}[name](folder, config, ledger)


def _row(ledger: Ledger, number: int) -> tuple[int, dict[str, float]]:
    """Return the round of an evaluation, and by column of metrics.csv what was measured."""
    row = dict(zip(ledger.columns, ledger.metrics[number], strict=True))
    done = int(row.pop("round"))
    return done, {name: float(value) for name, value in row.items() if not np.isnan(value)}


class _RunById:
    """A run that its service knows by an id, and to which a resumed run adds the rounds that it lacks.

    Rounds that a killed run did after its last checkpoint are there already, and have the same numbers.
    """

    def __init__(self, folder: Path, config: Config, ledger: Ledger) -> None:
        file = folder / RUN_ID_NAME
        known = file.read_text().strip() if file.is_file() else None
        run_id, self._next_round = self._open(
            known, folder, {"folder": str(folder), **flatten(config.tree())}
        )
        file.write_text(f"{run_id}\n")
        self._read = 0
        self.append(ledger)

    def append(self, ledger: Ledger) -> None:
        for number in range(self._read, len(ledger.metrics)):
            done, row = _row(ledger, number)
            if done >= self._next_round:
                self._send(done, row)
        self._read = len(ledger.metrics)

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any]) -> tuple[str, int]:
        """Open the run of an id, or a new one; return its id and the first round that it lacks."""
        raise NotImplementedError

    def _send(self, done: int, row: dict[str, float]) -> None:
        raise NotImplementedError

    def close(self, is_finished: bool) -> None:
        raise NotImplementedError


class WandbRun(_RunById):
    """A run of Weights & Biases; with WANDB_MODE=offline the newest folder in wandb/ has all rounds."""

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any]) -> tuple[str, int]:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=known,
            resume="allow",
            name=folder.name,
            dir=folder,
            config=keys,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return self._run.id, self._run.step

    def _send(self, done: int, row: dict[str, float]) -> None:
        self._run.log(row, step=done)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowRun(_RunById):
    """A run of MLflow, on the server or in the folder that MLFLOW_TRACKING_URI names."""

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any]) -> tuple[str, int]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            # every evaluation has this number
            there = self._client.get_metric_history(known, "wall_s")
            return known, 1 + max((metric.step for metric in there), default=-1)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=folder.name).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in keys.items()])
        return self._id, 0

    def _send(self, done: int, row: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, done) for name, value in row.items()])

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


class EventFile:
    """Columns of metrics.csv as scalars, and the clients' accuracy as a histogram, by round, for TensorBoard.

    As the CSV files, it is begun anew at every start with all evaluations that the ledger holds: what a
    killed run wrote after its last checkpoint is gone with the old events, and nothing is there twice. A
    TensorBoard that has read the old ones forgets them. Each call leaves whole events on the disk.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        for old in folder.glob("events.out.tfevents.*"):
            # a TensorBoard that runs reads a file from where it was, and not one that is gone
            if old.stat().st_size:
                os.truncate(old, 0)
            else:
                old.unlink()
        # the time between the starts of a run is not the run's
        self._began_s = time.time() - ledger.wall_s
        # and from there only a file with a later name
        self._writer: EventsWriter = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._written = 0
        self.append(ledger)

    def append(self, ledger: Ledger) -> None:
        for number in range(self._written, len(ledger.metrics)):
            self._writer.write_event(self._event(ledger, number))
        self._written = len(ledger.metrics)
        self._writer.flush()

    def close(self, is_finished: bool) -> None:
        self._writer.close()

    def _event(self, ledger: Ledger, number: int) -> Any:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import histogram, scalar

        done, row = _row(ledger, number)
        event = Event(step=done, wall_time=self._began_s + row["wall_s"])
        for name, value in row.items():
            event.summary.MergeFrom(scalar(name, value))
        event.summary.MergeFrom(histogram("accuracy_of_clients", ledger.evaluated["accuracy"][number], BINS))
        return event
