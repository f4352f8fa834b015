"""A run's numbers for the pages of TensorBoard, Weights & Biases and MLflow, by each package's client."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcfl.errors import UserError, one_line
from hpcfl.storage.ledger import Ledger

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

BINS = np.linspace(0, 1, 21)
"""Limits of the bins in which clients are counted by their accuracy."""

PROJECT = "hpcfl"
"""Project of Weights & Biases and experiment of MLflow, where the user's environment names no other."""


class Tracker:
    """Where rank 0 sends each evaluation. Its service may know the run by an id.

    A resumed run adds the rounds that are not there. Those that a killed run did after its last checkpoint
    are, and have the same numbers. One that starts over (`is_resumed` is false) has a new id: what is there
    may be of other settings. Every call raises what the package raises. `name` is that of the tracker
    (`run.tracker`); `keys` are the run's folder and configuration, flat.
    """

    module: ClassVar[str]
    """What is imported."""
    package: ClassVar[str]
    """The package of pip that has it."""

    def __init__(
        self, folder: Path, name: str, keys: dict[str, Any], ledger: Ledger, is_resumed: bool
    ) -> None:
        # of each service its own: a resumed run may have another tracker
        file = folder / f"{name}.txt"
        known = file.read_text().strip() if is_resumed and file.is_file() else None
        run_id, self._next_round = self._open(known, folder, keys, ledger.wall_s)
        if run_id:
            file.write_text(f"{run_id}\n")
        self._read = 0
        self.append(ledger)

    def append(self, ledger: Ledger) -> None:
        """Send the evaluations that are new."""
        for number in range(self._read, len(ledger.metrics)):
            row = dict(zip(ledger.columns, ledger.metrics[number], strict=True))
            done = int(row.pop("round"))
            if done >= self._next_round:
                known = {name: float(value) for name, value in row.items() if not np.isnan(value)}
                self._send(done, known, ledger.evaluated["accuracy"][number])
        self._read = len(ledger.metrics)

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any], wall_s: float) -> tuple[str, int]:
        """Open the run of an id, or a new one; return its id, if it has any, and the first round that it
        lacks. `wall_s` are the seconds of the run so far."""
        raise NotImplementedError

    def _send(self, done: int, row: dict[str, float], accuracy: np.ndarray) -> None:
        """Send an evaluation after `done` rounds; `accuracy` is the clients' [N]."""
        raise NotImplementedError

    def close(self, is_finished: bool) -> None:
        """End; `is_finished`: the run has done its last round."""
        raise NotImplementedError


class WandbRun(Tracker):
    """A run of Weights & Biases; with WANDB_MODE=offline the newest folder in wandb/ has all rounds."""

    module = package = "wandb"

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any], _: float) -> tuple[str, int]:
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

    def _send(self, done: int, row: dict[str, float], _: np.ndarray) -> None:
        self._run.log(row, step=done)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowRun(Tracker):
    """A run of MLflow, on the server or in the folder that MLFLOW_TRACKING_URI names."""

    module, package = "mlflow", "mlflow-skinny"

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any], _: float) -> tuple[str, int]:
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

    def _send(self, done: int, row: dict[str, float], _: np.ndarray) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, done) for name, value in row.items()])

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


class EventFile(Tracker):
    """Columns of metrics.csv as scalars, and the clients' accuracy as a histogram, by round, for TensorBoard.

    Every start begins a new file with all evaluations so far. Its mark of a restart tells TensorBoard to
    forget the earlier files. Each evaluation is at once on the disk.
    """

    module, package = "tensorboardX.event_file_writer", "tensorboardX"

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any], wall_s: float) -> tuple[str, int]:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # the time between the starts of a run is not the run's
        self._began_s = time.time() - wall_s
        # a TensorBoard that runs reads a new file only if its name comes later
        self._writer: EventsWriter = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        return "", 0

    def _send(self, done: int, row: dict[str, float], accuracy: np.ndarray) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import histogram, scalar

        event = Event(step=done, wall_time=self._began_s + row["wall_s"])
        for name, value in row.items():
            event.summary.MergeFrom(scalar(name, value))
        event.summary.MergeFrom(histogram("accuracy_of_clients", accuracy, BINS))
        self._writer.write_event(event)

    def append(self, ledger: Ledger) -> None:
        super().append(ledger)
        self._writer.flush()

    def close(self, is_finished: bool) -> None:
        self._writer.close()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": EventFile, "wandb": WandbRun, "mlflow": MlflowRun}
"""Trackers by `run.tracker`."""


def check_tracker(name: str | None) -> None:
    """Raise UserError where the tracker's package cannot be imported."""
    if name is None:
        return
    kind = TRACKERS[name]
    try:
        importlib.import_module(kind.module)
    except ImportError as error:
        raise UserError(
            f"run.tracker={name} needs the package {kind.package} ({one_line(error)}); install it with: "
            f"pip install {kind.package}, or drop run.tracker"
        ) from error
